"""Logbook: a served run's state after each step, and its records. The digest is in the order of the steps, always."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.checkpoint.keeper import RunState
from shoal.data.sample_digest import chain_digest
from shoal.distributed.agreement import from_rows
from shoal.parallel.base import StepSums
from shoal.runs.records import Spread, StepRecord
from shoal.training.optimizer_step import Update
from shoal.training.parameter_server.push_counts import Arrived
from shoal.training.trainer import Parts, Surroundings, measured


class ServedRecords:
    """Counts steps into `state` and writes a record of each once the next has come, or it was evaluated."""

    def __init__(self, parts: Parts, around: Surroundings, state: RunState) -> None:
        self._parts, self._around, self._state = parts, around, state
        self._words: dict[int, Any] = {}  # of steps that were applied before an earlier one
        self._digested = state.step
        self._record: StepRecord | None = None
        self._slowest = 0
        self._why: dict[str, Any] | None = None
        self.step_seconds: list[float] = []

    def count(self, sums: StepSums, update: Update, found: dict[str, Any] | None, push: Mapping[int, Arrived]) -> None:
        """Counts a step that was applied or left out: `push` holds its parts, `found` what was not finite."""
        self.write()
        parts, state, came = self._parts, self._state, [push[part] for part in sorted(push)]
        step, digest = came[0].task.step, state.digest
        staleness = state.step - min(part.version for part in came)
        state.advance(sums, update.skipped)
        self._words[step] = sums.digest
        while self._digested in self._words:
            digest = chain_digest(digest, self._words.pop(self._digested))
            self._digested += 1
        state.digest = digest
        spreads = from_rows(np.array([part.row for part in came])).spreads
        ranks = {n: Spread(s.min, s.max, came[s.rank_of_max].member.rank) for n, s in spreads.items()}
        self._slowest = ranks["busy_seconds"].rank_of_max
        self._record = StepRecord(
            **measured(parts, state, sums, update, found),
            epoch=parts.order.epoch(step),
            ranks=ranks,
            push={"step": step + 1, "workers": [part.member.number for part in came], "staleness": staleness}
            | ({"fell_back": self._why} if self._why is not None else {}),
        )
        self._why = None
        self.step_seconds.append(self._record.seconds)
        parts.step.clock.begin()

    @property
    def ends_epoch(self) -> bool:
        """Whether the step that was counted last ended a pass over the data."""
        order, step = self._parts.order, self._state.step
        return self._record is not None and order.epoch(step) != order.epoch(step - 1)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Adds an evaluation to the record of the step that was counted last."""
        if self._record is not None:
            self._record = self._record.evaluated(metrics)

    def restart(self, why: dict[str, Any]) -> None:
        """Forgets the steps after that of the state; the first that is counted from here on says why."""
        self._words, self._digested, self._record, self._why = {}, self._state.step, None, why
        self._parts.records.forget_after(self._state.step)

    def write(self) -> None:
        """Writes the record that is kept, if one is."""
        record, self._record = self._record, None
        if record is not None:
            self._parts.records.write(record)
            self._around.on_step(record, self._slowest)
