"""What an update keeps and moves, for the optimizers whose formulas are known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.planner.profile.operators import update


def made(make: Callable[[Any], Any], device: str = "cpu", layers: int = 2) -> Any:
    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
    return update(make, model, mode, device)


@pytest.mark.parametrize(
    ("make", "state", "passes", "launches"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1, fused=False), 0, 3, 1),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=False), 4, 8, 3),
        (lambda ps: torch.optim.AdamW(ps, fused=True), 8, 7, None),
        (lambda ps: torch.optim.Adam(ps, fused=False), 8, 18, None),
        (lambda ps: torch.optim.AdamW(ps, fused=False), 8, 20, None),
        (lambda ps: torch.optim.AdamW(ps), 8, 7, None),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 4, 5, None),
    ],
    ids=["sgd", "momentum", "fused AdamW", "Adam", "AdamW", "AdamW as the engine steps it", "momentum as the engine"],
)
def test_of_torchs_optimizers(make: Any, state: float, passes: float, launches: int | None) -> None:
    """Reads and writes of p, g, m and v, an operation at a time; fused: p, m, v read and written, g read."""
    found = made(make)
    assert found.note is None
    assert found.state_bytes_per_element == pytest.approx(state, rel=1e-3)
    assert found.passes == pytest.approx(passes, rel=1e-3)
    if launches is not None:
        assert found.launches == 2 * launches


def test_on_a_gpu_many_tensors_share_a_kernel() -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    assert (
        made(adam, "cuda", 20).launches < 20 < made(lambda ps: torch.optim.AdamW(ps, fused=False), "cpu", 20).launches
    )


def test_on_a_gpu_large_tensors_take_no_more_calls() -> None:
    """A rank may hold a part of them only, and the kernels of one call follow each other without Python."""

    def launches(width: int) -> int:
        mode = FakeTensorMode()
        with mode:
            model = nn.Linear(width, width, bias=False)
        return update(lambda ps: torch.optim.AdamW(ps), model, mode, "cuda").launches

    assert launches(100_000) == launches(10)


def test_the_products_of_muon_are_counted_by_shape() -> None:
    """Five rounds of X X^T, its square, and the sum's product with X, a product each for each matrix."""
    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(*(nn.Linear(64, width, bias=False) for width in (64, 64, 256)))
    found = update(torch.optim.Muon, model, mode, "cuda")
    assert found.note is None
    sizes: dict[tuple[float, float, float], int] = {}
    for one in found.products:
        key = one.m.fixed, one.n.fixed, one.k.fixed
        sizes[key] = sizes.get(key, 0) + one.launches
        assert one.dtype == "bfloat16"
    assert sizes == {(64, 64, 64): 2 * 15 + 5, (64, 64, 256): 5, (64, 256, 64): 5}
    assert found.whole == 64 * (64 + 64 + 256)
    other = made(lambda ps: torch.optim.AdamW(ps))
    assert (other.products, other.whole) == ((), 0)


def test_what_cannot_be_traced_is_said() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("not here")

    found = made(lambda ps: Odd(ps, lr=0.1))
    assert found.note is not None
    assert "not here" in found.note


def test_without_parameters_there_is_no_update() -> None:
    assert update(torch.optim.SGD, nn.ReLU(), contextlib.nullcontext(), "cpu").passes == 0.0
