"""Diagnosis of a run: its lost time by cause, remedies, and trials of the remedies."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.doctor.causes import LostTime, Remedy, causes, ms
from shoal.doctor.read_backs import lost_in, places_of, read_backs
from shoal.doctor.run_times import RunTimes, run_times
from shoal.doctor.trial import TrialJob, TrialResult, changed_plan, tried
from shoal.errors import CommandError, HardwareError, PlanError, RunDirectoryError, UserCodeError, folded
from shoal.jobs.job_file import JobRequest, load, with_settings_of
from shoal.jobs.settings import note_other_secrets, setting_text
from shoal.launch.environment import inside_run
from shoal.planner.calibrate.comparison import MeasuredStep, account_of
from shoal.plans.plan import Plan, plan_text, read_plan
from shoal.report.account import steady
from shoal.runs.chrome_trace import read as read_trace
from shoal.runs.directory import RunDirectory, read_json, write_file
from shoal.runs.options import TraceSteps
from shoal.runs.run_files import RunFiles, run_reader

_BEST = 3
_LEAST_STEPS, _MOST_STEPS = 40, 400
_PERIODS = 3
_MOST_TRACED = 10_000
_UNSTEADY = 1.5


@dataclass(frozen=True)
class RunDiagnosis:
    """Diagnosis of a run: times, causes, and the planner's choice.

    `unasked`: the reason if the planner could not be used.
    """

    times: RunTimes
    causes: tuple[LostTime, ...]
    chosen: Remedy | None = None
    unasked: str | None = None

    @property
    def remedies(self) -> Iterator[Remedy]:
        """All remedies of the causes, and the planner's choice."""
        yield from (remedy for loss in self.causes for remedy in loss.remedies)
        if self.chosen is not None:
            yield self.chosen


def examine(run: str, job: JobRequest | None, *, try_out: bool, steps: int | None, as_json: bool) -> None:
    """Diagnose a run and print the result, as JSON if `as_json`.

    Args:
        job: the run's job, which the planner loads and the trials run, with settings that the run's lack or differ in.
        try_out: run the best remedies beside the run as it is, for `steps` steps each.

    Raises: RunDirectoryError if there is no run or too few records; CommandError; LaunchError.
    """
    with run_reader(run) as reader:
        if try_out and job is None:
            named = ""
            with contextlib.suppress(RunDirectoryError):
                known = reader.read().job
                named = f": its job.json says {known.get('file')}:{known.get('function')}"
            raise CommandError(
                given=f"shoal doctor {run} --try",
                conflict="a trial trains the job, and a run directory is data: no code that it names is run",
                remedy=f"add --job JOBFILE[:FUNCTION], as shoal run had it{named}",
            )
        files = reader.read()
        files.say_damage()
        if job is not None:
            of_run = read_json(RunDirectory(files.path).job, exactly=True) or {}
            job = with_settings_of(job, of_run, all_known=True)
        times, losses = diagnosis(files)
        run_diagnosis = planned_for(job, files, times, losses) if job else RunDiagnosis(times, losses)
        plans = _write_plans(files, run_diagnosis.remedies)
        results: list[TrialResult] = []
        remedies = best_remedies(run_diagnosis.causes, run_diagnosis.chosen)[:_BEST] if try_out else []
        if job is not None and remedies:
            trial = trial_job(job, files, times, steps or trial_steps(times, remedies))
            results = tried(trial, remedies, lambda text: print(folded(text), file=sys.stderr, flush=True))
        if as_json:
            print(json.dumps(_document(run, run_diagnosis, plans, results), indent=2))
        else:
            lines = [*_lines(run, run_diagnosis, plans), *(["tried:"] if results else [])]
            for result in results:
                if result.gain is None:
                    lines.append(f"   {result.remedy.words}: it did not run: {result.error}")
                    continue
                rounds = ", ".join(f"{-gain:+.0%}" for gain in result.gains)
                beside = f"{rounds}; {-result.remedy.gain:+.0%} was expected"
                lines.append(f"   {-result.gain:+.0%} of the time ({beside}): {result.remedy.words}")
            print("\n".join(line if "shoal run JOBFILE" in line else folded(line) for line in lines))


