"""Benchmark processes: ranks of `shoal bench`, started like those of `shoal run`; each writes its results to a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError, from_json
from shoal.launch.local import LocalRun, launch


def found_by(arguments: Sequence[str], ranks: int, threads: int, started_at: float, what: str) -> list[dict[str, Any]]:
    """Results of each of so many ranks of `shoal bench ARGUMENTS`, in order; `what` names them in errors.

    Raises: the error of a rank; LaunchError where they ended without one.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        own = ["bench", *arguments, "--into", folder, "--threads", str(threads)]
        code, error = launch(LocalRun(own, ranks, threads, started_at, Path(folder) / "none" / "logs"))
        if error is not None:
            raise from_json(error)
        if code:
            again = " ".join(word for word in ("shoal bench", *arguments[:1]) if not word.startswith("-"))
            raise LaunchError(
                given=what,
                conflict=f"it ended with code {code}",
                remedy=f"run {again} again; nothing was written",
            )
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
