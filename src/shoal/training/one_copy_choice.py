"""Choice between one copy of the parameters for the ranks of a host and a copy each, by what a job needs."""

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

# Of parameters. With fewer, what a rank is spared of the update is less than the two meetings that it takes: 0.1 ms.
WORTH_BYTES = 1 << 20
# Gloo's threads keep a tensor that they have broadcast for a moment longer: on a busy machine 0.2 s were seen.
_PATIENCE_SECONDS, _POLL_SECONDS = 2.0, 0.001


@dataclass(frozen=True)
class CopyNeed:
    """Cause, in a job, of a copy of the parameters on each rank; `forbids` one copy also where that is asked for.

    `remedy`: what to write where one copy is asked for.
    """

    what: str
    why: str
    remedy: str = ""
    forbids: bool = True

    def refuse(self) -> None:
        """Raises: JobError of a plan that asks for one copy, where the need forbids it."""
        if self.forbids:
            raise JobError(
                given=f"{self.what}, with memory.shared = true",
                conflict=self.why,
                remedy=f"write memory.shared = false{self.remedy}",
            )


def copy_need(
    model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Iterable[Callback], hooked: Sequence[str] = ()
) -> CopyNeed | None:
    """The first need of a job to have a copy on each rank; None where one copy will do.

    `hooked`: the parameters that have hooks.
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
    """Whether somebody else has a tensor's memory, or a part of it, and does not let go of it in a while.

    Another tensor, another process, or an array or a file that it was made from.
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
    """Whether a copy of the parameters for each rank costs nothing that is felt."""
    return sum(parameter.nbytes for parameter in model.parameters()) < WORTH_BYTES


def need_here() -> CopyNeed | None:
    """The lack of this machine for one copy; None where it has what that needs."""
    lacking = why_not_copied()
    return None if lacking is None else CopyNeed("this machine", lacking)