def diagnosis(files: RunFiles) -> tuple[RunTimes, tuple[LostTime, ...]]:
    """Return the times of a run and its causes of lost time. Raises: RunDirectoryError if there are too few records."""
    traced: set[int] = set()
    for file in files.path.glob("trace-*.json.gz"):
        with contextlib.suppress(CommandError):
            steps = TraceSteps.parse(file.name.removeprefix("trace-").removesuffix(".json.gz"))
            traced |= set(range(steps.first, min(steps.last, steps.first + _MOST_TRACED) + 1))
    ordered = sorted(traced)
    untraced = [r for r in files.records if bisect_left(ordered, r.first) == bisect_right(ordered, r.step)]
    times = run_times(replace(files, records=tuple(untraced)), account_of(files))
    if times is None:
        raise RunDirectoryError(
            given=files.shown,
            conflict="the run has records of fewer than four steps, too few for a diagnosis",
            remedy="train some more steps, without --no-telemetry",
        )
    return times, causes(times, *_traced(files, times))


def planned_for(request: JobRequest, files: RunFiles, times: RunTimes, losses: tuple[LostTime, ...]) -> RunDiagnosis:
    """Return the diagnosis with the planner's predictions. This loads the job but runs no step."""
    from shoal.doctor.planned import base_of, planned_run, with_planner
    from shoal.planner.answer.answer import question  # torch

    plan_file = RunDirectory(files.path).plan
    try:
        with inside_run(os.environ):
            loaded = load(request)
        note_other_secrets(loaded.settings, files.job)
        plan = read_plan(plan_file) if plan_file.exists() else Plan()
        steps = [MeasuredStep.of(record) for record in steady(files.records)]
        planned = planned_run(question(loaded.job, base_of(plan), "here", None).case, plan, steps, times)
        losses = with_planner(losses, planned)
        return RunDiagnosis(times, losses, planned.best(losses))
    except (PlanError, HardwareError, UserCodeError) as error:
        return RunDiagnosis(times, losses, unasked=f"{error.given}: {error.conflict}")


