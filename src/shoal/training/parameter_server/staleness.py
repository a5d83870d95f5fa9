"""Staleness of gradients: a stability limit from the momentum, and a guard that watches the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

import numpy as np

# Measured on the digits and on LeNet (docs/parameter-server.md), at the right rate for up-to-date gradients:
# with shares of 1/11 and more the training works, with 1/38 and less it ends at chance.
LEAST_SHARE = 1 / 20
# Updates in the first mean and in the window; limits of a rise (standard errors) and of a fall (squared ones).
# The limit of a fall grows with the number of updates: the lowest of many windows is low by chance.
# These values separate the 13 of 49 runs on the digits that end at chance; in 2,000 updates of pure noise without
# a trend they wrongly detect a fall and a rise in 1 % to 3 %.
BEGINNING, WINDOW, ERRORS, FALL = 10, 25, 3.0, 7.0
LAST = 3


def largest_rate(momentum: float, staleness: int) -> float:
    """Return the largest product of rate and curvature at which gradient descent on a quadratic stays bounded.

    The gradients are always `staleness` updates old. The roots of z^2 - (1 + momentum) z + momentum + rate curvature
    z^(1 - staleness) must lie within the unit circle.
    """
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        powers = np.zeros(max(staleness, 1) + 2)
        powers[:3] = 1.0, -(1.0 + momentum), momentum
        powers[staleness + 1 if staleness else 1] += middle
        low, high = (middle, high) if max(abs(np.roots(powers))) <= 1.0 + 1e-9 else (low, middle)
    return low


def foretold(groups: Iterable[Mapping[str, Any]], staleness: int) -> str | None:
    """Return a warning for an optimizer with gradients that are `staleness` updates old, or None.

    The check uses the momentum in `groups` alone: only a run can show the right rate for up-to-date gradients.
    """
    momentum = max((float(group.get("momentum") or 0.0) for group in groups), default=0.0)
    if not staleness or not 0.0 < momentum < 1.0:
        return None
    share = largest_rate(momentum, staleness) / largest_rate(momentum, 0)
    if share >= LEAST_SHARE:
        return None
    return (
        f"momentum {momentum:g} and gradients of parameters that are about {staleness} update(s) old: the largest "
        f"stable rate is about 1/{1 / share:.0f} of that of up-to-date ones; without momentum it is "
        f"1/{largest_rate(0.0, 0) / largest_rate(0.0, staleness):.1f}. Take momentum out, or a tenth of the rate, or "
        'server.mode = "synchronous"'
    )


@dataclass
class LossGuard:
    """Detector of a loss that has fallen and is back where it began. `fell_back`: the fallback, set once.

    `lowest`: the lowest mean over a window, the variance there, and the number of updates until then.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    lowest: tuple[float, float, int] | None = None
    counted: int = 0
    fell_back: dict[str, Any] | None = None

    @property
    def beginning(self) -> float:
        """The mean loss of the first updates; infinite before it is known."""
        return fmean(self.first) if len(self.first) == BEGINNING else math.inf

    @property
    def now(self) -> float:
        """The mean loss over the window; infinite before the window is full."""
        return fmean(self.recent) if len(self.recent) == WINDOW else math.inf

    @property
    def lately(self) -> float:
        """The mean loss over the last few updates; infinite before there are enough."""
        return fmean(self.recent[-BEGINNING:]) if len(self.recent) >= BEGINNING else math.inf

    @property
    def of_now(self) -> float:
        """The loss of the current state: `lately`, or the mean of the last three updates if it is higher."""
        return max(self.lately, fmean(self.recent[-LAST:])) if self.lately < math.inf else math.inf

    def add(self, loss: float | None) -> None:
        """Add the loss of one more update; None for a skipped update."""
        if loss is None:
            return
        self.counted += 1
        if len(self.first) < BEGINNING:
            self.first.append(loss)
        self.recent = [*self.recent, loss][-WINDOW:]
        if self.now < (math.inf if self.lowest is None else self.lowest[0]):
            self.lowest = self.now, variance(self.recent), self.counted

    @property
    def lost(self) -> bool:
        """True if all progress is lost: the loss is back where it began, by more than batch noise explains."""
        if self.lowest is None or self.now < self.beginning or self.now <= self.lowest[0]:
            return False
        lowest, spread, at = self.lowest
        fell = math.sqrt((variance(self.first) / BEGINNING + spread / WINDOW) * (FALL + 2 * math.log(at / WINDOW)))
        rose = math.sqrt((spread + variance(self.recent)) / WINDOW) * ERRORS
        return self.beginning - lowest > fell and self.now - lowest > rose

    @property
    def learnt(self) -> bool:
        """True if the loss is below its beginning; True if that is not certain yet."""
        return self.counted < 2 * BEGINNING or self.lately < self.beginning
