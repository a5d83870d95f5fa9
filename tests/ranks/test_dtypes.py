"""Models in float64, of mixed dtypes, and with buffers of any kind train as they are made, and are verified."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.conformance.cases import classify
from tests.conformance.cases import job as small
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import JobError

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"layout": {"data": 2}},
    "exact": {"layout": {"data": 2}, "execution": {"exact": True}},
    "zero 1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "zero 3": {"layout": {"shard": 2}},
    "server": {"layout": {"data": 2}, "server": {"mode": "synchronous"}},
    "narrow": {"layout": {"data": 2}, "precision": {"parameters": "bfloat16", "compute": "bfloat16"}},
}


def in_float64() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


class Mixed(nn.Module):
    """A float64 head on a float32 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(inputs)).double())
        return found


class Rotary(nn.Module):
    """Turns pairs by a table of complex numbers, as Llama does, and keeps a mean of them; and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("table", torch.polar(torch.ones(4), torch.arange(4).float()))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("large", torch.tensor(2**60 + 1))  # float64 does not have it
        self.register_buffer("thirds", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.register_buffer("eighths", torch.full((3,), 0.125).to(torch.float8_e4m3fn))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("unknown", torch.full((2,), torch.nan))

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(torch.tanh(self.first(inputs)).float().view(-1, 4, 2)) * self.table
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * pairs.detach().mean(0)
        found: Tensor = self.second(torch.view_as_real(pairs).flatten(1).to(inputs.dtype))
        return found


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(6, 4, dtype=torch.complex64)), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head((inputs.to(torch.complex64) @ self.weight).abs())
        return found


def wide(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The cases' loss of inputs in float64 or fewer bits."""
    return classify(model, (batch[0].double() if batch[0].dtype == torch.float32 else batch[0], batch[1]))


MODELS: dict[str, dict[str, Any]] = {
    "float64": {"model": in_float64, "loss": wide, "metrics": {}},
    "mixed": {"model": Mixed},
    "rotary": {"model": Rotary},
    "complex": {"model": Complex},
}


def verify(name: str, layout: str) -> shoal.Verdict:
    plan = shoal.Plan().with_sections(**LAYOUTS[layout])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Casting complex values to real")
        return shoal.verify(small(**MODELS[name], clip_norm=0.1), plan, steps=2)


@parametrize(
    ("name", "layout"),
    [
        *(("float64", layout) for layout in ("data", "exact", "zero 1", "zero 3", "server")),
        *(("mixed", layout) for layout in ("data", "exact")),
        *(("rotary", layout) for layout in ("data", "exact", "narrow")),
        *(("complex", layout) for layout in ("data", "exact", "zero 1")),
    ],
    usual=["float64-exact", "mixed-data", "rotary-narrow", "complex-exact"],
)
def test_is_verified(name: str, layout: str) -> None:
    verdict = verify(name, layout)
    assert verdict.verified, verdict.render()


def with_pairs() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_buffer("table", torch.ones(2, dtype=torch.complex128))
    return model


@pytest.mark.parametrize(
    ("changes", "sections", "said"),
    [
        ({"model": Complex}, LAYOUTS["zero 3"], "the complex parameter weight, with shard.level"),
        (MODELS["mixed"], LAYOUTS["zero 3"], "parameters in float32 and float64"),
        (MODELS["float64"], {"precision": {"compute": "bfloat16"}}, "autocast leaves float64 as it is"),
        ({"model": with_pairs}, {}, "table in complex128"),
    ],
    ids=["complex", "mixed", "autocast", "complex128"],
)
def test_is_refused(changes: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        shoal.verify(small(**changes), shoal.Plan().with_sections(**sections), steps=1)


def test_float64_is_summed_in_float64() -> None:
    """Were it summed in float32, two ranks would be some 1e-7 from one process."""
    verdict = verify("float64", "data")
    errors = [check.error for check in verdict.checks if check.phase == "reduction" and check.name != "loss"]
    assert errors
    assert max(errors) < 1e-13
