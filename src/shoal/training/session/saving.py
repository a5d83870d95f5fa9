"""Checkpoints of a Session, also when a loop ends early."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint.keeper import Keeper, RunState, Trained
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.state import TENSOR, decode, encode
from shoal.checkpoint.store import Store
from shoal.data.loader import Loader
from shoal.distributed.mesh import together
from shoal.errors import JobMismatchError, RunDirectoryError, StorageError, say_note
from shoal.jobs.job import Job
from shoal.numerics.precision import LossScale
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.grains import FEW_GRAINS
from shoal.runs.directory import RunDirectory, claim, read_json
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.session.arguments import Prepared, Training
from shoal.training.session.optimizers import Groups, as_one
from shoal.training.session.passes import Base


@dataclass(frozen=True)
class Resumed:
    """Training that a Session resumes. `grains`: None for a new one. `older`: it began before draws by hash."""

    grains: int | None = None
    older: bool = False


def resumed(training: Training, job: Job) -> Resumed:
    """Return the training of the newest readable checkpoint. Raises: JobMismatchError for another sampler."""
    if not training.resume or training.checkpoints is None:
        return Resumed()
    store = Store(Path(training.checkpoints))
    for step in reversed(store.steps()):
        with contextlib.suppress(ManifestError):
            run = store.open(step).document["run"]
            before, sampler = read_json(RunDirectory(Path(training.checkpoints)).job), job.describe().get("sampler")
            if before is not None and before.get("sampler") != sampler:
                raise JobMismatchError(
                    given=f"a Session with sampler {sampler}",
                    conflict=f"the training to resume has sampler {before.get('sampler')}",
                    remedy="give the sampler that it began with, or start anew with another checkpoints=",
                )
            return Resumed(
                run.get("grains") or FEW_GRAINS, older=not (run.get("computation") or {}).get("by_hash", False)
            )
    return Resumed()


class Schedulers:
    """Schedulers of a Session, in the order of `prepare`."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = list(schedulers)

    def state(self) -> list[dict[str, Any]]:
        """Return the schedulers' state as a JSON value. Raises: UserCodeError for a state that has none."""

        def leaf(path: str, tensor: Tensor) -> dict[str, Any]:
            return {TENSOR: tensor.tolist(), "dtype": str(tensor.dtype).removeprefix("torch.")}

        named = [(type(scheduler).__name__, scheduler) for scheduler in self._schedulers]
        return [{"kind": kind, "state": encode(s.state_dict(), kind, "scheduler", leaf)} for kind, s in named]

    def restore(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restore the value of `state`. Raises: JobMismatchError for the state of other schedulers."""
        mine, theirs = [type(s).__name__ for s in self._schedulers], [document["kind"] for document in saved]
        if mine != theirs:
            raise JobMismatchError(
                given=f"a session with the schedulers {', '.join(mine) or 'none'}",
                conflict=f"the checkpoint is of one with {', '.join(theirs) or 'none'}",
                remedy="give prepare() the schedulers that the training began with, in that order, or start anew with "
                "another checkpoints=",
            )
        for scheduler, document in zip(self._schedulers, saved, strict=True):
            scheduler.load_state_dict(
                decode(document["state"], lambda t: torch.tensor(t[TENSOR], dtype=getattr(torch, t["dtype"])))
            )


class Trainable:
    """Parameters that a loop trains: the parameters with `requires_grad` at the last `mark`."""

    def __init__(self, model: ShardedModel, *, warns: bool) -> None:
        self._model, self._warns = model, warns
        self.mark()

    def mark(self) -> None:
        """Record which parameters require a gradient."""
        self._noted = [name for name, p in self._model.parameters() if p.requires_grad]

    def state(self) -> list[str]:
        """Return the names of the recorded parameters."""
        return self._noted

    def restore(self, saved: Sequence[str]) -> None:
        """Set `requires_grad` of all parameters, and warn if the script has set it differently."""
        wanted = set(saved)
        changed = [(name, p) for name, p in self._model.parameters() if p.requires_grad != (name in wanted)]
        for name, parameter in changed:
            parameter.requires_grad_(name in wanted)
        if changed and self._warns:
            names = ", ".join(name for name, _ in changed[:4]) + (", ..." if len(changed) > 4 else "")
            text = f"requires_grad of {names} is as in the checkpoint; to change it, set it in the loop"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.mark()


class Saving:
    """Checkpoints of the state after a finished step, even if the next step has already changed groups."""

    def __init__(
        self,
        base: Base,
        prepared: Prepared,
        sharded_model: ShardedModel,
        loader: Loader,
        strategy: Strategy,
        *,
        callbacks: CallbackCalls,
    ) -> None:
        """Open the checkpoint directory. Raises: JobError for schedulers with a state that cannot be stored."""
        folder = base.training.checkpoints if base.replay is None else None  # none in a verification
        limit = base.training.keep_checkpoints
        store = None if folder is None else Store(Path(folder), None if limit == "all" else limit)
        self._lock = contextlib.ExitStack()
        self._rank = base.mesh.rank
        self._prepared, self._schedulers = prepared, Schedulers(prepared.schedulers)
        every = as_one(prepared.optimizers, base.plan.execution.exact)
        self._trainable = Trainable(sharded_model, warns=self._rank == 0)
        states = callbacks.for_checkpoints if callbacks else None
        shares = base.plan.shares_memory
        trained = Trained(sharded_model, every, loader, strategy, self._schedulers, self._trainable, states, shares)
        self.keeps = store is not None
        try:
            if store is not None:
                together(base.mesh, lambda: self._take(store, base.training.resume))
            self.keeper = Keeper(base.mesh, store, trained, base.training.checkpoint_every)
        except BaseException:
            self._lock.close()
            raise
        self.mark()

    def _take(self, store: Store, resume: bool) -> None:
        """Lock the directory. Raises: InUseError; RunDirectoryError if it has another training's checkpoints."""
        self._schedulers.state()
        if self._rank != 0:
            return
        if names := self._prepared.unprepared():
            warnings.warn(
                f"a scheduler of {', '.join(names)} was not given to prepare(): its place is in no checkpoint, and "
                "a resume begins its schedule anew; write session.prepare(model, optimizer, scheduler)",
                RuntimeWarning,
                stacklevel=2,
            )
        self._lock.enter_context(claim(store.folder, say_note, mode=0o700))
        store.clean()
        steps = store.steps()
        if steps and not resume:
            raise RunDirectoryError(
                given=f"Session(checkpoints={str(store.folder)!r}) without resume",
                conflict=f"it holds checkpoints up to step {max(steps)}, which a resume would take for this training's",
                remedy="write resume=True to go on from there, or another directory",
            )

    def load(self, scale: LossScale) -> RunState | None:
        """Load the newest good checkpoint and return its state. Collective: all ranks. Raises: as Keeper.load."""
        state, complaints = self.keeper.load(scale)
        for complaint in complaints if self._rank == 0 else ():
            warnings.warn(complaint, RuntimeWarning, stacklevel=2)
        self.mark()
        return state

    def mark(self) -> None:
        """Record groups and schedulers, before a step's own changes."""
        if self.keeps:
            self._groups, self._noted = Groups(self._prepared.optimizers), self._schedulers.state()
            self._trainable.mark()

    def regular(self, state: RunState, *, best: bool = False) -> None:
        """Save a checkpoint within the training, with the `best` evaluation so far or not. Collective: all ranks."""
        if not self.keeps:
            return
        groups, noted = Groups(self._prepared.optimizers), self._schedulers.state()
        self._put_back()
        if best:
            self.keeper.save_best(state)
        else:
            self.keeper.save(state)
        groups.put_back()
        self._schedulers.restore(noted)

    def last(self, state: RunState, *, live: bool) -> None:
        """Save the last checkpoint, with groups and schedulers as they are (`live`) or as marked.

        Collective: all ranks.
        """
        if not self.keeps or state.step == 0:
            return
        if live:
            self._trainable.mark()
        else:
            self._put_back()
        with contextlib.suppress(StorageError):  # the writer has warned; let the code after the loop run
            self.keeper.save(state, wait=True)

    def alone(self, state: RunState) -> str:
        """Save the last checkpoint after other ranks are gone, if rank 0 has all of it; return the result in words."""
        if state.step == 0:
            return "no step was finished"
        if not self.keeps:
            return "no checkpoints were asked for"
        self._put_back()
        why = self.keeper.save_alone(state)
        if why is None:
            return f"step {state.step} was saved, and Session(resume=True) goes on from it"
        return (
            f"step {state.step} could not be saved here ({why}); Session(resume=True) goes on from the newest there is"
        )

    def torn(self, state: RunState, names: list[str], *, at_first: bool) -> None:
        """Warn that a step ended between its updates. `at_first`: no earlier step shows how many updates a step has."""
        if not self.keeps or self._rank != 0:
            return
        if not names:
            said = "the ranks left the loop within a step, some before and some after the last of its updates: that"
        elif at_first:
            said = (
                f"step {state.step + 1} was left after the update of {', '.join(names)}, and no step before it tells "
                "whether that was the last of its updates: that may be"
            )
        else:
            said = f"step {state.step + 1} was left after the update of {', '.join(names)} and before its others: that"
        said += (" the" if said.endswith("be") else " is the") + " state after no step, and is not saved; "
        warnings.warn(f"{said}the newest checkpoint is that of an earlier step", RuntimeWarning, stacklevel=2)

    def _put_back(self) -> None:
        self._groups.put_back()
        self._schedulers.restore(self._noted)

    def close(self) -> None:
        """Wait for pending writes, and unlock the directory."""
        self.keeper.close()
        self._lock.close()
