"""Asynchronous transfer of batches to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class Transfer:
    """Moves batches by `move`; on CUDA from pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self._move = move
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Any) -> Callable[[], Any]:
        """Begins to move a batch; the result gives it, ready for use on the current stream."""
        stream = self._stream
        if stream is None:
            return lambda: self._move(batch)
        pinned = tree_map(_pin, batch)
        with torch.cuda.stream(stream):
            moved = self._move(pinned)

        def ready() -> Any:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            # The allocator may give the memory away once the side stream is done with it; the current one is not yet.
            for leaf in tree_leaves(moved):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)
            return moved

        return ready


def _pin(value: Any) -> Any:
    movable = isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_pinned()
    return value.pin_memory() if movable else value
