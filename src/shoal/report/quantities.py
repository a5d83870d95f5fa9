"""Quantities in words: readable seconds, bytes, rates, shares and dollars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def seconds(value: float | None) -> str:
    """Return seconds in a readable unit."""
    if value is None:
        return "-"
    if value >= 86400:
        return f"{value / 86400:.1f} d"
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    if value >= 100:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-4 else f"{value * 1e6:.0f} us"


def several(number: int, noun: str) -> str:
    """Return a number of things: "1 process", "2 processes"."""
    plural = "es" if noun.endswith("s") or noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def rate(value: float) -> str:
    """Return a rate with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def dollars(value: float) -> str:
    """Return US dollars, with cents below $1000."""
    if 0.0 < value < 0.005:  # would print as $0.00
        return "under $0.01"
    return f"${value:,.2f}" if value < 1000 else f"${value:,.0f}"


def size(value: float | None) -> str:
    """Return bytes in binary units."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError("a last unit takes all")


def share(value: float | None) -> str:
    """Return a share in per cent."""
    return "-" if value is None else f"{value:.1%}"


def short(value: float | None) -> str:
    """Return a number as text: integers in full, others with four significant digits, "-" for None."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def change(predicted: float | None, measured: float | None) -> str:
    """Return a measurement relative to its prediction: "+4%", "21 times"."""
    if not predicted or measured is None:
        return "-"
    ratio = measured / predicted
    return f"{ratio:.3g} times" if ratio >= 2 or ratio <= 0.5 else f"{ratio - 1:+.0%}"


def step_words(result: Mapping[str, Any]) -> str:
    """Return the mode of a run's steps with the reason, or an empty text if its result has none."""
    trial = result.get("trial")
    if not isinstance(trial, dict) or not trial.get("chosen"):
        return ""
    since = f" from step {trial['from_step']} on" if trial.get("turns") else ""
    return f"{trial['chosen']}{since}: {trial.get('reason')}"
