"""Fallback to synchronous training: what it keeps and what it restores, without servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import shoal
from shoal.checkpoint.keeper import RunState
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.parameter_server.retreat import Retreat


class Counts(shoal.Callback):
    """Counts, in place and not."""

    def __init__(self) -> None:
        self.steps, self.total = 0, torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.steps, self.total = state["steps"], state["total"]


def test_callbacks_go_back_with_the_model() -> None:
    callback, model = Counts(), nn.Linear(2, 1)
    plan = SimpleNamespace(server=SimpleNamespace(mode="asynchronous", staleness=0), layout=SimpleNamespace(data=2))
    engine: Any = SimpleNamespace(
        plan=plan,
        model=model,
        updater=SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1)),
        callbacks=CallbackCalls([callback]),
        keeper=SimpleNamespace(restart=lambda state: None),
    )
    nothing: Any = SimpleNamespace(
        note=print, load=lambda step: None, restart=lambda *told: None, fetch=lambda optimizer: None
    )
    state = RunState()
    retreat = Retreat(engine, nothing, state, nothing)
    callback.steps, callback.total = 3, torch.full((1,), 3.0)
    retreat.begin()
    callback.steps += 4
    callback.total += 4.0
    retreat._guard.lowest = (0.5, 1)
    retreat.go(nothing, nothing)
    assert (callback.steps, callback.total.item()) == (3, 3.0)
