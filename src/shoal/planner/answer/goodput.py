"""Goodput: the share of a run's time that failures and checkpoints leave, and the optimal checkpoint interval.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), equations 20 and 37.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, isinf, sqrt


@dataclass(frozen=True)
class Failures:
    """Failure model of a run: `mtbf_seconds` of all its devices together; seconds of a checkpoint, and of a restart."""

    mtbf_seconds: float
    checkpoint_seconds: float
    restart_seconds: float


@dataclass(frozen=True)
class Goodput:
    """Seconds between checkpoints and of each, and the share of the time that goes into training."""

    interval_seconds: float
    checkpoint_seconds: float
    share: float
    failures_per_day: float


def daly(failures: Failures) -> float:
    """The interval in seconds to higher order than Young's sqrt(2 x checkpoint x MTBF).

    The MTBF itself where a checkpoint takes twice that or more.
    """
    cost, mtbf = failures.checkpoint_seconds, failures.mtbf_seconds
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = cost / (2.0 * mtbf)
    return sqrt(2.0 * cost * mtbf) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def share_left(interval: float, failures: Failures) -> float:
    """Training over wall time: failures are Poisson, and may come in a checkpoint or a restart too."""
    mtbf = failures.mtbf_seconds
    if isinf(mtbf):
        return interval / (interval + failures.checkpoint_seconds)
    lost = (interval + failures.checkpoint_seconds) / mtbf
    if lost + failures.restart_seconds / mtbf > 700.0:  # exp of more is no float: nothing is left
        return 0.0
    return interval / (mtbf * exp(failures.restart_seconds / mtbf) * expm1(lost))


def goodput(failures: Failures) -> Goodput:
    """The best interval and what it leaves."""
    interval = daly(failures) if failures.checkpoint_seconds > 0.0 else 1.0
    left = 1.0 if isinf(interval) else share_left(interval, failures)
    return Goodput(interval, failures.checkpoint_seconds, left, 86400.0 / failures.mtbf_seconds)
