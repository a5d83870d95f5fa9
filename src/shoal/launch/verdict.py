"""Verdict on a run whose ranks have ended: the exit code and the root error, by the same rules on every engine."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.errors import ExitCode, RankLostError, ShoalError, from_json
from shoal.launch.signals import Signals


class EndedRank(Protocol):
    """Rank whose process has ended, from its launcher's point of view."""

    @property
    def code(self) -> int | None:
        """Exit code of the process, negative for a signal; None if unknown."""

    @property
    def given_up(self) -> bool:
        """Whether the launcher ended it after another rank had failed."""

    def how_it_ended(self) -> dict[str, Any] | None:
        """Return its report, or None if it ended without a report."""

    def error(self, others: Mapping[int, str]) -> RankLostError:
        """Describe the rank's loss. `others`: stacks of the ranks that noticed the loss, by rank."""


def verdict(ranks: Sequence[EndedRank], signals: Signals, *, elsewhere: bool = True) -> tuple[int, ShoalError | None]:
    """Return the exit code of all ranks and the root error. `elsewhere`: other hosts may have ranks, unknown here."""
    ends = [(rank, rank.how_it_ended()) for rank in ranks]
    lost = sorted((rank for rank, end in ends if end is None), key=lambda rank: rank.given_up)
    if signals.twice and lost:
        return int(ExitCode.INTERRUPTED), None
    told = [end for _, end in ends if end and end.get("error")]
    roots = [end for end in told if end["error"]["kind"] != "PeerError"]
    if roots:
        return int(roots[0]["exit_code"]), from_json(roots[0]["error"])
    if signals.received and any(rank.code == -signal.SIGTERM for rank in lost):
        return int(ExitCode.INTERRUPTED), None  # the signal came before the rank could handle it: nothing had begun
    if lost:
        errors = [end["error"] for end in told]
        stacks = {int(error["rank"]): error.get("traceback") or "" for error in errors if error.get("rank") is not None}
        return int(ExitCode.RANK_LOST), lost[0].error(stacks)
    if told:
        return int(ExitCode.RANK_LOST if elsewhere else ExitCode.FAILED), from_json(told[0]["error"])
    return max((int(end["exit_code"]) for _, end in ends if end), default=0), None
