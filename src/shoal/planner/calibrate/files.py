"""Calibration files in TOML: predictions and measurements of runs on a cluster, and the correction from them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from shoal.errors import RunDirectoryError
from shoal.hardware.detect import measured_file
from shoal.planner.calibrate.comparison import PARTS, is_elsewhere
from shoal.planner.calibrate.lessons import (
    CORRECTED,
    LEAST_SHARE,
    LEAST_STEPS,
    Correction,
    Lesson,
    Observation,
    error,
    file_name,
    learn,
    observation,
)
from shoal.runs.directory import RunDirectory, read_json, write_file

_SCHEMA = 2


def calibration_file(cluster: str) -> Path:
    """Calibration file of a cluster, beside this machine's measurements."""
    here = measured_file()
    return here.parent / file_name(here.stem if cluster == "here" else Path(cluster).name)


def observations(cluster: str) -> dict[str, Observation]:
    """The runs of a cluster that were learned from, by their directories; none where the file says nothing."""
    try:
        document = tomllib.loads(calibration_file(cluster).read_text(encoding="utf-8"))
        kept = {str(run.pop("directory")): Observation(**run) for run in document["runs"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no file, none of ours, or of another version
    return kept


def read(cluster: str) -> Correction:
    """Correction of a cluster's predictions; an empty one where no run was recorded."""
    known = observations(cluster)
    return learn(list(known.values())).correction if known else Correction()


def write(cluster: str, runs: Mapping[str, Observation]) -> Path:
    """Keeps runs with those that are known already; one of the same directory is replaced."""
    path = calibration_file(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {**observations(cluster), **runs}
    kept = [{"directory": directory, **asdict(run)} for directory, run in every.items()]
    write_file(path, tomli_w.dumps({"schema": _SCHEMA, "cluster": cluster, "runs": kept}))
    return path


def learn_from(directories: Sequence[str]) -> None:
    """Reads the results of runs, corrects the calibration of their clusters, and prints by how much they were wrong.

    Raises: RunDirectoryError where a run has no prediction beside its measurement, or too few steps.
    """
    by_cluster: dict[str, dict[str, Observation]] = {}
    for text in directories:
        found = compared(Path(text))
        by_cluster.setdefault(str(found["cluster"]), {})[str(Path(text).resolve())] = observation(found)
    for cluster, runs in by_cluster.items():
        path = write(cluster, runs)
        every = observations(cluster)
        lesson = learn(list(every.values()))
        known = f", with {len(every) - len(runs)} learned from before" if len(every) > len(runs) else ""
        print(f"cluster {cluster}: {_runs(len(runs))}{known}")
        for line in _lines(list(every.values()), lesson):
            print(f"  {line}")
        before = median(error(run, None) for run in runs.values())
        after = median(error(run, lesson.correction) for run in runs.values())
        print(f"  a step was wrong by {before:.1%} (median) before, on {_these(len(runs))} by {after:.1%} after")
        print(f"  kept in {path}; remove it to forget")


def _runs(number: int) -> str:
    return f"{number} run{'s' if number > 1 else ''}"


def _these(number: int) -> str:
    return "these runs" if number > 1 else "this run"


def _lines(every: Sequence[Observation], lesson: Lesson) -> list[str]:
    """What was measured and predicted of each part of a step, and what follows."""
    found = []
    for part in PARTS:
        timed = [run for run in every if part in run.measured]
        if not timed:
            continue
        names = [name for name, (_, of) in CORRECTED.items() if of == part]
        measured = median(run.measured[part] for run in timed)
        predicted = median(sum(run.of(name) for name in names) for run in timed)
        step = median(run.step_seconds for run in timed)
        found.append(
            f"{part:<13} {measured * 1e3:9.2f} ms, predicted {predicted * 1e3:9.2f}: "
            + _verdict(names, lesson, max(measured, predicted) < LEAST_SHARE * step)
        )
    if lesson.together:
        found.append(
            "exchanges inside of a forward or backward cannot be told from computing by these runs: one factor "
            "for both; a run on one device, or with a data axis alone, would tell them apart"
        )
    return found


def _verdict(names: Sequence[str], lesson: Lesson, is_little: bool) -> str:
    factors = lesson.correction.factors
    told = [
        f"{name + ' ' if len(names) > 1 else ''}x {factors[name]:.2f} ({_runs(lesson.num_runs[name])})"
        for name in names
        if name in factors
    ]
    if told:
        return ", ".join(told)
    if names == ["host"] and lesson.correction.host_seconds:
        return f"{lesson.correction.host_seconds * 1e3:.2f} ms are added to every step"
    return f"under {LEAST_SHARE:.1%} of a step" if is_little else "not corrected: nothing was predicted to multiply"


def compared(directory: Path) -> dict[str, Any]:
    """The comparison in a run's result. Raises: RunDirectoryError."""
    result = read_json(RunDirectory(directory).result)
    found = (result or {}).get("prediction")
    measured = found and found["step_seconds"]["measured"]
    if not found or not found.get("cluster") or not measured or not found.get("terms"):
        raise RunDirectoryError(
            given=f"--learn {directory}",
            conflict="there is no result.json in it" if result is None else "its run had no prediction to compare with",
            remedy="give the directory of a run of a plan that `shoal plan` wrote: shoal run JOBFILE --plan plan.toml",
        )
    if is_elsewhere(found):
        kinds = found["device_kind"]
        raise RunDirectoryError(
            given=f"--learn {directory}",
            conflict=f"its plan is for {found['cluster']}, a cluster of {kinds['predicted']}s, and it ran on a "
            f"{kinds['measured']}, which says nothing about that cluster",
            remedy="give the directory of a run on that cluster; of this machine: shoal plan JOBFILE --cluster here",
        )
    if found["num_steps"] < LEAST_STEPS:
        raise RunDirectoryError(
            given=f"--learn {directory}",
            conflict=f"its run measured {found['num_steps']} steps after the first ones, and fewer than {LEAST_STEPS} "
            "tell more of the start than of a step",
            remedy="run more of them, 50 say: shoal run JOBFILE --plan plan.toml --steps 50",
        )
    return dict(found)
