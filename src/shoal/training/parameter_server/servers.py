"""Client of all servers in the conductor: gathers, scatters and updates the whole model and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.state import load_optimizer, merged_optimizers, optimizer_state
from shoal.job import Progress
from shoal.numerics.gradient_norm import rounded
from shoal.parallel.data.pushed import pack, unpack
from shoal.training.parameter_server.members import Asked, Members
from shoal.training.parameter_server.server import homes


class Servers:
    """All servers of a run together. The model and optimizer here are theirs only after a `fetch`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_servers: int, crew: Members) -> None:
        self._model, self._optimizer, self._crew = model, optimizer, crew
        self.names = homes(model, num_servers)
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def load(self, version: int) -> None:
        """Gives each server its shard of the model and of the optimizer's state, as they are here."""
        tensors, document = optimizer_state(self._optimizer, self._model, copy=False)
        known = set(self._named)

        def of(number: int) -> Asked:
            own = set(self.names[number])
            state = {name: values for name, values in document["state"].items() if name in own}
            others = known - own
            paths = [path for path in tensors if path.partition("/")[0] not in others]
            told = {"kind": "load", "version": version, "paths": paths, "document": {**document, "state": state}}
            packed = pack([self._named[name] for name in self.names[number]])
            return told, [packed, *(tensors[path] for path in paths)]

        self._crew.ask(of)

    def fetch(self, *, optimizer: bool) -> None:
        """Takes up the servers' parameters, and their optimizers' states where these are wanted."""
        asked = {"kind": "state"} if optimizer else {"kind": "pull", "have": -1}
        answers = self._crew.ask(lambda number: (asked, ()))
        held: dict[str, Tensor] = {}
        for names, (answer, tensors) in zip(self.names, answers, strict=True):
            unpack(tensors[0], [self._named[name] for name in names])
            held |= dict(zip(answer.get("paths", ()), tensors[1:], strict=True))
        if optimizer:
            document = merged_optimizers(answer["document"] for answer, _ in answers)
            load_optimizer(self._optimizer, self._model, held, document)

    def combine(self, step: int, tickets: Mapping[int, int]) -> float:
        """Lets each server add up a step's gradients: their norm over the whole model, not divided by any weight."""
        asked = {"kind": "combine", "step": step, "tickets": list(tickets.items())}
        answers = self._crew.ask(lambda number: (asked, ()))
        norms: dict[str, float] = {}
        for names, (answer, _) in zip(self.names, answers, strict=True):
            norms |= {name: norm for name, norm in zip(names, answer["norms"], strict=True) if norm is not None}
        return rounded(math.hypot(*norms.values()), {p.dtype for p in self._model.parameters()})

    def apply(self, version: int, scale: float | None, progress: Progress) -> int:
        """Lets each server update its parameters, or leave the step out; how many pushes it had more than once."""
        told = {"kind": "apply", "step": progress.step, "version": version, "scale": scale}
        asked: dict[str, Any] = {**told, "progress": [progress.step, progress.num_steps, progress.samples]}
        answers = self._crew.ask(lambda number: (asked, ()))
        return max(int(answer["repeated"]) for answer, _ in answers)

    def gradients(self) -> None:
        """Takes up what was added up last, as the parameters' `.grad`."""
        answers = self._crew.ask(lambda number: ({"kind": "gradients"}, ()))
        for names, (answer, tensors) in zip(self.names, answers, strict=True):
            found = iter(tensors)
            for name, used in zip(names, answer["used"], strict=True):
                self._named[name].grad = next(found) if used else None
