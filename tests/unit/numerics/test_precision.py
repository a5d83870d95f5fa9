"""Dtypes of a run, and the scale of a float16 loss."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.numerics.precision import LossScale, Precision
from shoal.plans.plan import PrecisionSection

CPU = torch.device("cpu")


def test_autocast_only_where_compute_differs() -> None:
    plain = Precision.of(PrecisionSection(), CPU)
    assert isinstance(plain.autocast(), nullcontext)
    mixed = Precision.of(PrecisionSection(compute="bfloat16"), CPU)
    with mixed.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    pure = Precision.of(PrecisionSection(parameters="bfloat16", compute="bfloat16"), CPU)
    assert isinstance(pure.autocast(), nullcontext)


def test_channels_last_changes_the_strides_alone() -> None:
    images, gray = torch.randn(2, 3, 4, 5), torch.randn(2, 1, 4, 5)
    batch = [images, gray, torch.ones(2, 3), torch.ones(2, 3, 4, 5, dtype=torch.int64)]
    moved = Precision.of(PrecisionSection(), CPU, channels_last=True).inputs(batch)
    assert all(map(torch.equal, moved, batch))
    assert [t.stride() for t in moved[:2]] == [(60, 1, 15, 3), (20, 1, 5, 1)]
    assert [t.stride() for t in moved[2:]] == [t.stride() for t in batch[2:]]
    out = torch.nn.Conv2d(1, 6, 3)(moved[1])  # of one channel too: convolutions go on in it
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not torch.nn.Conv2d(1, 6, 3)(gray).is_contiguous(memory_format=torch.channels_last)


def test_inputs_take_the_dtype_of_narrow_parameters() -> None:
    batch = {"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.int64), "text", 3]}
    kept = Precision.of(PrecisionSection(compute="bfloat16"), CPU).inputs(batch)
    assert kept["x"].dtype == torch.float32
    narrow = Precision.of(PrecisionSection(parameters="bfloat16", compute="bfloat16"), CPU).inputs(batch)
    assert narrow["x"].dtype == torch.bfloat16
    assert narrow["y"][0].dtype == torch.int64
    assert narrow["y"][1:] == ["text", 3]


@pytest.mark.parametrize(
    ("setting", "compute", "expected"),
    [
        ("none", torch.float16, LossScale()),
        ("dynamic", torch.float16, LossScale(2.0**16, dynamic=True)),
        (1024.0, torch.float16, LossScale(1024.0)),
        ("dynamic", torch.bfloat16, LossScale()),
        (1024.0, torch.float32, LossScale()),
    ],
)
def test_only_float16_is_scaled(setting: str | float, compute: torch.dtype, expected: LossScale) -> None:
    assert LossScale.of(setting, compute) == expected


def test_an_overflow_halves_and_two_thousand_good_steps_double() -> None:
    scale = LossScale(2.0**16, dynamic=True)
    scale = scale.after(overflow=True)
    assert (scale.scale, scale.good_steps) == (2.0**15, 0)
    for _ in range(1999):
        scale = scale.after(overflow=False)
    assert (scale.scale, scale.good_steps) == (2.0**15, 1999)
    assert scale.after(overflow=True).good_steps == 0
    scale = scale.after(overflow=False)
    assert (scale.scale, scale.good_steps) == (2.0**16, 0)


def test_a_fixed_scale_stays() -> None:
    assert LossScale(8.0).after(overflow=True) == LossScale(8.0)


@given(st.integers(1, 10**6), st.sampled_from([2.0**16, 1024.0, 1.0, 0.5]))
def test_the_factor_of_a_total_is_a_power_of_two(global_batch: int, scale: float) -> None:
    factor = LossScale(scale).factor(global_batch)
    assert math.frexp(factor)[0] == 0.5
    assert 0.7 < factor * global_batch / scale < 1.42


@given(st.integers(0, 20))
def test_no_pass_over_gradients_of_samples_that_weigh_one(power: int) -> None:
    assert LossScale().factor(2**power) * 2**power == 1.0


@pytest.mark.parametrize("batch", [[torch.ones(2), torch.zeros(2)], {"x": torch.ones(2), "y": torch.zeros(2)}])
def test_what_a_loss_takes_out_of_its_batch_is_there_for_the_next(batch: Any) -> None:
    wide = Precision.of(PrecisionSection(), torch.device("cpu"))
    once = wide.inputs(batch)
    once.pop(next(iter(once)) if isinstance(once, dict) else 0)
    assert len(once) == 1
    assert len(wide.inputs(batch)) == 2
