"""Checkpoint manager of a run: saves the run's state, in a thread or on all ranks together, and restores it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from shoal.checkpoint.callback_state import GROUP as CALLBACKS
from shoal.checkpoint.callback_state import CallbackState, KeptCallbacks
from shoal.checkpoint.callback_state import restore as restore_callbacks
from shoal.checkpoint.error_feedback_state import GROUP, CompressedState, left_behind
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.pieces import described, fill, index, refuse_other_model, share, write_together
from shoal.checkpoint.run_state import RunState
from shoal.checkpoint.state import documents_of, load_optimizer, merged_optimizers, of_parameters, optimizer_state
from shoal.checkpoint.store import SavedCheckpoint, Snapshot, Store
from shoal.checkpoint.whole_optimizer import EVALUATED, evaluated_weights
from shoal.checkpoint.writer import CheckpointWriter, SnapshotMemory
from shoal.data.loader import Loader
from shoal.distributed.agreement import together
from shoal.distributed.mesh import Mesh
from shoal.errors import IntegrityError, NonFiniteError, PeerError, ShoalError, StorageError
from shoal.numerics.precision import LossScale
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import (
    ShardedModel,
    TensorSlices,
    allocate_state,
    key_names,
    local,
    state_slices,
)


class AlsoKept(Protocol):
    """Additional state in a checkpoint, the same on all ranks."""

    def state(self) -> Any:
        """Return the state as a JSON value."""

    def restore(self, saved: Any) -> None:
        """Restore the value that `state` returned. Raises: JobMismatchError."""


@dataclass(frozen=True)
class Trained:
    """The objects that a checkpoint saves: model, optimizer, loader, strategy and callbacks.

    `schedulers`: learning-rate schedulers of a user's own training loop.
    `trainable`: which parameters that loop trains.
    `has_one_copy`: whether the ranks of one host together have a single copy of all state.
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    loader: Loader
    strategy: Strategy
    schedulers: AlsoKept | None = None
    trainable: AlsoKept | None = None
    callbacks: KeptCallbacks | None = None
    has_one_copy: bool = False


