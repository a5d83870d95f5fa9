"""Job of an observed script, for the planner: made within the script's own process from one step without values.

The script runs as one process. Forwards with gradients, and what follows from them, run on fake tensors, so that a
large model takes no time. Before its first update the process turns to the planner, which gets the script's module,
inputs, loss and optimizer as a Job. Unlike the observer, this needs shoal.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import IterableDataset

from shoal.errors import CommandError, ShoalError
from shoal.jobs.job import Job
from shoal.numerics.losses import cross_entropy
from shoal.numerics.operators import replace_leaves, tensors_in
from shoal.parallel.model.value_free import ValueFree, twin
from shoal.report.quantities import several

if TYPE_CHECKING or "_shoal_observer" not in sys.modules:
    from shoal.programs import observer, parts, replay
else:
    observer, parts = sys.modules["_shoal_observer"], sys.modules["_shoal_parts"]
    replay = observer.beside("replay")

_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__bool__")
_IGNORED = -100  # torch's default for targets without a loss


class ObservedJob(NamedTuple):
    """Job of a script, its name, its precision, what was seen of it, and what may diverge on several devices."""

    job: Job
    name: str
    precision: str | None
    rows: list[list[str]]
    risks: list[str]


class StepObserver(observer.ScriptRecorder):
    """Recorder of one step without values. `then` gets the Job before the first update, and returns a text."""

    def __init__(self, folder: str, then: Callable[[ObservedJob], str]) -> None:
        super().__init__(folder, 1)
        self.left = observer.LeftGradients(self.known, {"gradients have no values"})
        self._then = then
        self._restore: list[Callable[[], None]] = []

    def _store(self, into: dict[str, Tensor], own: Sequence[parts.ParameterPart]) -> dict[str, str]:
        return {}

    def _gradient(self, key: str, parameter: Tensor, gradient: Tensor) -> None:
        pass

    def _output_gradient(self, call: dict[str, Any], place: int, gradient: Tensor) -> None:
        call["passes"].setdefault(0, {})[place] = None

    def fake(self) -> None:
        """Run forwards on fake tensors from here on. What reads their values gets zeros."""
        free, evaluated = ValueFree(), dict[Any, Any]()
        forward: Any = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inside = free.mode in _get_current_dispatch_mode_stack()
            if inside or observer.is_passed_by(module) or next(module.parameters(), None) is None:
                return forward(module, *args, **kwargs)
            key = id(module), module.training, *(t.shape for t in tensors_in((args, kwargs)))
            if torch.is_grad_enabled() or key not in evaluated:
                with free.running():
                    evaluated[key] = forward(module, *args, **kwargs)
            return evaluated[key]

        setattr(nn.Module, "_call_impl", call)  # noqa: B010
        self._restore.append(lambda: setattr(nn.Module, "_call_impl", forward))
        for name in _READS:
            original = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                with unset_fake_temporarily():
                    return original(_zeros(self) if isinstance(self, FakeTensor) else self, *args, **kwargs)

            setattr(Tensor, name, read)
            back = functools.partial(setattr, Tensor, name, original)
            self._restore.append(back if name in vars(Tensor) else functools.partial(delattr, Tensor, name))

    def before_update(self, optimizer: Any) -> None:
        """Hand the Job over, write what comes of it, and end the process."""
        if self.deaf:
            return
        self.deaf.add("done")
        for restore in self._restore:
            restore()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                document = {"text": self._then(self.observed(optimizer))}
        except ShoalError as error:
            document = {"given": error.given, "conflict": error.conflict, "remedy": error.remedy}
        except Exception:
            traceback.print_exc()
            os._exit(1)
        path = os.path.join(self.folder, "answer.json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(f"{path}.new", path)
        os._exit(0)

    def observed(self, optimizer: Any) -> ObservedJob:
        """Return the Job of the step so far. Raises: CommandError if its module cannot be called again."""
        modules = self.known.modules
        sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
        number = sizes.index(max(sizes)) if sizes else -1
        calls = [call for call in self.step["calls"] if call["module"] == number]
        if not calls or calls[0]["args"] is None:
            raise CommandError(
                given="--script, whose module is called " + ("with what is no data" if calls else "never"),
                conflict="; ".join(self.unseen) or "no forward with gradients came before the first update",
                remedy="write a job file with its model: docs/tutorial.md",
            )
        for call in calls:
            call["args"], call["kwargs"] = replace_leaves((call["args"], call["kwargs"]), FakeTensor, _zeros)
        module, first = modules[number], calls[0]
        inputs = [t for t in tensors_in((first["args"], first["kwargs"])) if t.ndim]
        rows = [len(next(iter(t for t in tensors_in((c["args"], c["kwargs"])) if t.ndim), [0])) for c in calls]
        losses = self.step["losses"]
        job = Job(
            model=functools.partial(_without_values, module),
            loss=_Loss(first, rows[0], any(one["function"] == "cross_entropy" for one in losses)),
            optimizer=functools.partial(_optimizer, type(optimizer), optimizer.defaults),
            train_data=_RecordedRows([t for t in inputs if len(t) == rows[0]]),
            global_batch=max(1, sum(rows)),
        )
        kind = type(module).__name__
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in inputs[:3])
        seen = [["script", f"{kind}, {sizes[number]:,} parameters, called with {shapes}"]]
        functions = ", ".join(dict.fromkeys(one["function"] for one in losses)) or "of the module, or its own"
        seen.append(["batch", f"{sum(rows):,} samples a step, in {several(len(rows), 'forward')} of one process"])
        if len(modules) > 1:
            others = ", ".join(type(one).__name__ for one in modules if one is not module)
            seen.append(["alone", f"{others} is trained as well, and not planned"])
        dtype = next(iter(module.parameters())).dtype
        half = str(dtype if dtype in (torch.bfloat16, torch.float16) else first["autocast"]).removeprefix("torch.")
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(half)
        precision = "bf16-pure" if dtype == torch.bfloat16 else precision
        seen.insert(1, ["loss", f"{functions}; {type(optimizer).__name__}; {precision or 'fp32'}"])
        return ObservedJob(job, kind, precision, seen, list(self._risks(module, calls, rows)))

    def _risks(self, module: nn.Module, calls: list[dict[str, Any]], rows: list[int]) -> Iterator[str]:
        """Yield what may differ on several devices, in words."""
        if len(set(rows)) > 1:
            yield f"forwards have {min(rows)} to {max(rows)} samples: a mean over each weighs samples unequally"
        integers = [t for c in calls for t in tensors_in((c["args"], c["kwargs"])) if t.dtype == torch.int64]
        ignored = sum(int((t == _IGNORED).sum()) for t in integers)
        ignored = ignored or sum(one["ignored"] for one in self.step["losses"] if one["count"])
        if ignored:
            yield (
                f"{ignored:,} targets are ignored: ranks count unequal numbers of tokens. Divide the sum of the "
                "losses by the tokens of all ranks"
            )
        elif any("attention_mask" in c["kwargs"] and not bool(c["kwargs"]["attention_mask"].all()) for c in calls):
            yield "sequences are padded: ranks count unequal numbers of tokens if padding has no loss"
        norm = next((n for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)
        if norm is not None:
            yield f"batch statistics ({norm}) follow the samples of a rank: more ranks, fewer samples each"


def _zeros(fake: Tensor) -> Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype)


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device, without what frameworks have put around its forwards."""
    outer = [(one, vars(one).pop("forward")) for one in module.modules() if "forward" in vars(one)]
    try:
        return twin(module, lambda _, tensor: parts.local(tensor).to("meta")).train()
    finally:
        for one, forward in outer:
            vars(one)["forward"] = forward


