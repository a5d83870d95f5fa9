"""Calibration files: by what the predictions for a cluster are multiplied, as runs have shown; TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from shoal.catalogue.here import measured_file
from shoal.errors import RunDirectoryError
from shoal.planner.comparison import PARTS, Lesson, file_name, learn
from shoal.run_directory import RunDirectory, read_json, write_file


def calibration_file(cluster: str) -> Path:
    """Where the factors of a cluster are kept: beside what was measured of this machine."""
    here = measured_file()
    return here.parent / file_name(here.stem if cluster == "here" else Path(cluster).name)


def read(cluster: str) -> dict[str, float]:
    """The factors by part of a step; none where nothing was learned."""
    try:
        document = tomllib.loads(calibration_file(cluster).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}
    factors = document.get("factors", {})
    return {part: float(value) for part, value in factors.items() if part in PARTS and float(value) > 0.0}


def write(cluster: str, lesson: Lesson) -> Path:
    """Writes the factors of a lesson over what there was, which they contain."""
    path = calibration_file(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    factors = {**read(cluster), **lesson.factors}
    document = {"schema": 1, "cluster": cluster, "factors": factors, "num_runs": lesson.num_runs}
    write_file(path, tomli_w.dumps(document))
    return path


def learn_from(directories: Sequence[str]) -> None:
    """Reads the results of runs, corrects the calibration of their clusters, and prints by how much they were wrong.

    Raises: RunDirectoryError where a run has no prediction beside its measurement.
    """
    by_cluster: dict[str, list[Mapping[str, Any]]] = {}
    for text in directories:
        found = compared(Path(text))
        by_cluster.setdefault(str(found["cluster"]), []).append(found)
    for cluster, runs in by_cluster.items():
        lesson = learn(runs)
        path = write(cluster, lesson)
        print(f"cluster {cluster}: {len(runs)} run(s)")
        for part, factor in lesson.factors.items():
            runs_of = lesson.num_runs[part]
            print(f"  {part:<15} takes {factor:.2f} x what is predicted without correction ({runs_of} run(s))")
        for part, seconds in lesson.unexplained.items():
            print(f"  {part:<15} took {seconds * 1e3:.2f} ms and was predicted to take next to nothing: not corrected")
        print(
            f"  a step was wrong by {lesson.error_before:.1%} (median) before, "
            f"on these runs by {lesson.error_after:.1%} after"
        )
        print(f"  written to {path}")


def compared(directory: Path) -> dict[str, Any]:
    """The comparison in a run's result. Raises: RunDirectoryError."""
    result = read_json(RunDirectory(directory).result)
    found = (result or {}).get("prediction")
    measured = found and found["step_seconds"]["measured"]
    if not found or not found.get("cluster") or not measured:
        raise RunDirectoryError(
            given=f"--learn {directory}",
            conflict="there is no result.json in it" if result is None else "its run had no prediction to compare with",
            remedy="give the directory of a run of a plan that `shoal plan` wrote: shoal run JOBFILE --plan plan.toml",
        )
    return dict(found)
