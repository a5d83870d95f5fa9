"""Calibration: correction factors of the planner's terms, as medians over measured runs, and their files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from shoal.errors import RunDirectoryError
from shoal.hardware.detect import measured_file
from shoal.planner.calibrate.comparison import PARTS, is_elsewhere
from shoal.runs.directory import RunDirectory, read_json, write_file

_SCHEMA = 2
# Corrected terms, and the part of the clock that measures them. Exchanges in a forward or backward are in its spans.
_EXCHANGES = ("tensor", "context", "experts", "pipeline", "parameters")
CORRECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "compute": (tuple(term for term in PARTS["compute"][0] if term not in _EXCHANGES), "compute"),
    "exchanges": (_EXCHANGES, "compute"),
    **{part: (terms, part) for part, (terms, _) in PARTS.items() if part != "compute"},
}
# Fraction of a step below which no ratio is computed, since the clock itself takes about as long.
LEAST_SHARE = 0.001
# Fewest steps after the first ones: with fewer, the median reflects the start of a run.
LEAST_STEPS = 10


@dataclass(frozen=True)
class Correction:
    """Correction factors of terms (by the names of CORRECTED), and constant host seconds of every step."""

    factors: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0

    @property
    def of_terms(self) -> dict[str, float]:
        """The factors by term."""
        return {term: factor for name, factor in self.factors.items() for term in CORRECTED[name][0]}

    def terms(self, predicted: Mapping[str, float]) -> dict[str, float]:
        """Return the corrected terms."""
        factors = self.of_terms
        terms = {term: seconds * factors.get(term, 1.0) for term, seconds in predicted.items()}
        terms["host"] = terms.get("host", 0.0) + self.host_seconds
        return terms

    def __bool__(self) -> bool:
        return bool(self.factors) or self.host_seconds > 0.0


@dataclass(frozen=True)
class Observation:
    """One run: uncorrected predicted seconds of a step by term, and measured seconds by part of the clock."""

    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    step_seconds: float
    told_seconds: float  # predicted at the time of the run, with its correction
    num_steps: int

    def of(self, name: str) -> float:
        """Return the predicted seconds of one name of CORRECTED."""
        return sum(self.predicted.get(term, 0.0) for term in CORRECTED[name][0])

    @property
    def least_seconds(self) -> float:
        """Seconds below which a ratio is meaningless."""
        return LEAST_SHARE * self.step_seconds


def observation(compared: Mapping[str, Any]) -> Observation:
    """Build an observation from the comparison in a run's result."""
    old = Correction(compared["factors"], compared.get("host_seconds", 0.0))
    factors = old.of_terms
    predicted = {term: float(seconds) / factors.get(term, 1.0) for term, seconds in compared["terms"].items()}
    predicted["host"] = max(0.0, predicted.get("host", 0.0) - old.host_seconds / factors.get("host", 1.0))
    measured = {part: v["measured"] for part, v in compared["parts"].items() if v["measured"] is not None}
    step = compared["step_seconds"]
    return Observation(
        predicted, measured, float(step["measured"]), float(step["predicted"]), int(compared["num_steps"])
    )


@dataclass(frozen=True)
class Lesson:
    """Correction from the runs on one cluster."""

    correction: Correction
    num_runs: dict[str, int]  # by factor
    together: bool  # every run had exchanges, so compute and exchanges share a factor


def learn(every: Sequence[Observation]) -> Lesson:
    """Return the median ratio of measured over predicted seconds for each name of CORRECTED."""
    ratios: dict[str, list[float]] = {name: [] for name in CORRECTED}
    for name in CORRECTED:
        if name not in ("compute", "exchanges"):
            large = (one for one in every if name in one.measured and one.of(name) >= one.least_seconds)
            ratios[name] = [_ratio(one, one.measured[name], one.of(name)) for one in large]
    timed = [one for one in every if "compute" in one.measured]
    alone = [one for one in timed if one.of("exchanges") < one.least_seconds]
    others = [one for one in timed if one.of("exchanges") >= one.least_seconds]
    ratios["compute"] = [one.measured["compute"] / one.of("compute") for one in alone if one.of("compute")]
    together = bool(others) and not ratios["compute"]
    if together:
        whole = [one.measured["compute"] / (one.of("compute") + one.of("exchanges")) for one in others]
        ratios["compute"] = ratios["exchanges"] = whole
    elif others:
        computing = median(ratios["compute"])
        ratios["exchanges"] = [
            _ratio(one, one.measured["compute"] - computing * one.of("compute"), one.of("exchanges")) for one in others
        ]
    # If host time is predicted for any run, a factor corrects it. Constant seconds are only for the other case.
    hosts = [one.measured["host"] for one in every if "host" in one.measured and not ratios["host"]]
    known = {name: of_runs for name, of_runs in ratios.items() if of_runs}
    factors = {name: median(of_runs) for name, of_runs in known.items()}
    correction = Correction(factors, median(hosts) if hosts else 0.0)
    return Lesson(correction, {name: len(of_runs) for name, of_runs in known.items()}, together)


def _ratio(one: Observation, measured: float, predicted: float) -> float:
    """Return measured over predicted seconds, but never 0: one run does not prove that a part takes no time."""
    return max(measured, one.least_seconds) / predicted


