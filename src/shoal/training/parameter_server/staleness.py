"""Staleness of gradients: a stability limit from the momentum, and a guard that watches the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

import numpy as np

# Measured on the digits and on LeNet (docs/parameter-server.md): with shares of 1/11 and more training goes on, with
# 1/38 and less it ends at chance at the rate that is right for up-to-date gradients.
LEAST_SHARE = 1 / 20
# The loss began at the mean of so many updates, and is judged over so many; a rise is one of so many standard errors.
# A fall needs as many, and more the longer it was waited for: the lowest of many windows is low by chance.
# Of 49 runs on the digits these tell the 13 that end at chance from all others; of 2,000 updates of pure noise without
# any trend they call 1 % to 3 % a fall and a rise.
BEGINNING, WINDOW, ERRORS, FALL = 10, 25, 3.0, 7.0
LAST = 3


def largest_rate(momentum: float, staleness: int) -> float:
    """The largest rate times curvature at which gradient descent on a quadratic stays bounded.

    With gradients of parameters that are always `staleness` updates old: the roots of
    z^2 - (1 + momentum) z + momentum + rate curvature z^(1 - staleness) must lie within the unit circle.
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
    """Warning for an optimizer of these parameter groups whose gradients are so many updates old; None: no risk.

    Its momentum alone is judged: what rate is right for up-to-date gradients only a run can tell.
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
    """Detector of a loss that has fallen and is back where it began. `fell_back`: since when, and why; set once.

    `lowest`: the mean over a window where that was lowest, its variance, and after how many updates.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    lowest: tuple[float, float, int] | None = None
    counted: int = 0
    fell_back: dict[str, Any] | None = None

    @property
    def beginning(self) -> float:
        """The loss that it began with; infinite before it is known."""
        return fmean(self.first) if len(self.first) == BEGINNING else math.inf

    @property
    def now(self) -> float:
        """The mean over the window; infinite before that is full."""
        return fmean(self.recent) if len(self.recent) == WINDOW else math.inf

    @property
    def lately(self) -> float:
        """The mean over the last few updates; infinite before there are as many."""
        return fmean(self.recent[-BEGINNING:]) if len(self.recent) >= BEGINNING else math.inf

    @property
    def of_now(self) -> float:
        """How good the values of now are: as `lately`, or worse where the last of these were: a rise is sudden."""
        return max(self.lately, fmean(self.recent[-LAST:])) if self.lately < math.inf else math.inf

    def add(self, loss: float | None) -> None:
        """The loss of one more update; None where it was left out."""
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
        """Whether all that was learnt is lost: the loss is up to where it began, and that is no accident of batches."""
        if self.lowest is None or self.now < self.beginning or self.now <= self.lowest[0]:
            return False
        lowest, spread, at = self.lowest
        fell = math.sqrt((variance(self.first) / BEGINNING + spread / WINDOW) * (FALL + 2 * math.log(at / WINDOW)))
        rose = math.sqrt((spread + variance(self.recent)) / WINDOW) * ERRORS
        return self.beginning - lowest > fell and self.now - lowest > rose

    @property
    def learnt(self) -> bool:
        """Whether the loss is below where it began; True where that is not certain yet."""
        return self.counted < 2 * BEGINNING or self.lately < self.beginning
