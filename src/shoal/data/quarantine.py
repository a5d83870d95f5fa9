"""Quarantine of unreadable samples: another sample replaces each one, by a rule that is independent of the layout."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data._utils.pin_memory import pin_memory

from shoal.data.order import Ids
from shoal.errors import DataError
from shoal.numerics.generators import seed_everything
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.plans.grains import random_key

if TYPE_CHECKING:
    from shoal.data.source import SampleSource

# After this many unreadable candidates in a row, the whole dataset counts as broken.
_MOST_DRAWS = 50
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass  # made in every step
class Fetched:
    """A batch. `replaced`: sample id -> id of its replacement; `bad`: error texts of newly unreadable samples."""

    batch: Any
    replaced: Mapping[int, int] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)

    def pin_memory(self) -> Fetched:
        """Return a copy with the batch in pinned memory, for torch's DataLoader."""
        return replace(self, batch=pin_memory(self.batch))


@dataclass
class Quarantine:
    """Samples that are no longer read: error texts by sample id, for at most `most` samples."""

    most: int
    known: dict[int, str] = field(default_factory=dict)

    def add(self, bad: Mapping[int, str]) -> dict[int, str]:
        """Add samples. Return the new ones."""
        new = {i: text for i, text in bad.items() if i not in self.known}
        self.known |= new
        return new

    def check(self) -> None:
        """Check the number of samples. Raises: DataError if there are more than `most`."""
        if len(self.known) > self.most:
            ids = sorted(self.known)
            raise DataError(
                given=f"--bad-samples {self.most}",
                conflict=f"{len(ids)} samples cannot be read: {ids[:8]}{' ...' if len(ids) > 8 else ''}; "
                f"{self.known[ids[-1]]}",
                remedy="mend the dataset, or allow more of them and --resume",
            )


class TolerantReader:
    """Reader of samples that replaces each unreadable sample by another one, drawn at random.

    `step_key`: key of the draws. It is of the step, since a sample that a step reads twice has one replacement.
    """

    def __init__(self, source: SampleSource, quarantine: Quarantine, step_key: int) -> None:
        self._source, self._quarantine, self._step_key = source, quarantine, step_key
        self.replaced: dict[int, int] = {}
        self.bad: dict[int, str] = {}

    def grain(self, ids: list[int], key: int) -> list[Any]:
        """Return the samples of a grain, whose `key` is already seeded.

        Raises: DataError if no replacement is readable.
        """
        if not any(i in self._quarantine.known or i in self.bad for i in ids):
            try:
                return self._source.read(ids)
            except DataError as error:
                _refuse_shortage(error)
                seed_everything(key)  # now read one by one
        return [self._sample(i, key) for i in ids]

    def _sample(self, wanted: int, key: int) -> Any:
        """Return the sample, or the first readable candidate that is drawn in its place.

        The random numbers must not depend on whether the sample was already known to be bad.
        """
        candidate = wanted
        for attempt in range(_MOST_DRAWS):
            if candidate not in self._quarantine.known and candidate not in self.bad:
                try:
                    (sample,) = self._source.read([candidate])
                    break
                except DataError as error:
                    _refuse_shortage(error)
                    self.bad[candidate] = error.conflict.split("\n")[0]
            candidate = random_key(self._step_key, "in place of", wanted, attempt) % len(self._source)
            seed_everything(random_key(key, "in place of", wanted, attempt))
        else:
            raise DataError(
                given=f"sample {wanted} of {self._source.name}, in the place of which others were drawn",
                conflict=f"none of {_MOST_DRAWS} can be read; {next(iter(self.bad.values()), '')}",
                remedy="mend the dataset",
            )
        if candidate != wanted:
            self.replaced[wanted] = candidate
        return sample


def _refuse_shortage(error: DataError) -> None:
    """Raise the error again if the host ran out of memory or file descriptors, since the sample is not at fault."""
    cause = error.__cause__
    if cause is not None and (is_out_of_memory(cause) or getattr(cause, "errno", None) in _SHORTAGES):
        raise error


def with_replaced(ids: Sequence[Ids], replaced: Mapping[int, int]) -> tuple[Ids, ...]:
    """Return the ids of the samples that were read, with replacements."""
    if not replaced:
        return tuple(ids)
    return tuple(np.array([replaced.get(i, i) for i in own.tolist()], dtype=np.int64) for own in ids)
