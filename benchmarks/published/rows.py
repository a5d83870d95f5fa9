"""Rows of published measurements: what they describe, and, apart from it, what was measured."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, str]

# Columns that a prediction must not see.
OUTCOMES = (
    "status",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "samples_per_s",
    "tflops_per_gpu",
    "mfu_pct",
    "hfu_pct",
    "peak_mem_gib",
    "derived_step_time_s",
    "throughput",
    "scaling_printed",
)
# Columns that say how a job is laid out, or how a row is told: two rows that differ in no other are of one job.
LAYOUT = ("dp", "tp", "pp", "vpp", "cp", "ep", "sequence_parallel", "sharding", "zero_stage", "micro_batch")
LAYOUT += ("grad_accum", "recompute", "recompute_kind")
TOLD = ("row_id", "inferred_fields", "trust", "notes", "source", "tflops_def", "mem_def", "mfu_pct", "hfu_pct")


@dataclass(frozen=True)
class Outcome:
    """What was measured: seconds a step, GiB at the peak, whether it ran; None where it was not published."""

    seconds: float | None
    peak_gib: float | None
    ran: bool


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows, all of the same columns."""
    found = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]) if found else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def described(row: Row) -> dict[str, str]:
    """The row without what was measured."""
    return {key: value for key, value in row.items() if key not in OUTCOMES}


class CellError(ValueError):
    """A cell of a row has no number where one belongs."""


def number(row: Row, key: str, otherwise: float = 0.0) -> float:
    """A number in a row; `otherwise` where the cell is empty. Raises: CellError."""
    text = (row.get(key) or "").strip()
    try:
        found = float(text) if text else otherwise
    except ValueError:
        raise CellError(f"{key} = {text!r} is no number") from None
    if not math.isfinite(found):
        raise CellError(f"{key} = {text!r} is no finite number")
    return found


def integer(row: Row, key: str, otherwise: int = 1) -> int:
    """A whole number in a row; `otherwise` where the cell is empty. Raises: CellError."""
    found = number(row, key, otherwise)
    if found != int(found) or found < 0:
        raise CellError(f"{key} = {row.get(key)!r} is no whole number from 0 on")
    return int(found)


def outcome(row: Row) -> Outcome:
    """What was measured of a transformer's row."""
    seconds = number(row, "step_time_s") or number(row, "derived_step_time_s") or None
    return Outcome(seconds, number(row, "peak_mem_gib") or None, row.get("status", "ok") == "ok")


def job(row: Row) -> tuple[str, ...]:
    """What is the same in all rows of one job, whatever its layout."""
    hidden = {*OUTCOMES, *LAYOUT, *TOLD}
    return tuple(value for key, value in sorted(row.items()) if key not in hidden)


def scaling(row: Row) -> tuple[str, ...]:
    """What is the same in all rows of one model on one kind of device, whatever their number and the batch."""
    keys = ("source_key", "model", "gpu", "gpu_mem_gb", "precision", "seq_len", "tp", "pp", "n_layers", "batch_per_gpu")
    return tuple(row.get(key, "") for key in keys)
