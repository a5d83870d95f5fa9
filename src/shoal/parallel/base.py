"""Interface of parallelism strategies: backwards of microbatches, and the sums of gradients and losses over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.data.microbatch import Microbatch
from shoal.data.sample_digest import DIGEST_WORDS, grain_words

if TYPE_CHECKING:
    from shoal.distributed.collectives.compression.compressed_sum import Compression
    from shoal.distributed.collectives.compression.guard import Comparison

# The sums of a step: loss total, weight, samples, the digest's words, then weighted buffers (see
# numerics/batch_statistics.py).
TOTAL, WEIGHT, SAMPLES, DIGEST = 0, 1, 2, 3
NUM_SUMS = DIGEST + DIGEST_WORDS


@dataclass(frozen=True)
class Flags:
    """Failures of this rank in this step; after a sum over ranks, the number of ranks with each."""

    errors: int = 0
    redo: int = 0  # out of memory, or a model that has to be computed another way


@dataclass(frozen=True)
class StepSums:
    """Sums of a step over all ranks, the same on each of them; `sums` float64 as laid out above."""

    sums: npt.NDArray[np.float64]
    flags: Flags
    rows: npt.NDArray[np.float64] | None = None  # [world_size, n]: every rank's row, where they travelled with the sums
    compared: Comparison | None = None  # compressed with exact gradients, in a sampled step

    @property
    def loss(self) -> float:
        """The mean loss over the global batch; NaN where nothing had a weight."""
        weight = self.weight
        return float(self.sums[TOTAL] / weight) if weight else float("nan")

    @property
    def weight(self) -> float:
        """The sum of the weights."""
        return float(self.sums[WEIGHT])

    @property
    def num_samples(self) -> int:
        """Samples computed."""
        return round(float(self.sums[SAMPLES]))

    @property
    def digest(self) -> npt.NDArray[np.float64]:
        """The sum of the grains' digests."""
        return self.sums[DIGEST:NUM_SUMS]

    @property
    def buffers(self) -> npt.NDArray[np.float64]:
        """The buffers' values, each times its samples."""
        return self.sums[NUM_SUMS:]


def microbatch_sums(microbatch: Microbatch, total: Tensor, weight: Tensor | float, buffers: Tensor) -> Tensor:
    """One microbatch's terms of the step's sums: float64 on the device, so that nothing waits for the device here."""
    words = grain_words(microbatch.step, [grain.index for grain in microbatch.grains], microbatch.ids)
    # What is on the host is waiting for nobody: one array made of numbers costs a fraction of writing into its places.
    here = total.device.type == "cpu"
    known = [total.item(), float(weight)] if here else [0.0, 0.0]
    sums = torch.from_numpy(np.array([*known, microbatch.num_samples, *words])).to(buffers.device)
    if not here:
        sums[TOTAL] = total.detach()
        sums[WEIGHT] = weight
    return torch.cat([sums, buffers]) if len(buffers) else sums


def buffer_sums(buffers: Tensor) -> Tensor:
    """A microbatch's terms where another rank counts its loss and samples: the buffers alone."""
    return torch.cat([buffers.new_zeros(NUM_SUMS), buffers])


# Takes the name of the span that begins.
Mark = Callable[[str], None]


class Strategy(ABC):
    """Interface of a step: begin, a backward for each microbatch, finish; on every rank, also one without samples.

    After `finish` each parameter's `.grad` is the sum over all grains of all ranks, not divided by the weight, or None
    where no rank's loss depended on it.
    """

    compression: Compression | None = None  # what compresses the gradients on their way

    @abstractmethod
    def begin(self, step: int = 0, factor: float = 1.0) -> None:
        """Starts a step, perhaps again: no gradients, no sums. Loss totals are multiplied by `factor`."""

    @abstractmethod
    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        """Adds a microbatch's gradient and sums; `last` says that this rank's others are all done.

        `total` is a scalar times any factor that is the same for all; its graph is freed.
        """

    def add(self, sums: Tensor) -> None:
        """Adds a microbatch's sums, where a pipeline runs its backward."""
        raise NotImplementedError

    def arm(self) -> None:
        """Says that the backward which a pipeline runs next is this rank's last of the step."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """The sums over all ranks, with every rank's `row` where that costs nothing.

        A row holds as many numbers on every rank, rounded to float32. Collective: all ranks; `num_sums` is the length
        of the sums.
        """

    @abstractmethod
    def update(self, step: Callable[[], None]) -> None:
        """Calls the optimizer's `step` so that every rank ends with every parameter's new value.

        Collective: the ranks that divide the update. Raises: what `step` raises.
        """

    @abstractmethod
    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank updates it and so holds the optimizer's state for it."""

    def rest(self) -> None:
        """Puts away what forwards without a backward, as of an evaluation, have left."""
        return

    @property
    def syncs_every_microbatch(self) -> bool:
        """Whether ranks with different grains meet within each microbatch, and so have to compute as many of them."""
        return False

    def gradient_buffers(self) -> list[Tensor]:
        """Gradient memory besides the parameters' own `.grad`; none."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Takes the strategy's hooks off the parameters."""


class Replicated(Strategy):
    """Strategy of replicas: every rank updates all of its parameters."""

    def update(self, step: Callable[[], None]) -> None:
        """Every rank computes the same."""
        step()

    def updates(self, parameter: Tensor) -> bool:
        """Every parameter."""
        return True
