"""Microbatches: the division of a rank's grains of a step into forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.data.sample_digest import Ids
from shoal.plans.grains import Grain


@dataclass(frozen=True)
class Microbatch:
    """Neighbouring grains that share one forward; `batch` is the collate function's result.

    `ids` holds one int64 array of sample ids a grain. `split` fetches the same samples again, grain by grain, and
    `samples` those of a single grain one by one.
    """

    step: int
    grains: tuple[Grain, ...]
    ids: tuple[Ids, ...]
    batch: Any
    split: Callable[[], list[Microbatch]]
    samples: Callable[[], list[Microbatch]]

    @property
    def num_samples(self) -> int:
        """Samples in all its grains."""
        return sum(g.size for g in self.grains)

    def without_batch(self) -> Microbatch:
        """The same, which keeps no tensors; dataclasses.replace would take three times as long."""
        return Microbatch(self.step, self.grains, self.ids, None, self.split, self.samples)


@dataclass(frozen=True)
class StepData:
    """One rank's microbatches of one step: `num_microbatches` of them, which may be none."""

    step: int
    epoch: int
    num_microbatches: int
    microbatches: Iterator[Microbatch]

    def again(self, first: Microbatch) -> StepData:
        """The same with a microbatch put back that was taken."""
        return StepData(self.step, self.epoch, self.num_microbatches, itertools.chain([first], self.microbatches))
