"""Streams: iterables without a length, whole and sharded, of 100 samples."""

from __future__ import annotations

from collections.abc import Iterator

import tiny
import torch.distributed as dist
from torch import Tensor

import shoal

NUM_SAMPLES = 100


class Stream:
    """Every `num_shards`-th sample from `index` on."""

    def __init__(self, num_shards: int = 1, index: int = 0) -> None:
        self.num_shards, self.index = num_shards, index

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        inputs, labels, ids = tiny.vectors(NUM_SAMPLES)
        for i in range(self.index, NUM_SAMPLES, self.num_shards):
            yield inputs[i], labels[i], ids[i]


class Sharded(Stream):
    """The same with `shard`."""

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(num_shards, index)


def job(steps: int = 8) -> shoal.Job:
    """A plain stream; 12 samples a step, so that 8 steps leave 4."""
    return tiny.mlp(train_data=Stream(), batch=12, steps=steps, grains=4)


def sharded(steps: int = 8) -> shoal.Job:
    """A stream that each grain reads its own part of."""
    return tiny.mlp(train_data=Sharded(), batch=12, steps=steps, grains=4)


def endless(steps: int = 50) -> shoal.Job:
    """The plain stream asked for more than it has."""
    return tiny.mlp(train_data=Stream(), batch=12, steps=steps, grains=4)


class ByRank(Stream):
    """A stream that divides itself among the ranks, as scripts of DistributedDataParallel do."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return iter(Stream(dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else Stream())


def by_rank(steps: int = 8) -> shoal.Job:
    """A stream of which each rank reads other samples."""
    return tiny.mlp(train_data=ByRank(), batch=12, steps=steps, grains=4)
