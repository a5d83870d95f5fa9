"""Reads of numbers off a device: each waits until the device has done all that was queued before it."""

from __future__ import annotations

import torch


def waits(device: torch.device) -> bool:
    """Whether Python waits for queued work where it reads a number of this device; a CPU has done it by then."""
    return device.type != "cpu"
