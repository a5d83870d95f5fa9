"""The rule of a buffer is found from forwards of some grains, each by itself and all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.buffer_names import matches
from shoal.numerics.buffer_rules import (
    COARSE,
    FINE,
    Observed,
    declared_rules,
    defined_rules,
    explaining,
    in_words,
    is_in_order,
    no_rule,
)

# What a forward of samples, float64 [n, 3], makes of a buffer.
Update = Callable[[Tensor, Tensor], Tensor]

SIZES = (4, 4, 4, 3)


def grains(data: Tensor | None = None) -> list[Tensor]:
    data = torch.randn(sum(SIZES), 3, generator=torch.Generator().manual_seed(1)).double() if data is None else data
    return list(data.split(SIZES))


def observed(update: Update, start: Tensor, parts: Sequence[Tensor]) -> list[Observed]:
    """As a look at the first grains: all of them, fewer of them, and all again from what they have left."""
    apart = [update(start, part) for part in parts]
    found = []
    for number in range(len(parts), 1, -1):
        found.append(Observed(start, update(start, torch.cat(list(parts[:number]))), apart[:number], SIZES[:number]))
    again = found[0].together
    apart = [update(again, part) for part in parts]
    return [*found, Observed(again, update(again, torch.cat(list(parts))), apart, SIZES)]


def rule(update: Update, start: Tensor | None = None, data: Tensor | None = None) -> str | None:
    found = explaining(observed(update, torch.zeros(3).double() if start is None else start, grains(data)), FINE)
    return found[0] if found else None


def count(x: Tensor) -> Tensor:
    return (x > 0).sum(0).double()


def normaliser(b: Tensor, x: Tensor) -> Tensor:
    """Welford's running mean, with its count as the last element."""
    seen, mean = b[-1], b[:-1]
    return torch.cat([mean + (x.mean(0)[:-1] - mean) * len(x) / (seen + len(x)), (seen + len(x)).reshape(1)])


