"""Records of a parameter-server run: the state after each step; the sample digest is in the order of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.checkpoint.keeper import RunState
from shoal.data.sample_digest import chain_digest
from shoal.distributed.agreement import from_rows
from shoal.parallel.base import StepSums
from shoal.runs.records import Spread
from shoal.training.optimizer_step import Update
from shoal.training.parameter_server.push_counts import Arrived
from shoal.training.step_records import StepRecords, Surroundings, TrainingParts
from shoal.training.telemetry import RecordWriter


class ServedRecords(StepRecords):
    """Counts steps into `state`; the record of each is written once the next has come, or it was evaluated."""

    def __init__(self, parts: TrainingParts, around: Surroundings, writer: RecordWriter, state: RunState) -> None:
        super().__init__(parts, around, writer)
        self._state = state
        self.restart(None)

    def restart(self, why: dict[str, Any] | None) -> None:
        """Forgets the steps after that of the state; the first that is counted from here on says why."""
        self._words: dict[int, Any] = {}  # of steps that were applied before an earlier one
        self._digested, self._why = self._state.step, why
        self.forget_after(self._state.step)

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
        pushed = {"step": step + 1, "workers": [part.member.number for part in came], "staleness": staleness}
        if self._why is not None:
            pushed["fell_back"], self._why = self._why, None
        self.add(state, sums, update, found, epoch=parts.order.epoch(step), ranks=ranks, push=pushed)
        parts.clock.begin()
