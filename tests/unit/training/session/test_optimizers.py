from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

DATA = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)


class Noisy(torch.optim.SGD):
    """An optimizer that draws a random number in each step."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.drawn: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.drawn.append(torch.rand(1))
        super().step(closure)


def drawn(kind: type[torch.optim.Optimizer]) -> tuple[list[float], list[float]]:
    """What an optimizer draws in two passes of each of two steps, and what the loop draws after each step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    session = shoal.Session(global_batch=4)
    model, optimizer = session.prepare(model, kind(model.parameters(), lr=0.1))
    own, after = [], []
    for step in session.steps(DATA, epochs=1):
        for _ in range(2):
            for inputs, labels in step.batches(optimizer):
                step.backward(*shoal.cross_entropy(model(inputs), labels))
        after.append(float(torch.rand(1)))
    session.close()
    own = [float(one) for one in getattr(optimizer, "drawn", [])]
    return own, after


def test_each_pass_of_a_step_draws_other_numbers_and_each_training_the_same() -> None:
    own, _ = drawn(Noisy)
    assert len(own) == len(set(own)) == 4
    assert drawn(Noisy)[0] == own


def test_an_optimizer_of_torch_leaves_the_generators_alone() -> None:
    assert len(set(drawn(torch.optim.SGD)[1])) == 2
