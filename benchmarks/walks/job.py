"""A small job that says when a walk begins and ends; WALK in the environment is which one."""

import os
import signal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from benchmarks.walks.walk import walk
from shoal.training.callbacks.base import RunControl

WALK, STEP = os.environ["WALK"], 4
# Of the step that is walked: calls of the loss so far.
CALLS: list[int] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        if WALK == "gradient" and len(CALLS) == 2:
            y.register_hook(lambda gradient: walk.begin())
        return y


def model() -> Net:
    if WALK == "plan":
        walk.end()
    return Net()


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    if CALLS and CALLS[0]:
        CALLS.append(1)
        if WALK == "microbatch" and len(CALLS) == 3:
            walk.begin()
        if (WALK == "microbatch" and len(CALLS) == 4) or (WALK == "gradient" and len(CALLS) == 3):
            walk.end()
    return shoal.cross_entropy(model(batch[0]), batch[1])


class Marks(shoal.Callback):
    """Marks the step that is walked, and sends SIGTERM where that is the walk."""

    def on_step(self, run: RunControl, record: shoal.StepRecord) -> None:
        if run.step == STEP and run.rank == 0:
            CALLS.append(1)
            if WALK == "sigterm":
                walk.begin()
                os.kill(os.getpid(), signal.SIGTERM)


def job() -> shoal.Job:
    x = torch.sin(torch.arange(64 * 8.0)).view(64, 8)
    return shoal.Job(
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train_data=lambda: TensorDataset(x, (x.sum(1) > 0).long()),
        callbacks=[Marks()],
        global_batch=16,
        grains=4,
        length=shoal.Epochs(3),
    )
