"""Agreement: an exchange of all ranks before each step on data, errors and stop requests, so that all end together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.mesh import Mesh
from shoal.errors import PeerError, ShoalError, from_json
from shoal.runs.records import SPANS, OwnSpreads, Spread
from shoal.runs.request import dumped, loaded

T = TypeVar("T")
_FLAGS = ("has_data", "error", "stop", "checkpoint", "asked")
_of_spans = operator.itemgetter(*SPANS)  # in one call
_MEASURES = (*SPANS, "step_seconds", "memory_bytes")
_SPREADS = (*_MEASURES, "busy_seconds")
_ALONE = np.zeros(1)  # nobody waits for it
_STEP, _EXPOSED = _MEASURES.index("step_seconds"), _MEASURES.index("exposed_communication")


@dataclass  # made in every step
class Report:
    """One rank's contribution at the start of a step; `measures` are of the step before.

    `asked`: bits of what its callbacks ask for, below 2^24.
    """

    has_data: bool = False
    error: bool = False
    stop: bool = False
    checkpoint: bool = False
    asked: int = 0
    measures: tuple[float, ...] = (0.0,) * len(_MEASURES)


@dataclass  # made in every step
class Agreement:
    """Common state of all ranks: whether any has data, failed, or was asked to stop; rank 0 calls for checkpoints.

    `asked`: the bits that any rank's callbacks have set.
    """

    any_data: bool
    any_error: bool
    stop: bool
    checkpoint: bool
    asked: int
    spreads: Mapping[str, Spread]
    busy_seconds: npt.NDArray[np.float64]  # of each rank in the step before; zero where there is one

    @property
    def slowest_rank(self) -> int:
        """The rank that computed longest in the step before."""
        return self.spreads["busy_seconds"].rank_of_max if len(self.busy_seconds) > 1 else 0


def measures(spans: dict[str, float], step_seconds: float, memory_bytes: int) -> tuple[float, ...]:
    """The measures of a report."""
    return (*_of_spans(spans), step_seconds, float(memory_bytes))


def to_row(report: Report) -> list[float]:
    """The report as 15 numbers, small enough for float32 (memory in bytes is rounded)."""
    return [*(float(getattr(report, name)) for name in _FLAGS), *report.measures]


def agree(mesh: Mesh, report: Report) -> Agreement:
    """Collective: all ranks, one all-gather of 15 numbers a rank."""
    if mesh.world_size == 1:
        return _own(report)
    return from_rows(mesh.all_gather(to_row(report)))


def _own(report: Report) -> Agreement:
    """As `from_rows` of one row."""
    own = report.measures
    busy = own[_STEP] - own[_EXPOSED]
    spreads = OwnSpreads(_SPREADS, (*own, busy))
    return Agreement(report.has_data, report.error, report.stop, report.checkpoint, report.asked, spreads, _ALONE)


def from_rows(table: npt.NDArray[np.float64]) -> Agreement:
    """The agreement, from the rows of all ranks, [world_size, 15]."""
    has_data, error, stop, *_ = np.any(table[:, : len(_FLAGS)] > 0, axis=0).tolist()
    asked = int(np.bitwise_or.reduce(table[:, _FLAGS.index("asked")].astype(np.int64)))
    measured = table[:, len(_FLAGS) :]
    # Who computes longest waits least: a slow rank shows in its own work, everywhere else as communication.
    busy = measured[:, _STEP] - measured[:, _EXPOSED]
    measured = np.column_stack([measured, busy])
    columns = zip(measured.min(0).tolist(), measured.max(0).tolist(), measured.argmax(0).tolist(), strict=True)
    spreads = {name: Spread(*column) for name, column in zip(_SPREADS, columns, strict=True)}
    return Agreement(has_data, error, stop, bool(table[0, _FLAGS.index("checkpoint")]), asked, spreads, busy)


def interrupts(rows: Tensor) -> Tensor:
    """Whether anything comes between a step and that before it, by the ranks' rows where a device has them: bool []."""
    has_data, *others = rows[:, : len(_FLAGS)].unbind(1)
    return (torch.stack(others) > 0).any() | (has_data <= 0).all()


def raise_together(mesh: Mesh, error: ShoalError | None) -> None:
    """Raises on every rank if any has an error: its own where it has one, else a PeerError that names the culprit.

    Collective: all ranks, one JSON gather.
    """
    told = mesh.gather_json(to_json(error, mesh.rank, mesh.host) if error else None)
    if error is not None:
        error.rank, error.host, error.everywhere = mesh.rank, mesh.host, True
        raise error
    try:
        raise_peer(told)
    except PeerError as peer:
        peer.everywhere = True
        raise


def raise_peer(told: list[dict[str, Any] | None]) -> None:
    """Raises: PeerError where another rank told of an error."""
    culprit = next((t for t in told if t), None)
    if culprit is not None:
        peer = PeerError(
            given=f"rank {culprit['rank']} on {culprit['host']}: {culprit['given']}",
            conflict=culprit["conflict"],
            remedy=culprit["remedy"],
        )
        peer.exit_code = from_json(culprit).exit_code  # an engine may report any rank's
        raise peer


def together(mesh: Mesh, work: Callable[[], T]) -> T:
    """The result of `work`, unless it raised on any rank; then every rank raises. Collective: all ranks."""
    result: T
    error: ShoalError | None = None
    try:
        result = work()
    except Exception as caught:
        error = as_shoal_error(caught)
    raise_together(mesh, error)
    return result


def decided_by_rank_0(mesh: Mesh, kind: type[T], work: Callable[[], T]) -> T:
    """Rank 0's result of `work`, a value of the `kind`, which no other rank does. Raises: its error, on every rank.

    Collective: all ranks, one JSON gather; none with one rank.
    """
    if mesh.world_size == 1:
        return work()
    decision: dict[str, Any] = {}
    error: ShoalError | None = None
    if mesh.rank == 0:
        try:
            decision = {"value": dumped(work())}
        except Exception as caught:
            error = as_shoal_error(caught)
            decision = {"error": to_json(error, mesh.rank, mesh.host)}
    decision = mesh.gather_json(decision)[0]
    if "error" in decision:
        error = error or from_json(decision["error"])
        error.rank, error.host, error.everywhere = 0, decision["error"]["host"], True
        raise error
    return loaded(kind, decision["value"])


def collectively(mesh: Mesh, divided: bool, work: Callable[[], T]) -> T:
    """Result of `work`. Raises: its exception, on every rank as `together` does; in a divided model on one alone.

    There the others wait within the same work: this rank's end is what they notice, and no collective must come before.
    """
    if not divided:
        return together(mesh, work)
    try:
        return work()
    except Exception as error:
        raise as_shoal_error(error) from error
