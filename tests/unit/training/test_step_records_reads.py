"""Reads of device values in a steady step, each of which waits for the device; CPU tensors stand for device ones."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint import weights_sha256
from shoal.distributed.mesh import alone
from shoal.plans.plan import Plan
from shoal.runs.records import StepRecord
from shoal.training.engine import Options, build
from shoal.training.preflight import judged
from shoal.training.step_records import Surroundings
from shoal.training.telemetry import RecordWriter

DATA = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)
STEPS, STEADY = 8, 3
# What is on the host whatever the device: a key that is drawn from torch's own generator there.
OF_THE_HOST = ("numerics/grain_randomness.py _key_of_call",)


def read_by() -> str:
    """Where in the package the read is; empty where it is not there."""
    frame = sys._getframe(2)
    while frame is not None:
        if "/shoal/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rsplit('/shoal/', 1)[1]} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Scalars(TorchDispatchMode):
    """Counts numbers that are taken out of tensors: item, float, bool."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense and read_by() not in OF_THE_HOST:
            self._found[read_by()] += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the host, which are none of a tensor that is there and which torch does not tell of."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cpu, Tensor.tolist) and args[0].numel():
            self._found[read_by()] += 1
        return func(*args, **(kwargs or {}))


def job(**changes: Any) -> shoal.Job:
    said: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        "loss": lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "train_data": DATA,
        "global_batch": 16,
        "length": shoal.Steps(STEPS),
    }
    return shoal.Job(**{**said, **changes})


def trained(wanted: shoal.Job, found: Counter[str]) -> tuple[str, list[tuple[float | None, float | None]]]:
    """Hash of the weights, and loss and norm of each step; `found`: the reads of the steps after the first ones."""
    seen: list[StepRecord] = []

    def on_step(record: StepRecord, rank: int) -> None:
        seen.append(record)
        if len(seen) == STEADY:
            found.clear()

    made = build(wanted, judged(wanted, Plan()).plan, alone(torch.device("cpu")), Options(telemetry=False))
    try:
        around = Surroundings(lambda text: None, on_step, lambda: False)
        with Scalars(found), Copies(found):
            made.trainer(None, STEPS, around, RecordWriter(None)).train()
        return weights_sha256(dict(made.model.state_dict())), [(r.loss, r.grad_norm) for r in seen]
    finally:
        made.close()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What makes tensors of the CPU count as those of a device that is waited for."""
    return lambda: monkeypatch.setattr("shoal.numerics.device_reads.waits", lambda device: True)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "clipped by value": {"clip_value": 0.01},
    "batch statistics, dropout, AdamW": {"model": normed, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
}


@pytest.mark.parametrize("name", JOBS)
def test_one_read_in_a_steady_step(name: str, waiting: Callable[[], None]) -> None:
    """The loss, the weight, the digest and the norm come in one copy; nothing else of the device is looked at."""
    on_host = trained(job(**JOBS[name]), Counter())
    waiting()
    found: Counter[str] = Counter()
    on_device = trained(job(**JOBS[name]), found)
    assert on_device == on_host
    assert set(found) == {"parallel/data/replicated.py _read"}
    assert sum(found.values()) == STEPS - STEADY


def test_a_step_that_is_not_finite_is_seen_as_on_a_host(waiting: Callable[[], None]) -> None:
    """Its norm comes with the sums, too; the search for the sample reads what it needs."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
        return total + torch.where((batch[0] == DATA.tensors[0][5]).all(1), torch.inf, 0.0).sum(), weight

    wanted = job(loss=loss, on_nonfinite="skip")
    on_host = trained(wanted, Counter())
    assert any(value is None for value, _ in on_host[1])
    waiting()
    assert trained(wanted, Counter()) == on_host
