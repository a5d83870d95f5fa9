"""Choice between one shared copy of the parameters per host and one copy per rank, from the needs of the job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.distributed.collectives.shared_memory.copy_on_write import why_not_copied
from shoal.distributed.process_setup import is_hooked, is_torchs
from shoal.errors import JobError
from shoal.training.callbacks.base import Callback

# Bytes of parameters. Below, sharing the update saves less time than its two synchronizations cost: 0.1 ms.
WORTH_BYTES = 1 << 20
# Gloo's threads reference a tensor for a moment after its broadcast: up to 0.2 s were measured on a busy machine.
_PATIENCE_SECONDS, _POLL_SECONDS = 2.0, 0.001


@dataclass(frozen=True)
class CopyNeed:
    """A reason why each rank needs its own copy of the parameters.

    `remedy`: words to append to the advice of the error. `forbids`: True if the reason also refuses a plan that
    requests one copy.
    """

    what: str
    why: str
    remedy: str = ""
    forbids: bool = True

    def refuse(self) -> None:
        """Raise JobError for a plan that requests one copy, if the need forbids one copy."""
        if self.forbids:
            raise JobError(
                given=f"{self.what}, with memory.shared = true",
                conflict=self.why,
                remedy=f"write memory.shared = false{self.remedy}",
            )


def copy_need(
    model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Iterable[Callback], hooked: Sequence[str] = ()
) -> CopyNeed | None:
    """Return the job's first reason for a copy on each rank, or None if one copy per host suffices.

    `hooked`: names of the parameters that have hooks.
    """
    if hooked:
        why = "a hook sees a whole gradient, of which each rank has a part where the ranks share one copy"
        return CopyNeed(f"a hook on the parameter {hooked[0]}", why)
    if not is_torchs(optimizer) or is_hooked(optimizer):
        hooked = "an optimizer with hooks" if is_torchs(optimizer) else f"optimizer {type(optimizer).__name__}"
        why = (
            "all ranks have the parameters in one memory, and each may write to its own part of them alone; that is "
            "known of torch's own optimizers"
        )
        return CopyNeed(hooked, why, ", or use a class of torch.optim without hooks")
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            return CopyNeed(f"the complex parameter {name}", "the ranks share real numbers")
        if is_held_elsewhere(parameter):
            why = "its memory is moved to where all ranks have it, and what else refers to it would stay behind"
            return CopyNeed(f"parameter {name}, which is a view or has one", why, ", or give it memory of its own")
    own = next((type(c).__name__ for c in callbacks if not type(c).__module__.startswith("shoal.")), None)
    if own is not None:
        return CopyNeed(f"callback {own}", "it may ask on one rank alone for what is divided then", forbids=False)
    return None


def is_held_elsewhere(parameter: Tensor, patience_seconds: float = _PATIENCE_SECONDS) -> bool:
    """Return True if something else references the tensor's memory for longer than `patience_seconds`.

    Other owners are another tensor, another process, or the array or file that the tensor was made from.
    """
    storage, began = parameter.untyped_storage(), time.monotonic()
    if storage.is_shared() or not storage.resizable():
        return True
    # The parameter's own reference, and that of `storage`.
    while torch._C._storage_Use_Count(storage._cdata) > 2:
        if time.monotonic() - began > patience_seconds:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def is_small(model: nn.Module) -> bool:
    """Return True if the parameters are smaller than 1 MiB, so that a copy for each rank costs nothing noticeable."""
    return sum(parameter.nbytes for parameter in model.parameters()) < WORTH_BYTES


def need_here() -> CopyNeed | None:
    """Return the reason why this machine cannot share one copy, or None if it can."""
    lacking = why_not_copied()
    return None if lacking is None else CopyNeed("this machine", lacking)
