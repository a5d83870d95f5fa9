"""Codecs of gradient compression: a vector's sum over ranks in fewer bytes, with the collectives of any algorithm.

Every rank ends with the same bits: it decodes the common received data with elementwise operators only, whose results
do not depend on the number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle
from shoal.plans.accounting.all_reduce import INT8_LEVELS, Matrix, factored, num_kept

# Half of the largest float16 at most, since the scale is a power of two rounded down: the sum does not overflow.
_FLOAT16_PEAK = 2.0**15
# Smaller tensors are exchanged by copies anyway, and an allocation in shared memory takes a descriptor.
_WORTH_A_PLACE = 64 << 10
# 1 / x is finite from here on. Blocks of smaller values count as zeros, also in the withheld error.
_SMALLEST_SCALE = 2.0**-126


class CodecTransport:
    """Transport of codecs: a collective, and memory on the device of the vectors."""

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self.collective, self.device = collective, device
        self._scratch = torch.empty(0, device=device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory with which the collective is fast. Collective: if it allocates for all ranks together."""
        if self.device.type == "cpu" and numel * dtype.itemsize > _WORTH_A_PLACE:
            return self.collective.allocate(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def scratch(self, numel: int) -> Tensor:
        """Return float32 memory whose content is valid until the next call."""
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, device=self.device)
        return self._scratch[:numel]

    def sum(self, tensor: Tensor) -> Handle:
        """Start an all-reduce."""
        return self.collective.all_reduce(tensor, asynchronous=True)

    def buffers(self) -> list[Tensor]:
        """Return the memory that the transport owns."""
        return [self._scratch]


class Codec(ABC):
    """Sum of one vector of float32 values, step after step. Collective: `sum`, in the same order on all ranks."""

    # Number of consecutive collectives of a sum; all but the last are small.
    num_rounds: ClassVar[int] = 1

    def __init__(self, wire: CodecTransport, *memory: Tensor) -> None:
        """Store the transport and the tensors that the codec owns."""
        self.wire, self._memory = wire, memory

    @abstractmethod
    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        """Yield each collective to wait for; afterwards `total` is the decoded sum of all ranks' `values`.

        `keep`: afterwards `values` is the part that this rank has not sent, so that the exact sum is `total` plus all
        ranks' `values`. Else `total` may be the memory of `values`. Non-finite values give a non-finite sum.
        """

    def commit(self) -> None:
        """Commit the state for the next sum, since the last sum was used."""
        return

    def buffers(self) -> list[Tensor]:
        """Return the memory that the codec owns."""
        return list(self._memory)


class BFloat16(Codec):
    """Codec to bfloat16: 2 bytes a value, 8 bits of precision, float32's range."""

    def __init__(self, wire: CodecTransport, numel: int) -> None:
        self._sent = wire.allocate(numel, torch.bfloat16)
        super().__init__(wire, self._sent)

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        self._sent.copy_(values)
        if keep:
            values.sub_(self._sent)
        yield self.wire.sum(self._sent)
        total.copy_(self._sent)


class Float16(Codec):
    """Codec to float16 after scaling by a power of two: 2 bytes a value, 11 bits of precision.

    The scale comes from the largest value of any rank, so that no sum overflows and the loss is 2^-39 of that value.
    (The loss scale does not help here: gradients are sums over a batch of any size.)
    """

    num_rounds = 2

    def __init__(self, wire: CodecTransport, numel: int) -> None:
        self._sent, self._peak = wire.allocate(numel, torch.float16), wire.allocate(1, torch.float32)
        super().__init__(wire, self._sent, self._peak)

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        """Reduce one number, and then the values."""
        self._peak.copy_(_peaks(values.view(1, -1)))
        yield self.wire.collective.all_reduce(self._peak, "max", asynchronous=True)
        fitting = _FLOAT16_PEAK / self.wire.collective.world_size / self._peak
        exponent = torch.frexp(fitting.clamp_(2.0**-125, 2.0**126)).exponent
        scale = torch.ldexp(torch.ones_like(fitting), exponent - 1)
        scale[self._peak == torch.inf] = torch.nan
        scaled = torch.mul(values, scale, out=self.wire.scratch(values.numel()))
        self._sent.copy_(scaled)
        if keep:
            values.sub_(torch.div(self._sent, scale, out=scaled))
        yield self.wire.sum(self._sent)
        torch.div(self._sent, scale, out=total)


