"""The rule: what lies within what a step moves by passes, what lies outside does not."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.training.observe.trace.traces import MicrobatchTrace, StepTrace
from shoal.verification.compare import MULTIPLE, Check, References, compare, distance
from shoal.verification.reference import Computed


def trace(gradient: Tensor, step: int = 0) -> StepTrace:
    """A step of plain gradient descent on one parameter, with rate 1."""
    found = StepTrace(step, loss=1.0, weight=4.0, norm=float(gradient.norm()))
    found.parts = [MicrobatchTrace(0, (0, 1), ((0, 1), (2, 3)), 4.0, 4.0)]
    found.gradients = {0: {"w": gradient}}
    found.tensors = {"reduction/w": gradient, "clipping/w": gradient, "update/w": 1.0 - gradient}
    found.digests = {0: {}}
    return found


def computed(gradient: Tensor) -> Computed:
    return Computed(trace(gradient), contributions={0: {"w": gradient}}, magnitudes={"w": float(gradient.norm())})


BEFORE = StepTrace(-1, tensors={"update/w": torch.ones(100)})
GRADIENT = torch.linspace(1, 2, 100)
MOVE = 1e-4 * torch.cos(torch.arange(100.0))


def failed(value: Tensor, measured: dict[str, float] | None = None, complete: bool = True) -> list[Check]:
    ways = [computed(GRADIENT), computed(GRADIENT + MOVE)] if complete else [computed(GRADIENT)]
    references = References(ways, None, complete)
    checks = compare(trace(value), BEFORE, references, ["w"], {} if measured is None else measured)
    assert {check.phase for check in checks} >= {"data", "loss", "backward", "reduction", "clipping", "update"}
    return [check for check in checks if not check.passed]


@pytest.mark.parametrize(("times", "passes"), [(0.0, True), (1.0, True), (MULTIPLE, True), (MULTIPLE + 2, False)])
def test_within_a_multiple_of_what_the_ways_differ_by(times: float, passes: bool) -> None:
    found = failed(GRADIENT + times * MOVE)
    assert (not found) is passes
    if not passes:
        assert found[0].phase == "backward"
        assert {check.name for check in found} == {"w"}


def test_a_later_step_takes_over_what_the_first_measured() -> None:
    measured: dict[str, float] = {}
    assert not failed(GRADIENT, measured)
    assert measured["reduction/w"] > 0
    assert not failed(GRADIENT + MULTIPLE * MOVE, measured, complete=False)
    assert failed(GRADIENT + 3 * MULTIPLE * MOVE, measured, complete=False)
    assert failed(GRADIENT + MOVE, None, complete=False), "without that it may differ by rounding only"


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (1e-6, True), (1e-4, False)])
def test_an_update_is_judged_by_what_the_optimizer_makes_of_its_own_gradients(off: float, passes: bool) -> None:
    """However far it is from that of other gradients, which a division by their own size would tell apart."""
    amplified = 1.0 - GRADIENT - 1000 * MOVE
    parallel = trace(GRADIENT + MOVE)
    parallel.tensors["update/w"] = amplified + off
    own = References([Computed(StepTrace(0, tensors={"update/w": amplified}))], None, complete=True)
    references = References([computed(GRADIENT), computed(GRADIENT + MOVE)], None, complete=True)
    checks = compare(parallel, BEFORE, replace(references, updated=own), ["w"], {})
    assert [check.phase for check in checks if not check.passed] == ([] if passes else ["update"])
    assert not all(check.passed for check in compare(parallel, BEFORE, references, ["w"], {}))


def test_nan_is_not_close_to_anything() -> None:
    bad = GRADIENT.clone()
    bad[3] = math.nan
    assert failed(bad)
    assert distance(bad, bad) == 0.0
    assert distance(bad, GRADIENT) == math.inf


def test_a_gradient_more_or_less_is_told() -> None:
    more = trace(GRADIENT)
    more.gradients[0]["v"] = GRADIENT
    less = replace(trace(GRADIENT), gradients={0: {}})
    references = References([computed(GRADIENT)], None, complete=True)
    for parallel, name in ((more, "v"), (less, "w")):
        checks = compare(parallel, BEFORE, references, ["w", "v"], {})
        (found,) = [check for check in checks if not check.passed]
        assert (found.phase, found.name, found.ratio) == ("backward", name, math.inf)
        assert "gradient" in (found.said or "")


def test_samples_and_grains_have_to_be_the_same() -> None:
    references = References([computed(GRADIENT)], None, complete=True)
    for part in (
        MicrobatchTrace(0, (0, 1), ((0, 1), (2, 4)), 4.0, 4.0),
        MicrobatchTrace(0, (0, 0), ((0, 1), (0, 1)), 4.0, 4.0),
        MicrobatchTrace(0, (0,), ((0, 1),), 4.0, 4.0),
    ):
        parallel = trace(GRADIENT)
        parallel.parts = [part]
        checks = compare(parallel, BEFORE, references, ["w"], {})
        assert next(check for check in checks if not check.passed).phase == "data"


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),  # the imaginary part alone
        (torch.tensor([2**60 + 1]), torch.tensor([2**60])),  # float64 has one number for both
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor([1.0, -math.inf]), torch.tensor([2.0, -math.inf])),
        (torch.tensor([0.5]).to(torch.float8_e4m3fn), torch.tensor([0.25]).to(torch.float8_e4m3fn)),
    ],
    ids=["complex", "whole", "truth", "infinite", "float8"],
)
def test_buffers_of_any_dtype_are_compared_whole(value: Tensor, other: Tensor) -> None:
    def checks(found: Tensor) -> list[Check]:
        parallel, way = trace(GRADIENT), computed(GRADIENT)
        parallel.tensors["buffers/b"], way.trace.tensors["buffers/b"] = found, value
        every = compare(parallel, BEFORE, References([way], None, True), ["w"], {})
        return [check for check in every if check.phase == "buffers"]

    assert [check.passed for check in checks(value)] == [True]
    assert [check.passed for check in checks(other)] == [False]


def test_values_that_are_not_numbers_are_unchanged_where_a_step_is_left_out() -> None:
    parallel, way, before = trace(GRADIENT), computed(GRADIENT), StepTrace(-1)
    nothing = {"update/w": torch.ones(100), "buffers/b": torch.tensor([math.nan])}
    parallel.tensors |= nothing
    way.trace.tensors |= nothing
    before.tensors |= nothing
    parallel.skipped = way.trace.skipped = "nonfinite"
    assert all(check.passed for check in compare(parallel, before, References([way], None, True), ["w"], {}))
