"""Saves and restores a training run's state in checkpoints. Collective: all ranks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from shoal.checkpoint.error_feedback_state import GROUP, CompressedState, left_behind
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.pieces import described, fill, index, refuse_other_model, share, write_together
from shoal.checkpoint.state import load_optimizer, merged_optimizers, optimizer_state
from shoal.checkpoint.store import SavedCheckpoint, Snapshot, Store
from shoal.checkpoint.writer import CheckpointWriter
from shoal.data.loader import Loader
from shoal.data.sample_digest import EMPTY_DIGEST, chain_digest
from shoal.distributed.agreement import together
from shoal.distributed.mesh import Mesh
from shoal.errors import IntegrityError, NonFiniteError, PeerError, ShoalError, StorageError
from shoal.numerics.precision import LossScale
from shoal.parallel.base import StepSums, Strategy
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlices


@dataclass
class RunState:
    """Training progress besides tensors: counters, sums and schedules. The same on all ranks.

    `step` counts finished steps; `digest` is over the ids of all samples read so far; `bad_steps`, with what was found
    there, are left out when a rollback comes to them again; `server` is what the guard over stale parameters has seen.
    Nothing random is here: every draw is a function of seed, step and grain.
    """

    step: int = 0
    samples: int = 0
    digest: str = EMPTY_DIGEST
    loss: float | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    skipped_steps: int = 0
    bad_streak: int = 0
    bad_steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    computation: dict[str, Any] | None = None
    server: dict[str, Any] | None = None

    def advance(self, sums: StepSums, skipped: str | None) -> None:
        """Counts a step of these sums; `skipped` says why its update was left out, as in Update."""
        self.adapt(skipped)
        self.count(sums, skipped)

    def adapt(self, skipped: str | None) -> None:
        """The loss scale after an update."""
        if skipped in (None, "overflow"):
            self.loss_scale = self.loss_scale.after(skipped == "overflow")

    def count(self, sums: StepSums, skipped: str | None) -> None:
        """Counts a step, and its samples."""
        self.samples += sums.num_samples
        self.digest = chain_digest(self.digest, sums.digest)
        self.loss = sums.loss if math.isfinite(sums.loss) else None
        if skipped is not None:
            self.skipped_steps += 1
        elif self.step > max(self.bad_steps, default=-1):  # not while replaying what came before a bad step
            self.bad_streak = 0
        self.step += 1

    def to_json(self) -> dict[str, Any]:
        """JSON value of this state."""
        now = self.loss_scale
        scale = {"scale": now.scale, "good_steps": now.good_steps} if now.active else None
        return {**vars(self), "loss_scale": scale, "bad_steps": dict(self.bad_steps)}

    @classmethod
    def from_json(cls, document: dict[str, Any], loss_scale: LossScale) -> RunState:
        """From `to_json`; whether the loss scale is dynamic comes from the plan in force."""
        saved = document["loss_scale"]
        scale = replace(loss_scale, **saved) if loss_scale.dynamic and saved is not None else loss_scale
        bad_steps = {int(step): found for step, found in document["bad_steps"].items()}  # JSON has made texts of them
        return cls(**{**document, "loss_scale": scale, "bad_steps": bad_steps})


class AlsoKept(Protocol):
    """Further state in a checkpoint, the same on all ranks."""

    def state(self) -> Any:
        """A JSON value."""

    def restore(self, saved: Any) -> None:
        """From `state`. Raises: JobMismatchError."""


@dataclass(frozen=True)
class Trained:
    """Model, optimizer, loader and strategy, whose state a checkpoint saves. `schedulers` of a loop of one's own."""

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    loader: Loader
    strategy: Strategy
    schedulers: AlsoKept | None = None


