"""Power caps: devices whose clock is lowered so that they draw less than their limit as sold."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from shoal.errors import HardwareError
from shoal.hardware.values import Device

CAP: Final = re.compile(r"(\d+(?:\.\d+)?)\s?W", re.IGNORECASE)
# Share of the limit that leakage, memory and links draw at any clock.
_IDLE: Final = 0.2
# Dynamic power is f V^2 (f the clock, V the voltage). At boost clocks V grows a little slower than f: with V ~ f^(2/3),
# power grows with f^(7/3), and the clock with the power to 3/7.
_CLOCK: Final = 3 / 7
_LEAST: Final = 0.3  # of the limit: no driver for a device of the catalogue accepts less


def capped(device: Device, watts: float) -> Device:
    """Return the device with its power limit set to `watts`. Tensor cores slow down with the clock; memory does not.

    The model assumes that whole steps draw the full limit as sold, as the steps to which `sustained` was fitted do.
    Raises: HardwareError if the device's limit is unknown, or the cap is above the limit or below a driver's minimum.
    """
    limit = device.watts
    if limit is None:
        raise HardwareError(
            given=f"{device.name} at {watts:g} W",
            conflict="the catalogue does not know what this device draws without a cap",
            remedy=f"write it without a cap, or a file with [device] like = {device.name!r} and its watts",
        )
    if not _LEAST * limit <= watts <= limit:
        raise HardwareError(
            given=f"{device.name} at {watts:g} W",
            conflict=f"its own limit is {limit:g} W, and drivers set no less than {_LEAST * limit:g} W",
            remedy=f"write between {_LEAST * limit:g} and {limit:g} W, as {device.name}@{0.75 * limit:.0f}W",
        )
    if watts == limit:
        return device
    clock = ((watts / limit - _IDLE) / (1 - _IDLE)) ** _CLOCK
    said = f"capped at {watts:g} of {limit:g} W: x {clock:.2f} ((P - 0.2 P0) / 0.8 P0) ^ (3/7) (stated)"
    sources = {key: f"{device.sources.get(key, '')}; {said}" for key in ("sustained", "attention")}
    return replace(
        device,
        name=f"{device.name}@{watts:g}W",
        watts=watts,
        sustained=device.sustained * clock,
        sustained_dtypes={dtype: share * clock for dtype, share in device.sustained_dtypes.items()},
        attention={kernel: share * clock for kernel, share in device.attention.items()},
        sources={**device.sources, **sources, "watts": f"given: a cap of {watts:g} W"},
    )
