"""Trials of remedies: short runs of the job with each remedy, alternating with unchanged runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from shoal.doctor.causes import Remedy
from shoal.doctor.run_times import seconds_per_step
from shoal.errors import LaunchError
from shoal.plans.plan import Plan, plan_text
from shoal.plans.resolve import relaid
from shoal.runs.directory import write_file
from shoal.runs.records import read_steps

_TAIL = 12
# Rounds agree if their middle half spans at most this share of the time, or this share of the gain.
_NEAR, _NEARLY = 0.02, 0.15


@dataclass(frozen=True)
class TrialJob:
    """Job of a run as named on the command line, its plan, and the number of steps of a trial.

    `arguments`: the run's settings and options that a remedy does not change. `variables`: the run's environment.
    `rounds`: the fewest rounds; up to `most_rounds` follow until the middle half of them agrees.
    `folder`: parent of the temporary directories, on the run's disk because checkpoint times depend on it.
    """

    job: str
    plan: Plan
    num_steps: int
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    rounds: int = 3
    most_rounds: int = 9
    folder: Path | None = None


@dataclass(frozen=True)
class TrialResult:
    """Result of a remedy's trial: seconds per step of each round without and with it; `error` if it could not run."""

    remedy: Remedy
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    error: str | None = None

    @property
    def gains(self) -> tuple[float, ...]:
        """Fraction of the time that each round saved."""
        return tuple(1.0 - then / now for now, then in zip(self.before, self.after, strict=True) if now > 0.0)

    @property
    def gain(self) -> float | None:
        """Median of the rounds' gains, or None without rounds."""
        return median(self.gains) if self.gains else None

    @property
    def agrees(self) -> bool:
        """True if the middle half of the rounds is close to the median; other rounds may have been disturbed."""
        if self.gain is None:
            return True
        first, _, last = quantiles(self.gains, n=4, method="inclusive") if len(self.gains) > 1 else (0.0, 0.0, 1.0)
        return last - first <= max(_NEAR, _NEARLY * abs(self.gain))


def changed_plan(plan: Plan, remedy: Remedy) -> Plan:
    """Return the plan with a remedy applied and without a prediction. Raises: PlanError."""
    changed = plan.model_copy(update={"prediction": {}})
    if remedy.devices is not None:
        changed = relaid(changed, remedy.devices)
        if changed.layout.world_size == 1 and changed.collectives.all_reduce != "native":
            changed = changed.with_sections(collectives={"all_reduce": "native"})
        changed = changed.with_sections(batch={"grains_per_microbatch": 0})
    return changed.with_sections(**{name: dict(section) for name, section in remedy.sections.items()})


def tried(job: TrialJob, remedies: Sequence[Remedy], note: Callable[[str], None]) -> list[TrialResult]:
    """Run each remedy in turn with the unchanged run; the order reverses after each round.

    Raises: LaunchError if the unchanged run fails.
    """
    order = [Remedy("unchanged", "as it was", 0.0), *remedies]
    seconds: dict[str, list[float]] = {remedy.name: [] for remedy in order}
    errors: dict[str, str] = {}
    results: list[TrialResult] = []
    with tempfile.TemporaryDirectory(prefix=".shoal-doctor-", dir=job.folder) as folder:
        for number in range(max(job.rounds, job.most_rounds)):
            if number >= job.rounds and all(result.agrees for result in results):
                break
            for remedy in order:
                if remedy.name in errors:
                    continue
                note(f"trial {number + 1}: {remedy.words}")
                try:
                    seconds[remedy.name].append(_run(job, remedy, Path(folder) / f"{remedy.name}-{number}"))
                except LaunchError as error:
                    if remedy.name == "unchanged":
                        raise
                    errors[remedy.name] = error.conflict
            order.reverse()
            results = [
                TrialResult(remedy, error=errors[remedy.name])
                if remedy.name in errors
                else TrialResult(remedy, tuple(seconds["unchanged"]), tuple(seconds[remedy.name]))
                for remedy in remedies
            ]
    return results


def _run(job: TrialJob, remedy: Remedy, out: Path) -> float:
    """Return the seconds per step of one run. Raises: LaunchError with the end of its output if it fails."""
    plan = out.with_name(f"{out.name}.toml")
    write_file(plan, plan_text(changed_plan(job.plan, remedy)))
    names = {argument for argument in remedy.arguments if argument.startswith("--")}
    pairs = zip(job.arguments[::2], job.arguments[1::2], strict=True)
    arguments = [text for pair in pairs if pair[0] not in names for text in pair]
    own = ["run", job.job, "--plan", str(plan), "--out", str(out), "--steps", str(job.num_steps), "--max-restarts", "0"]
    wanted = {**job.variables, **remedy.variables}
    variables = {name: value for name, value in os.environ.items() if name not in wanted}
    variables |= {name: value for name, value in wanted.items() if value is not None}
    command = [sys.executable, "-m", "shoal", *own, *arguments, *remedy.arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_TAIL:])
        raise LaunchError(
            given=f"shoal {' '.join(own)}",
            conflict=f"a trial ended with code {done.returncode}: {said}",
            remedy="run the job by itself first: a trial does what shoal run does",
        )
    return seconds_per_step(list(read_steps(out / "records.jsonl")))
