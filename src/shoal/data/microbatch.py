"""Microbatches: the division of a rank's grains of a step into forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.data.sample_digest import Ids
from shoal.plans.grains import Grain


@dataclass(frozen=True)
class Microbatch:
    """Neighbouring grains that share one forward; `batch` is the collate function's result.

    `ids` holds one int64 array of sample ids a grain. `read` makes a microbatch of some of the samples, read again.
    """

    step: int
    grains: tuple[Grain, ...]
    ids: tuple[Ids, ...]
    batch: Any
    read: Callable[[tuple[Grain, ...], tuple[Ids, ...]], Microbatch]

    @property
    def num_samples(self) -> int:
        """Samples in all its grains."""
        return sum(g.size for g in self.grains)

    def split(self) -> list[Microbatch]:
        """The same samples, read again, grain by grain."""
        return [self.read((grain,), (ids,)) for grain, ids in zip(self.grains, self.ids, strict=True)]

    def samples(self) -> list[Microbatch]:
        """The samples of a single grain, read again, one by one."""
        (grain,), (ids,) = self.grains, self.ids
        alone = [Grain(grain.index, grain.start + i, 1) for i in range(grain.size)]
        return [self.read((one,), (ids[i : i + 1],)) for i, one in enumerate(alone)]

    def without_batch(self) -> Microbatch:
        """The same, which keeps no tensors; dataclasses.replace would take three times as long."""
        return Microbatch(self.step, self.grains, self.ids, None, self.read)


@dataclass(frozen=True)
class StepData:
    """One rank's microbatches of one step: `num_microbatches` of them, which may be none."""

    step: int
    epoch: int
    num_microbatches: int
    microbatches: Iterator[Microbatch]