def _traced(files: RunFiles, times: RunTimes) -> list[LostTime]:
    """Return the causes that only a trace shows, if the run has a trace."""
    newest = max(files.path.glob("trace-*.json.gz"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return []
    try:
        document = read_trace(newest)
    except (OSError, ValueError, EOFError, zlib.error):
        return []
    reads = read_backs(document, times)
    return [lost_in(reads, times, places_of(Path(str(files.job.get("file")))))] if reads is not None else []


def _write_plans(files: RunFiles, remedies: Iterable[Remedy]) -> dict[str, Path]:
    """Write a plan file for each remedy that changes the plan, if the run directory is writable.

    Return paths by name.
    """
    plan_file, written = RunDirectory(files.path).plan, dict[str, Path]()
    folder = files.output_folder / "doctor"
    if not plan_file.exists() or folder.is_symlink():
        return written
    plan = read_plan(plan_file)
    for remedy in (remedy for remedy in remedies if remedy.sections or remedy.devices):
        target = folder / f"{remedy.name}.toml"
        with contextlib.suppress(OSError):
            target.parent.mkdir(exist_ok=True)
            write_file(target, plan_text(changed_plan(plan, remedy)))
            written[remedy.name] = target
    return written


def best_remedies(losses: Sequence[LostTime], chosen: Remedy | None = None) -> list[Remedy]:
    """Return the best remedy of each cause that a trial can measure, with the planner's plan in second place.

    No two remedies have the same name.
    """
    best = [max((r for r in loss.remedies if r.can_be_tried), key=lambda r: r.gain, default=None) for loss in losses]
    named = {remedy.name: remedy for remedy in (*best[:1], chosen, *best[1:]) if remedy is not None}
    return list(named.values())


def trial_job(job: JobRequest, files: RunFiles, times: RunTimes, num_steps: int) -> TrialJob:
    """Return a run's job for a trial, with the run's plan, settings, options and threads."""
    last = files.attempts[-1] if files.attempts else None
    arguments = [word for one in job.settings for word in ("--set", f"{one[0]}={setting_text(*one)}")]
    for option in ("evaluate_every", "checkpoint_every"):
        value = getattr(last, option) if last is not None else None
        if value is not None:
            arguments += [f"--{option.replace('_', '-')}", str(value)]
    plan_file = RunDirectory(files.path).plan
    plan = read_plan(plan_file) if plan_file.exists() else Plan()
    folder = files.path.absolute().parent if files.address is None else Path.cwd()  # on the run's disk
    # A trial has the run's number of threads.
    own_threads = times.threads is not None and times.device == "cpu"
    variables: dict[str, str | None] = {"OMP_NUM_THREADS": str(times.threads)} if own_threads else {}
    return TrialJob(job.argument, plan, num_steps, tuple(arguments), variables, folder=folder)


def trial_steps(times: RunTimes, remedies: Sequence[Remedy]) -> int:
    """Return the number of steps of a trial: a few periods of rare events, also if a remedy makes them rarer."""
    longest = max(times.evaluation.every or 0.0, times.checkpoint.every or 0.0)
    wanted = max(_PERIODS * longest, 2.0 * max(remedy.period for remedy in remedies))
    return min(_MOST_STEPS, max(_LEAST_STEPS, round(wanted) + 3))


def _lines(path: str, result: RunDiagnosis, plans: dict[str, Path]) -> list[str]:
    """Format the diagnosis for people."""
    times, chosen = result.times, result.chosen
    computing = f"{times.computing / times.total:.0%} of it forward and backward"
    ranks = f"{times.world_size} process{'es' if times.world_size > 1 else ''}"
    lines = [f"{path}: {ms(times.total)} a step on {ranks}, {computing} ({times.num_steps} steps)"]
    if not result.causes:
        lines.append("healthy: nothing that could be had back takes 3 % of the time")
    for number, loss in enumerate(result.causes, 1):
        lines.append(f"{number}. {loss.title}: {ms(loss.seconds)} a step, {loss.share:.0%} of the time")
        lines.append(f"   {loss.seen}")
        for remedy in loss.remedies:
            lines.append(f"   {-remedy.gain:+.0%} of the time{_cost(remedy, times)}: {remedy.words}")
            if remedy.planned is not None and remedy.planned != remedy.gain:
                lines.append(f"      {-remedy.planned:+.0%} by the planner's predictions of both plans")
            if remedy.can_be_tried:
                lines.append(f"      {_how(remedy, plans)}")
    if chosen is not None:
        lines.append(f"{-chosen.gain:+.0%} of the time{_cost(chosen, times)}: {chosen.words}")
        lines.append(f"   {_how(chosen, plans)}")
    if result.unasked is not None:
        lines.append(f"note: the planner was not asked: {result.unasked}")
    if times.spread[1] > _UNSTEADY:
        low, high = times.spread
        lines.append(
            f"note: steps vary, a tenth below {low:.2g} and a tenth above {high:.2g} times the median: other programs, "
            "clocks, or work that not each step has; shoal doctor examines the machine"
        )
    if times.blocks is not None:
        lines.append(
            f"note: {times.blocks}; each of its steps counts with the block's mean, so single slow steps do not show"
        )
    if times.wall > 0.0:
        share = times.start_up / times.wall
        lines.append(f"once a call: {times.start_up:.1f} s from the command to the first step, {share:.0%} of this run")
    return lines


def _cost(remedy: Remedy, times: RunTimes) -> str:
    """Describe the change of cost if a remedy changes the number of devices, in dollars if the plan has a price."""
    if remedy.cost == 1.0:
        return ""
    price = times.section("prediction").get("price_per_hour")
    text = f" at {remedy.device_time:.0%} of the device time"
    if isinstance(price, int | float) and times.samples:
        per_sample = price / 3600 * times.world_size * times.total / times.samples
        text += f" (${per_sample * 1e6:.3g} for a million samples becomes ${per_sample * remedy.device_time * 1e6:.3g})"
    return text


def _how(remedy: Remedy, plans: dict[str, Path]) -> str:
    """Return the command that applies a remedy."""
    variables = [f"{name}={value}" for name, value in remedy.variables.items() if value is not None]
    plan = ["--plan", str(plans[remedy.name])] if remedy.name in plans else []
    return " ".join([*variables, "shoal run JOBFILE", *plan, *remedy.arguments])


def _document(
    path: str, result: RunDiagnosis, plans: dict[str, Path], results: Sequence[TrialResult]
) -> dict[str, Any]:
    def document(remedy: Remedy) -> dict[str, Any]:
        plan = os.fspath(plans[remedy.name]) if remedy.name in plans else None
        return {**asdict(remedy), "device_time": remedy.device_time, "plan": plan}

    causes = []
    for loss in result.causes:
        remedies = [document(remedy) for remedy in loss.remedies]
        causes.append({**asdict(loss), "regained": loss.regained, "remedies": remedies})
    tries = [
        {"name": r.remedy.name, "expected": r.remedy.gain, "gain": r.gain, "gains": r.gains, "error": r.error}
        for r in results
    ]
    return {
        "run": path,
        "healthy": not result.causes,
        "step_seconds": result.times.total,
        "computing_share": result.times.computing / result.times.total,
        "start_up_seconds": result.times.start_up,
        "causes": causes,
        "planner_chooses": document(result.chosen) if result.chosen is not None else None,
        "tried": tries,
    }
