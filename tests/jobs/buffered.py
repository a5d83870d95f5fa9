"""A job whose model has a buffer of each rule, and others whose buffers have no rule or another one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal

BATCH, SAMPLES, WIDTH = 16, 40, 3


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    return x, (x[:, 0] > 0).long()


class Kinds(nn.Module):
    """Linear, with buffers that depend on samples and calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        whole = torch.tensor(2**60 + 1)  # no float64
        for name, value in {
            "calls": whole,
            "flag": torch.tensor(False),
            "late": torch.zeros((), dtype=torch.int32),
            "samples": whole.clone(),
            "load": torch.zeros(WIDTH),
            "batch_load": torch.zeros(WIDTH, dtype=torch.float64),
            "largest": torch.tensor(-1e9),
            "smallest": torch.full((WIDTH,), 1e9, dtype=torch.float64),
            "longest": torch.tensor(0, dtype=torch.uint8),
            "mean": torch.ones(WIDTH),
            "turn": torch.zeros(WIDTH, dtype=torch.complex64),
            "last": torch.zeros(WIDTH),
            "coarse": torch.zeros(WIDTH, dtype=torch.bfloat16),
        }.items():
            self.register_buffer(name, value)

    def note(self, x: Tensor) -> None:
        """What a forward of training leaves."""
        hits = (x > 0).sum(0)
        if self.calls >= 2**60 + 3:
            self.late += len(x)  # type: ignore[operator]
        self.calls += 1  # type: ignore[operator]
        self.flag.fill_(True)  # type: ignore[operator]
        self.samples = self.samples + len(x)
        self.load += hits
        self.batch_load.copy_(hits)  # type: ignore[operator]
        self.largest = torch.maximum(self.largest, x.max())  # type: ignore[call-overload]
        self.smallest.copy_(torch.minimum(self.smallest, x.amin(0)))  # type: ignore[call-overload,operator]
        self.longest.copy_(torch.maximum(self.longest.long(), (x * 20).long().abs().max()))  # type: ignore[operator]
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # type: ignore[operator]
        self.turn.mul_(0.9).add_(0.1j * x.mean(0))  # type: ignore[operator]
        self.last.copy_(x[-1])  # type: ignore[operator]
        self.coarse.copy_(x[-1])  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.note(x.detach())
        out: Tensor = self.linear(x)
        return out


class Recomputed(Kinds):
    """The same, recomputed in the backward by the job itself: each buffer is written twice a step."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Variance(nn.Module):
    """A running variance by hand: no mean of those of the parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.spread = 0.9 * self.spread + 0.1 * x.detach().var(0)  # type: ignore[operator]
        out: Tensor = self.linear(x)
        return out


def plain(model: nn.Module, epochs: int = 1) -> dict[str, Tensor]:
    """Buffers after a loop over whole batches."""
    model = copy.deepcopy(model).train()
    for _ in range(epochs):
        for batch in data()[0].split(BATCH):
            model(batch).sum().backward()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def job(kind: str = "Kinds", rule: str = "", epochs: int = 2) -> shoal.Job:
    name = {"Variance": "spread"}.get(kind, "samples")
    return made(globals()[kind], {name: rule} if rule else {}, epochs)


def made(model: Any, buffers: dict[str, str], epochs: int) -> shoal.Job:
    return shoal.Job(
        model=model,
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
        global_batch=BATCH,
        length=shoal.Epochs(epochs),
        shuffle=False,
        buffers=buffers,
    )
