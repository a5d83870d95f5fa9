"""Random numbers of the model as a pure hash of (seed, step, site, position of the sample, element).

A *site* is a random operation of a forward: the name of the module that draws, and the number of that module's earlier
draws in the forward. The same number comes from eager, captured and compiled code, for any part of a batch's rows:

- `row_keys(seed, step, positions)`: two words for each sample, computed on the host once per microbatch. A replayed
  graph needs only this tensor, filled anew for each step.
- `row_keys ^ site_key(name, count, device)`: the rows' keys for one site. `GrainScope.keys_at` returns those of several
  sites in one tensor, and counts them.
- `keep_mask(keys, columns, p)`, `words(keys, columns)`: a boolean or 32 bits for each element of each row. `columns`
  are the `element_keys`.
- `dropout(input, p, keys)`: F.dropout with the keys of one site.

These functions consist of torch's integer operators, so Dynamo traces them. `>>` of int32 repeats the sign.
`SampleKeys.noise` computes the same bits in fewer passes for eager code on CPUs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.numerics.device_reads import sent
from shoal.plans.grains import Grain

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
Site = tuple[str, int]  # the name of the module that draws, and the number of its earlier draws in the forward
_CPU = torch.device("cpu")
_MULTIPLIER = 0x2C1B3C6D
_FACTOR, _SHIFT = np.int32(_MULTIPLIER), np.int32(15)
# Below the first number numpy takes less time than torch, whose operators take 1 to 3 us each. Chunks of the second fit
# in caches.
_SMALL, _CHUNK = 1 << 14, 1 << 18


def _key(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def row_keys(seed: int, step: int, positions: np.ndarray) -> Tensor:
    """Return the keys of samples at `positions` of a step's global batch: int32 [2, rows], the second row odd."""
    key = np.uint64(_key("model", seed, step))
    mixed = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key  # splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    halves = np.stack([mixed.astype(np.uint32), (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)])
    return torch.from_numpy(halves.view(np.int32))


@functools.lru_cache(maxsize=4096)
def site_key(name: str, count: int, device: torch.device) -> Tensor:
    """Return the key of a draw, int32 [2, 1]. Its second word is even, so that the rows' second word stays odd."""
    key = np.array([[_key("site", name, count)]], dtype=np.uint64).view(np.uint32).reshape(2, 1)
    return torch.from_numpy((key & np.array([[0xFFFFFFFF], [0xFFFFFFFE]], np.uint32)).view(np.int32)).to(device)


def element_keys(elements: int, device: torch.device) -> Tensor:
    """Return the keys of a row's elements, int32 [elements] (MurmurHash3's finalizer)."""
    mixed = torch.arange(1, elements + 1, dtype=torch.int32, device=device) * -1640531527
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * -2048144789
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -1028477387
    return mixed ^ ((mixed >> 16) & 0xFFFF)


_cached_element_keys = functools.lru_cache(maxsize=64)(element_keys)


def _hashed(keys: Tensor, columns: Tensor) -> Tensor:
    """Return a hash with good high bits of each element of each row, int32 [rows, *elements]."""
    first, second = keys.view(2, -1, *[1] * columns.ndim).unbind()
    mixed = (first ^ columns) * second
    return (mixed ^ (mixed >> 15)) * _MULTIPLIER


