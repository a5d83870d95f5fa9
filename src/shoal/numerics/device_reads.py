"""Reads of numbers off a device: each waits until the device has done all that was queued before it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Whether Python waits for queued work where it reads a number of this device; a CPU has done it by then."""
    return device.type != "cpu"


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Numbers on a device: the host's from pinned memory, since any other copy waits for what is queued there."""
    if not values.is_cpu:
        return values
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def send(values: Tensor, into: Tensor) -> None:
    """Copies the host's numbers into a tensor of a device, as `sent` does."""
    into.copy_(values.pin_memory() if into.is_cuda and values.is_cpu else values, non_blocking=True)


class LateNumbers:
    """Numbers of a device on their way to the host, in pinned memory, behind all that was queued before them."""

    def __init__(self, values: Tensor) -> None:
        """`values` may change from here on."""
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values.detach(), non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def numbers(self) -> npt.NDArray[Any]:
        """The numbers, once they are here; nothing that was queued after them is waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()
