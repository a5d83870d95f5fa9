"""Global random generators of torch, Python and numpy: seeds, states, contexts that restore them, and watches."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# 624 words of key and the position among them.
_MT19937_BYTES = 625 * 4


def seed_torch(key: int) -> None:
    """Seed torch's global generators, of the CPU and of the CUDA devices in use."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)


def seed_everything(key: int) -> None:
    """Seed the global generators of torch, Python and numpy."""
    seed_torch(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def torch_generator() -> bytes:
    """Return the state of torch's CPU generator."""
    return torch.default_generator.get_state().numpy().tobytes()


def device_generators() -> tuple[bytes, ...]:
    """Return the states of the CUDA devices' generators in comparable form; empty if CUDA was not used."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())


def all_generators() -> tuple[Any, ...]:
    """Return the states of all global generators in comparable form: torch, its devices, Python and numpy."""
    return torch_generator(), device_generators(), python_generators()


def python_generators() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's global generators in comparable form."""
    _, words, next_gauss = random.getstate()
    source: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    # Reading the memory of numpy's generator takes 1 us; get_state takes 32 us, twice in every step.
    is_usual = isinstance(source, np.random.MT19937)
    numpys = ctypes.string_at(source.ctypes.state_address, _MT19937_BYTES) if is_usual else source.state
    # All 624 words are renewed together, and the last counts the used words. Comparing all words takes 30 us a step.
    return words[-1], words[1:9], next_gauss, numpys


@contextmanager
def python_generators_kept() -> Iterator[None]:
    """Restore Python's and numpy's global generators at the end."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch's CPU at the end."""
    state = torch.default_generator.get_state()
    with python_generators_kept():
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


class DrawWatch:
    """Watch over all global generators during consecutive stretches of code; it reports whether any code has drawn.

    The states after one stretch also serve as the states before the next, if no other code draws in between. So a
    stretch takes one reading instead of two. `forget` reports that other code may have drawn. If `is_unclear`, a draw
    may have happened before the stretch, and each stretch needs readings of its own.
    """

    def __init__(self) -> None:
        self._left: tuple[Any, ...] | None = None
        self.is_unclear = False

    def begin(self) -> None:
        """Begin a stretch of code."""
        self._is_fresh = self._left is None
        if self._is_fresh:
            self._left = all_generators()

    def end(self) -> bool:
        """End the stretch. Return whether any code has drawn, earlier code included if the result `is_unclear`."""
        now, before = all_generators(), self._left
        if now == before:
            self.is_unclear = False
            return False
        self._left, self.is_unclear = now, not self._is_fresh
        return True

    def forget(self) -> None:
        """Read the states again at the beginning of the next stretch."""
        self._left = None