class Int8(Codec):
    """Codec to 8-bit integers times a scale for each block of neighbouring values. All ranks share the scale.

    Ranks first agree on the largest value of each block. Each rank then uses the most levels whose sum fits in a byte:
    63 for two ranks, 31 for four. Any algorithm can sum them as they are, exactly and in any order, with one rounding.
    Mishchenko et al., IntSGD: Adaptive floatless compression of stochastic gradients, 2022.
    """

    num_rounds = 2

    def __init__(self, wire: CodecTransport, numel: int, block: int) -> None:
        self._block, self._levels = block, INT8_LEVELS // wire.collective.world_size
        self._sent = wire.allocate(numel, torch.int8)
        self._scales = wire.allocate(-(-numel // block), torch.float32)
        super().__init__(wire, self._sent, self._scales)

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        """Reduce one number a block, and then one byte a value."""
        for part, blocks in self._parts(values):
            self._scales[blocks] = _peaks(part)
        yield self.wire.collective.all_reduce(self._scales, "max", asynchronous=True)
        self._scales.div_(self._levels)  # infinite if any value is not finite, so that zero times it is NaN
        inverse, nothing = self._scales.reciprocal(), self._scales < _SMALLEST_SCALE
        inverse[nothing] = 0.0
        scratch = self.wire.scratch(values.numel())
        for (part, blocks), (whole, _) in zip(self._parts(values), self._parts(scratch), strict=True):
            torch.mul(part, inverse[blocks, None], out=whole)
        self._sent.copy_(scratch.nan_to_num_(0.0, 0.0, 0.0).round_())
        if keep:
            for (part, blocks), (whole, _) in zip(self._parts(values), self._parts(scratch), strict=True):
                part.sub_(whole.mul_(self._scales[blocks, None]))
                part[nothing[blocks]] = 0.0
        yield self.wire.sum(self._sent)
        for (part, blocks), (sent, _) in zip(self._parts(total), self._parts(self._sent), strict=True):
            torch.mul(sent, self._scales[blocks, None], out=part)

    def _parts(self, flat: Tensor) -> list[tuple[Tensor, slice]]:
        """Return the whole blocks [blocks, block] and the shorter last block, with their indices among the scales."""
        count, rest = divmod(flat.numel(), self._block)
        whole_blocks = [(flat[: count * self._block].view(count, -1), slice(0, count))] if count else []
        return whole_blocks + ([(flat[count * self._block :].view(1, -1), slice(count, None))] if rest else [])


class TopK(Codec):
    """Codec of the values with the largest magnitude and their indices: 8 bytes each, from every rank to every rank.

    Aji and Heafield, Sparse communication for distributed gradient descent, 2017.
    """

    def __init__(self, wire: CodecTransport, numel: int, density: float) -> None:
        self._count = num_kept(numel, density)
        self._sent = wire.allocate(2 * self._count, torch.int32)
        self._gathered = self._sent.new_empty(wire.collective.world_size * 2 * self._count)
        super().__init__(wire, self._sent, self._gathered)

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        """Gather the values and indices. NaN counts as the largest value."""
        size = torch.abs(values, out=self.wire.scratch(values.numel()))
        places = torch.topk(size, self._count, sorted=False).indices
        self._sent[: self._count] = places
        self._sent[self._count :] = values[places].view(torch.int32)
        if keep:
            values[places] = 0.0
        yield self.wire.collective.all_gather(self._gathered, self._sent, asynchronous=True)
        total.zero_()
        for own in self._gathered.view(-1, 2, self._count):  # in rank order, each index of a rank once
            total.index_add_(0, own[0], own[1].view(torch.float32))


def _peaks(rows: Tensor) -> Tensor:
    """Return the largest absolute value of each row; infinite for a row with a non-finite value.

    The maximum of some libraries drops NaN, so that a NaN would not reach the other ranks.
    """
    peaks: Tensor = torch.linalg.vector_norm(rows, torch.inf, dim=1)
    return peaks.nan_to_num_(torch.inf, torch.inf)


# After the projection, a column with this share of its original energy is noise.
_NOISE = 1e-10


class PowerSGD(Codec):
    """PowerSGD: each matrix M as the product of two thin factors, by one step of power iteration.

    The sums over ranks are of `P = M Q` and `Q = M^T P`, both linear in M, so that any algorithm can sum them. A tensor
    [n, ...] is the matrix [n, m]. Tensors that the factors would not make smaller, such as vectors, are sent unchanged.
    Vogels, Karimireddy and Jaggi, PowerSGD: Practical low-rank gradient compression, 2019.
    """

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
        # Factors are stored transposed, [rank, n] and [rank, m], so that a column is contiguous.
        self._left = [f.view(rank, -1) for f in lefts]
        self._right = [f.view(rank, -1) for f in rights]
        self.basis = [self._fresh(number) for number in range(len(self._matrices))]
        self._next: list[Tensor] = []

    def _fresh(self, number: int) -> Tensor:
        """Return an initial factor Q of a matrix, the same on all ranks."""
        generator = torch.Generator().manual_seed(number)
        factor = torch.randn(self._rank, self._matrices[number].columns, generator=generator)
        return factor.to(self.wire.device)

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        """Reduce the unfactored values with all P, and then all Q."""
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
        for shape, left, right in zip(self._matrices, lefts, self._right, strict=True):
            # left^T right as a sequential sum of products: the same bits with any number of threads
            out = _view(total, shape)
            torch.mul(left[0][:, None], right[0], out=out)
            term = self.wire.scratch(shape.rows * shape.columns).view(out.shape)
            for own, other in zip(left[1:], right[1:], strict=True):
                out.add_(torch.mul(own[:, None], other, out=term))
        self._next = [right.clone() for right in self._right]

    def commit(self) -> None:
        """Use the new Q in the next power iteration. A zero column would stay zero, so it is initialised again."""
        for number, factor in enumerate(self._next):
            dead = (factor == 0).all(dim=1, keepdim=True)
            self.basis[number] = torch.where(dead, self._fresh(number), factor) if bool(dead.any()) else factor
        self._next = []

    def factors(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each matrix's first index among the values, and the factor with which its next sum begins."""
        yield from zip((m.start for m in self._matrices), self.basis, strict=True)

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), *self.basis]


def _view(flat: Tensor, matrix: Matrix) -> Tensor:
    return flat[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def _orthogonal(rows: Tensor) -> Tensor:
    """Return orthonormal rows by Gram-Schmidt; zero for a row that depends on the rows before it.

    Only elementwise operators are used: every rank gets the same bits with any number of threads.
    """
    basis = torch.zeros_like(rows)
    for number, row in enumerate(rows):
        energy = folded_sum(row * row)
        left = row
        for _ in range(2 if number else 0):  # a second pass removes the rounding error
            along = folded_sum(basis[:number] * left)
            for other, share in zip(basis[:number], along, strict=True):
                left = left - other * share
        rest = folded_sum(left * left)
        basis[number] = torch.where(rest <= _NOISE * energy, torch.zeros_like(left), left / rest.sqrt())
    return basis


def folded_sum(values: Tensor) -> Tensor:
    """Sum over the last dim by repeated folding in half, in an order that does not depend on threads."""
    while (length := values.shape[-1]) > 1:
        half = length // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if length % 2:
            folded[..., :1] += values[..., -1:]
        values = folded
    return values[..., 0]
