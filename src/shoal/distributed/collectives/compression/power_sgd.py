"""PowerSGD: each matrix of a gradient as the product of two thin factors, by one step of power iteration.

Vogels, Karimireddy and Jaggi, PowerSGD: Practical low-rank gradient compression, 2019. A tensor [n, ...] is the matrix
[n, m]; what the factors would not make smaller, all vectors among it, is sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Handle
from shoal.distributed.collectives.compression.codecs import Codec, CodecTransport
from shoal.plans.accounting.compressed import Matrix, factored

# What is left of a column after the projection is noise where its energy is this share of what it was.
_NOISE = 1e-10


class PowerSGD(Codec):
    """PowerSGD's sums over ranks of `P = M Q` and `Q = M^T P`, both linear in M, so that any algorithm sums them."""

    num_rounds = 2

    def __init__(self, wire: CodecTransport, shapes: Sequence[tuple[int, ...]], rank: int) -> None:
        self._rank = rank
        self._matrices, self._plain = factored(shapes, rank)
        num_plain = sum(stop - start for start, stop in self._plain)
        self._first = wire.allocate(num_plain + sum(rank * m.rows for m in self._matrices), torch.float32)
        self._second = wire.allocate(sum(rank * m.columns for m in self._matrices), torch.float32)
        super().__init__(wire, self._first, self._second)
        self._rest, left = self._first[:num_plain], self._first[num_plain:]
        lefts = left.split([rank * m.rows for m in self._matrices])
        rights = self._second.split([rank * m.columns for m in self._matrices])
        # Factors lie transposed, [rank, n] and [rank, m]: a column in one piece.
        self._left = [f.view(rank, -1) for f in lefts]
        self._right = [f.view(rank, -1) for f in rights]
        self.basis = [self._fresh(number) for number in range(len(self._matrices))]
        self._next: list[Tensor] = []

    def _fresh(self, number: int) -> Tensor:
        """The factor Q of a matrix to begin with: the same on all ranks."""
        generator = torch.Generator().manual_seed(number)
        found = torch.randn(self._rank, self._matrices[number].columns, generator=generator)
        return found.to(self.wire.device)

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        """Two all-reduces: of what is not factored with all P, and of all Q."""
        matrices = [_view(values, m) for m in self._matrices]
        place = 0
        for start, stop in self._plain:
            self._rest[place : place + stop - start] = values[start:stop]
            place += stop - start
            if keep:
                values[start:stop] = 0.0
        for matrix, basis, left in zip(matrices, self.basis, self._left, strict=True):
            torch.mm(basis, matrix.t(), out=left)
        yield self.wire.sum(self._first)
        lefts = [_orthogonal(left) for left in self._left]
        for matrix, left, right in zip(matrices, lefts, self._right, strict=True):
            torch.mm(left, matrix, out=right)
            if keep:
                matrix.addmm_(left.t(), right, alpha=-1.0)
        yield self.wire.sum(self._second)
        place = 0
        for start, stop in self._plain:
            total[start:stop] = self._rest[place : place + stop - start]
            place += stop - start
        for found, left, right in zip(self._matrices, lefts, self._right, strict=True):
            _product(left, right, _view(total, found), self.wire.scratch(found.rows * found.columns))
        self._next = [right.clone() for right in self._right]

    def commit(self) -> None:
        """The next power iteration begins with the new Q; a column of it that is zero would stay so and begins anew."""
        for number, found in enumerate(self._next):
            dead = (found == 0).all(dim=1, keepdim=True)
            self.basis[number] = torch.where(dead, self._fresh(number), found) if bool(dead.any()) else found
        self._next = []

    def factors(self) -> Iterator[tuple[int, Tensor]]:
        """Each matrix's first index among the values, and the factor that its next sum begins with."""
        yield from zip((m.start for m in self._matrices), self.basis, strict=True)

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), *self.basis]


def _view(flat: Tensor, matrix: Matrix) -> Tensor:
    return flat[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def _orthogonal(rows: Tensor) -> Tensor:
    """Rows of length one at right angles, by Gram and Schmidt; zero where a row adds nothing to those before it.

    By elementwise operators alone: every rank has the same bits, whatever its number of threads.
    """
    found = torch.zeros_like(rows)
    for number, row in enumerate(rows):
        energy = folded_sum(row * row)
        left = row
        for _ in range(2 if number else 0):  # once more for what rounding has left
            along = folded_sum(found[:number] * left)
            for other, share in zip(found[:number], along, strict=True):
                left = left - other * share
        rest = folded_sum(left * left)
        found[number] = torch.where(rest <= _NOISE * energy, torch.zeros_like(left), left / rest.sqrt())
    return found


def folded_sum(values: Tensor) -> Tensor:
    """The sum over the last dim, half onto half: in an order that does not depend on threads."""
    while (length := values.shape[-1]) > 1:
        half = length // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if length % 2:
            folded[..., :1] += values[..., -1:]
        values = folded
    return values[..., 0]


def _product(left: Tensor, right: Tensor, out: Tensor, scratch: Tensor) -> None:
    """out = left^T right, a sum of products one after the other: the same bits whatever the number of threads."""
    torch.mul(left[0][:, None], right[0], out=out)
    term = scratch.view(out.shape)
    for own, other in zip(left[1:], right[1:], strict=True):
        out.add_(torch.mul(own[:, None], other, out=term))