class Keeper:
    """Checkpoint manager of a run. `store` is None where no checkpoint is written."""

    def __init__(self, mesh: Mesh, store: Store | None, trained: Trained, every_steps: int | None) -> None:
        self._mesh, self._store, self._trained = mesh, store, trained
        self.every_steps = every_steps  # between two checkpoints; None where time decides
        self._writer = CheckpointWriter(store) if store is not None and mesh.rank == 0 else None
        self._newest = -1
        self._notes: list[str] = []

    @property
    def _compressed(self) -> CompressedState | None:
        compression = self._trained.strategy.compression
        if compression is None:
            return None
        names = [name for name, p in self._trained.sharded_model.parameters() if p.requires_grad]
        return CompressedState(compression, self._mesh, names)

    def due(self, step: int) -> bool:
        """Whether this rank calls for a checkpoint; only rank 0 does."""
        if self._writer is None or step in (0, self._newest):
            return False
        return step % self.every_steps == 0 if self.every_steps is not None else self._writer.due()

    def save(self, state: RunState, wait: bool = False) -> None:
        """Takes a snapshot after `state.step` steps and starts writing it; where state is divided it is written then.

        Collective: all ranks, JSON gathers. Raises: StorageError, on every rank, where it waits and the newest snapshot
        could not be written.
        """
        if self._store is None:
            return
        if state.step != self._newest:
            self._start(state)
            self._newest = state.step
        if wait:
            self._confirm(self._store)

    def rescue(self, error: ShoalError, state: RunState, torn: str | None = None) -> None:
        """Saves `state` before an error ends the run, and says so in the error's remedy.

        `torn` says why the model is not that of the state, where it is not. Nothing is saved then, nor where the error
        is not everywhere: others may wait in another collective. Collective: all ranks, as `save`. Raises: nothing.
        """
        if self._store is None or state.step == 0 or isinstance(error, NonFiniteError):
            return
        if torn is not None:
            said = self._kept(state.step, torn)
        elif error.everywhere or self._mesh.world_size == 1:
            try:
                self.save(state, wait=True)
                said = f"step {state.step} is saved: --resume goes on from there"
            except Exception as failure:  # the error at hand is the reason to end, and is to be told
                first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
                said = f"step {state.step} could not be saved: {first}"
        elif isinstance(error, PeerError):
            return
        else:
            said = self._kept(state.step, "the other ranks may wait within the same work, and cannot be asked to save")
        error.remedy = f"{error.remedy}; {said}"

    def _kept(self, step: int, why: str) -> str:
        if self._newest >= step:
            return f"step {step} is saved: --resume goes on from there"
        kept = f"--resume goes on from step {self._newest}" if self._newest > 0 else "no checkpoint was taken yet"
        return f"step {step} could not be saved: {why}; {kept}"

    def restart(self, state: RunState) -> None:
        """Saves a state anew and removes the checkpoints of later steps, which are to be trained once more.

        Collective: all ranks, JSON gathers. Raises: StorageError as `save`; then nothing is removed.
        """
        if self._store is None:
            return
        self._newest = -1
        self.save(state, wait=True)
        if self._writer is not None:
            self._store.forget_after(state.step)

    def _confirm(self, store: Store) -> None:
        """Raises: StorageError where the last save failed. Collective: all ranks, JSON gathers."""
        together(self._mesh, lambda: self._writer.wait() if self._writer is not None else None)
        failure = self._writer.failure if self._writer is not None else None
        told = self._mesh.gather_json(str(failure) if failure is not None else None)[0]
        if told is not None:
            raise StorageError(
                given=f"the checkpoint of step {self._newest} in {store.folder}",
                conflict=f"it could not be written: {told}",
                remedy="mend the disk; --resume goes on from the newest checkpoint that is there",
            )

    def _start(self, state: RunState) -> None:
        document = self._document(state, self._mesh.gather_json(self._trained.loader.state()))
        compressed = self._compressed
        if compressed is not None:
            document[GROUP] = compressed.document()
        if self._is_divided(compressed):
            self._write_together(state.step, document)
        else:
            together(self._mesh, lambda: self._hand_over(state.step, document))

    def _is_divided(self, compressed: CompressedState | None) -> bool:
        """Whether a checkpoint needs more than rank 0 has."""
        return self._trained.sharded_model.divides_state or (compressed is not None and compressed.compression.carries)

    def save_alone(self, state: RunState) -> str | None:
        """Writes what rank 0 has after the other ranks are gone; why there is no checkpoint, or None."""
        compressed, places = self._compressed, self._trained.loader.state()
        if self._store is None:
            return "no checkpoints were asked for"
        if compressed is not None or places or self._is_divided(compressed):
            return "each rank has a part of the state"
        if self._writer is None:
            return "rank 0 has the state"
        if state.step != self._newest:
            self._hand_over(state.step, self._document(state, [places]))
            self._newest = state.step
        self._writer.wait()
        return str(self._writer.failure) if self._writer.failure is not None else None

    def _document(self, state: RunState, streams: list[Any]) -> dict[str, Any]:
        document = {"run": state.to_json(), "world_size": self._mesh.world_size, "streams": streams}
        schedulers = self._trained.schedulers
        return document if schedulers is None else {**document, "schedulers": schedulers.state()}

    def _held(self, copy: bool) -> tuple[dict[str, TensorSlices], dict[str, Any]]:
        """This rank's tensors by group, the optimizer's as copies or themselves, and the optimizer's document."""
        sharded_model = self._trained.sharded_model
        tensors, document = optimizer_state(self._trained.optimizer, sharded_model.model, copy)
        held = {"model": sharded_model.tensors(), "optimizer": sharded_model.state(tensors)}
        compressed = self._compressed
        if compressed is not None and compressed.compression.carries:
            held[GROUP] = compressed.held()
        return held, document

    def _hand_over(self, step: int, document: dict[str, Any]) -> None:
        """What rank 0 holds, which is everything, to the thread that writes."""
        if self._writer is None:
            return
        held, optimizer = self._held(copy=True)
        written = index([described(held)])
        document = {**document, "optimizer": optimizer, "tensors": written}
        content = dict(share(held, written, 0, 1))
        # The optimizer's are copies already; the model's will change while the thread writes.
        content["model"] = {name: tensor.clone() for name, tensor in content["model"].items()}
        self._writer.write(Snapshot(step, content, document))

    def _write_together(self, step: int, document: dict[str, Any]) -> None:
        """Each rank writes what it is the first to hold, so that none ever has the whole. Collective: all ranks."""
        assert self._store is not None
        began = time.monotonic()
        held, optimizer = together(self._mesh, lambda: self._held(copy=False))  # nothing changes while it is written
        document = {**document, "optimizer": merged_optimizers(self._mesh.gather_json(optimizer))}
        failure = write_together(self._mesh, self._store, Snapshot(step, {}, document), held)
        if self._writer is not None:
            self._writer.wrote(failure, time.monotonic() - began)

    def load(self, loss_scale: LossScale) -> tuple[RunState | None, list[str]]:
        """Sets model, optimizer and loader from the newest good checkpoint; and lines about damaged ones.

        None where there is none. Rank 0 judges; the others read the same one. Collective: all ranks, JSON gathers.
        Raises: IntegrityError, StorageError, JobMismatchError; on every rank.
        """
        if self._store is None:
            return None, []
        store = self._store
        newest, complaints = together(self._mesh, lambda: self._newest_good(store))
        step, complaints = self._mesh.gather_json([newest.step if newest else None, complaints])[0]
        if step is None:
            return None, complaints
        state = together(self._mesh, lambda: self._take_up(store, newest, step, loss_scale))
        return state, [*complaints, *self._notes]

    def _take_up(self, store: Store, saved: SavedCheckpoint | None, step: int, loss_scale: LossScale) -> RunState:
        try:
            return self._restore(saved or store.open(step), loss_scale)
        except (ManifestError, OSError) as error:
            if isinstance(error, ShoalError):
                raise
            raise IntegrityError(
                given=f"the checkpoint of step {step} in {store.folder}",
                conflict=f"rank 0 can read it, rank {self._mesh.rank} on {self._mesh.host} cannot: {error}",
                remedy="give an --out directory that all hosts share",
            ) from error

    def _newest_good(self, store: Store) -> tuple[SavedCheckpoint | None, list[str]]:
        """On rank 0, which judges; nothing on the others."""
        if self._writer is None:
            return None, []
        self._writer.wait()
        try:
            return store.newest_good()
        except ShoalError:
            raise
        except OSError as error:
            raise StorageError(
                given=f"the checkpoints in {store.folder}",
                conflict=f"they cannot be read now: {error}; nothing was moved or changed",
                remedy="mend the permission or the disk, then --resume",
            ) from error

    def _restore(self, saved: SavedCheckpoint, loss_scale: LossScale) -> RunState:
        trained, document = self._trained, saved.document
        sharded_model, strategy = trained.sharded_model, trained.strategy
        held, parameters, absent = sharded_model.tensors(), dict(sharded_model.parameters()), sharded_model.absent()
        refuse_other_model(saved, held, absent)
        # Of a name that is no parameter any more `load_optimizer` tells.
        state = {
            name: values
            for name, values in document["optimizer"]["state"].items()
            if name not in absent and (name not in parameters or strategy.updates(parameters[name]))
        }
        targets = sharded_model.room(document["tensors"]["optimizer"], state.keys())
        fill(saved, "optimizer", targets)
        tensors = {path: tensor for path, (_, tensor) in targets.items()}
        taken_up = {**document["optimizer"], "state": state}
        replaced = load_optimizer(trained.optimizer, sharded_model.model, tensors, taken_up)
        fill(saved, "model", held)
        compressed = self._compressed
        self._notes = compressed.restore(saved) if compressed is not None else left_behind(saved)
        if trained.schedulers is None:  # a loop of one's own sets the groups as it likes
            self._notes = replaced + self._notes
        trained.loader.restore(document["streams"])
        if trained.schedulers is not None:
            trained.schedulers.restore(document.get("schedulers", []))
        self._newest = saved.step
        if self._writer is not None:
            self._writer.failure = None  # that of a snapshot that is no longer the newest
        return RunState.from_json(document["run"], loss_scale)

    def close(self) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            self._writer.close()
