"""Cells: what is run of each row, each in a child of its own of a parent that has imported all and computed nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus.row import Row

STEPS = 2
TIME_LIMIT_SECONDS = 180.0
# Errors by which shoal says beforehand that it does not do something.
REFUSALS = ("PlanError", "JobError")

Found = dict[str, Any]
Sections = dict[str, dict[str, Any]]

_BFLOAT16 = {"precision": {"compute": "bfloat16"}}
VERIFIED: dict[str, Sections] = {
    "fast": {"layout": {"data": 2}},
    "fast bf16": {"layout": {"data": 2}, **_BFLOAT16},
    "exact": {"layout": {"data": 2}, "execution": {"exact": True}},
    "exact bf16": {"layout": {"data": 2}, "execution": {"exact": True}, **_BFLOAT16},
    "ZeRO-3": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "tensor 2": {"layout": {"tensor": 2}},
    "pipeline 2": {"layout": {"pipeline": 2}, "batch": {"grains_per_microbatch": 1}},
    "context 2": {"layout": {"context": 2}},
}
HASH = "one hash on 1, 2, 3"
EVERY = ("fast", "fast bf16", "exact", "exact bf16", HASH)
DIVIDED = ("ZeRO-3", "tensor 2", "pipeline 2", "context 2")


@dataclass(frozen=True)
class Cell:
    """One thing that is run of one row."""

    row: Row
    kind: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.row.name}, {self.kind}"


# ------------------------------------------------------------------------------------------ in a cell's process


def computed(cell: Cell) -> Found:
    """What came of a cell, as JSON: its status, the worst ratio or what was said, and seconds."""
    import torch

    from shoal.errors import ShoalError

    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        found = _hashed(cell.row) if cell.kind == HASH else _verified(cell.row, VERIFIED[cell.kind])
    except ShoalError as error:
        kind = type(error).__name__
        found = {"status": "refused" if kind in REFUSALS else "failed", "kind": kind, "given": error.given}
        found |= {"said": error.conflict, "remedy": error.remedy, "traceback": error.traceback_text}
    except Exception as error:
        found = {"status": "failed", "kind": type(error).__name__, "said": str(error)[:1000]}
        found["traceback"] = traceback.format_exc()[-6000:]
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _verified(row: Row, sections: Sections) -> Found:
    import shoal

    verdict = shoal.verify(row.job(), shoal.Plan().with_sections(**sections), STEPS)
    if not verdict.verified:
        return {"status": "diverged", "said": verdict.render(), "notes": verdict.notes}
    worst = max(check.ratio for check in verdict.checks)
    return {"status": "verified", "worst": worst, "notes": verdict.notes}


def _hashed(row: Row) -> Found:
    """Whether exact runs on 1, 2 and 3 processes end with the same bits."""
    import shoal
    from shoal.training.setup.preflight import judged
    from shoal.verification.forked import trace_forked

    job, hashes, num_parameters = row.job(), {}, 0
    for ranks, kinds in ((2, ("alone", "parallel")), (3, ("parallel",))):
        plan = shoal.Plan().with_sections(layout={"data": ranks}, execution={"exact": True})
        plan = judged(job, plan).plan
        with tempfile.TemporaryDirectory(prefix="corpus-") as name:
            trace_forked(lambda: job, plan, Path(name), STEPS)
            for kind in kinds:
                hashes[1 if kind == "alone" else ranks], num_parameters = _hash(Path(name) / kind)
    facts = {"parameters": num_parameters, "hashes": hashes}
    if len(set(hashes.values())) == 1:
        return {"status": "verified", "worst": 0.0, **facts}
    return {"status": "diverged", "said": f"first divergence: hashes by number of processes {hashes}", **facts}


def _hash(folder: Path) -> tuple[str, int]:
    """The hash of parameters, buffers and optimizer's state after the last step, and how many parameters they are."""
    from shoal.verification.traced_run import read_outcome

    last = list(read_outcome(folder).steps(folder))[-1]
    state = {k: d for k, d in last.first_digests.items() if k.startswith(("update/", "buffers/"))}
    digest = hashlib.sha256(json.dumps(sorted(state.items())).encode()).hexdigest()[:16]
    return digest, sum(value.numel() for value in last.parameters.values())


# ------------------------------------------------------------------------------------------ outside


def start(cell: Cell) -> tuple[int, int]:
    """A child that computes a cell, in a session of its own: its id, and where to read the result."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none that the parent had
        pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.setsid()
        os.close(reading)
        log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        warnings.simplefilter("ignore")
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            json.dump(computed(cell), pipe)
    finally:
        os._exit(0)


def finish(pid: int, reading: int, since: float) -> Found:
    """The result of a child that has closed its pipe or is given up; ends it and all its ranks."""
    with contextlib.suppress(ProcessLookupError):
        if time.monotonic() - since > TIME_LIMIT_SECONDS:
            os.killpg(pid, signal.SIGKILL)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if text:
        with contextlib.suppress(json.JSONDecodeError):
            found: Found = json.loads(text)
            return found
    if time.monotonic() - since > TIME_LIMIT_SECONDS:
        return {"status": "failed", "kind": "TimeLimit", "said": f"not done after {TIME_LIMIT_SECONDS:.0f} s"}
    return {"status": "failed", "kind": "Death", "said": f"ended with {os.waitstatus_to_exitcode(status)}, no word"}


def run(cells: Sequence[Cell], at_once: int) -> Iterator[tuple[Cell, Found]]:
    """Every cell and what came of it, as they end."""
    import shoal.verification  # noqa: F401  (once here and not in every child)

    waiting, running = list(cells), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            cell = waiting.pop(0)
            found = prepared(cell.row)
            if found is not None:
                yield cell, found
                continue
            pid, reading = start(cell)
            running[reading] = (cell, pid, time.monotonic())
        ready, _, _ = select.select(list(running), [], [], 1.0)
        late = [r for r, (_, _, since) in running.items() if time.monotonic() - since > TIME_LIMIT_SECONDS]
        for reading in {*ready, *late}:
            cell, pid, since = running.pop(reading)
            yield cell, finish(pid, reading, since)


def prepared(row: Row) -> Found | None:
    """Imports what a row needs; what is to be said where that is not possible."""
    try:
        row.prepare()
    except Exception as error:
        return {"status": "failed", "kind": type(error).__name__, "said": str(error)[:1000], "seconds": 0.0}
    return None
