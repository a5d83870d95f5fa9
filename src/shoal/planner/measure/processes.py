"""Benchmark processes: ranks of `shoal bench`, started like those of `shoal run`, that write their results to files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.supervise.ranks import LocalRun, launch


def results_of(what: str, task: Mapping[str, Any], ranks: int, threads: int, named: str) -> list[dict[str, Any]]:
    """Run `shoal bench WHAT` on `ranks` ranks and return each rank's results, in order.

    `task`: JSON values for the ranks, which also get a folder and their threads. `named`: the benchmark, for errors.
    Raises: the error of a rank; LaunchError if the ranks ended without one.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        request = json.dumps({**task, "folder": folder, "threads": threads})
        logs = Path(folder) / "none" / "logs"
        code, error, _ = launch(LocalRun(["bench", what], ranks, threads, logs, request=request))
        if error is not None:
            raise error
        if code:
            raise LaunchError(
                given=named,
                conflict=f"it ended with code {code}",
                remedy=f"run shoal bench {what} again; nothing was written",
            )
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
