"""Suspension of torch's function and dispatch modes while a model is tried."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context outside of every mode that watches or changes what torch computes, for a trial run of a model.

    Python's and numpy's generators are put back, which libraries behind a trial draw from.
    """
    found, drawn = [], (random.getstate(), np.random.get_state())
    while torch.overrides._get_current_function_mode() is not None:
        found.append(torch.overrides._pop_mode())
    try:
        with _disable_current_modes():
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for mode in reversed(found):
            torch.overrides._push_mode(mode)