whole = torch.tensor(0)
sentinel = torch.tensor(-1e9).double()
CASES: dict[str, tuple[Update, Tensor | None, str | None]] = {
    "count of calls": (lambda b, x: b + 1, None, "same"),
    "count of calls in whole numbers": (lambda b, x: b + 1, whole, "same"),
    "flag": (lambda b, x: torch.ones_like(b), torch.tensor(False), "max"),
    "teacher": (lambda b, x: 0.9 * b + 0.1 * torch.tensor([1.0, -2.0, 3.0]).double(), None, "same"),
    "samples": (lambda b, x: b + len(x), whole, "sum"),
    "load": (lambda b, x: b + count(x), None, "sum"),
    "load of a batch": (lambda b, x: count(x), None, "total"),
    "sum of squares": (lambda b, x: b + x.square().sum(0), None, "sum"),
    "largest": (lambda b, x: torch.maximum(b, x.max()), sentinel, "max"),
    "smallest": (lambda b, x: torch.minimum(b, x.amin(0)), None, "min"),
    "largest of a batch": (lambda b, x: x.amax(0), None, "max"),
    "moving minimum": (lambda b, x: 0.9 * b + 0.1 * x.amin(0), None, "min"),
    "moving mean": (lambda b, x: 0.9 * b + 0.1 * x.mean(0), None, "mean"),
    "moving second moment": (lambda b, x: 0.9 * b + 0.1 * x.square().mean(0), None, "mean"),
    "complex mean": (lambda b, x: 0.9 * b + 0.1j * x.mean(0), torch.zeros(3, dtype=torch.complex128), "mean"),
    "last sample": (lambda b, x: x[-1], None, "last"),
    "last number": (lambda b, x: x[-1, 0], torch.tensor(0.0).double(), "last"),
    "moving variance": (lambda b, x: 0.9 * b + 0.1 * x.var(0), None, None),
    "moving sum": (lambda b, x: 0.9 * b + 0.1 * count(x), None, None),
    "running normaliser": (normaliser, None, None),
    "ratio": (lambda b, x: b + count(x) / (1 + count(x).sum()), None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule_of_a_buffer(case: str) -> None:
    update, start, wanted = CASES[case]
    assert rule(update, start) == wanted


def test_of_rules_that_all_explain_the_first_is_right_later() -> None:
    """A maximum that all grains reach is no constant, and a count that one grain alone has seen no last value."""
    same = torch.ones(sum(SIZES), 3).double()
    assert rule(lambda b, x: torch.maximum(b, x.amax(0)), None, same) == "max"
    seen_last = torch.zeros(sum(SIZES), 3).double()
    seen_last[-1] = 1.0
    assert rule(lambda b, x: b + count(x), None, seen_last) == "sum"
    ordered = torch.arange(3.0 * sum(SIZES)).double().view(-1, 3)
    assert rule(lambda b, x: torch.maximum(b, x.max()), sentinel, ordered) == "max"


def test_grains_that_differ_by_less_than_rounding_may_leave_show_the_nearest_rule() -> None:
    """A second moment with a small momentum moves by as little as a float32 look may be off."""
    start = torch.ones(3).double()
    seen = observed(lambda b, x: 0.999 * b + 1e-3 * (1 + 1e-3 * x.square().mean(0)), start, grains())
    assert explaining(seen, COARSE)[0] == "mean"


def test_a_mean_of_values_that_cancel_is_rounding() -> None:
    noise = torch.Generator().manual_seed(0)
    seen = observed(
        lambda b, x: b + 1e-10 * torch.randn(3, generator=noise).double(), torch.zeros(3).double(), grains()
    )
    assert explaining(seen, FINE, scale=1.0) == ("mean",)
    assert explaining(seen, FINE, scale=1e-6) == ()
    seen = observed(lambda b, x: b + 1e-3 * torch.randn(3, generator=noise).double(), torch.zeros(3).double(), grains())
    assert explaining(seen, FINE, scale=1.0) == ()


def test_what_nothing_moves_is_seen() -> None:
    still = observed(lambda b, x: torch.maximum(b, x.amax(0)), torch.full((3,), 1e9).double(), grains())
    assert not any(one.moves for one in still)
    assert any(one.moves for one in observed(lambda b, x: b + 1, torch.tensor(0), grains()))
    nan = torch.full((3,), torch.nan)
    assert not Observed(nan, nan.clone(), [nan.clone()], [1]).moves


def test_a_queue_keeps_samples_in_their_order() -> None:
    def enqueue(b: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x, b[len(x) :]])

    found = observed(enqueue, torch.zeros(32, 3).double(), grains())
    assert not explaining(found, FINE)
    assert is_in_order(found[0])
    error = no_rule({"queue": "MoCo", "at": "MoCo"}, ordered=True)
    assert error.given == "buffers queue of MoCo, at of MoCo, which a forward changes"
    assert "one of them keeps samples in their order" in error.conflict
    assert 'Job(buffers={"queue": "last", "at": "last"})' in error.remedy
    assert not is_in_order(observed(lambda b, x: 0.9 * b + 0.1 * x.var(0), torch.zeros(3).double(), grains())[0])


def test_buffers_whose_meaning_torch_defines() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    model = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True), spectral)
    model.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
    found = defined_rules(model)
    assert {name for name, _ in model.named_buffers()} <= found.keys()
    assert {found[name] for name in found if "running" in name} == {"mean"}
    assert {found[name] for name in found if "running" not in name} == {"same"}


def test_declared_names() -> None:
    names = ["blocks.0.load", "blocks.1.load", "head.load", "calls"]
    assert declared_rules({"blocks.*.load": "sum", "calls": "same"}, names) == {
        "blocks.0.load": "sum",
        "blocks.1.load": "sum",
        "calls": "same",
    }
    assert not matches("*", "head.load")
    with pytest.raises(JobError, match="no such buffer; its buffers are blocks"):
        declared_rules({"*.load.x": "sum"}, names)


def test_rules_in_words() -> None:
    assert in_words({"b.0.load": "sum", "b.1.load": "sum", "calls": "same"}) == "same of calls; sum of b.*.load"
