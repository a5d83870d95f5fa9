"""Agreement: an exchange before each step about data, errors and stop requests, so that all ranks end together."""

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
_FLAGS = ("has_data", "error", "stop", "checkpoint", "requests")
_of_spans = operator.itemgetter(*SPANS)  # one call for all spans
_MEASURES = (*SPANS, "step_seconds", "memory_bytes")
_SPREADS = (*_MEASURES, "busy_seconds")
_ALONE = np.zeros(1)  # of one rank: no other rank waits for it
_STEP, _EXPOSED = _MEASURES.index("step_seconds"), _MEASURES.index("exposed_communication")


@dataclass  # made in every step
class Report:
    """One rank's contribution at the start of a step; `measures` are those of the previous step.

    `requests`: bits of the requests that the rank's callbacks have made, below 2^24.
    """

    has_data: bool = False
    error: bool = False
    stop: bool = False
    checkpoint: bool = False
    requests: int = 0
    measures: tuple[float, ...] = (0.0,) * len(_MEASURES)


@dataclass  # made in every step
class Agreement:
    """Common state of all ranks: whether any has data, an error or a stop request. Only rank 0 requests checkpoints.

    `requests`: the bits that any rank's callbacks have set.
    """

    any_data: bool
    any_error: bool
    stop: bool
    checkpoint: bool
    requests: int
    spreads: Mapping[str, Spread]
    busy_seconds: npt.NDArray[np.float64]  # of each rank in the previous step; zero with one rank
    slowest_rank: int = 0  # the rank that computed longest in the previous step


def measures(spans: dict[str, float], step_seconds: float, memory_bytes: int) -> tuple[float, ...]:
    """Return the measures of a report."""
    return (*_of_spans(spans), step_seconds, float(memory_bytes))


def to_row(report: Report) -> list[float]:
    """Return the report as 15 numbers, small enough for float32 (memory in bytes is rounded)."""
    return [*(float(getattr(report, name)) for name in _FLAGS), *report.measures]


def agree(mesh: Mesh, report: Report) -> Agreement:
    """Exchange the reports of all ranks. Collective: all ranks, one all-gather of 15 numbers a rank."""
    if mesh.world_size > 1:
        return from_rows(mesh.all_gather(to_row(report)))
    own = report.measures  # the same as `from_rows` of one row
    spreads = OwnSpreads(_SPREADS, (*own, own[_STEP] - own[_EXPOSED]))
    return Agreement(report.has_data, report.error, report.stop, report.checkpoint, report.requests, spreads, _ALONE)


def from_rows(table: npt.NDArray[np.float64]) -> Agreement:
    """Compute the agreement from the rows of all ranks, [world_size, 15]."""
    has_data, error, stop, *_ = np.any(table[:, : len(_FLAGS)] > 0, axis=0).tolist()
    requests = int(np.bitwise_or.reduce(table[:, _FLAGS.index("requests")].astype(np.int64)))
    measured = table[:, len(_FLAGS) :]
    # The rank that computes longest waits least: slowness shows in its own work, and in others' communication.
    busy = measured[:, _STEP] - measured[:, _EXPOSED]
    measured = np.column_stack([measured, busy])
    columns = zip(measured.min(0).tolist(), measured.max(0).tolist(), measured.argmax(0).tolist(), strict=True)
    spreads = {name: Spread(*column) for name, column in zip(_SPREADS, columns, strict=True)}
    return Agreement(
        has_data,
        error,
        stop,
        bool(table[0, _FLAGS.index("checkpoint")]),
        requests,
        spreads,
        busy,
        spreads["busy_seconds"].rank_of_max,
    )


def interrupts(rows: Tensor) -> Tensor:
    """Compute whether anything comes between a step and the previous one, from the ranks' rows on a device: bool []."""
    has_data, *others = rows[:, : len(_FLAGS)].unbind(1)
    return (torch.stack(others) > 0).any() | (has_data <= 0).all()


def raise_together(mesh: Mesh, error: ShoalError | None) -> None:
    """Raise on every rank if any rank has an error: the rank's own error, else a PeerError that names the culprit.

    Collective: all ranks, one JSON gather.
    """
    reports = mesh.gather_json(to_json(error, mesh.rank, mesh.host) if error else None)
    if error is not None:
        error.rank, error.host, error.everywhere = mesh.rank, mesh.host, True
        raise error
    try:
        raise_peer(reports)
    except PeerError as peer:
        peer.everywhere = True
        raise


def raise_peer(reports: list[dict[str, Any] | None]) -> None:
    """Raise PeerError if another rank reported an error."""
    culprit = next((t for t in reports if t), None)
    if culprit is not None:
        peer = PeerError(
            given=f"rank {culprit['rank']} on {culprit['host']}: {culprit['given']}",
            conflict=culprit["conflict"],
            remedy=culprit["remedy"],
        )
        peer.exit_code = from_json(culprit).exit_code  # an engine may report the exit code of any rank
        raise peer


def together(mesh: Mesh, work: Callable[[], T]) -> T:
    """Return the result of `work`. If it raises on any rank, every rank raises. Collective: all ranks."""
    result: T
    error: ShoalError | None = None
    try:
        result = work()
    except Exception as caught:
        error = as_shoal_error(caught)
    raise_together(mesh, error)
    return result


def decided_by_rank_0(mesh: Mesh, kind: type[T], work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only, and return its result, of type `kind`, on every rank.

    Raises: the error of rank 0, on every rank. Collective: all ranks, one JSON gather; none with one rank.
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
    """Return the result of `work`. An exception is raised on every rank, as in `together`.

    In a divided model only the failing rank raises. The other ranks wait inside `work` and notice only that this rank
    ends, so no collective may come before that.
    """
    if not divided:
        return together(mesh, work)
    try:
        return work()
    except Exception as error:
        raise as_shoal_error(error) from error
