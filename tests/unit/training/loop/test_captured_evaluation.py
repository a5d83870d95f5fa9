"""Chunks of an evaluation that a graph replays, beside chunks that are queued one operation after the other."""

from __future__ import annotations

from typing import Any

import torch
from tests.unit.training.loop.test_captured_step import SAID, both, normed, said_of_graph, same
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

# Six chunks of 16 and one of 4, in each of three evaluations.
ROWS = TensorDataset(torch.randn(100, 6, generator=torch.Generator().manual_seed(1)), torch.arange(100) % 3)
STEPS = {"length": shoal.Steps(12), "eval_data": ROWS}
MADE: dict[str, Any] = {"model": normed, "metrics": {"accuracy": shoal.accuracy}, **STEPS}


def test_the_metrics_are_those_without_a_graph() -> None:
    queued, captured, counted = both(MADE)
    assert same(captured) == same(queued)
    assert [bool(record["metrics"]) for record in captured.records] == [False, False, False, True] * 3
    steps = both({**MADE, "eval_data": None})[2]
    # The first chunk and three more of 16 run without the graph. Those of 4 are too few. One more replay is the trial.
    assert counted - steps == {"warm_up": 1, "record": 1, "replay": 1 + 18 - 4}


def test_a_metric_that_cannot_be_captured_falls_back_with_the_reason() -> None:
    def read(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        right, weight = shoal.accuracy(model, batch)
        return right, float(weight) * float(right >= 0.0)

    queued, captured, _ = both({**MADE, "metrics": {"read": read}})
    assert same(captured) == same(queued)
    told = said_of_graph(captured)
    assert len(told) == 2
    assert told[1].startswith(f"{SAID}: evaluations run without a graph: it reads a number off the device")


def test_weights_that_move_are_captured_anew() -> None:
    """Weights that an optimizer swaps in for each evaluation lie elsewhere each time."""

    class Averaged(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.own: list[Tensor] = []

        def eval(self) -> None:
            parameters = self.param_groups[0]["params"]
            self.own = [p.data for p in parameters]
            for parameter in parameters:
                parameter.data = parameter.data * 0.5

        def train(self) -> None:
            for parameter, own in zip(self.param_groups[0]["params"], self.own, strict=False):
                parameter.data = own

    # They are as large as activations are, so that their memory may be used again between two evaluations.
    queued, captured, _ = both({**MADE, "optimizer": Averaged, "model": lambda: nn.Linear(6, 3)})
    assert same(captured) == same(queued)
