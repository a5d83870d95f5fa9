"""Objectives of a search, as an order of (devices, seconds) and a limit on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from shoal.errors import CommandError, nearest

# Two plans closer than this are a tie: far less than a prediction can tell apart. Ties go to fewer devices, then to
# the simpler layout.
TIE = 0.01
# The fastest plan has to be faster by more than this than one on fewer devices: of 284 pairs of published layouts that
# were predicted to differ by less, every second one came out the other way round (docs/planner.md).
TOLD_APART = 0.05
AIMS = ("fastest", "cheapest", "deadline", "efficiency", "widest")
SHARES = ("efficiency", "widest")  # compared with the cheapest layout there is
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

Key = tuple[float, ...]


@dataclass(frozen=True)
class Aim:
    """Objective of a search; `value` is the deadline of the whole job in seconds, or the least efficiency.

    fastest: the least time of a step. cheapest: the least device-seconds, and so the least money, of a step.
    deadline: the cheapest that ends the job in time. efficiency: the fewest devices that keep at least this share of
    the throughput per device that the cheapest layout has. widest: the most devices that keep it.
    """

    name: str = "fastest"
    value: float = 0.0

    def key(self, devices: int, seconds: float) -> Key:
        """Value to minimize; never smaller where `seconds` is larger."""
        if self.name == "fastest":
            return (seconds,)
        if self.name == "efficiency":
            return (devices, seconds)
        if self.name == "widest":
            return (-devices, seconds)
        return (devices * seconds,)

    def __str__(self) -> str:
        """As the command line spells it."""
        unit = "s" if self.name == "deadline" else ""
        return f"{self.name}={self.value:g}{unit}" if self.name in ("deadline", *SHARES) else self.name

    @property
    def prefers_more(self) -> bool:
        """Whether the key is smaller on more devices, whatever their seconds."""
        return self.name == "widest"


@dataclass(frozen=True)
class Limit:
    """Limit of a layout: seconds of a step, and device-seconds of a step."""

    seconds: float = float("inf")
    device_seconds: float = float("inf")

    def allows(self, devices: int, seconds: float) -> bool:
        """Whether so many seconds of a step on so many devices are within the limit."""
        return seconds <= self.seconds and devices * seconds <= self.device_seconds


class Ceiling:
    """Key above which a pass wants nothing, as far as is known.

    Where parts of a space are searched at once, `shared` has a number of each part: the first of the key that it found.
    """

    def __init__(self, shared: memoryview[float] | None = None, own: int = 0) -> None:
        self.key: Key = (float("inf"),)
        self._shared, self._own = shared, own

    def lower(self, key: Key) -> None:
        """Nothing above this key is wanted."""
        self.key = min(self.key, key)
        if self._shared is not None:
            self._shared[self._own] = self.key[0]

    def allows(self, key: Key) -> bool:
        """Whether plans with this key may be wanted."""
        return key <= self.key and (self._shared is None or key[0] <= min(self._shared))


def tied(key: Key, best: Key) -> bool:
    """Whether two keys are too close to tell apart."""
    return key[:-1] == best[:-1] and key[-1] <= best[-1] * (1 + TIE)


def parse(text: str) -> Aim:
    """`fastest`, `cheapest`, `deadline=2h`, `efficiency=0.8`, `widest=80%`. Raises: CommandError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if name not in AIMS:
        raise CommandError(
            given=f"--aim {text}",
            conflict="there is no such aim",
            remedy="write fastest, cheapest, deadline=2h, efficiency=0.8 or widest=0.8" + nearest(name, list(AIMS)),
        )
    if name in ("fastest", "cheapest"):
        if equals:
            raise CommandError(given=f"--aim {text}", conflict=f"{name} takes no value", remedy=f"write --aim {name}")
        return Aim(name)
    return Aim(name, _deadline(text, value) if name == "deadline" else _share(text, name, value))


def _deadline(text: str, value: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", value.lower())
    seconds = float(found[1]) * _UNITS.get(found[2], 0.0) if found else 0.0
    if not seconds:
        raise CommandError(
            given=f"--aim {text}",
            conflict="a deadline is the time of the whole job: a number above zero of s, m, h or d",
            remedy="write --aim deadline=2h, say",
        )
    return seconds


def written_time(seconds: float) -> str:
    """A time of at least so many seconds as a deadline is written, in the largest unit of which it has two."""
    unit = next((name for name in ("d", "h", "m") if seconds >= 2 * _UNITS[name]), "s")
    return f"{ceil(10 * seconds / _UNITS[unit]) / 10:.12g}{unit}"


def _share(text: str, name: str, value: str) -> float:
    try:
        share = float(value.removesuffix("%")) / (100.0 if value.endswith("%") else 1.0)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise CommandError(
            given=f"--aim {text}",
            conflict=f"{name} takes a share in (0, 1]" + ("" if value else ", and there is none"),
            remedy=f"write --aim {name}=0.8 or {name}=80%",
        )
    return share
