"""Objectives of a search, as an order of (devices, seconds) and a limit on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from shoal.errors import CommandError, nearest

# Relative difference below which two plans tie, far less than the prediction error. Ties go to fewer devices, then to
# the simpler layout.
TIE = 0.01
# Relative speedup that justifies more devices. Of 284 pairs of published layouts with a smaller predicted difference,
# half were measured in the other order (docs/planner.md).
TOLD_APART = 0.05
AIMS = ("fastest", "cheapest", "deadline", "efficiency", "widest")
SHARES = ("efficiency", "widest")  # relative to the cheapest layout
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

Key = tuple[float, ...]


@dataclass(frozen=True)
class Aim:
    """Objective of a search.

    `value`: deadline of the whole job in seconds, or the least efficiency in (0, 1].
    `name`: "fastest" minimizes the step time, "cheapest" the device-seconds, and so the price, of a step. "deadline" is
    the cheapest plan that ends the job in time. "efficiency" is the fewest devices that keep this share of the cheapest
    layout's throughput per device; "widest" is the most devices that keep it.
    """

    name: str = "fastest"
    value: float = 0.0

    def key(self, devices: int, seconds: float) -> Key:
        """Return the value to minimize. It never shrinks as `seconds` grows."""
        if self.name == "fastest":
            return (seconds,)
        if self.name == "efficiency":
            return (devices, seconds)
        if self.name == "widest":
            return (-devices, seconds)
        return (devices * seconds,)

    def __str__(self) -> str:
        """Format the aim as the command line spells it."""
        unit = "s" if self.name == "deadline" else ""
        return f"{self.name}={self.value:g}{unit}" if self.name in ("deadline", *SHARES) else self.name

    @property
    def prefers_more(self) -> bool:
        """Whether the key shrinks with more devices, for any seconds."""
        return self.name == "widest"


@dataclass(frozen=True)
class Limit:
    """Upper limits of a layout: seconds of a step, and device-seconds of a step."""

    seconds: float = float("inf")
    device_seconds: float = float("inf")

    def allows(self, devices: int, seconds: float) -> bool:
        """Check whether a step of `seconds` on `devices` devices is within the limit."""
        return seconds <= self.seconds and devices * seconds <= self.device_seconds


def tied(key: Key, best: Key) -> bool:
    """Check whether two keys are too close to tell apart."""
    return key[:-1] == best[:-1] and key[-1] <= best[-1] * (1 + TIE)


def parse(text: str) -> Aim:
    """Parse `fastest`, `cheapest`, `deadline=2h`, `efficiency=0.8` or `widest=80%`.

    Raises: CommandError if the text is none of these.
    """
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
    """Format seconds, rounded up, as a deadline in the largest unit of which there are at least two."""
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