def words(keys: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits for each element of each row, int32 [rows, elements]."""
    mixed = _hashed(keys, columns)
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def _limit(p: float) -> int:
    """Return the even number below which a hash lies with probability 1 - p."""
    return min(round((1.0 - p) * 2**31) * 2 - 2**31, 2**31 - 2)


def keep_mask(keys: Tensor, columns: Tensor, p: float) -> Tensor:
    """Return booleans [rows, *elements], False with probability `p`."""
    return _hashed(keys, columns) < _limit(p)


def noise_of(shape: Sequence[int], p: float, dtype: torch.dtype, keys: Tensor, columns: Tensor) -> Tensor:
    """Return the factors of a dropout of [rows, ...]: 0 with probability `p`, else 1 / (1 - p)."""
    # In this shape from the start: Inductor fuses no loops over other dims.
    return keep_mask(keys, columns.view(tuple(shape[1:])), p).to(dtype) * (1.0 / (1.0 - p))


def dropout(input: Tensor, p: float, keys: Tensor) -> Tensor:
    """Return F.dropout of [rows, ...] for 0 < p < 1, with the keys of one site."""
    columns = element_keys(math.prod(input.shape[1:]), input.device)
    return input * noise_of(input.shape, p, input.dtype, keys, columns)


@functools.lru_cache(maxsize=64)
def _bits(p: float, dtype: torch.dtype) -> Tensor:
    """Return the bits of 1 / (1 - p) as an integer of the same size, []."""
    return torch.tensor(1.0 / (1.0 - p), dtype=dtype).view(_INTEGERS[dtype.itemsize])


def _noise_in_chunks(shape: Sequence[int], p: float, dtype: torch.dtype, keys: Tensor, columns: Tensor) -> Tensor:
    """Return `noise_of` with the same bits, by fewer passes over chunks that fit in caches."""
    limit, bits = _limit(p), _bits(p, dtype)
    noise = torch.empty(len(keys[0]), len(columns), dtype=bits.dtype)
    size = max(1, _CHUNK // len(columns))
    for part, own in zip(noise.split(size), keys.split(size, 1), strict=True):
        first, second = own.unsqueeze(2)
        mixed = torch.bitwise_xor(first, columns, out=part if part.dtype == torch.int32 else None).mul_(second)
        mixed.bitwise_xor_(mixed >> 15).mul_(_MULTIPLIER)
        # The sign of half of the hash minus half of the limit: all bits for elements that stay, else none.
        mixed.bitwise_right_shift_(1).sub_(limit // 2).bitwise_right_shift_(31)
        torch.bitwise_and(mixed.to(part.dtype), bits, out=part)
    return noise.view(dtype).view(shape)


class _OnHost:
    """Constants of small draws as NumPy's arrays. Conversions would take half of the time of a draw."""

    site = staticmethod(functools.lru_cache(maxsize=4096)(lambda *site: site_key(*site, _CPU).numpy()))
    elements = staticmethod(functools.lru_cache(maxsize=64)(lambda count: element_keys(count, _CPU).numpy()))
    limit = staticmethod(functools.lru_cache(maxsize=64)(lambda p: np.int32(_limit(p))))
    bits = staticmethod(functools.lru_cache(maxsize=64)(lambda p, dtype: _bits(p, dtype).numpy()[()]))


class SampleKeys:
    """Keys of a microbatch's samples. `on_host`: True if the numbers may be computed by code that is not torch's."""

    on_host = True

    def __init__(self, seed: int, step: int, grains: Sequence[Grain]) -> None:
        self._seed, self._step, self._grains = seed, step, grains
        self._rows: dict[torch.device, Tensor] = {}

    def rows(self, device: torch.device) -> Tensor:
        """Return the `row_keys` of the samples."""
        keys = self._rows.get(device)
        if keys is None:
            positions = np.concatenate([np.arange(grain.start, grain.start + grain.size) for grain in self._grains])
            keys = self._rows[device] = sent(row_keys(self._seed, self._step, positions), device)
        return keys

    def at(self, site: Site, device: torch.device) -> Tensor:
        """Return the rows' keys for one site, int32 [2, rows]."""
        return self.rows(device) ^ site_key(*site, device)

    def columns(self, elements: int, device: torch.device) -> Tensor:
        """Return the `element_keys`."""
        return _cached_element_keys(elements, device)

    def words(self, site: Site, elements: int, device: torch.device) -> Tensor:
        """Return `words` at a site."""
        return words(self.at(site, device), self.columns(elements, device))

    def noise(self, site: Site, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `noise_of` a shape at a site."""
        rows = self.rows(device)
        elements = math.prod(shape) // rows.shape[1]
        if not self.on_host or device.type != "cpu":
            return noise_of(shape, p, dtype, self.at(site, device), self.columns(elements, device))
        if elements * rows.shape[1] > _SMALL:
            return _noise_in_chunks(shape, p, dtype, self.at(site, device), self.columns(elements, device))
        own = rows.numpy() ^ _OnHost.site(*site)
        mixed = own[0, :, None] ^ _OnHost.elements(elements)
        mixed *= own[1, :, None]
        mixed ^= mixed >> _SHIFT
        mixed *= _FACTOR
        return torch.from_numpy(((mixed < _OnHost.limit(p)) * _OnHost.bits(p, dtype)).reshape(shape)).view(dtype)
