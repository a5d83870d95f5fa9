"""Reads of numbers from a device. A read waits until the device has finished all work that was queued before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Return True if reading a number from this device waits for queued work; a CPU queues no work."""
    return device.type != "cpu"


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return host numbers on `device`. CUDA copies use pinned memory, since any other copy waits for queued work."""
    if not values.is_cpu:
        return values
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def send(values: Tensor, into: Tensor) -> None:
    """Copy host numbers into a device tensor without waiting for queued work, as `sent` does."""
    into.copy_(values.pin_memory() if into.is_cuda and values.is_cpu else values, non_blocking=True)


class Constants(dict[tuple[float, ...], Tensor]):
    """Numbers on a device by value, as float64. They stay there, so that steady and captured steps send none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, key: tuple[float, ...]) -> Tensor:
        self[key] = constant = sent(torch.tensor(key, dtype=torch.float64), self._device)
        return constant


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, uint8 [n], by one operation."""
    return torch.cat([part.detach().reshape(-1).view(torch.uint8) for part in parts])


class LateNumbers:
    """Numbers on their way from a device to pinned host memory, behind all work that was queued before."""

    def __init__(self, values: Tensor) -> None:
        """Queue the copy; `values` may change from here on."""
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values.detach(), non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def numbers(self) -> npt.NDArray[Any]:
        """Return the numbers once they have arrived, without waiting for work that was queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()
