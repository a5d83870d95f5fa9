"""Checkpoint manager of a run: saves the run's state, in a thread or on all ranks together, and restores it.

`RunState` is the training progress other than tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.checkpoint.callback_state import GROUP as CALLBACKS
from shoal.checkpoint.callback_state import CallbackState, CheckpointedCallbacks
from shoal.checkpoint.callback_state import restore as restore_callbacks
from shoal.checkpoint.error_feedback_state import GROUP, CompressedState, left_behind
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.pieces import described, fill, index, refuse_other_model, share, write_together
from shoal.checkpoint.state import (
    OptimizerDocument,
    documents_of,
    load_optimizer,
    merged_optimizers,
    of_parameters,
    optimizer_state,
)
from shoal.checkpoint.store import SavedCheckpoint, Snapshot, Store, directory_name, make_room, remove_later
from shoal.checkpoint.whole_optimizer import EVALUATED, evaluated_weights
from shoal.data.loader import Loader
from shoal.data.order import EMPTY_DIGEST
from shoal.distributed.mesh import Mesh, together
from shoal.errors import IntegrityError, NonFiniteError, PeerError, ShoalError, StorageError
from shoal.numerics.precision import LossScale
from shoal.parallel.base import StepSums, Strategy
from shoal.parallel.model.sharded_model import (
    ShardedModel,
    TensorSlices,
    allocate_state,
    key_names,
    local,
    state_slices,
)


@dataclass
class RunState:
    """Training progress other than tensors: counters, sums and schedules. It is the same on all ranks.

    `step`: number of finished steps.
    `digest`: digest of the ids of all samples read so far.
    `bad_steps`: findings by step; a rollback skips these steps when it reaches them again.
    `server`: state of the guard against stale parameters.
    `grains`: the job's number of grains.
    `bad_samples`: error text by sample id; these samples are no longer read.
    `evaluation_due`: whether a stop interrupted the evaluation after `step`, so that a resume evaluates first.
    Random state is not stored, since every draw is a function of seed, step and grain.
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
    grains: int | None = None
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation
    bad_samples: dict[int, str] = field(default_factory=dict)
    evaluation_due: bool = False

    def improves(self, watched: tuple[str, bool], metrics: dict[str, float]) -> bool:
        """Return True if this step's metrics are the best so far, and store them in `best` if so."""
        name, largest = watched
        value, best = metrics.get(name, math.nan), self.best
        if not math.isfinite(value):
            return False
        same = best is not None and (best["metric"], best["largest"]) == watched
        if best is not None and same and not (value > best["value"] if largest else value < best["value"]):
            return False
        self.best = {"step": self.step, "metric": name, "largest": largest, "value": value}
        return True

    def advance(self, sums: StepSums, skipped: str | None) -> None:
        """Count a step with these sums. `skipped`: the reason why the update was skipped, as in Update."""
        self.adapt(skipped)
        self.count(sums, skipped)

    def adapt(self, skipped: str | None) -> None:
        """Adjust the loss scale after an update."""
        if self.loss_scale.dynamic and skipped in (None, "overflow"):
            self.loss_scale = self.loss_scale.after(skipped == "overflow")

    def count(self, sums: StepSums, skipped: str | None) -> None:
        """Count a step and its samples."""
        self.samples += sums.num_samples
        self.digest = chain_digest(self.digest, sums.digest)
        self.loss = sums.loss if math.isfinite(sums.loss) else None
        if skipped is not None:
            self.skipped_steps += 1
        elif self.step > max(self.bad_steps, default=-1):  # not while steps before a bad step are replayed
            self.bad_streak = 0
        self.step += 1

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON value."""
        now = self.loss_scale
        scale = {"scale": now.scale, "good_steps": now.good_steps} if now.active else None
        return {
            **vars(self),
            "loss_scale": scale,
            "bad_steps": dict(self.bad_steps),
            "bad_samples": dict(self.bad_samples),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], loss_scale: LossScale) -> RunState:
        """Restore the state from `to_json`. The current plan decides whether the loss scale is dynamic."""
        saved = document["loss_scale"]
        scale = replace(loss_scale, **saved) if loss_scale.dynamic and saved is not None else loss_scale
        bad_steps = {int(step): entry for step, entry in document["bad_steps"].items()}  # JSON keys are strings
        bad_samples = {int(sample): text for sample, text in document.get("bad_samples", {}).items()}
        return cls(**{**document, "loss_scale": scale, "bad_steps": bad_steps, "bad_samples": bad_samples})


def chain_digest(previous: str, words: npt.NDArray[np.float64]) -> str:
    """Return the digest after a step: SHA-256 over the previous digest and the sum of the step's grain digests."""
    return hashlib.sha256(bytes.fromhex(previous) + words.astype("<u8").tobytes()).hexdigest()


