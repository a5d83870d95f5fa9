"""Random numbers of the model as a pure hash of (seed, step, site, position of the sample, element).

A *site* is a random operation of a forward: the name of the module that draws, and the number of that module's earlier
draws in the forward. The same number comes from eager, captured and compiled code, for any part of a batch's rows:

- `row_keys(seed, step, positions)`: two words for each sample, computed on the host once per microbatch. A replayed
  graph needs only this tensor, filled anew for each step.
- `at_site(keys, name, count)`: the words for one site. `at_sites` returns them for several sites in one tensor.
- `keep_mask(keys, elements, p)`, `words(keys, elements)`: booleans or 32 bits for each element of each row.
- `dropout(input, p, keys)`: F.dropout with these keys; `keys` are those of one site.

These functions consist of torch's integer operators, so Dynamo traces them. `>>` of int32 repeats the sign.
`noise_on_cpu` computes the same bits in fewer passes for eager code on CPUs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_MULTIPLIER = 0x2C1B3C6D
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
def _site(name: str, count: int, device: torch.device) -> Tensor:
    """Return a site's key, int32 [2, 1], the second word even, so that the rows' second word stays odd."""
    key = np.array([[_key("site", name, count)]], dtype=np.uint64).view(np.uint32).reshape(2, 1)
    return torch.from_numpy((key & np.array([[0xFFFFFFFF], [0xFFFFFFFE]], np.uint32)).view(np.int32)).to(device)


def at_site(keys: Tensor, name: str, count: int) -> Tensor:
    """Return the rows' keys for one site, int32 [2, rows]."""
    return keys ^ _site(name, count, keys.device)


@functools.lru_cache(maxsize=256)
def _sites(sites: tuple[tuple[str, int], ...], device: torch.device) -> Tensor:
    return torch.stack([_site(name, count, device) for name, count in sites])


def at_sites(keys: Tensor, sites: Sequence[tuple[str, int]]) -> Tensor:
    """Return the rows' keys for several (name, count), int32 [sites, 2, rows], by one operator."""
    return keys ^ _sites(tuple(sites), keys.device)


def element_keys(elements: int, device: torch.device) -> Tensor:
    """Return the keys of a row's elements, int32 [elements] (MurmurHash3's finalizer)."""
    mixed = torch.arange(1, elements + 1, dtype=torch.int32, device=device) * -1640531527
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * -2048144789
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -1028477387
    return mixed ^ ((mixed >> 16) & 0xFFFF)


# Constants of a device: a graph that is captured after a first forward refers to them.
_known_elements = functools.lru_cache(maxsize=64)(element_keys)


def _hashed(keys: Tensor, elements: int) -> Tensor:
    """Return a hash with good high bits of each element of each row, int32 [rows, elements]."""
    of_elements = element_keys if torch.compiler.is_compiling() else _known_elements
    mixed = (keys[0].unsqueeze(1) ^ of_elements(elements, keys.device)) * keys[1].unsqueeze(1)
    return (mixed ^ (mixed >> 15)) * _MULTIPLIER


def words(keys: Tensor, elements: int) -> Tensor:
    """Return 32 random bits for each element of each row, int32 [rows, elements]."""
    mixed = _hashed(keys, elements)
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def _limit(keep: float) -> int:
    """Return the even number below which a hash lies with probability `keep`."""
    return min(round(keep * 2**31) * 2 - 2**31, 2**31 - 2)


def keep_mask(keys: Tensor, elements: int, p: float) -> Tensor:
    """Return booleans [rows, elements], False with probability `p`."""
    return _hashed(keys, elements) < _limit(1.0 - p)


def noise_of(shape: Sequence[int], p: float, dtype: torch.dtype, keys: Tensor) -> Tensor:
    """Return the factors of a dropout: 0 with probability `p`, else 1 / (1 - p)."""
    mask = keep_mask(keys, math.prod(shape[1:]), p).reshape(tuple(shape))
    return mask.to(dtype) * (1.0 / (1.0 - p))


def dropout(input: Tensor, p: float, keys: Tensor) -> Tensor:
    """Return F.dropout of [rows, ...] for 0 < p < 1, with the keys of one site."""
    return input * noise_of(input.shape, p, input.dtype, keys)


def noise_on_cpu(shape: Sequence[int], p: float, dtype: torch.dtype, keys: Tensor) -> Tensor:
    """Return `noise_of` with the same bits, by few passes over chunks; for eager code on CPUs."""
    rows, elements = shape[0], math.prod(shape[1:])
    limit, scale = _limit(1.0 - p), torch.tensor(1.0 / (1.0 - p), dtype=dtype).view(_INTEGERS[dtype.itemsize])
    first, second, columns = keys[0].unsqueeze(1), keys[1].unsqueeze(1), _known_elements(elements, keys.device)
    if rows * elements <= _SMALL:
        small = first.numpy() ^ columns.numpy()
        small *= second.numpy()
        small ^= small >> np.int32(15)
        small *= np.int32(_MULTIPLIER)
        bits = (small < np.int32(limit)) * scale.numpy()
        return torch.from_numpy(bits).view(dtype).view(tuple(shape))
    noise = torch.empty(rows, elements, dtype=scale.dtype)
    size = max(1, _CHUNK // elements)
    for part, own, odd in zip(noise.split(size), first.split(size), second.split(size), strict=True):
        mixed = torch.bitwise_xor(own, columns, out=part if part.dtype == torch.int32 else None).mul_(odd)
        mixed.bitwise_xor_(mixed >> 15).mul_(_MULTIPLIER)
        # The sign of half of the hash minus half of the limit: all bits for elements that stay, else none.
        mixed.bitwise_right_shift_(1).sub_(limit // 2).bitwise_right_shift_(31)
        torch.bitwise_and(mixed.to(part.dtype), scale, out=part)
    return noise.view(dtype).view(tuple(shape))
