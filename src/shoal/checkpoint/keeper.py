"""Checkpoint manager of a run: saves its state, in a thread or on all ranks together, and restores it."""

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
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlices, local


class AlsoKept(Protocol):
    """Further state in a checkpoint, the same on all ranks."""

    def state(self) -> Any:
        """A JSON value."""

    def restore(self, saved: Any) -> None:
        """From `state`. Raises: JobMismatchError."""


@dataclass(frozen=True)
class Trained:
    """Model, optimizer, loader, strategy and callbacks, whose state a checkpoint saves.

    `schedulers` of a loop of one's own, and which parameters it trains: `trainable`.
    `has_one_copy`: whether ranks of one host have one of all state, by parts.
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
    """Checkpoint manager of a run. `store` is None where no checkpoint is written."""

    def __init__(
        self,
        mesh: Mesh,
        store: Store | None,
        trained: Trained,
        every_steps: int | None,
        mtbf_seconds: float | None = None,
    ) -> None:
        """`every_steps`: between two checkpoints, None where time decides; `mtbf_seconds`: between losses of ranks."""
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
        """Whether this rank calls for a checkpoint; only rank 0 does."""
        if self._writer is None or step in (0, self._newest):
            return False
        return step % self.every_steps == 0 if self.every_steps is not None else self._writer.due()

    def tell_failures(self, told: Callable[[str], None]) -> None:
        """From now on `told` takes the reason why a checkpoint could not be written; on rank 0."""
        if self._writer is not None:
            self._writer.told = told

    def save(self, state: RunState, wait: bool = False) -> None:
        """Takes a snapshot after `state.step` steps and starts writing it; divided state but one copy's is written now.

        Collective: all ranks, JSON gathers. Raises: StorageError, on every rank, where it waits and the newest snapshot
        could not be written. Where the one before is still being written, and nobody waits, there is none.
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
        """Saves a state whose evaluation is the best; its checkpoint is kept as such. Collective: all ranks."""
        self._newest = -1  # or what was saved before the evaluation would do
        together(self._mesh, lambda: self._writer.wait() if self._writer is not None else None)  # or there is none
        self.save(state)

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
        document["keys"] = self._trained.sharded_model.key_names()
        for key, also in (("schedulers", self._trained.schedulers), ("trainable", self._trained.trainable)):
            if also is not None:
                document[key] = also.state()
        return document

    def _held(self, hooked: CallbackState | None) -> tuple[dict[str, TensorSlices], dict[str, Any]]:
        """This rank's tensors by group, themselves and no copies, and the optimizer's document."""
        sharded_model = self._trained.sharded_model
        tensors, document = optimizer_state(self._trained.optimizer, sharded_model.model, copy=False)
        held = {"model": sharded_model.tensors(), "optimizer": sharded_model.state(tensors)}
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
        """The snapshot with what rank 0 holds, which is everything, to the thread that writes."""
        if self._writer is None:
            return
        self._writer.wait()  # which reads from the memory that this snapshot goes to
        held, optimizer = self._held(hooked)
        written = index([described(held)])
        document = {**empty.document, "optimizer": optimizer, "tensors": written}
        content = dict(share(held, written, 0, 1, self._memory.copied))
        self._writer.write(replace(empty, tensors=content, document=document))

    def _hand_over_parts(self, empty: Snapshot, hooked: CallbackState | None) -> bool:
        """The snapshot with what each rank is the first to hold, to the thread that writes; whether there is memory.

        Collective: all ranks. Raises: on every rank, where any could not copy; nothing is written then.
        """

        def ready() -> tuple[dict[str, TensorSlices], dict[str, Any]]:
            if self._writer is not None:
                self._writer.wait()  # which reads from the memory that this snapshot goes to
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
        """Each rank writes what it is the first to hold, so that none ever has the whole. Collective: all ranks."""
        assert self._store is not None
        began = time.monotonic()
        # Nothing changes while it is written.
        held, optimizer = together(self._mesh, lambda: self._held(hooked))
        document = {**empty.document, "optimizer": merged_optimizers(self._mesh.gather_json(optimizer))}
        failure = write_together(self._mesh, self._store, replace(empty, document=document), held)
        if self._writer is not None:
            self._writer.wrote(failure, time.monotonic() - began)

    def begin(self) -> None:
        """Makes this run the one that writes where checkpoints are, before it judges or removes any.

        Collective: all ranks, JSON gathers. Raises: StorageError, on every rank.
        """
        store = self._store
        if store is not None:
            together(self._mesh, lambda: self._reached(store, store.take_over) if self._writer is not None else None)

    def send(self) -> None:
        """Sends the run's own files to where it is, if that is an address. On rank 0. Raises: StorageError."""
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
        """Removes what the writer of a killed run left half done. Before this one writes anything.

        Collective: all ranks, JSON gathers. Raises: StorageError, on every rank.
        """
        store = self._store
        if store is not None:
            together(self._mesh, lambda: self._reached(store, store.clean) if self._writer is not None else None)

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
                given=f"the checkpoints in {store.place.shown()}",
                conflict=f"they cannot be read now: {error}; nothing was moved or changed",
                remedy="mend the permission or the disk, then --resume",
            ) from error

    def _restore(self, saved: SavedCheckpoint, loss_scale: LossScale) -> RunState:
        trained, document = self._trained, saved.document
        sharded_model, strategy = trained.sharded_model, trained.strategy
        held, parameters, absent = sharded_model.tensors(), dict(sharded_model.parameters()), sharded_model.absent()
        refuse_other_model(saved, held, absent)
        # Of a name that is no parameter any more `load_optimizer` tells.
        if trained.trainable is not None and "trainable" in document:  # an earlier version did not keep it
            trained.trainable.restore(document["trainable"])
        taken_up = of_parameters(
            document["optimizer"],
            lambda name: name not in absent and (name not in parameters or strategy.updates(parameters[name])),
        )
        held_states = {name for own in documents_of(taken_up).values() for name in own["state"]}
        targets = sharded_model.room(document["tensors"]["optimizer"], held_states)
        fill(saved, "optimizer", targets)
        tensors = {path: tensor for path, (_, tensor) in targets.items()}
        loops = trained.schedulers is not None
        replaced = load_optimizer(trained.optimizer, sharded_model.model, tensors, taken_up, adds_groups=loops)
        fill(saved, "model", held)
        compressed = self._compressed
        self._notes = compressed.restore(saved) if compressed is not None else left_behind(saved)
        if trained.schedulers is None:  # a loop of one's own sets the groups as it likes
            self._notes = replaced + self._notes
        trained.loader.restore(document["streams"])
        if trained.schedulers is not None:
            trained.schedulers.restore(document.get("schedulers", []))
        if trained.callbacks is not None:
            self._notes = self._notes + restore_callbacks(saved, trained.callbacks, sharded_model)
        self._newest = saved.step
        if self._writer is not None:
            self._writer.failure = None  # that of a snapshot that is no longer the newest
        return RunState.from_json(document["run"], loss_scale)

    @property
    def writing(self) -> float | None:
        """Seconds of a core that a checkpoint takes beside training; None where no thread has written one."""
        taken = self._writer.cpu_seconds if self._writer is not None else []
        return round(sum(taken) / len(taken), 6) if taken else None

    def close(self) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            self._writer.close()
