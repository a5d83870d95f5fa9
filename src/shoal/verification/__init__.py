"""Verification of parallel training, of a job or of a user's own loop, against the same steps on one process."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.distributed.failures import user_error
from shoal.distributed.process_setup import versions
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Job
from shoal.jobs.job_file import LoadedJob
from shoal.launch.environment import Environment
from shoal.numerics.precision import numbers
from shoal.plans.legal import idle
from shoal.plans.plan import Plan
from shoal.plans.resolve import complete, warn_of
from shoal.runs.certificate import SCHEMA
from shoal.training.observe.trace.traces import Replay, StepTrace, read, read_changes
from shoal.training.setup.job_model import with_grains
from shoal.verification.compare import References, compare
from shoal.verification.diagnose import diagnose
from shoal.verification.forked import forked, trace_forked
from shoal.verification.judge import Verdict, at_least_one, judge_traces, refuse_unrepeatable
from shoal.verification.reference import Computed
from shoal.verification.traced_run import left_out

__all__ = ["Verdict", "certificate", "verify", "verify_session"]


def verify(job: Job, plan: Plan, steps: int = 3) -> Verdict:
    """Run `steps` steps as planned and on one process, and compare every tensor.

    Args:
        job: The job to verify.
        plan: The plan to verify. Forked processes on this host run its ranks.
        steps: Number of steps, by default 3.

    Raises:
        NotDeterministicError: If one process alone does not repeat its results.
        ShoalError: Any error of the job or the plan.
    """
    if not isinstance(job, Job):
        raise JobError(
            given=f"shoal.verify({job!r:.60}, ...)",
            conflict=f"that is a {type(job).__name__}, and no Job",
            remedy="call the job function: shoal.verify(job(), plan)",
        )
    at_least_one("steps", steps)
    notes = left_out(plan)
    warn_of(idle(plan))
    job = with_grains(job)
    complete_plan = complete(plan.uncompressed, job.num_grains, job.grain_size)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        trace_forked(lambda: job, complete_plan, folder, steps)
        verdict = judge_traces(job, complete_plan, folder)
        verdict.notes += notes
        return verdict


def certificate(verdict: Verdict, loaded: LoadedJob, plan: Plan, parallel_seconds: float) -> dict[str, Any]:
    """Return the certificate as a JSON value. Ratios are error over tolerance, null for a failed equality check."""
    first = verdict.failed[0] if verdict.failed else None
    return {
        "schema": SCHEMA,
        "verdict": "verified" if verdict.verified else "diverged",
        "job": loaded.describe(),
        "plan": plan.to_mapping(),
        "versions": versions(),
        "steps": verdict.num_steps,
        "seconds": {"parallel": round(parallel_seconds, 2), "references": round(verdict.seconds, 2)},
        "notes": verdict.notes,
        "worst": {name: ratio if math.isfinite(ratio) else None for name, ratio in verdict.worst().items()},
        "first_divergence": None
        if first is None or verdict.diagnosis is None
        else {
            "step": first.step + 1,
            "phase": first.phase,
            "name": first.name,
            "rank": first.rank,
            "error": first.error if math.isfinite(first.error) else None,
            "tolerance": first.tolerance,
            "said": first.said,
            "causes": verdict.diagnosis.causes,
        },
    }


def verify_session(train: Callable[[], object], devices: int, steps: int = 3) -> Verdict:
    """Run a user's own loop on forked ranks and on one process, and compare every tensor of every step.

    Each step on one process starts from the state that the ranks had reached.

    Args:
        train: A function that makes a Session and iterates its steps.
        devices: Number of ranks.
        steps: Number of steps after which the loops end, by default 3.

    Raises:
        NotDeterministicError: If one process alone does not repeat its results.
        JobError: If `train` makes no steps.
        ShoalError: Any error of `train`.
    """
    at_least_one("devices", devices)
    at_least_one("steps", steps)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        together = Replay(str(folder / "parallel"), steps)
        _train(train, devices, together)
        single = replace(together, of=together.folder, world_size=devices)
        ways = {
            "alone": single,
            "again": single,
            "grain by grain": replace(single, grain_by_grain=True),
            "backwards": replace(single, grain_by_grain=True, backwards=True),
        }
        for way, replay in ways.items():
            _train(train, 1, replace(replay, folder=str(folder / way)))
        verdict = _judge(folder, list(ways), devices)
    verdict.seconds = time.monotonic() - began
    return verdict


def _train(train: Callable[[], object], world_size: int, replay: Replay) -> None:
    def work(environment: Environment) -> None:
        os.environ.update(replay.variables())
        try:
            train()
        except (ShoalError, SystemExit):
            raise
        except Exception as error:
            raise user_error("the loop", error) from error

    with forked(world_size, work, Path(replay.folder), aloud=replay.of is None) as wait:
        wait()


def _judge(folder: Path, ways: list[str], world_size: int) -> Verdict:
    verdict = Verdict()
    before = _read(folder / "parallel", -1, world_size)
    for step in itertools.count():  # each update is compared separately if a step has several
        if step and not (folder / "parallel" / f"step-{step}-0.json").exists():
            break
        parallel = _read(folder / "parallel", step, world_size)
        for name, tensor in read_changes(folder / "parallel", step).items():
            key = f"update/{name}"
            before.tensors[key if key in before.tensors else f"buffers/{name}"] = tensor
        computed = [Computed(_read(folder / way, step, 1)) for way in ways]
        if step == 0:
            refuse_unrepeatable(computed[0].trace, computed[1].trace)
        for way in computed:
            way.magnitudes = {n: float(numbers(t).norm()) for n, t in way.trace.phase("reduction").items()}
        references = References(computed, None, complete=True)
        order = list(parallel.parameters)
        verdict.checks += compare(parallel, before, references, order, {})
        verdict.num_steps += 1
        if verdict.failed:
            verdict.diagnosis = diagnose(verdict.failed, parallel, before, references, world_size)
            break
        before = parallel
    return verdict


def _read(folder: Path, step: int, world_size: int) -> StepTrace:
    try:
        return read(folder, step, world_size)
    except FileNotFoundError:
        raise JobError(
            given="a loop to verify",
            conflict="it made no steps of a shoal.Session, or not the same on one process",
            remedy="give a function that makes a Session, prepares, and iterates its steps",
        ) from None
