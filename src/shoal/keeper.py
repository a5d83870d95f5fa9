"""Keeper: the state of a training run into checkpoints and out of them, on all ranks together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.manifest import ManifestError
from shoal.checkpoint.state import load_model, load_optimizer, model_tensors, optimizer_state
from shoal.checkpoint.store import Snapshot, Store
from shoal.checkpoint.writer import CheckpointWriter
from shoal.data.loader import Loader
from shoal.errors import IntegrityError
from shoal.ledger import EMPTY_DIGEST
from shoal.mesh import Mesh
from shoal.precision import LossScale


@dataclass
class RunState:
    """Everything that a run carries from step to step besides tensors. The same on all ranks.

    `step` counts finished steps; `digest` is over the ids of all samples read so far; `bad_steps`, with what was found
    there, are left out when a rollback comes to them again. Nothing random is here: every draw is a function of seed,
    step and grain.
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

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        scale = {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
        return {
            **vars(self),
            "loss_scale": scale,
            "bad_steps": {str(step): found for step, found in self.bad_steps.items()},
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], loss_scale: LossScale) -> RunState:
        """From `to_json`; whether the loss scale is dynamic comes from the plan in force."""
        saved = document["loss_scale"]
        scale = replace(loss_scale, **saved) if loss_scale.dynamic and saved["scale"] != 1.0 else loss_scale
        return cls(
            **{
                **document,
                "loss_scale": scale,
                "bad_steps": {int(step): found for step, found in document["bad_steps"].items()},
            }
        )


@dataclass(frozen=True)
class Trained:
    """What a checkpoint is of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader


class Keeper:
    """Saves and loads. `store` is None where nothing is kept."""

    def __init__(self, mesh: Mesh, store: Store | None, trained: Trained, every_steps: int | None) -> None:
        self._mesh, self._store, self._trained, self._every = mesh, store, trained, every_steps
        self._writer = CheckpointWriter(store) if store is not None and mesh.rank == 0 else None
        self._newest = -1

    def due(self, step: int) -> bool:
        """Whether this rank calls for a checkpoint; only rank 0 does."""
        if self._writer is None or step in (0, self._newest):
            return False
        return step % self._every == 0 if self._every is not None else self._writer.due()

    def save(self, state: RunState, wait: bool = False) -> None:
        """Takes a snapshot after `state.step` steps and starts writing it. Collective: all ranks, one JSON gather."""
        if self._store is None or state.step == self._newest:
            return
        streams = self._mesh.gather_json(self._trained.loader.state())
        self._newest = state.step
        if self._writer is None:
            return
        tensors, document = optimizer_state(self._trained.optimizer, self._trained.model)
        model = model_tensors(self._trained.model)
        document = {
            "run": state.to_json(),
            "optimizer": document,
            "streams": streams,
            "world_size": self._mesh.world_size,
        }
        self._writer.write(Snapshot(state.step, {"model": model, "optimizer": tensors}, document))
        if wait:
            self._writer.wait()

    def load(self, loss_scale: LossScale) -> tuple[RunState | None, list[str]]:
        """Sets model, optimizer and loader from the newest good checkpoint; and lines about damaged ones.

        None where there is none. Rank 0 judges; the others read the same one. Collective: all ranks, JSON gathers.
        """
        if self._store is None:
            return None, []
        if self._writer is not None:
            self._writer.wait()
        snapshot: Snapshot | None = None
        complaints: list[str] = []
        step: int | None = None
        error: IntegrityError | None = None
        if self._mesh.rank == 0:
            try:
                snapshot, complaints = self._store.newest_good()
                step = snapshot.step if snapshot else None
            except IntegrityError as caught:
                error = caught
        failed, step, complaints = self._mesh.gather_json([error is not None, step, complaints])[0]
        if error is not None:
            raise error
        if failed or step is None:
            return None, complaints
        snapshot = snapshot or self._read(self._store, step)
        return self._restore(snapshot, loss_scale), complaints

    def _read(self, store: Store, step: int) -> Snapshot:
        try:
            return store.read(step)
        except (ManifestError, OSError) as error:
            raise IntegrityError(
                given=f"the checkpoint of step {step} in {store.folder}",
                conflict=f"rank 0 can read it, rank {self._mesh.rank} on {self._mesh.host} cannot: {error}",
                remedy="give an --out directory that all hosts share",
            ) from error

    def _restore(self, snapshot: Snapshot, loss_scale: LossScale) -> RunState:
        trained, document = self._trained, snapshot.document
        load_model(trained.model, snapshot.tensors["model"])
        load_optimizer(trained.optimizer, trained.model, snapshot.tensors["optimizer"], document["optimizer"])
        trained.loader.restore(document["streams"])
        self._newest = snapshot.step
        return RunState.from_json(document["run"], loss_scale)

    @property
    def failures(self) -> int:
        """How many of the last saves failed, in a row."""
        return self._writer.failures if self._writer else 0

    def close(self) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            self._writer.close()
