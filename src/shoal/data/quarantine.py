"""Quarantine of samples that cannot be read: in the place of each another is read, by a rule without a layout in it."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data._utils.pin_memory import pin_memory

from shoal.data.sample_digest import Ids
from shoal.errors import DataError
from shoal.numerics.grain_randomness import seed_everything
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.plans.grains import random_key

if TYPE_CHECKING:
    from shoal.data.source import SampleSource

# A dataset in which so many draws in a row cannot be read is broken as a whole.
_MOST_DRAWS = 50
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass  # made in every step
class Fetched:
    """A batch; `replaced`: which sample was read in the place of which; `bad`: what those raised that were new."""

    batch: Any
    replaced: Mapping[int, int] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)

    def pin_memory(self) -> Fetched:
        """With the batch in pinned memory, for torch's DataLoader."""
        return replace(self, batch=pin_memory(self.batch))


@dataclass
class Quarantine:
    """Samples that are read no more, by id with what reading them raised; at most `most`."""

    most: int
    known: dict[int, str] = field(default_factory=dict)

    def add(self, bad: Mapping[int, str]) -> dict[int, str]:
        """Takes up samples; those that were not known."""
        new = {i: said for i, said in bad.items() if i not in self.known}
        self.known |= new
        return new

    def check(self) -> None:
        """Raises: DataError where there are more than `most`."""
        if len(self.known) > self.most:
            ids = sorted(self.known)
            raise DataError(
                given=f"--bad-samples {self.most}",
                conflict=f"{len(ids)} samples cannot be read: {ids[:8]}{' ...' if len(ids) > 8 else ''}; "
                f"{self.known[ids[-1]]}",
                remedy="mend the dataset, or allow more of them and --resume",
            )


class TolerantReader:
    """Reader of one request's samples that puts others in the places of those that cannot be read."""

    def __init__(self, source: SampleSource, quarantine: Quarantine) -> None:
        self._source, self._quarantine = source, quarantine
        self.replaced: dict[int, int] = {}
        self.bad: dict[int, str] = {}

    def grain(self, ids: list[int], key: int) -> list[Any]:
        """The samples of a grain, after its `key` was seeded. Raises: DataError where none can be found."""
        if not any(self._is_bad(i) for i in ids):
            try:
                return self._source.read(ids)
            except DataError as error:
                _refuse_shortage(error)
                seed_everything(key)  # and one by one
        return [self._sample(i, key) for i in ids]

    def _sample(self, wanted: int, key: int) -> Any:
        """The sample, or the first good one of those that are drawn for its place.

        What is drawn at random while a bad sample is read must not depend on whether it was known to be bad.
        """
        candidate = wanted
        for attempt in range(_MOST_DRAWS):
            if not self._is_bad(candidate):
                try:
                    (sample,) = self._source.read([candidate])
                    break
                except DataError as error:
                    _refuse_shortage(error)
                    self.bad[candidate] = error.conflict.split("\n")[0]
            draw = random_key(key, "in place of", wanted, attempt)
            candidate = draw % len(self._source)
            seed_everything(draw)
        else:
            raise DataError(
                given=f"sample {wanted} of {self._source.name}, in the place of which others were drawn",
                conflict=f"none of {_MOST_DRAWS} can be read; {next(iter(self.bad.values()), '')}",
                remedy="mend the dataset",
            )
        if candidate != wanted:
            self.replaced[wanted] = candidate
        return sample

    def _is_bad(self, sample: int) -> bool:
        return sample in self._quarantine.known or sample in self.bad


def _refuse_shortage(error: DataError) -> None:
    """Raises: the error where the host had no memory or file descriptor left, which is no sample's fault."""
    cause = error.__cause__
    if cause is not None and (is_out_of_memory(cause) or getattr(cause, "errno", None) in _SHORTAGES):
        raise error


def with_replaced(ids: Sequence[Ids], replaced: Mapping[int, int]) -> tuple[Ids, ...]:
    """The ids of what was read, where some were replaced."""
    if not replaced:
        return tuple(ids)
    return tuple(np.array([replaced.get(i, i) for i in own.tolist()], dtype=np.int64) for own in ids)