class _Loss:
    """Loss of a recorded call: what the script makes of the outputs that got gradients."""

    def __init__(self, call: dict[str, Any], rows: int, of_classes: bool) -> None:
        self._tree, self._rows, self._of_classes = (call["args"], call["kwargs"]), rows, of_classes
        self._places = sorted({place for own in call["passes"].values() for place in own})

    def __call__(self, module: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Any]:
        """Return the sum and the number of samples."""
        fields = iter(batch)
        args, kwargs = replace_leaves(
            self._tree, Tensor, lambda leaf: next(fields) if leaf.ndim and len(leaf) == self._rows else leaf
        )
        outputs = [t for t in observer.tensors_of(module(*args, **kwargs)) if t.requires_grad]
        chosen = [t for place, t in enumerate(outputs) if place in self._places] or outputs
        scalars = [t for t in chosen if not t.ndim]
        if not scalars and self._of_classes and len(chosen) == 1 and chosen[0].ndim > 1:
            rows = chosen[0].flatten(0, -2)
            return cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))
        total = sum((t.float().sum() for t in scalars or chosen), torch.zeros((), device=chosen[0].device))
        return total, float(len(batch[0]))


class _RecordedRows(IterableDataset[list[Tensor]]):
    """Endless stream of the samples of a recorded forward."""

    def __init__(self, fields: list[Tensor]) -> None:
        self._fields = fields

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            for number in range(len(self._fields[0])):
                yield [field[number] for field in self._fields]


def _optimizer(kind: Any, defaults: dict[str, Any], parameters: Any) -> Any:
    """Return an optimizer of the script's class with its own settings."""
    known = inspect.signature(kind).parameters
    return kind(list(parameters), **{name: value for name, value in defaults.items() if name in known})


def install(options: dict[str, Any]) -> Any:
    """Return the recorder of this process, which ends in the function that the options name."""
    module, _, name = options["then"].partition(":")
    then = getattr(importlib.import_module(module), name)
    recorder = StepObserver(options["folder"], functools.partial(then, request=options["request"]))
    replay.leave_whole()
    if options["fake"]:
        recorder.fake()
    return recorder
