"""Lazy modules: parameters and buffers that get their shapes from the first batch, before other code uses them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoal.data.loader import DataRank, MapLoader
from shoal.data.opened import opened, order_of
from shoal.data.source import MapSource, small_batch
from shoal.distributed.failures import user_error
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Job
from shoal.numerics.isolation import generators_kept
from shoal.numerics.no_trace import NoTrace
from shoal.parallel.model.deferred_init import InitRecorder, NotUnderstoodError


def lazy_names(model: object) -> list[str]:
    """Return the names of parameters and buffers that have no shape yet; empty if `model` is not a module."""
    if not isinstance(model, nn.Module):
        return []
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]


def whole(model: nn.Module, job: Job) -> nn.Module:
    """Return the model. If it has lazy modules, first run one forward with the first step's batch.

    Initial values are identical to plain torch: they are drawn when the forward reaches a lazy module, from the
    generators as the constructor left them. The forward changes nothing else: buffers, attributes of modules and
    generators are restored. Raises: UserCodeError, DataError; JobError for a lazy module that the forward does not use.
    """
    names = lazy_names(model)
    if not names:
        return model
    if any(isinstance(mode, InitRecorder) for mode in _get_current_dispatch_mode_stack()):
        raise NotUnderstoodError("lazy modules, whose shapes a forward gives")
    with generators_kept():
        batch = _first_batch(job)
    tensors = {m: [*m._parameters.values(), *m._buffers.values()] for m in model.modules()}
    lazy = {m for m, own in tensors.items() if any(t is not None and is_lazy(t) for t in own)}
    attributes = {m: dict(vars(m)) for m in tensors if m not in lazy}
    buffers = {m: _held(m) for m in attributes}

    def keep(module: nn.Module, args: object) -> None:  # runs after torch's own hook, which initialises the module
        buffers.setdefault(module, _held(module))

    handles = [module.register_forward_pre_hook(keep) for module in lazy]
    try:
        with NoTrace(None, {"loss": job.loss}):
            job.loss(model, batch)
    except ShoalError:
        raise
    except Exception as error:
        raise user_error("the model or loss, in the forward that makes lazy modules whole,", error, batch) from error
    finally:
        for handle in handles:
            handle.remove()
    for module, held in attributes.items():
        vars(module).clear()
        vars(module).update(held)
    with torch.no_grad():
        for module, held_buffers in buffers.items():
            for name, (buffer, value) in held_buffers.items():
                module._buffers[name] = buffer.copy_(value)
    names = lazy_names(model)
    if names:
        raise JobError(
            given=f"a model with lazy modules: {', '.join(names[:8])}",
            conflict="the loss of the first batch does not use them, so that they have no shape",
            remedy="use them in the forward, or give these layers their sizes: nn.Linear(64, 10) for nn.LazyLinear(10)",
        )
    return model


def _held(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the buffers of a module by name, each with a copy of its value."""
    found = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and not is_lazy(buffer)}
    return {name: (buffer, buffer.detach().clone()) for name, buffer in found.items()}


def _first_batch(job: Job) -> object:
    """Return the batch of the first step as one process reads it, or the first samples of a stream."""
    job = opened(job)
    data = job.train_data
    if not isinstance(data.source, MapSource):
        return small_batch(data.source, data.collate, count=job.global_batch)
    order = order_of(data, job, job.length, job.shuffle is not False)
    loader = MapLoader(data.source, order, DataRank(0, 1), 0, pin_memory=False, bad_samples=data.bad_samples)
    loader.seek(0, order.num_grains)
    return next(loader.step(0).microbatches).batch
