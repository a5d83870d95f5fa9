"""Sizes of a product on one rank of a tensor axis, and the rows of its matrices that do not begin at 16 bytes."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from shoal.planner.predict.share import Share
from shoal.planner.profile.values import ALIGNED, Operation, TensorCut


class MatrixRow(NamedTuple):
    """Row of a matrix: its elements on all ranks together, and the number of ranks that divide them."""

    length: int
    ranks: int = 1

    @property
    def is_aligned(self) -> bool:
        """Whether the next row begins at a multiple of 16 bytes too, on every rank.

        Ranks have the largest part or one less, as `plans.accounting.partition` divides; all wait for the slowest.
        """
        fewest, most = self.length // self.ranks, -(-self.length // self.ranks)
        return fewest % ALIGNED == 0 and most % ALIGNED == 0

    @property
    def padded(self) -> int:
        """The next length that is aligned on every rank."""
        step = ALIGNED * self.ranks
        return -(-self.length // step) * step


def sizes_on_rank(operation: Operation, share: Share) -> tuple[float, float, float, float]:
    """m, n, k and batch on one rank."""
    samples, cut = share.local_samples, operation.cut
    m, n, k = operation.m.at(samples), operation.n.at(samples), operation.k.at(samples)
    batch = operation.batch.at(samples)
    divided = _divided_size(operation, share)
    if divided == "m":
        m = ceil(m / share.tensor)
    elif divided == "n":
        n = ceil(n / share.tensor)
    elif divided == "k":
        k = ceil(k / share.tensor)
    elif cut is TensorCut.BATCH or cut is TensorCut.ALL:
        batch /= share.tensor
    return m, n, k, batch


def unaligned_rows(operation: Operation, share: Share) -> tuple[MatrixRow, ...]:
    """Rows of a product's matrices that are no multiple of 8 elements; none of a vector, which other kernels multiply.

    A division of the batch (heads of an attention) leaves rows as they are. Of a view whose rows are further apart than
    they are long, a rank's distance is not known: it counts as aligned where it is in the whole (see `operators.py`).
    """
    if not operation.rows or min(sizes_on_rank(operation, share)[:3]) <= 1:
        return ()
    divided, lengths = _divided_size(operation, share), {"m": operation.m, "n": operation.n, "k": operation.k}
    rows = (
        MatrixRow(ceil(lengths[name].at(share.local_samples)), share.tensor if name == divided else 1)
        for name in operation.rows
    )
    return tuple(row for row in rows if not row.is_aligned)


def _divided_size(operation: Operation, share: Share) -> str:
    """The name of the size that a tensor axis divides; empty where it is none of m, n, k."""
    if operation.cut is TensorCut.SEQUENCE:
        return "m" if share.sequence else ""
    return operation.cut.value if operation.cut in (TensorCut.M, TensorCut.N, TensorCut.K) else ""
