"""Clock of an unchanged training script, within the script's own process: spans of its steps, and torch's profile.

Like the observer of `shoal verify --script`, which loads it, the clock makes no collective call, changes no value and
draws no number, and it needs torch alone. It records no tensors. When all ranks have written, the processes end.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import multiprocessing
import os
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING or "_shoal_observer" not in sys.modules:
    from shoal.programs import hooks, observer, parts
else:  # within a script, whose environment may be without shoal
    observer, parts, hooks = (sys.modules[f"_shoal_{name}"] for name in ("observer", "parts", "hooks"))

# Updates before the profiler starts, and steps under it. The first step under it has the profiler's own start in it.
_WARM_STEPS, _PROFILED_STEPS = 2, 6
_SAMPLE_SECONDS = 5e-3
_FEWEST = 4  # steps without which nothing is written
_TRIAL_ELEMENTS, _TRIAL_UPDATES = 1 << 26, 7
_LIBRARIES = (sysconfig.get_paths()["stdlib"], os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class OpenSpan(NamedTuple):
    """A span that has not ended, its begin, the seconds of spans inside of it, and its mark in the profile."""

    name: str
    began: float
    inner: list[float]
    mark: Any


class ScriptClock:
    """Clock of a rank's first steps. A step begins with the end of an update of the first optimizer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.folder, self.num_steps, self.on_cpu = options["folder"], options["steps"], bool(options.get("cpu"))
        self.steps: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = defaultdict(float)  # of the present step by span, without the spans inside
        self.counts: dict[str, float] = defaultdict(float)  # of the present step
        self.lines: Counter[tuple[str, bool, str]] = Counter()  # samples by span, by whether in a model, and by line
        self.exchanges: dict[str, dict[str, float]] = {}  # calls of torch.distributed by line
        self.loaders: dict[int, dict[str, Any]] = {}
        self.replicas: list[Any] = []  # DistributedDataParallel
        self.optimizers: list[Any] = []
        self.updates = 0
        self.done = False
        self._open: list[OpenSpan] = []
        self._profiler: Any = None
        self._process = os.getpid()

    def begin(self, name: str) -> None:
        """Begin a span on the main thread."""
        if self.updates and threading.current_thread() is threading.main_thread():
            mark = torch.autograd.profiler.record_function(f"shoal:{name}")
            mark.__enter__()
            self._open.append(OpenSpan(name, time.perf_counter(), [0.0], mark))

    def end(self, name: str) -> float:
        """End the innermost span of a name, and what is still open inside of it. Return its seconds."""
        seconds = 0.0
        if threading.current_thread() is not threading.main_thread():
            return seconds
        while any(span.name == name for span in self._open):
            span = self._open.pop()
            seconds = time.perf_counter() - span.began
            span.mark.__exit__(None, None, None)
            inside = any(one.name == "evaluation" for one in self._open)
            self.seconds["evaluation" if inside else span.name] += seconds - span.inner[0]
            if self._open:
                self._open[-1].inner[0] += seconds
            if span.name == name:
                break
        return seconds

    def within(self, name: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function within a span, unless it is in such a span already."""
        if any(span.name == name for span in self._open):
            return run(*args, **kwargs)
        self.begin(name)
        try:
            return run(*args, **kwargs)
        finally:
            self.end(name)

    def next_batch(self, run: Any, iterator: Any) -> Any:
        """Read a batch. Note whether the processor worked or waited, and the batch's size."""
        is_first = iterator._num_yielded == 0
        began, worked = time.perf_counter(), time.thread_time()
        batch = self.within("data", run, iterator)
        if threading.current_thread() is threading.main_thread():
            self.counts["data_cpu"] += time.thread_time() - worked
            self.counts["data_first"] += (time.perf_counter() - began) * is_first
            tensors = observer.tensors_of(batch)
            self.counts["rows"] += next((len(one) for one in tensors if one.ndim), 0)
            self.counts["elements"] += sum(one.numel() for one in tensors)
        return batch

    def exchange(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of torch.distributed, and note it by the script's line if no sharded module calls it."""
        frame = sys._getframe(2)  # of what calls the wrapper
        is_sharding = str(frame.f_globals.get("__name__")).startswith(hooks.SHARDING)
        if is_sharding or not self._open or any(span.name in ("exchange", "backward") for span in self._open):
            return run(*args, **kwargs)
        began = time.perf_counter()
        result = self.within("exchange", run, *args, **kwargs)
        tensors = observer.tensors_of((args, kwargs))
        where = own_line(frame) + ("" if is_own(frame.f_code.co_filename) else f" in {frame.f_globals.get('__name__')}")
        line = self.exchanges.setdefault(where, defaultdict(float))
        line["calls"] += 1
        line["elements"] += max((one.numel() for one in tensors), default=0)
        line["seconds"] += time.perf_counter() - began
        return result

    def after_update(self, optimizer: Any) -> None:
        """End a step if the first optimizer has made its update. Turn the profiler on and off, and leave at the end."""
        if not self.optimizers:
            self.optimizers.append(optimizer)
            threading.Thread(target=self._sample, daemon=True).start()
        if optimizer is not self.optimizers[0]:
            if all(optimizer is not one for one in self.optimizers):
                self.optimizers.append(optimizer)
            return
        turns = self.updates - _WARM_STEPS in (_PROFILED_STEPS, _PROFILED_STEPS - 1)
        if (turns or self.updates + 1 >= self.num_steps) and self._is_on_gpu():
            torch.cuda.synchronize()  # the steps until here have ended on the device too
        self.end("step")
        if self.seconds:
            profiled = self._profiler is not None
            self.steps.append({"seconds": dict(self.seconds), "counts": dict(self.counts), "profiled": profiled})
        self.updates += 1
        if self.updates == _WARM_STEPS:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._is_on_gpu():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            try:
                self._profiler = torch.profiler.profile(activities=kinds)
                self._profiler.start()
            except RuntimeError:  # the script has a profile of its own under way
                self._profiler = None
        elif self.updates == _WARM_STEPS + _PROFILED_STEPS:
            self._end_profile()
        if self.updates >= self.num_steps:
            self.write()
            observer.leave(self.folder, observer.num_ranks(), "json")
        self.seconds.clear()
        self.counts.clear()
        self.begin("step")

    def _end_profile(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            path = os.path.join(self.folder, f"trace-{parts.own_rank()}.json.gz")
            profiler.export_chrome_trace(path)

    def _is_on_gpu(self) -> bool:
        return not self.on_cpu and torch.cuda.is_available() and torch.cuda.is_initialized()

    def _sample(self) -> None:
        """Count where the main thread is: its span, whether a module's forward runs, and the script's line."""
        main = threading.main_thread().ident
        while not self.done:
            time.sleep(_SAMPLE_SECONDS)
            frame: Any = sys._current_frames().get(main or 0)
            names = [span.name for span in self._open]
            if frame is None or not names or self.updates < _WARM_STEPS:
                continue
            line, in_model = own_line(frame), False
            while frame is not None and not in_model:
                in_model, frame = frame.f_code.co_name == "_call_impl", frame.f_back
            self.lines["evaluation" if "evaluation" in names else names[-1], in_model, line] += 1

    def write(self) -> None:
        """Write the record, once, after time trials of the optimizers on copies of their parameters."""
        path = observer.path_of(self.folder, parts.own_rank(), "json")
        helps = multiprocessing.parent_process() is not None or os.path.exists(path)
        if self.done or os.getpid() != self._process or (not self.updates and helps):
            return
        self.done = True
        self._end_profile()
        device = next((p.device for o in self.optimizers for g in o.param_groups for p in g["params"]), None)
        on_gpu = self._is_on_gpu()
        record = {
            "rank": parts.own_rank(),
            "updates": self.updates,
            "steps": self.steps,
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "capability": torch.cuda.get_device_capability(device) if on_gpu else None,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "loaders": list(self.loaders.values()),
            "exchanges": self.exchanges,
            "lines": [[*place, count] for place, count in self.lines.most_common(200)],
            "replicas": [one._get_ddp_logging_data() for one in self.replicas],
            "optimizers": [about(one, on_gpu, len(self.steps) >= _FEWEST) for one in self.optimizers],
        }
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(record, file, default=str)
        os.replace(path + ".new", path)


@functools.cache
def is_own(file: str) -> bool:
    """Return True for a file of the script, False for one of Python, of an installed package or of shoal."""
    installed = file.startswith("<") or "site-packages" in file or "dist-packages" in file
    return not installed and not file.startswith(_LIBRARIES)


def own_line(frame: Any) -> str:
    """Return the script's innermost line of a stack, "FILE:LINE", or an empty text."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def about(optimizer: Any, on_gpu: bool, tries: bool) -> dict[str, Any]:
    """Return facts of an optimizer, and seconds of an update of copies as it is and fused, if it is not fused."""
    owners = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    facts: dict[str, Any] = {
        "class": type(optimizer).__name__,
        "parameters": len(owners),
        "elements": sum(parts.local(p).numel() for p in owners),
        "bytes": sum(parts.local(p).nbytes for p in owners),
        "sharded": any(parts.is_sharded(p) for p in owners),
        "trial": None,
    }
    is_plain = type(optimizer).__module__.startswith("torch.optim.") and "fused" in optimizer.defaults
    if not tries or not is_plain or any(group.get("fused") for group in optimizer.param_groups):
        return facts
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in known and name != "params"}
    copies: list[torch.Tensor] = []
    try:
        for parameter in owners:
            copies.append(parts.local(parameter).clone().requires_grad_())
            copies[-1].grad = torch.full_like(copies[-1], 1e-3)
            if sum(one.numel() for one in copies) > _TRIAL_ELEMENTS:
                break
        facts["trial"] = [
            update_seconds(type(optimizer)(copies, **{**options, **own}), on_gpu)
            for own in ({}, {"fused": True, "foreach": None})
        ]
    except (RuntimeError, ValueError, TypeError):  # such parameters have no fused update, or copies no room
        facts["trial"] = None
    return facts


def update_seconds(optimizer: Any, on_gpu: bool) -> float:
    """Return the least seconds of an optimizer's updates."""
    seconds = []
    for _ in range(_TRIAL_UPDATES):
        began = time.perf_counter()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def install(options: dict[str, Any]) -> None:
    """Install the clock in this process: hooks of optimizers, loaders, backwards, collectives and checkpoints."""
    import torch.distributed
    from torch.nn.utils import clip_grad
    from torch.utils.data import DataLoader, dataloader

    clock = ScriptClock(options)
    atexit.register(clock.write)

    def before_step(optimizer: Any, closure: Any) -> Any:
        if clock.done:
            return None
        clock.end("evaluation")
        clock.begin("optimizer")
        return closure and functools.partial(clock.within, "closure", closure)

    def after_step(optimizer: Any) -> None:
        if not clock.done:
            clock.end("optimizer")
            clock.after_update(optimizer)

    hooks.around_updates(before_step, after_step)

    def backward(run: Any, *args: Any, **kwargs: Any) -> Any:
        clock.end("evaluation")
        clock.counts["backwards"] += 1
        return clock.within("backward", run, *args, **kwargs)

    hooks.around(torch.autograd, "backward", backward)

    def zero(run: Any, *args: Any, **kwargs: Any) -> Any:
        clock.counts["zeros"] += not (args[1] if len(args) > 1 else kwargs.get("set_to_none", True))
        return clock.within("zero", run, *args, **kwargs)

    for owner in (torch.optim.Optimizer, nn.Module):
        hooks.around(owner, "zero_grad", zero)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for module in (clip_grad, nn.utils):
            hooks.around(module, name, functools.partial(clock.within, "optimizer"))
    for name in (*hooks.EXCHANGES, "barrier"):
        hooks.around(torch.distributed, name, clock.exchange)
    hooks.around(torch.distributed.Work, "wait", functools.partial(clock.within, "exchange"))
    hooks.around(torch, "save", functools.partial(clock.within, "checkpoint"))

    def mode(module: nn.Module, training: bool = True) -> None:
        if not clock.optimizers or module.training == training:
            return
        owners = [p for group in clock.optimizers[0].param_groups for p in group["params"]]
        if 2 * sum(1 for _ in module.parameters()) >= len(owners):  # the model, and none of its layers
            (clock.end if training else clock.begin)("evaluation")

    hooks.method(nn.Module, "train", mode)

    def iterated(run: Any, loader: Any) -> Any:
        clock.loaders[id(loader)] = {
            "workers": loader.num_workers,
            "pinned": loader.pin_memory,
            "persistent": loader.persistent_workers,
        }
        clock.counts["loader_starts"] += 1
        return clock.within("data", run, loader)

    hooks.around(DataLoader, "__iter__", iterated)
    hooks.around(dataloader._BaseDataLoaderIter, "__next__", clock.next_batch)
    if torch.distributed.is_available():
        hooks.method(nn.parallel.DistributedDataParallel, "__init__", lambda self, *a, **k: clock.replicas.append(self))
