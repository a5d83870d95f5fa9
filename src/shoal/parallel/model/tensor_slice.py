"""Tensor slices: index ranges of a rank's part of a tensor, and copies between slices; no communication."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Half-open runs of indices along one dim, in the order of the local tensor.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorSlice:
    """Slice of a tensor of `shape`: along each dim the indices in `ranges`, one after the other."""

    shape: tuple[int, ...]
    ranges: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> TensorSlice:
        """Return the slice of all indices."""
        sizes = tuple(shape)
        return cls(sizes, tuple(((0, size),) for size in sizes))

    @property
    def is_whole(self) -> bool:
        """True if the slice has all elements."""
        return self == TensorSlice.whole(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""
        return math.prod(self.local_shape)

    def narrow(self, dim: int, start: int, stop: int) -> TensorSlice:
        """Return the part of this slice at its own indices [start, stop) along `dim`."""
        inside, place = [], 0
        for first, last in self.ranges[dim]:
            size = last - first
            low, high = max(start - place, 0), min(stop - place, size)
            if low < high:
                inside.append((first + low, first + high))
            place += size
        return TensorSlice(self.shape, (*self.ranges[:dim], tuple(inside), *self.ranges[dim + 1 :]))

    def select(self, dim: int, runs: Runs) -> TensorSlice:
        """Return the part with the indices in `runs` along a dim that is whole in this slice."""
        assert self.ranges[dim] == ((0, self.shape[dim]),), "a dim is cut once"
        return TensorSlice(self.shape, (*self.ranges[:dim], tuple(runs), *self.ranges[dim + 1 :]))

    def take(self, whole: Tensor) -> Tensor:
        """Return this slice of `whole`, a tensor of `shape`; a view if each dim has one run."""
        for dim, runs in enumerate(self.ranges):
            if runs == ((0, self.shape[dim]),):
                continue
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
        return whole

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Write the slice's values, of `local_shape`, into `whole`, a tensor of `shape`."""
        TensorSlice.whole(self.shape).copy(whole, self, local)

    def copy(self, target: Tensor, other: TensorSlice, source: Tensor) -> int:
        """Copy the elements in common from `source` (slice `other`) to `target` (this slice); return their number.

        Raises: ValueError if the slices are of tensors of different shapes.
        """
        if self.shape != other.shape:
            raise ValueError(f"a part of {self.shape} and one of {other.shape}")
        if self == other:
            target.copy_(source)
            return target.numel()
        pairs = zip(map(_indices, self.ranges), map(_indices, other.ranges), strict=True)
        common = [np.intersect1d(own, given, return_indices=True)[1:] for own, given in pairs]
        mine, theirs = [here for here, _ in common], [there for _, there in common]
        if not all(map(len, mine)):
            return 0
        values = _block(source, theirs)
        if _are_runs(mine):
            _block(target, mine).copy_(values)
        else:
            target[_mesh(mine)] = values.to(target)
        return math.prod(map(len, mine))

    def to_json(self) -> list[list[list[int]]] | None:
        """Return the ranges as JSON; None for the whole."""
        return None if self.is_whole else [[list(run) for run in runs] for runs in self.ranges]

    @classmethod
    def from_json(cls, shape: Iterable[int], ranges: list[list[list[int]]] | None) -> TensorSlice:
        """Return the slice of a `to_json` result."""
        if ranges is None:
            return cls.whole(shape)
        return cls(tuple(shape), tuple(tuple((start, stop) for start, stop in runs) for runs in ranges))


_Places = npt.NDArray[np.int64]


def _indices(runs: Runs) -> _Places:
    return np.concatenate([np.arange(start, stop) for start, stop in runs] or [np.empty(0, np.int64)])


def _are_runs(places: list[_Places]) -> bool:
    """Return True if each dim's indices are consecutive, so that they form a view."""
    return all(int(p[-1]) - int(p[0]) == len(p) - 1 for p in places)


def _block(tensor: Tensor, places: list[_Places]) -> Tensor:
    if not _are_runs(places):
        return tensor[_mesh(places)]
    for dim, indices in enumerate(places):
        tensor = tensor.narrow(dim, int(indices[0]), len(indices))
    return tensor


def _mesh(places: list[_Places]) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, np.ix_(*places)))


@dataclass(frozen=True)
class Outputs:
    """Output slicing of a layer that is not torch's own: `dims` of its parameters, the weight first.

    `size`: number of outputs along `feature_dim` of the layer's output, counted from the end. The layer has methods
    `tensor_outputs()`, which returns an Outputs or None, and `keep_outputs(size)`, called after its parameters are cut.
    """

    dims: dict[str, int]
    size: int
    feature_dim: int
