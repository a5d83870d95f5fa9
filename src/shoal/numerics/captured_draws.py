"""Random numbers of a step that a CUDA graph replays: the same bits as in a step without a graph.

The operations that GrainScope seeds draw from device generators that exist before the capture, one for each operation
and grain. A replay runs no Python, so the generators receive the step's seeds before it. A CUDA generator is
counter-based (Philox). If it is registered with a graph, torch keeps its key and counter in device tensors, which each
replay fills.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from shoal.numerics.generators import seed_torch
from shoal.numerics.grain_randomness import INT63, GrainScope
from shoal.plans.grains import Grain, random_key


class NotCapturableError(Exception):
    """Error for a step that no graph can replay; the message gives the reason."""


class CapturedScope(GrainScope):
    """GrainScope with generators that are seeded anew for each step.

    The first forward under the scope creates the generators. After `close`, later forwards create no more.
    """

    def __init__(self, seed: int, grains: Sequence[Grain], device: torch.device) -> None:
        super().__init__(seed, 0, grains)
        self._seed, self._device = seed, device
        self._of_calls: list[list[torch.Generator]] = []
        self._next, self._closed = 0, False
        self.drawing: torch.Generator | None = None  # the generator in place of the device's global one

    @property
    def all_generators(self) -> list[torch.Generator]:
        """All generators, in the order of the operations and, within an operation, of the grains."""
        return [generator for own in self._of_calls for generator in own]

    def seed(self, step: int) -> None:
        """Seed the generators for a step, and the global ones to the state in which a GrainScope leaves them."""
        self._key = random_key(self._seed, "model", step)
        with _unseen():
            seed_torch(self._key)
            bases = torch.randint(INT63, (len(self._of_calls),)).tolist()
        for base, own in zip(bases, self._of_calls, strict=True):
            for generator, index in zip(own, self._indices, strict=True):
                generator.manual_seed(random_key(base, index))

    def close(self) -> None:
        """Forbid new generators, because all random operations are known."""
        self._closed = True

    def __enter__(self) -> CapturedScope:
        self._next = 0
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchFunctionMode.__exit__(self, *error)

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """Return a generator per grain for the next operation.

        Raises: NotCapturableError for a draw on the host, or for an operation beyond the known ones.
        """
        if device.type != self._device.type:
            raise NotCapturableError("it draws random numbers on the host")
        number, self._next = self._next, self._next + 1
        if number < len(self._of_calls):
            return self._of_calls[number]
        if self._closed:
            raise NotCapturableError("it does not draw as often in each forward")
        with _unseen():
            base = int(torch.randint(INT63, ()))
        own = [torch.Generator(self._device).manual_seed(random_key(base, index)) for index in self._indices]
        self._of_calls.append(own)
        return own

    def under(self, generator: torch.Generator, call: Callable[[], Any]) -> Any:
        self.drawing = generator
        try:
            if generator.device.type == "cpu":
                return super().under(generator, call)
            # A capture forbids copies of states, so the global generator refers to the other generator's state.
            device = torch.cuda.default_generators[generator.device.index or 0]
            before = device.graphsafe_get_state()
            device.graphsafe_set_state(generator)
            try:
                return call()
            finally:
                device.graphsafe_set_state(before)
        finally:
            self.drawing = None

    def words(self, rows: int, elements: int) -> torch.Tensor:
        """Raise NotCapturableError, because numbers by position are drawn on the host."""
        raise NotCapturableError("it draws random numbers on the host")


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Disable all torch modes within the context."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