class Keeper:
    """Checkpoint manager of a run. `store` is None if the run writes no checkpoints."""

    def __init__(
        self,
        mesh: Mesh,
        store: Store | None,
        trained: Trained,
        every_steps: int | None,
        mtbf_seconds: float | None = None,
    ) -> None:
        """Create the manager.

        Args:
            every_steps: steps between two checkpoints; None if elapsed time decides.
            mtbf_seconds: mean time between losses of ranks, in seconds.
        """
        self._mesh, self._store, self._trained = mesh, store, trained
        self.every_steps = every_steps
        self._writer = CheckpointWriter(store, mtbf_seconds) if store is not None and mesh.rank == 0 else None
        self._memory, self._host_memory = SnapshotMemory(), HostMemory(mesh)
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
        """Return True if this rank requests a checkpoint. Only rank 0 does."""
        if self._writer is None or step in (0, self._newest):
            return False
        return step % self.every_steps == 0 if self.every_steps is not None else self._writer.due()

    def tell_failures(self, told: Callable[[str], None]) -> None:
        """Set the function that rank 0 calls with the reason when a checkpoint could not be written."""
        if self._writer is not None:
            self._writer.told = told

    def save(self, state: RunState, wait: bool = False) -> None:
        """Take a snapshot after `state.step` steps and start writing it.

        A thread writes the snapshot if rank 0 or the host's shared memory has all state. Otherwise all ranks write it
        before this call returns. If the previous snapshot is still being written, no snapshot is taken unless `wait` is
        set.
        Raises: StorageError, on every rank, if `wait` is set and the newest snapshot could not be written.
        Collective: all ranks, JSON gathers.
        """
        if self._store is None:
            return
        if state.step != self._newest:
            if not self._mesh.gather_json(self._writer is None or wait or self._writer.is_free())[0]:
                return
            self._start(state)
            self._newest = state.step
            if self._trained.callbacks is not None:
                self._trained.callbacks.saved(self._store.shown(state.step))
        if wait:
            self._confirm(self._store)

    def save_best(self, state: RunState) -> None:
        """Save a state with the best evaluation so far; its checkpoint is stored as the best.

        Collective: all ranks.
        """
        self._newest = -1  # else `save` would skip a step that was saved before the evaluation
        together(self._mesh, lambda: self._writer.wait() if self._writer is not None else None)  # or `save` skips
        self.save(state)

    def rescue(self, error: ShoalError, state: RunState, torn: str | None = None) -> None:
        """Save `state` before an error ends the run, and add the outcome to the error's remedy. Raises nothing.

        `torn`: the reason why the model does not match the state; nothing is saved then. Nothing is saved either if
            only some ranks have the error, since the others may wait in another collective.
        Collective: all ranks, as `save`.
        """
        if self._store is None or state.step == 0 or isinstance(error, NonFiniteError):
            return
        if torn is not None:
            said = self._kept(state.step, torn)
        elif error.everywhere or self._mesh.world_size == 1:
            try:
                self.save(state, wait=True)
                said = f"step {state.step} is saved: --resume goes on from there"
            except Exception as failure:  # the original error ends the run and is reported
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
        """Save a state again and remove the checkpoints of later steps, which will be trained again.

        Raises: StorageError as `save`; nothing is removed then.
        Collective: all ranks, JSON gathers.
        """
        if self._store is None:
            return
        self._newest = -1
        self.save(state, wait=True)
        if self._writer is not None:
            self._store.forget_after(state.step)

    def _confirm(self, store: Store) -> None:
        """Wait for the writer and check the last save. Raises: StorageError if it failed.

        Collective: all ranks, JSON gathers.
        """
        together(self._mesh, lambda: self._writer.wait() if self._writer is not None else None)
        failure = self._writer.failure if self._writer is not None else None
        told = self._mesh.gather_json(str(failure) if failure is not None else None)[0]
        if told is not None:
            raise StorageError(
                given=f"the checkpoint of step {self._newest} in {store.place.shown()}",
                conflict=f"it could not be written: {told}",
                remedy="mend the disk; --resume goes on from the newest checkpoint that is there",
            )

    def _start(self, state: RunState) -> None:
        hooked, callbacks = self._hooked(), self._trained.callbacks
        digests = hooked.digests() if hooked is not None else None
        told = self._mesh.gather_json([self._trained.loader.state(), digests])
        if callbacks is not None:
            callbacks.differ([own for _, own in told])
        document = self._document(state, [place for place, _ in told], hooked)
        best = state.best is not None and state.best["step"] == state.step
        compressed = self._compressed
        if compressed is not None:
            document[GROUP] = compressed.document()
        empty = Snapshot(state.step, {}, document, best)
        if not self._is_divided(compressed):
            together(self._mesh, lambda: self._hand_over(empty, hooked))
        elif not (self._trained.has_one_copy and self._hand_over_parts(empty, hooked)):
            self._write_together(empty, hooked)

    def _hooked(self) -> CallbackState | None:
        callbacks, model = self._trained.callbacks, self._trained.sharded_model
        return together(self._mesh, lambda: CallbackState.of(callbacks, model)) if callbacks is not None else None

    def _is_divided(self, compressed: CompressedState | None) -> bool:
        """Return True if a checkpoint needs state that rank 0 does not have."""
        return self._trained.sharded_model.divides_state or (compressed is not None and compressed.compression.carries)

    def save_alone(self, state: RunState) -> str | None:
        """Write a checkpoint from rank 0 after the other ranks are gone. Return the reason if none was written."""
        compressed, places = self._compressed, self._trained.loader.state()
        if self._store is None:
            return "no checkpoints were asked for"
        if compressed is not None or places or self._is_divided(compressed):
            return "each rank has a part of the state"
        if self._writer is None:
            return "rank 0 has the state"
        if state.step != self._newest:
            callbacks = self._trained.callbacks
            hooked = CallbackState.of(callbacks, self._trained.sharded_model) if callbacks is not None else None
            self._hand_over(Snapshot(state.step, {}, self._document(state, [places], hooked)), hooked)
            self._newest = state.step
        self._writer.wait()
        return str(self._writer.failure) if self._writer.failure is not None else None

    def _document(self, state: RunState, streams: list[Any], hooked: CallbackState | None) -> dict[str, Any]:
        document = {"run": state.to_json(), "world_size": self._mesh.world_size, "streams": streams}
        if hooked is not None:
            document[CALLBACKS] = hooked.document
        document["keys"] = key_names(self._trained.sharded_model)
        for key, also in (("schedulers", self._trained.schedulers), ("trainable", self._trained.trainable)):
            if also is not None:
                document[key] = also.state()
        return document

    def _held(self, hooked: CallbackState | None) -> tuple[dict[str, TensorSlices], dict[str, Any]]:
        """Return this rank's tensors by group, not copied, and the optimizer's document."""
        sharded_model = self._trained.sharded_model
        tensors, document = optimizer_state(self._trained.optimizer, sharded_model.model, copy=False)
        held = {"model": sharded_model.tensors(), "optimizer": state_slices(sharded_model, tensors)}
        compressed = self._compressed
        if compressed is not None and compressed.compression.carries:
            held[GROUP] = compressed.held()
        held |= hooked.tensors if hooked is not None else {}
        with evaluated_weights(self._trained.optimizer) as parameters:
            mine = {id(p) for p in parameters}
            found = {
                name: (held["model"][name][0], local(p)) for name, p in sharded_model.parameters() if id(p) in mine
            }
            if found:
                held[EVALUATED] = {name: (part, tensor.detach().clone()) for name, (part, tensor) in found.items()}
        return held, document

    def _hand_over(self, empty: Snapshot, hooked: CallbackState | None) -> None:
        """Pass a snapshot to the writer thread if rank 0 has all state."""
        if self._writer is None:
            return
        self._writer.wait()  # the last write reads from the memory that this snapshot goes to
        held, optimizer = self._held(hooked)
        written = index([described(held)])
        document = {**empty.document, "optimizer": optimizer, "tensors": written}
        content = dict(share(held, written, 0, 1, self._memory.copied))
        self._writer.write(replace(empty, tensors=content, document=document))

    def _hand_over_parts(self, empty: Snapshot, hooked: CallbackState | None) -> bool:
        """Pass a snapshot that all ranks of the host copied to the writer thread. Return False without shared memory.

        Raises: on every rank, if any rank could not copy; nothing is written then.
        Collective: all ranks.
        """

        def ready() -> tuple[dict[str, TensorSlices], dict[str, Any]]:
            if self._writer is not None:
                self._writer.wait()  # the last write reads from the memory that this snapshot goes to
            return self._held(hooked)

        held, optimizer = together(self._mesh, ready)
        told = self._mesh.gather_json([described(held), optimizer])
        written = index([own for own, _ in told])
        content = self._host_memory.copied(held, written)
        if content is not None and self._writer is not None:
            merged = merged_optimizers(own for _, own in told)
            document = {**empty.document, "optimizer": merged, "tensors": written}
            self._writer.write(replace(empty, tensors=content, document=document))
        return content is not None

    def _write_together(self, empty: Snapshot, hooked: CallbackState | None) -> None:
        """Write a checkpoint in which each rank writes its own part, so that no rank needs the whole state.

        Collective: all ranks.
        """
        assert self._store is not None
        began = time.monotonic()
        # No copies: training waits while the checkpoint is written.
        held, optimizer = together(self._mesh, lambda: self._held(hooked))
        document = {**empty.document, "optimizer": merged_optimizers(self._mesh.gather_json(optimizer))}
        failure = write_together(self._mesh, self._store, replace(empty, document=document), held)
        if self._writer is not None:
            self._writer.wrote(failure, time.monotonic() - began)

    def begin(self) -> None:
        """Take over the checkpoint store as its only writer, before this run checks or removes checkpoints.

        Raises: StorageError, on every rank.
        Collective: all ranks, JSON gathers.
        """
        store = self._store
        if store is not None:
            together(self._mesh, lambda: self._reached(store, store.take_over) if self._writer is not None else None)

    def send(self) -> None:
        """Send the run's own files to the run's address, if it has one. Call on rank 0. Raises: StorageError."""
        if self._store is not None:
            self._reached(self._store, self._store.send)

    def _reached(self, store: Store, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            raise StorageError(
                given=f"the checkpoints in {store.place.shown()}",
                conflict=f"nothing can be written there: {error}",
                remedy="check the address, and this host's credentials and way to it",
            ) from error

    def clean(self) -> None:
        """Remove incomplete checkpoints of a killed run. Call before this run writes any.

        Raises: StorageError, on every rank.
        Collective: all ranks, JSON gathers.
        """
        store = self._store
        if store is not None:
            together(self._mesh, lambda: self._reached(store, store.clean) if self._writer is not None else None)

    def load(self, loss_scale: LossScale) -> tuple[RunState | None, list[str]]:
        """Restore model, optimizer and loader from the newest valid checkpoint.

        Rank 0 selects the checkpoint, and all ranks read it. Returns the run state, or None if there is no checkpoint,
        and messages about damaged checkpoints.
        Raises: IntegrityError, StorageError or JobMismatchError, on every rank.
        Collective: all ranks, JSON gathers.
        """
        if self._store is None:
            return None, []
        store = self._store
        newest, complaints = together(self._mesh, lambda: self._newest_good(store))
        step, complaints = self._mesh.gather_json([newest.step if newest else None, complaints])[0]
        if step is None:
            return None, complaints
        state = together(self._mesh, lambda: self._take_up(store, newest, step, loss_scale))
        best = state.best
        if best is not None and self._writer is not None:
            with contextlib.suppress(OSError):
                store.mend_best(best["step"])
        return state, [*complaints, *self._notes]

    def _take_up(self, store: Store, saved: SavedCheckpoint | None, step: int, loss_scale: LossScale) -> RunState:
        try:
            return self._restore(saved or store.open(step), loss_scale)
        except (ManifestError, OSError) as error:
            if isinstance(error, ShoalError):
                raise
            raise IntegrityError(
                given=f"the checkpoint of step {step} in {store.place.shown()}",
                conflict=f"rank 0 can read it, rank {self._mesh.rank} on {self._mesh.host} cannot: {error}",
                remedy="give an --out directory that all hosts share",
            ) from error

    def _newest_good(self, store: Store) -> tuple[SavedCheckpoint | None, list[str]]:
        """Select the newest valid checkpoint on rank 0. Other ranks return (None, [])."""
        if self._writer is None:
            return None, []
        self._writer.wait()
        try:
            return store.newest_good()
        except ShoalError:
            raise
        except OSError as error:
            raise StorageError(
                given=f"the checkpoints in {store.place.shown()}",
                conflict=f"they cannot be read now: {error}; nothing was moved or changed",
                remedy="mend the permission or the disk, then --resume",
            ) from error

    def _restore(self, saved: SavedCheckpoint, loss_scale: LossScale) -> RunState:
        trained, document = self._trained, saved.document
        sharded_model, division = trained.sharded_model, trained.strategy.update_division
        held, parameters, absent = sharded_model.tensors(), dict(sharded_model.parameters()), sharded_model.absent()
        refuse_other_model(saved, held, absent)
        # `load_optimizer` reports names that are no longer parameters.
        if trained.trainable is not None and "trainable" in document:  # earlier versions did not store it
            trained.trainable.restore(document["trainable"])
        taken_up = of_parameters(
            document["optimizer"],
            lambda name: name not in absent and (name not in parameters or division.updates(parameters[name])),
        )
        held_states = {name for own in documents_of(taken_up).values() for name in own["state"]}
        targets = allocate_state(sharded_model, document["tensors"]["optimizer"], held_states)
        fill(saved, "optimizer", targets)
        tensors = {path: tensor for path, (_, tensor) in targets.items()}
        loops = trained.schedulers is not None
        replaced = load_optimizer(trained.optimizer, sharded_model.model, tensors, taken_up, adds_groups=loops)
        fill(saved, "model", held)
        compressed = self._compressed
        self._notes = compressed.restore(saved) if compressed is not None else left_behind(saved)
        if trained.schedulers is None:  # a user's own loop may set the groups itself
            self._notes = replaced + self._notes
        trained.loader.restore(document["streams"])
        if trained.schedulers is not None:
            trained.schedulers.restore(document.get("schedulers", []))
        if trained.callbacks is not None:
            self._notes = self._notes + restore_callbacks(saved, trained.callbacks, sharded_model)
        self._newest = saved.step
        if self._writer is not None:
            self._writer.failure = None  # that failure is of a snapshot that is no longer the newest
        return RunState.from_json(document["run"], loss_scale)

    @property
    def writing(self) -> float | None:
        """Mean CPU seconds that the writer thread takes for a checkpoint; None before the first one."""
        taken = self._writer.cpu_seconds if self._writer is not None else []
        return round(sum(taken) / len(taken), 6) if taken else None

    def close(self) -> None:
        """Wait until the current checkpoint is written."""
        if self._writer is not None:
            self._writer.close()
