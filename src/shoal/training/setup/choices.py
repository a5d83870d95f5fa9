"""Settings that a run chooses before its first step: reading processes, one parameter copy or several.

Each rank proposes values from what it sees. All ranks then derive the same complete plan from all proposals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint.whole_optimizer import is_hooked, is_torchs
from shoal.data.source import MapSource, Opened
from shoal.distributed.collectives.shared_memory.region import why_not_copied
from shoal.distributed.mesh import together
from shoal.errors import JobError
from shoal.jobs.job import Job
from shoal.parallel.data.sparse_rows import sparse_parameters
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.resolve import CompletePlan
from shoal.training.callbacks.base import Callback
from shoal.training.update.closure import needs_closure

# Bytes of parameters. Below, sharing the update saves less time than its two synchronizations cost: 0.1 ms.
WORTH_BYTES = 1 << 20
# Gloo's threads reference a tensor for a moment after its broadcast: up to 0.2 s were measured on a busy machine.
_PATIENCE_SECONDS, _POLL_SECONDS = 2.0, 0.001
# Note for runs that did not request the shared copy.
_ONE_COPY = (
    "the ranks share one copy of the model and the optimizer's state; to give each its own, run with --plan and a copy "
    "of this run's plan.toml in which [memory] shared = false"
)


class Choices(NamedTuple):
    """The complete plan of a run, and lines for people on its data, and on copies."""

    plan: CompletePlan
    notes: tuple[str, ...]
    copies_notes: tuple[str, ...]


def choose(
    plan: CompletePlan,
    job: Job,
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    *,
    data: Opened,
    workers: int,
    may_copy: bool,
    checks_replicas: bool,
) -> Choices:
    """Return the complete plan of this run, which no later stage changes.

    `workers`: this rank's proposal for data.workers.
    `may_copy`: the plan leaves open whether the ranks share one copy. `checks_replicas`: the run compares the copies.
    Raises: JobError if the user requests a shared copy that the job does not allow.
    Collective: all ranks, one JSON gather, and another one for a shared copy that the user requests.
    """
    mesh, model = sharded_model.mesh, sharded_model.model
    lacking = need = None
    if plan.shares_memory:
        lacking = why_not_copied()
        hooked = [*sharded_model.hooks.by_name]
        need = CopyNeed("this machine", lacking) if lacking else copy_need(model, optimizer, job.callbacks, hooked)
    wanted = need or (CopyNeed("--check-replicas", "it compares the copies") if checks_replicas else None)
    proposal = {
        "workers": workers,
        "lacks": lacking is not None,
        "need": None if wanted is None else f"{wanted.what}: {wanted.why}",
        "small": is_small(model),
    }
    # Every rank applies the same rules to the same rows, so that all ranks get the same plan.
    rows = mesh.gather_json(proposal)
    workers = rows[0]["workers"]
    notes = data.notes
    if data.workers not in (None, workers) and isinstance(data.source, MapSource):
        notes += (f"train_data: num_workers={data.workers} has no effect: the plan has data.workers = {workers}",)
    plan = plan.with_choices(workers=workers)
    if not plan.shares_memory:
        return Choices(plan, notes, ())
    # The plan may come from another machine.
    if not may_copy and not any(row["lacks"] for row in rows):
        together(mesh, lambda: need.refuse() if need is not None else None)
        return Choices(plan, notes, ())
    why, small = next((row["need"] for row in rows if row["need"] is not None), None), rows[0]["small"]
    if why is None and not any(row["small"] for row in rows):
        return Choices(plan, notes, (_ONE_COPY,))
    # No note about a small model, unless the user's plan requests the shared copy.
    is_silent = why is None or (small and may_copy)
    copies = () if is_silent else (f"each rank has a copy of the model and the optimizer's state: {why}",)
    return Choices(plan.with_choices(shared=False), notes, copies)


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
    if needs_closure(optimizer):
        why = "its step computes the loss again from all parameters, of which each rank updates a part in one copy"
        return CopyNeed(f"optimizer {type(optimizer).__name__}", why)
    if not is_torchs(optimizer) or is_hooked(optimizer):
        hooked = "an optimizer with hooks" if is_torchs(optimizer) else f"optimizer {type(optimizer).__name__}"
        why = (
            "all ranks have the parameters in one memory, and each may write to its own part of them alone; that is "
            "known of torch's own optimizers"
        )
        return CopyNeed(hooked, why, ", or use a class of torch.optim without hooks")
    for name in sparse_parameters(model):
        why = "each rank would add all rows, and none has a part of them"
        remedy = ", or build the embedding with sparse=False"
        return CopyNeed(f"{name} with sparse gradients", why, remedy, forbids=False)
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
