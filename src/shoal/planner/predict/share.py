"""Share of a body's work on one rank, and the sizes of matmuls on it."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from shoal.planner.profile.values import ALIGNED, Body, Operation, TensorCut


class Share(NamedTuple):
    """One rank's share of a body: its microbatch in samples, and the degrees that divide each sample."""

    samples: float
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    all_reduce: str = "native"  # algorithm of the tensor axis

    def of(self, body: Body, divides_ends: bool) -> Share:
        """Return the share of one body. Context and sequence parallelism may divide only blocks."""
        return self if body.repeated or divides_ends else self._replace(context=1, sequence=False)

    @property
    def local_samples(self) -> float:
        """Samples of the rank. A part of the positions of a sample counts as that fraction of the sample."""
        return self.samples / self.context


def divided(operation: Operation, share: Share) -> float:
    """Return the factor by which tensor parallelism divides the work of an operation."""
    if operation.cut is TensorCut.NONE or (operation.cut is TensorCut.SEQUENCE and not share.sequence):
        return 1.0
    return float(share.tensor)


class MatrixRow(NamedTuple):
    """Row of a matrix: its elements on all ranks together, and the number of ranks that divide them."""

    length: int
    ranks: int = 1

    @property
    def is_aligned(self) -> bool:
        """Whether, on every rank, the next row also begins at a multiple of 16 bytes.

        Each rank has the largest part or one element less, see `plans.accounting.partition`. All ranks wait for the
        slowest.
        """
        fewest, most = self.length // self.ranks, -(-self.length // self.ranks)
        return fewest % ALIGNED == 0 and most % ALIGNED == 0

    @property
    def padded(self) -> int:
        """The next length that is aligned on every rank."""
        step = ALIGNED * self.ranks
        return -(-self.length // step) * step


def sizes_on_rank(operation: Operation, share: Share) -> tuple[float, float, float, float]:
    """Return m, n, k and batch of a product on one rank."""
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
    """Return the rows of a product's matrices whose length is not a multiple of 8 elements.

    A product with a vector has none, since other kernels compute it. A division of the batch (heads of attention)
    leaves rows unchanged. The row stride of a view may be larger than its length. A rank's stride is then unknown and
    counts as aligned if the whole is (see `operators.py`).
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
    """Return the name of the size (m, n or k) that a tensor axis divides, or "" if it divides none."""
    if operation.cut is TensorCut.SEQUENCE:
        return "m" if share.sequence else ""
    return operation.cut.value if operation.cut in (TensorCut.M, TensorCut.N, TensorCut.K) else ""