# By default, writing takes about 1 % of the time between two checkpoints, within these limits of the interval.
_SHARE, _SOONEST_SECONDS, _LATEST_SECONDS = 0.01, 5.0, 600.0
# If ranks are lost often, writing may take more of the time.
_MOST_SHARE, _SOONEST_WITH_LOSSES_SECONDS = 0.1, 0.5
# How long to wait for the previous write before training continues without a new checkpoint.
_PATIENCE_SECONDS = 5.0
# A write that takes longer is reported, even if no other checkpoint is due.
_HUNG_SECONDS = 30.0


class SnapshotMemory:
    """Host memory that snapshots are copied into. It is reused, since fresh pages cost five times as much.

    On a host with a GPU the memory is pinned, so that the device copies into it directly.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], Tensor] = {}

    def copied(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous CPU copies of tensors, valid until the group is copied again."""
        copies = {}
        for name, tensor in tensors.items():
            own = self._copies.get((group, name))
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
                self._copies[group, name] = own
            with torch.no_grad():
                copies[name] = own.copy_(tensor)
        return copies


def interval_seconds(cost_seconds: float, mtbf_seconds: float | None) -> float:
    """Return the interval between checkpoints from the cost of one and the mean time between failures, if known.

    Source: Young, A First Order Approximation to the Optimum Checkpoint Interval (CACM, 1974): sqrt(2 * cost * MTBF).
    """
    by_cost = min(_LATEST_SECONDS, max(_SOONEST_SECONDS, cost_seconds / _SHARE))
    if mtbf_seconds is None:
        return by_cost
    best = max(math.sqrt(2.0 * cost_seconds * mtbf_seconds), _SOONEST_WITH_LOSSES_SECONDS)
    return max(cost_seconds / _MOST_SHARE, min(by_cost, best))


