"""Backward passes through the entry point of autograd's engine.

torch.autograd.backward and grad are dispatched to an active TorchFunctionMode, which is off while it handles a call;
recomputation in the backward needs the mode (see numerics/grain_randomness.py) in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def run_engine(
    roots: Sequence[Any],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
    *,
    keep: bool = False,
    accumulate: bool = True,
) -> tuple[Tensor | None, ...]:
    """Adds the gradients of `inputs`, or of all leaves, to their `.grad`; gives them instead where not `accumulate`.

    `keep`: the graph is not freed.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    found = engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return () if accumulate else tuple(found)


def run_backward(total: Tensor) -> None:
    """total.backward()."""
    run_engine((total,), (torch.ones_like(total),))
