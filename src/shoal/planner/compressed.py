"""Compressed gradients as numbers: what each scheme sends for a bucket, and what that makes of messages and bytes.

Integers only. The codecs divide tensors by these rules, the formulas predict by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

# What a signed byte holds on either side of zero.
INT8_LEVELS = 127


def num_kept(numel: int, density: float) -> int:
    """Values of a bucket that topk sends: at least one."""
    return min(numel, max(1, ceil(numel * density)))


@dataclass(frozen=True)
class Matrix:
    """A tensor of a bucket that powersgd factors, as a matrix; `start` is its place among the bucket's values."""

    start: int
    rows: int
    columns: int


def factored(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """The tensors that two factors of this rank make smaller, and the places [start, stop) of the others' values."""
    matrices: list[Matrix] = []
    plain: list[tuple[int, int]] = []
    start = 0
    for shape in shapes:
        numel = prod(shape)
        rows = shape[0] if shape else 1
        columns = numel // rows if rows else 0
        if rank * (rows + columns) < numel:
            matrices.append(Matrix(start, rows, columns))
        elif numel:
            plain.append((start, start + numel))
        start += numel
    return matrices, plain
