"""Launches of a steady queued step beyond those of a bare loop with torch's fused optimizer, counted by operators.

CPU tensors stand for those of a device. An operator that returns a view or memory without values launches nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.jobs.read_late import job, read_by, trained, waiting
from tests.jobs.replayed import memory
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import TensorDataset

import shoal
from shoal.numerics import device_reads
from shoal.training.loop.late_reads import LateReads
from shoal.training.microbatch.step import FetchedStep, StepRunner

# Operators without a launch: they allocate memory, or draw from the host's generator.
_WITHOUT = {"random_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}


class Launches(TorchDispatchMode):
    """Counts operators that launch a kernel or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        writes = func._schema.is_mutable or not memory(result) <= memory((args, kwargs))
        if writes and name not in _WITHOUT:
            self.counted[name] += 1
        return result


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.layers = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        found: Tensor = self.layers(F.max_pool2d(F.relu(self.second(x)), 2).flatten(1))
        return found


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        narrow = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.around = narrow if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.around(x))


def resnet18() -> nn.Module:
    """ResNet-18 of an eighth of its channels."""
    sizes = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    first = [nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(
        *first, *(Residual(*size) for size in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.output = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mixer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inputs(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        found: Tensor = x + self.mixer(x)
        return found


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(32, 16), nn.Parameter(torch.zeros(8, 16))
        self.layers = nn.Sequential(Attention(), Attention(), nn.LayerNorm(16), nn.Linear(16, 32, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.layers(self.embedding(tokens) + self.positions)
        return found


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]), batch[1])


def language(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


IMAGES = TensorDataset(torch.randn(128, 1, 28, 28), torch.arange(128) % 10)
TOKENS = TensorDataset(torch.randint(0, 32, (128, 8)))


def sgd(parameters: Any, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **how)


def adamw(parameters: Any, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.001, **how)


# Model, data, loss, optimizer, and how many launches more than a loop by hand with the same loss: the gradients' norms
# (1), the checks of weight and gradients (2), what the host reads (2). A masked step of AdamW takes back its counters.
# Buffers are saved by one copy for each dtype.
NETS: dict[str, tuple[Callable[[], nn.Module], TensorDataset, Any, Any, int]] = {
    "MLP": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)),
        IMAGES,
        classify,
        sgd,
        5,
    ),
    "LeNet": (LeNet, IMAGES, classify, sgd, 5),
    "ResNet-18": (resnet18, IMAGES, classify, sgd, 7),
    "GPT": (GPT, TOKENS, language, adamw, 6),
}


def bare(model: nn.Module, data: TensorDataset, loss: Any, optimizer: torch.optim.Optimizer) -> Counter[str]:
    """A steady step of a loop by hand."""
    batch = [tensor[:16] for tensor in data.tensors]
    for _ in range(2):
        with Launches() as launches:
            total, weight = loss(model, batch)
            (total / weight).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return launches.counted


@contextlib.contextmanager
def counting(steps: list[Counter[str]]) -> Iterator[None]:
    """A context that counts each queued step, without the reading of its samples on the host."""
    launch, fetch, sent = LateReads.launch, StepRunner.fetch, device_reads.sent

    def counted(self: LateReads, *given: Any) -> Any:
        steps.append(Counter())
        with Launches() as launches:
            flight = launch(self, *given)
        steps[-1].update(launches.counted)
        return flight

    def uncounted(self: StepRunner, step: int) -> FetchedStep:
        with _disable_current_modes():
            return fetch(self, step)

    def counted_copy(values: Tensor, device: torch.device) -> Tensor:
        if steps and read_by() == "parallel/base.py microbatch_sums":  # others pass tensors that are there
            steps[-1]["sent"] += 1
        return sent(values, device)

    patches = ((LateReads, "launch", counted), (StepRunner, "fetch", uncounted), (device_reads, "sent", counted_copy))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


@pytest.mark.parametrize("name", NETS)
def test_a_steady_step_launches_little_besides_what_a_bare_loop_does(name: str) -> None:
    model, data, loss, optimizer, more = NETS[name]
    own = model()
    alone = bare(own, data, loss, optimizer(own.parameters(), fused=True))
    steps = list[Counter[str]]()
    with waiting(late=True), counting(steps):
        made = {"model": model, "train_data": data, "loss": loss, "optimizer": optimizer, "grains": 1}
        course = trained(job(**made, length=shoal.Steps(7)))
    assert course.error == ""
    beyond = {name: steps[-2][name] - alone[name] for name in {*steps[-2], *alone} if steps[-2][name] != alone[name]}
    assert sum(beyond.values()) == more, sorted(beyond.items())
