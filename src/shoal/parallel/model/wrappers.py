"""Refusal of models that another trainer has wrapped, or that sum over ranks themselves, by type."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from shoal.errors import JobError

# By class names: an import would load unused packages.
_WRAPPERS = {
    "DistributedDataParallel": "sums the gradients",
    "DataParallel": "divides the batches over devices",
    "FullyShardedDataParallel": "divides the parameters and sums the gradients",
    "FSDPModule": "divides the parameters and sums the gradients",
    "DeepSpeedEngine": "sums the gradients and steps an optimizer",
    "PipelineEngine": "sums the gradients and steps an optimizer",
    "_FabricModule": "sums the gradients",
}
# The call that gives a module the class.
_CALLED = {"FSDPModule": "fully_shard"}
# Modules and classes with constructors that may wait for all ranks, or end the process if the ranks differ.
_COLLECTIVE = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


def refuse_wrapped(model: nn.Module, place: str = "model()") -> None:
    """Raise JobError if a module of the model is a wrapper, or normalises over a process group."""
    for name, module in model.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        where = f" as {name}" if name else ""
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper is not None:
            raise _wrapped(f"{place} with {_CALLED.get(wrapper, wrapper)}{where}", wrapper)
        if module.__dict__.get("_is_accelerate_prepared"):
            raise _wrapped(f"{place} with a module that Accelerate has prepared{where}", "an Accelerator")
        if isinstance(module, nn.SyncBatchNorm):
            raise JobError(
                given=f"{place} with SyncBatchNorm{where}",
                conflict="it normalises over the ranks of a process group, so that the number of devices changes the "
                "result, and it runs on GPUs alone",
                remedy="build the model with torch.nn.BatchNorm1d, BatchNorm2d or BatchNorm3d, which shoal computes by "
                "grain, the same on any number of devices, and leave out convert_sync_batchnorm",
            )


def _wrapped(given: str, wrapper: str) -> JobError:
    does = _WRAPPERS.get(wrapper, "sums the gradients")
    return JobError(
        given=given,
        conflict=f"{wrapper} {does}, which shoal does itself",
        remedy="give the bare module: what it was before it was wrapped",
    )


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Return a context in which a wrapper's constructor raises a JobError instead of communicating with other ranks."""
    with contextlib.ExitStack() as stack:
        for module, name in _COLLECTIVE:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None:

                def refuse(self: Any, *args: Any, name: str = name, **kwargs: Any) -> None:
                    raise _wrapped(f"model() that wraps a module in {name}", name)

                stack.callback(setattr, kind, "__init__", kind.__init__)
                kind.__init__ = refuse
        yield