class CheckpointWriter:
    """Writer thread of a store. A disk that fails or hangs causes a warning and does not end the training.

    `report`: function called with the reason when a checkpoint could not be written, and with what was done.
    """

    def __init__(
        self, store: Store, mtbf_seconds: float | None = None, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._store, self.mtbf_seconds, self._patience = store, mtbf_seconds, patience_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[float] | None = None
        self._given_up: Future[float] | None = None
        self._cost_seconds = 0.0
        self._last = time.monotonic()
        self.cpu_seconds: list[float] = []  # CPU seconds of the writer thread for each checkpoint
        self.failure: OSError | None = None
        self.report: Callable[[str, str], None] = lambda reason, done: None

    def mean_cpu_seconds(self) -> float | None:
        """Return the mean CPU seconds that the thread takes for a checkpoint; None before the first one."""
        seconds = self.cpu_seconds
        return round(sum(seconds) / len(seconds), 6) if seconds else None

    def due(self) -> bool:
        """Return True if the last write is done and long enough ago for a new checkpoint."""
        if self._pending is not None and not self._pending.done():
            if self._pending is not self._given_up and time.monotonic() - self._last > _HUNG_SECONDS:
                self._give_up()
            return False
        return time.monotonic() - self._last >= interval_seconds(self._cost_seconds, self.mtbf_seconds)

    def write(self, snapshot: Snapshot) -> None:
        """Wait for the previous write, then start writing a snapshot."""
        self.wait()

        def timed_write() -> float:
            began, cpu = time.monotonic(), time.thread_time()
            try:
                self._store.write(snapshot)
            except OSError as error:
                if not self.makes_room(error.errno, str(error), snapshot.step):
                    raise
                self._store.write(snapshot)
            self.cpu_seconds.append(time.thread_time() - cpu)
            return time.monotonic() - began

        self._pending = self._thread.submit(timed_write)
        self._last = time.monotonic()

    def is_free(self) -> bool:
        """Return True if the last write is done. Wait a few seconds for it, but only once for each write."""
        pending = self._pending
        if pending is None:
            return True
        if pending is self._given_up and not pending.done():
            return False
        try:
            pending.exception(self._patience)
        except NotDoneError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self._given_up = self._pending
        self._warn(f"the one before is still being written after {time.monotonic() - self._last:.0f} s")

    def wait(self) -> None:
        """Wait until no write is pending. A failed write causes a warning and sets `failure`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._cost_seconds = pending.result()
            self.failure = None
        except OSError as error:
            self.failure = error
            self._warn(error)

    def makes_room(self, code: int | None, reason: str, step: int) -> bool:
        """Return True if the write of `step` is worth a second attempt, since its disk was full and now has room.

        `code`, `reason`: errno and text of the failure.
        """
        removed = make_room(self._store, step) if code in (errno.ENOSPC, errno.EDQUOT) else None
        if removed is not None:
            oldest, num_bytes = removed
            done = f"the checkpoint of step {oldest} ({num_bytes:,} bytes) was removed early, and the write is repeated"
            self.report(reason, done)
            warnings.warn(f"no space for the checkpoint of step {step}: {done}", RuntimeWarning, stacklevel=2)
        return removed is not None

    def wrote(self, failure: str | None, seconds: float) -> None:
        """Record the outcome of a checkpoint that all ranks wrote together."""
        self._last, self._cost_seconds = time.monotonic(), seconds
        self.failure = None if failure is None else OSError(failure)
        if failure is not None:
            self._warn(failure)

    def close(self) -> None:
        """Wait for the current write and end the thread."""
        self.wait()
        self._thread.shutdown()

    def _warn(self, reason: object) -> None:
        self.report(str(reason), "the last good one stays, and the training goes on")
        text = f"no checkpoint written: {reason}; the last good one stays"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


class ExtraState(Protocol):
    """Additional state in a checkpoint, the same on all ranks."""

    def state(self) -> Any:
        """Return the state as a JSON value."""

    def restore(self, saved: Any) -> None:
        """Restore the value that `state` returned. Raises: JobMismatchError."""


@dataclass(frozen=True)
class Trained:
    """The objects that a checkpoint saves, and their conversion to tensors and a document and back.

    `schedulers`: learning-rate schedulers of a user's own training loop.
    `trainable`: which parameters that loop trains.
    `has_one_copy`: True if the ranks of one host together have a single copy of all state.
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    loader: Loader
    strategy: Strategy
    schedulers: ExtraState | None = None
    trainable: ExtraState | None = None
    callbacks: CheckpointedCallbacks | None = None
    has_one_copy: bool = False

    @property
    def compressed(self) -> CompressedState | None:
        """State of the compression of gradients, if the run compresses."""
        compression = self.strategy.compression
        if compression is None:
            return None
        names = [name for name, p in self.sharded_model.parameters() if p.requires_grad]
        return CompressedState(compression, self.sharded_model.mesh, names)

    def is_divided(self) -> bool:
        """Return True if a checkpoint needs state that rank 0 does not have."""
        compression = self.strategy.compression
        return self.sharded_model.divides_state or (compression is not None and compression.carries)

    def callback_state(self) -> CallbackState | None:
        """Return the state of the callbacks, if there are any. Raises: UserCodeError for unsupported state."""
        return CallbackState.of(self.callbacks, self.sharded_model) if self.callbacks is not None else None

    def document(self, state: RunState, streams: list[Any], callbacks: CallbackState | None) -> dict[str, Any]:
        """Return the JSON document of a checkpoint, without the optimizer's part."""
        world_size = self.sharded_model.mesh.world_size
        document = {"run": state.to_json(), "world_size": world_size, "streams": streams}
        if callbacks is not None:
            document[CALLBACKS] = callbacks.document
        document["keys"] = key_names(self.sharded_model)
        for key, extra in (("schedulers", self.schedulers), ("trainable", self.trainable)):
            if extra is not None:
                document[key] = extra.state()
        return document

    def tensors(self, callbacks: CallbackState | None) -> tuple[dict[str, TensorSlices], OptimizerDocument]:
        """Return this rank's tensors by group, not copied, and the optimizer's document."""
        model = self.sharded_model
        tensors, document = optimizer_state(self.optimizer, model.model, copy=False)
        groups = {"model": model.tensors(), "optimizer": state_slices(model, tensors)}
        compressed = self.compressed
        if compressed is not None and compressed.compression.carries:
            groups[GROUP] = compressed.tensors()
        groups |= callbacks.tensors if callbacks is not None else {}
        with evaluated_weights(self.optimizer) as parameters:
            affected = {id(p) for p in parameters}
            evaluated = {
                name: (groups["model"][name][0], local(p).detach().clone())
                for name, p in model.parameters()
                if id(p) in affected
            }
        if evaluated:
            groups[EVALUATED] = evaluated
        return groups, document

    def restore(self, saved: SavedCheckpoint, loss_scale: LossScale) -> tuple[RunState, list[str]]:
        """Restore everything from a checkpoint. Return the run's state, and notes on state that is not restored."""
        document, model, division = saved.document, self.sharded_model, self.strategy.update_division
        own, parameters, absent = model.tensors(), dict(model.parameters()), model.absent()
        refuse_other_model(saved, own, absent)
        # `load_optimizer` reports names that are no longer parameters.
        if self.trainable is not None and "trainable" in document:  # earlier versions did not store it
            self.trainable.restore(document["trainable"])
        of_rank = of_parameters(
            document["optimizer"],
            lambda name: name not in absent and (name not in parameters or division.updates(parameters[name])),
        )
        states = {name for part in documents_of(of_rank).values() for name in part["state"]}
        targets = allocate_state(model, document["tensors"]["optimizer"], states)
        fill(saved, "optimizer", targets)
        tensors = {path: tensor for path, (_, tensor) in targets.items()}
        loops = self.schedulers is not None
        replaced = load_optimizer(self.optimizer, model.model, tensors, of_rank, adds_groups=loops)
        fill(saved, "model", own)
        compressed = self.compressed
        notes = replaced if self.schedulers is None else []  # a user's own loop may set the groups itself
        notes = notes + (compressed.restore(saved) if compressed is not None else left_behind(saved))
        self.loader.restore(document["streams"])
        if self.schedulers is not None:
            self.schedulers.restore(document.get("schedulers", []))
        if self.callbacks is not None:
            notes += restore_callbacks(saved, self.callbacks, model)
        return RunState.from_json(document["run"], loss_scale), notes


@contextlib.contextmanager
def _writing_to(store: Store) -> Iterator[None]:
    """Turn a failure of the storage into a StorageError with what to check."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            given=f"the checkpoints in {store.place.shown()}",
            conflict=f"nothing can be written there: {error}",
            remedy="check the address, and this host's credentials and way to it",
        ) from error


class _Snapshots:
    """Snapshots of a run's state, which a thread writes if one process has all state, else all ranks together."""

    def __init__(self, mesh: Mesh, store: Store, trained: Trained, writer: CheckpointWriter | None) -> None:
        self._mesh, self._store, self._trained, self._writer = mesh, store, trained, writer
        self._memory, self._host_memory = SnapshotMemory(), HostMemory(mesh)

    def take(self, state: RunState) -> None:
        """Take a snapshot, and write it or pass it to the writer thread.

        Raises: on every rank, if any rank could not copy; nothing is written then.
        Collective: all ranks.
        """
        mesh, trained, writer = self._mesh, self._trained, self._writer
        callbacks = together(mesh, trained.callback_state) if trained.callbacks is not None else None
        digests = callbacks.digests() if callbacks is not None else None
        rows = mesh.gather_json([trained.loader.state(), digests])
        if trained.callbacks is not None:
            trained.callbacks.differ([of_rank for _, of_rank in rows])
        document = trained.document(state, [place for place, _ in rows], callbacks)
        if (compressed := trained.compressed) is not None:
            document[GROUP] = compressed.document()
        best = state.best is not None and state.best["step"] == state.step
        empty = Snapshot(state.step, {}, document, best)
        if not trained.is_divided():  # rank 0 has all state
            together(mesh, lambda: self.hand_over(writer, empty, callbacks) if writer is not None else None)
            return

        def tensors_of_rank() -> tuple[dict[str, TensorSlices], OptimizerDocument]:
            if trained.has_one_copy and writer is not None:
                writer.wait()  # the last write reads from the memory that this snapshot goes to
            return trained.tensors(callbacks)

        began = time.monotonic()
        tensors, optimizer = together(mesh, tensors_of_rank)
        if trained.has_one_copy:
            rows = mesh.gather_json([described(tensors), optimizer])
            written = index([of_rank for of_rank, _ in rows])
            content = self._host_memory.copied(tensors, written)
            if content is not None:  # else there is no shared memory
                if writer is not None:
                    merged = merged_optimizers(of_rank for _, of_rank in rows)
                    document = {**document, "optimizer": merged, "tensors": written}
                    writer.write(replace(empty, tensors=content, document=document))
                return
        # Each rank writes its own part, so that no rank needs the whole state. Nothing is copied, since training waits.
        document = {**document, "optimizer": merged_optimizers(mesh.gather_json(optimizer))}
        snapshot = replace(empty, document=document)
        failure = write_together(mesh, self._store, snapshot, tensors)
        if failure is not None:
            text, code = failure
            room = together(mesh, lambda: writer is not None and writer.makes_room(code, text, state.step))
            if mesh.gather_json(room)[0]:
                failure = write_together(mesh, self._store, snapshot, tensors)
        if writer is not None:
            writer.wrote(failure.text if failure is not None else None, time.monotonic() - began)

    def hand_over(self, writer: CheckpointWriter, empty: Snapshot, callbacks: CallbackState | None) -> None:
        """Pass a snapshot of rank 0's state to the writer thread."""
        writer.wait()  # the last write reads from the memory that this snapshot goes to
        tensors, optimizer = self._trained.tensors(callbacks)
        written = index([described(tensors)])
        document = {**empty.document, "optimizer": optimizer, "tensors": written}
        content = dict(share(tensors, written, 0, 1, self._memory.copied))
        writer.write(replace(empty, tensors=content, document=document))


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
        # On rank 0, if the run writes checkpoints.
        self.writer = CheckpointWriter(store, mtbf_seconds) if store is not None and mesh.rank == 0 else None
        self._snapshots = _Snapshots(mesh, store, trained, self.writer) if store is not None else None
        self._newest = -1

    def due(self, step: int) -> bool:
        """Return True if this rank requests a checkpoint. Only rank 0 does."""
        if self.writer is None or step in (0, self._newest):
            return False
        return step % self.every_steps == 0 if self.every_steps is not None else self.writer.due()

    def save(self, state: RunState, wait: bool = False) -> None:
        """Take a snapshot after `state.step` steps and start writing it.

        A thread writes the snapshot if rank 0 or the host's shared memory has all state. Otherwise all ranks write it
        before this call returns. If the previous snapshot is still being written, no snapshot is taken unless `wait` is
        set.
        Raises: StorageError, on every rank, if `wait` is set and the newest snapshot could not be written.
        Collective: all ranks, JSON gathers.
        """
        store, writer = self._store, self.writer
        if store is None or self._snapshots is None:
            return
        if state.step != self._newest:
            if not self._mesh.gather_json(writer is None or wait or writer.is_free())[0]:
                return
            self._snapshots.take(state)
            self._newest = state.step
            if self._trained.callbacks is not None:
                name = directory_name(state.step)
                self._trained.callbacks.saved(store.folder / name if store.remote is None else store.place.shown(name))
        if wait:
            together(self._mesh, lambda: writer.wait() if writer is not None else None)
            failure = writer.failure if writer is not None else None
            reason = self._mesh.gather_json(str(failure) if failure is not None else None)[0]
            if reason is not None:
                raise StorageError(
                    given=f"the checkpoint of step {self._newest} in {store.place.shown()}",
                    conflict=f"it could not be written: {reason}",
                    remedy="mend the disk; --resume goes on from the newest checkpoint that is there",
                )

    def save_best(self, state: RunState) -> None:
        """Save a state with the best evaluation so far; its checkpoint is stored as the best.

        Collective: all ranks.
        """
        self._newest = -1  # else `save` would skip a step that was saved before the evaluation
        together(self._mesh, lambda: self.writer.wait() if self.writer is not None else None)  # or `save` skips
        self.save(state)

    def rescue(self, error: ShoalError, state: RunState, torn: str | None = None) -> None:
        """Save `state` before an error ends the run, and add the outcome to the error's remedy. Raises nothing.

        `torn`: the reason why the model does not match the state; nothing is saved then. Nothing is saved either if
            only some ranks have the error, since the others may wait in another collective.
        Collective: all ranks, as `save`.
        """
        if self._store is None or state.step == 0 or isinstance(error, NonFiniteError):
            return
        saved = f"step {state.step} is saved: --resume goes on from there"
        failed = f"step {state.step} could not be saved"
        if torn is None and not error.everywhere and self._mesh.world_size > 1:
            if isinstance(error, PeerError):
                return
            torn = "the other ranks may wait within the same work, and cannot be asked to save"
        if torn is None:
            try:
                self.save(state, wait=True)
                outcome = saved
            except Exception as failure:  # the original error ends the run and is reported
                first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
                outcome = f"{failed}: {first}"
        elif self._newest >= state.step:
            outcome = saved
        else:
            before = f"--resume goes on from step {self._newest}" if self._newest > 0 else "no checkpoint was taken yet"
            outcome = f"{failed}: {torn}; {before}"
        error.remedy = f"{error.remedy}; {outcome}"

    def restart(self, state: RunState) -> None:
        """Save a state again and remove the checkpoints of later steps, which will be trained again.

        Raises: StorageError as `save`; nothing is removed then.
        Collective: all ranks, JSON gathers.
        """
        if self._store is None:
            return
        self._newest = -1
        self.save(state, wait=True)
        if self.writer is not None:
            remove_later(self._store, state.step)

    def save_alone(self, state: RunState) -> str | None:
        """Write a checkpoint from rank 0 after the other ranks are gone. Return the reason if none was written."""
        trained, places = self._trained, self._trained.loader.state()
        if self._snapshots is None:
            return "no checkpoints were asked for"
        if trained.strategy.compression is not None or places or trained.is_divided():
            return "each rank has a part of the state"
        if self.writer is None:
            return "rank 0 has the state"
        if state.step != self._newest:
            callbacks = trained.callback_state()
            document = trained.document(state, [places], callbacks)
            self._snapshots.hand_over(self.writer, Snapshot(state.step, {}, document), callbacks)
            self._newest = state.step
        self.writer.wait()
        return str(self.writer.failure) if self.writer.failure is not None else None

    def begin(self) -> None:
        """Take over the checkpoint store as its only writer, before this run checks or removes checkpoints.

        Raises: StorageError, on every rank.
        Collective: all ranks, JSON gathers.
        """

        def take_over(store: Store) -> None:
            if store.remote is not None:  # on disk, a lock does this
                store.remote.take_over(store.folder.parent, store.fence)

        self._on_rank_0(take_over)

    def clean(self) -> None:
        """Remove incomplete checkpoints of a killed run. Call before this run writes any.

        Raises: StorageError, on every rank.
        Collective: all ranks, JSON gathers.
        """
        self._on_rank_0(Store.clean)

    def _on_rank_0(self, change: Callable[[Store], None]) -> None:
        def act() -> None:
            if self.writer is not None and store is not None:
                with _writing_to(store):
                    change(store)

        store = self._store
        if store is not None:
            together(self._mesh, act)

    def send(self) -> None:
        """Send the run's own files to the run's address, if it has one. Call on rank 0. Raises: StorageError."""
        store = self._store
        if store is not None and store.remote is not None:
            with _writing_to(store):
                store.remote.address.send(store.folder.parent)

    def load(self, loss_scale: LossScale) -> tuple[RunState | None, list[str]]:
        """Restore model, optimizer and loader from the newest valid checkpoint.

        Rank 0 selects the checkpoint, and all ranks read it. Returns the run state, or None if there is no checkpoint,
        and messages about damaged checkpoints.
        Raises: IntegrityError, StorageError or JobMismatchError, on every rank.
        Collective: all ranks, JSON gathers.
        """
        store, mesh, writer = self._store, self._mesh, self.writer
        if store is None:
            return None, []

        def newest_good() -> tuple[SavedCheckpoint | None, list[str]]:
            if writer is None:
                return None, []
            writer.wait()
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

        newest, complaints = together(mesh, newest_good)
        step, complaints = mesh.gather_json([newest.step if newest else None, complaints])[0]
        if step is None:
            return None, complaints

        def restored() -> tuple[RunState, list[str]]:
            try:
                return self._trained.restore(newest or store.open(step), loss_scale)
            except (ManifestError, OSError) as error:
                if isinstance(error, ShoalError):
                    raise
                raise IntegrityError(
                    given=f"the checkpoint of step {step} in {store.place.shown()}",
                    conflict=f"rank 0 can read it, rank {mesh.rank} on {mesh.host} cannot: {error}",
                    remedy="give an --out directory that all hosts share",
                ) from error

        state, notes = together(mesh, restored)
        self._newest = step
        if writer is not None:
            writer.failure = None  # that failure is of a snapshot that is no longer the newest
            if state.best is not None:
                with contextlib.suppress(OSError):
                    store.keep_best(state.best["step"], if_missing=True)
        return state, [*complaints, *notes]

    def close(self) -> None:
        """Wait until the current checkpoint is written."""
        if self.writer is not None:
            self.writer.close()