def error(one: Observation, correction: Correction | None) -> float:
    """Return the relative error |predicted / measured - 1| of a step: as reported, or with a correction."""
    predicted = one.told_seconds if correction is None else sum(correction.terms(one.predicted).values())
    return abs(predicted / one.step_seconds - 1.0)


def calibration_file(cluster: str) -> Path:
    """Return the path of a cluster's calibration file, next to this machine's measurements."""
    here = measured_file()
    name = here.stem if cluster == "here" else Path(cluster).name
    return here.with_name(re.sub(r"[^A-Za-z0-9.@-]+", "-", name).strip("-.") + ".calibration.toml")


def observations(cluster: str) -> dict[str, Observation]:
    """Read the recorded runs of a cluster by directory; empty if there is no valid file."""
    try:
        document = tomllib.loads(calibration_file(cluster).read_text(encoding="utf-8"))
        return {str(run.pop("directory")): Observation(**run) for run in document["runs"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no file, an invalid one, or another version


def read(cluster: str) -> Correction:
    """Return the correction of a cluster's predictions; empty if no run is recorded."""
    known = observations(cluster)
    return learn(list(known.values())).correction if known else Correction()


def write(cluster: str, runs: Mapping[str, Observation]) -> Path:
    """Add runs to the calibration file of a cluster. A run of a known directory replaces the earlier one."""
    path = calibration_file(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {**observations(cluster), **runs}
    entries = [{"directory": directory, **asdict(run)} for directory, run in every.items()]
    write_file(path, tomli_w.dumps({"schema": _SCHEMA, "cluster": cluster, "runs": entries}))
    return path


def learn_from(directories: Sequence[str]) -> None:
    """Read the results of runs, correct the calibration of their clusters, and print the prediction errors.

    Raises: RunDirectoryError if a run has no prediction to compare with its measurement, or too few steps.
    """
    by_cluster: dict[str, dict[str, Observation]] = {}
    for text in directories:
        comparison = compared(Path(text))
        runs = by_cluster.setdefault(str(comparison["cluster"]), {})
        runs[str(Path(text).resolve())] = observation(comparison)
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
        these = "these runs" if len(runs) > 1 else "this run"
        print(f"  a step was wrong by {before:.1%} (median) before, on {these} by {after:.1%} after")
        print(f"  kept in {path}; remove it to forget")


def _runs(number: int) -> str:
    return f"{number} run{'s' if number > 1 else ''}"


def _lines(every: Sequence[Observation], lesson: Lesson) -> list[str]:
    """Return a line per part of a step: measured and predicted seconds, and the resulting correction."""
    lines, correction = [], lesson.correction
    for part in PARTS:
        timed = [run for run in every if part in run.measured]
        if not timed:
            continue
        names = [name for name, (_, of) in CORRECTED.items() if of == part]
        measured = median(run.measured[part] for run in timed)
        predicted = median(sum(run.of(name) for name in names) for run in timed)
        factors = [
            f"{name + ' ' if len(names) > 1 else ''}x {correction.factors[name]:.2f} ({_runs(lesson.num_runs[name])})"
            for name in names
            if name in correction.factors
        ]
        if factors:
            verdict = ", ".join(factors)
        elif names == ["host"] and correction.host_seconds:
            verdict = f"{correction.host_seconds * 1e3:.2f} ms are added to every step"
        elif max(measured, predicted) < LEAST_SHARE * median(run.step_seconds for run in timed):
            verdict = f"under {LEAST_SHARE:.1%} of a step"
        else:
            verdict = "not corrected: nothing was predicted to multiply"
        lines.append(f"{part:<13} {measured * 1e3:9.2f} ms, predicted {predicted * 1e3:9.2f}: {verdict}")
    if lesson.together:
        lines.append(
            "exchanges inside of a forward or backward cannot be told from computing by these runs: one factor "
            "for both; a run on one device, or with a data axis alone, would tell them apart"
        )
    return lines


def compared(directory: Path) -> dict[str, Any]:
    """Return the comparison in a run's result.

    Raises: RunDirectoryError if the result has no usable comparison.
    """
    result = read_json(RunDirectory(directory).result)
    comparison = (result or {}).get("prediction")
    measured = comparison and comparison["step_seconds"]["measured"]
    if not comparison or not comparison.get("cluster") or not measured or not comparison.get("terms"):
        conflict = "there is no result.json in it" if result is None else "its run had no prediction to compare with"
        remedy = "give the directory of a run of a plan that `shoal plan` wrote: shoal run JOBFILE --plan plan.toml"
    elif is_elsewhere(comparison):
        kinds = comparison["device_kind"]
        conflict = (
            f"its plan is for {comparison['cluster']}, a cluster of {kinds['predicted']}s, and it ran on a "
            f"{kinds['measured']}, which says nothing about that cluster"
        )
        remedy = "give the directory of a run on that cluster; of this machine: shoal plan JOBFILE --cluster here"
    elif comparison["num_steps"] < LEAST_STEPS:
        conflict = (
            f"its run measured {comparison['num_steps']} steps after the first ones, and fewer than {LEAST_STEPS} "
            "tell more of the start than of a step"
        )
        remedy = "run more of them, 50 say: shoal run JOBFILE --plan plan.toml --steps 50"
    else:
        return dict(comparison)
    raise RunDirectoryError(given=f"--learn {directory}", conflict=conflict, remedy=remedy)
