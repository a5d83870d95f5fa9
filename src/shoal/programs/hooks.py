"""Hooks of the observer within a script's process: each tells the recorder what torch is about to do, or has done.

Like the observer, this needs torch alone. No hook changes a value or draws a number.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING or "_shoal_observer" not in sys.modules:
    from shoal.programs import observer, parts
else:  # within a script, whose environment may be without shoal
    observer, parts = sys.modules["_shoal_observer"], sys.modules["_shoal_parts"]

OF_CLASSES = ("cross_entropy", "nll_loss")  # losses that ignore targets of one index
LOSSES = (
    *(*OF_CLASSES, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss"),
    *("soft_margin_loss", "hinge_embedding_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
SENDS = ("send", "isend", "recv", "irecv", "batch_isend_irecv")
# Functions of torch.distributed that bring values of other ranks, and parts of torch that use them to shard parameters.
EXCHANGES = (
    *("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "gather", "broadcast"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "broadcast_object_list", *SENDS),
    *("all_gather_tensor", "all_gather_single", "reduce_scatter_single", "permute_tensor"),
)
SHARDING = (
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._functional_collectives"),
    "deepspeed.runtime.zero",
)


def around(owner: Any, name: str, wrap: Any) -> None:
    """Replace a function of a module, or a method of a class, by `wrap(function, ...)`."""
    original = getattr(owner, name, None)
    if original is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrap(original, *args, **kwargs)

    with contextlib.suppress(TypeError, AttributeError):
        functools.update_wrapper(call, original)
    setattr(owner, name, call)


def method(owner: Any, name: str, before: Any) -> None:
    """Call `before(self, ...)` before a method of a class."""

    def wrap(run: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return run(*args, **kwargs)

    around(owner, name, wrap)


def around_updates(before: Any, after: Any) -> None:
    """Call `before(optimizer, closure)` and `after(optimizer)` at each update, but not at one within another's.

    What `before` returns is the closure of the update, if it has one.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    running: list[Any] = []

    def begin(optimizer: Any, args: Any, kwargs: Any) -> Any:
        running.append(optimizer)
        if len(running) > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the optimizer itself comes first
        observed = before(optimizer, closure if callable(closure) else None)
        if observed is None:
            return None
        return ((args[0], observed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": observed})

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        running.pop()
        if not running:
            after(optimizer)

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def note_optimizers(recorder: observer.ScriptRecorder) -> None:
    """Let the recorder know every optimizer in the order of their construction."""

    def init(run: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        run(optimizer, *args, **kwargs)
        recorder.known.number_of(optimizer)

    around(torch.optim.Optimizer, "__init__", init)


def observe_steps(recorder: observer.ScriptRecorder) -> None:
    """Install the hooks of forwards, backwards and optimizer steps."""
    from torch.nn.modules import module as nn_module

    nn_module.register_module_forward_pre_hook(recorder.enter)
    nn_module.register_module_forward_hook(recorder.leave, with_kwargs=True, always_call=True)
    around(torch.autograd, "backward", recorder.backward)

    def before_step(optimizer: Any, closure: Any) -> Any:
        if closure is None:
            recorder.before_update(optimizer)
            return None
        step, evaluations = recorder.step, itertools.count(1)

        def observed() -> Any:
            step["evaluations"] = next(evaluations)
            if step["evaluations"] == 1:
                loss = closure()
                recorder.before_update(optimizer)
                return loss
            recorder.deaf.add("again")  # an update by several gradients: the first is compared
            try:
                return closure()
            finally:
                recorder.deaf.discard("again")

        return observed

    around_updates(before_step, recorder.after_update)

    def zeroed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        recorder.cleared(parameter for group in optimizer.param_groups for parameter in group["params"])

    method(torch.optim.Optimizer, "zero_grad", zeroed)
    method(nn.Module, "zero_grad", lambda self, *args, **kwargs: recorder.cleared(self.parameters()))


def observe_calls(recorder: observer.ScriptRecorder) -> None:
    """Install the wrappers of clipping, loss scaling, loss functions and schedulers."""
    import torch.nn.functional as functional
    from torch.nn.utils import clip_grad

    def clipped(kind: str, run: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        keys = [part.key for p in parameters for part in recorder.known.of(p)]
        unchanged = recorder.left.unchanged(keys)
        result = run(parameters, *args, **kwargs)
        recorder.left.look(unchanged)
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        about: dict[str, Any] = {"kind": kind, "limit": float(limit or 0.0), "norm": None, "keys": keys}
        about["backwards"] = recorder.num_backwards
        about["raw"] = bool(recorder.step["scales"]) and not recorder.step["unscaled"]
        if kind == "norm" and parts.is_sharded(result) and any(not one.is_replicate() for one in result.placements):
            recorder.note("the norm by which gradients are clipped: each rank has a part of it")
        elif kind == "norm":
            about["norm"] = float(parts.local(result))
        recorder.step["clips"].append(about)
        return result

    for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
        for owner in (clip_grad, torch.nn.utils):
            around(owner, name, functools.partial(clipped, kind))

    def scaled_step(run: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        before, recorder.in_scaler = len(recorder.steps), True
        result = run(scaler, *args, **kwargs)
        recorder.in_scaler = False
        if len(recorder.steps) == before and scaler.is_enabled():
            recorder.skip()
        return result

    def unscaled(run: Any, *args: Any, **kwargs: Any) -> None:
        recorder.step["unscaled"] = True
        unchanged = recorder.left.unchanged(recorder.known.parts)
        run(*args, **kwargs)
        recorder.left.look(unchanged)

    around(torch.amp.GradScaler, "step", scaled_step)
    around(torch.amp.GradScaler, "unscale_", unscaled)
    method(torch.amp.GradScaler, "scale", lambda self, *a: recorder.step["scales"].append(float(self.get_scale())))
    method(
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        "__init__",
        lambda self, *args, **kwargs: setattr(recorder, "by_metric", True),
    )

    def loss_function(name: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.deaf or getattr(recorder.thread, "loss", False):  # called by another observed one
            return run(*args, **kwargs)
        recorder.thread.loss = True
        try:
            result = run(*args, **kwargs)
        finally:
            recorder.thread.loss = False
        options = dict(zip(("input", "target"), args, strict=False)) | kwargs
        weigh(recorder, name, result, options.get("target"), options)
        return result

    for name in LOSSES:
        around(functional, name, functools.partial(loss_function, name))


def caller_of(frame: Any) -> str:
    """Return the name of the module that calls a function of torch.distributed, or DeepSpeed's own one of that name."""
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(
        ("deepspeed.comm", "deepspeed.utils")
    ):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def observe_ranks(recorder: observer.ScriptRecorder) -> None:
    """Install the wrappers of what goes from rank to rank."""
    import torch.distributed._functional_collectives as functional_collectives

    def exchanged(run: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(recorder.thread, "call", None)
        caller = caller_of(sys._getframe(2))
        if call is not None and (".experimental" in caller or not caller.startswith(SHARDING)):
            call["exchanges"] = True
            recorder.exchanges.add(run.__name__)
        elif run.__name__ in SENDS and not caller.startswith("torch."):
            recorder.exchanges.add(run.__name__)
        elif run.__name__.startswith("all_gather") and not caller.startswith("torch."):
            own = {one.untyped_storage()._cdata for ref in recorder.outputs if (one := ref()) is not None}
            tensors = observer.tensors_of((args, kwargs))
            if own and any(t.requires_grad or t.untyped_storage()._cdata in own for t in tensors if t.ndim):
                recorder.step["gathered"].append(run.__name__)
            about = [(run.__name__, t.shape[-1], len(recorder.step["calls"])) for t in tensors if t.ndim > 1]
            recorder.step["gathers"] += about if not recorder.deaf else []
        result = run(*args, **kwargs)
        if call is None and not caller.startswith("torch."):  # gradients that the script sums itself
            of = {id(tensor) for tensor in observer.tensors_of(args)}
            recorder.left.look([k for k, p in recorder.known.parts.items() if not p.place and id(p.owner.grad) in of])
        return result

    def entered(join: Any) -> None:
        recorder.joins = math.inf if recorder.joins is None else recorder.joins

    def waited(run: Any, *args: Any) -> Any:
        recorder.joins = min(recorder.joins or 0, len(recorder.steps))
        recorder.write(final=False)  # this rank has no more samples, and others may end before it returns
        result = run(*args)
        with contextlib.suppress(FileNotFoundError):
            os.remove(observer.path_of(recorder.folder, recorder.rank))
        return result

    def hooked(model: Any, state: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
        recorder.hooks.add(getattr(hook, "__name__", type(hook).__name__))

    if torch.distributed.is_available():
        from torch.distributed.algorithms.join import Join

        method(nn.parallel.DistributedDataParallel, "register_comm_hook", hooked)
        method(Join, "__enter__", entered)
        around(Join, "__exit__", waited)
    for name in EXCHANGES:
        around(torch.distributed, name, exchanged)
        for of_tensors in (name, f"{name}_autograd"):
            around(functional_collectives, of_tensors, exchanged)


def weigh(recorder: observer.ScriptRecorder, name: str, result: Any, target: Any, options: dict[str, Any]) -> None:
    """Note how many elements a loss counts, and later the gradient of its result."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad or not isinstance(target, torch.Tensor):
        return
    whole, ignored = target.numel(), 0
    count: float = whole
    if name in OF_CLASSES and not target.is_floating_point():
        counted = target[target != options.get("ignore_index", -100)]
        own, ignored = options.get("weight"), whole - counted.numel()
        count = counted.numel() if own is None else float(parts.local(own)[counted].sum())
    elif name in OF_CLASSES and target.ndim > 1:
        count = whole // target.shape[1]
    elif options.get("reduction") == "batchmean":
        count = len(target) if target.ndim else 1
    about: dict[str, Any] = {
        "function": name,
        "count": count,
        "ignored": ignored,
        "weighted": options.get("weight") is not None,
        "classes": "",
        "reduction": options.get("reduction", "mean"),
        "gradient": None,
        "rows": len(target) if target.ndim else 1,
        "pairs": None,  # where targets that count rows begin, and the number of classes
    }
    scores = options.get("input")
    if name == "cross_entropy" and target.ndim == 1 and whole > 3 and isinstance(scores, torch.Tensor):
        begin = target[0]
        if torch.equal(target, begin + torch.arange(whole, device=target.device)):
            about["pairs"] = int(begin), scores.shape[-1]
    if about["weighted"] and name in OF_CLASSES:
        (about["classes"],) = observer.digests([options["weight"]])
    about["call"] = len(recorder.step["calls"]) - (getattr(recorder.thread, "now", 0) == 0)
    recorder.step["losses"].append(about)

    def received(gradient: torch.Tensor) -> None:
        each = parts.local(gradient).double()
        about["gradient"] = (about["gradient"] or 0.0) + float(each.sum())
        if about["reduction"] == "none":  # the script itself chooses the elements that count, and what each weighs
            each = each[each != 0.0]
            about["count"] = each.numel()
            about["weighted"] |= bool(each.numel()) and float(each.max() - each.min()) > 1e-3 * float(each.abs().max())

    result.register_hook(received)


def observe_data(recorder: observer.ScriptRecorder) -> None:
    """Install the wrappers of loaders and samplers."""
    from torch.utils.data import DataLoader, RandomSampler, Subset, SubsetRandomSampler, WeightedRandomSampler
    from torch.utils.data.distributed import DistributedSampler

    shuffled = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

    def iterated(loader: Any) -> None:
        inner = wrapper = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        shares = 1  # ranks among which the samples are divided
        while wrapper is not None:  # a framework's own batches of a script's batches of its samples
            shares = max(shares, *(int(getattr(wrapper, name, 1)) for name in ("num_replicas", "num_processes")))
            inner, wrapper = wrapper, getattr(wrapper, "sampler", getattr(wrapper, "batch_sampler", None))
        shuffles = hasattr(inner, "set_epoch") or isinstance(inner, shuffled)
        is_fixed = not shuffles or not getattr(inner, "shuffle", True)
        kind = "SequentialSampler" if is_fixed else type(inner).__name__
        about = {"loader": id(loader), "step": len(recorder.steps), "sampler": kind, "shares": shares}
        data = getattr(loader, "dataset", None)
        if isinstance(data, Subset):
            about["subset"] = hashlib.blake2b(repr(list(data.indices)).encode(), digest_size=8).hexdigest()
        recorder.loaders.append(about)

    def sampled(sampler: Any) -> None:
        names = ("epoch", "seed", "rank", "num_replicas", "shuffle", "drop_last")
        about = {name: getattr(sampler, name, None) for name in names}
        recorder.samplers.append({**about, "sampler": id(sampler), "step": len(recorder.steps)})

    method(DataLoader, "__iter__", iterated)
    method(DistributedSampler, "__iter__", sampled)


def answer_stall(recorder: observer.ScriptRecorder) -> None:
    """Wait until the parent says that the ranks hang; then write the record and where this one is, and end it."""
    while not os.path.exists(os.path.join(recorder.folder, observer.STALLED)):
        time.sleep(0.5)
    if recorder.deaf & {"done"}:
        os._exit(0)
    # A process that starts the ranks is none.
    if not (recorder.known.modules or "RANK" in os.environ or torch.distributed.is_initialized()):
        os._exit(1)
    try:
        main: Any = threading.main_thread().ident
        frames = traceback.extract_stack(sys._current_frames()[main])
        folders = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
        own = [one for one in frames if not one.filename.startswith(folders)][-1]  # of the script
        called = [one.name for one in frames[frames.index(own) + 1 :] if one.filename.startswith(folders[0])]
        called = [name for name in called if name != "wrapper"][:1]
        where = [*called, f"{os.path.basename(own.filename)} line {own.lineno}: {own.line}"]
        with open(observer.path_of(recorder.folder, recorder.rank, observer.STALLED), "w") as file:
            file.write(", ".join([*where, f"after {len(recorder.steps)} steps"]))
        recorder.write()
        time.sleep(2.0)  # others lose their connection to this rank when it ends
    finally:
        os._exit(1)
