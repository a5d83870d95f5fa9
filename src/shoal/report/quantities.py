"""Quantities in words: seconds, bytes, rates, shares and dollars as people read them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """Seconds as people read them."""
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


def rate(value: float) -> str:
    """Three digits at least of a number, as of samples a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def dollars(value: float) -> str:
    """US dollars, cents where they count."""
    if 0.0 < value < 0.005:  # which cents would print as none
        return "under $0.01"
    return f"${value:,.2f}" if value < 1000 else f"${value:,.0f}"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError("a last unit takes all")


def share(value: float | None) -> str:
    """A share in per cent."""
    return "-" if value is None else f"{value:.1%}"


def short(value: float | None) -> str:
    """Four digits of a number."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def change(predicted: float | None, measured: float | None) -> str:
    """A measurement against its prediction: +4 %, 21 times."""
    if not predicted or measured is None:
        return "-"
    ratio = measured / predicted
    return f"{ratio:.3g} times" if ratio >= 2 or ratio <= 0.5 else f"{ratio - 1:+.0%}"
