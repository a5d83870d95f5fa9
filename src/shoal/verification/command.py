"""The `shoal verify` command: starts the parallel run, computes the references, prints and writes the verdict."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.environment import Environment
from shoal.errors import ExitCode
from shoal.faults import as_shoal_error
from shoal.job_file import LoadedJob, load
from shoal.plan.plan import Plan
from shoal.plan.resolve import complete
from shoal.run_request import RunRequest, cores_here
from shoal.startup import prepare_process
from shoal.verification.certificate import certificate, write_certificate
from shoal.verification.judge import Verdict, judge_traces
from shoal.verification.parallel import runs, trace_rank
from shoal.worker import die_with_launcher, tell


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify: the run as `shoal run` would be asked for it, and how many of its steps.

    `trace` is set in the ranks: the folder for their traces. `alone` asks for the same run on one process.
    """

    run: RunRequest
    num_steps: int
    trace: Path | None
    alone: bool

    @property
    def plan(self) -> Plan:
        """The run's plan, or that of the same on one process."""
        return runs(self.run.plan)["alone" if self.alone else "parallel"]


def rank(request: VerifyRequest, environment: Environment) -> ExitCode:
    """One rank of the parallel run; errors go to the launcher."""
    die_with_launcher()
    code, error = ExitCode.DONE, None
    assert request.trace is not None
    try:
        prepare_process(request.plan.execution.exact, max(1, cores_here() // environment.local_world_size))
        loaded = load(request.run.job)
        plan = complete(request.plan, loaded.job.grains, loaded.job.grain_size, request.run.wishes.max_microbatch)
        trace_rank(loaded.job, plan, environment, request.trace, request.num_steps)
    except (Exception, SystemExit) as caught:
        error = as_shoal_error(caught)
        code = ExitCode.USER if error.exit_code != ExitCode.FAILED else ExitCode.FAILED
    tell(environment, code, error)
    return code


# Starts the ranks of the run, or of the same on one process, with a folder for their traces; waits for their end.
Start = Callable[[Path, bool], None]


def verify(request: VerifyRequest, start: Start) -> ExitCode:
    """Verifies. Raises: ShoalError where it cannot, an InternalError where that is our own doing."""
    out = request.run.out
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "traces"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return _verify(request, start, folder)
    except Exception as error:
        raise as_shoal_error(error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verify(request: VerifyRequest, start: Start, folder: Path) -> ExitCode:
    began = time.monotonic()
    world_size = request.run.world_size
    print(
        f"verifying          {request.run.job.path}: {request.num_steps} steps on {world_size} process(es)", flush=True
    )
    if world_size == 1:
        print("note               one process is compared with one: say --devices N for a parallel run", flush=True)
    for kind in runs(request.run.plan):
        start(folder / kind, kind == "alone")
    parallel_seconds = time.monotonic() - began
    print(f"parallel run       done after {parallel_seconds:.1f} s; computing the references", flush=True)
    prepare_process(request.run.plan.execution.exact, cores_here())
    loaded = load(request.run.job)
    plan = complete(request.run.plan, loaded.job.grains, loaded.job.grain_size, request.run.wishes.max_microbatch)
    verdict = judge_traces(loaded.job, plan, folder)
    _print(verdict, loaded, plan, parallel_seconds)
    document = certificate(verdict, loaded, plan, parallel_seconds)
    write_certificate(request.run.out / "certificate.json", document)
    print(f"written            {request.run.out / 'certificate.json'}")
    return ExitCode.DONE if verdict.verified else ExitCode.FAILED


def _print(verdict: Verdict, loaded: LoadedJob, plan: Plan, parallel_seconds: float) -> None:
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in plan.layout.model_dump().items() if degree > 1)
    mode = "exact" if plan.execution.exact else "fast"
    kind = f"{plan.precision.parameters}, compute {plan.precision.compute}"
    print(f"layout             {degrees or 'one process'}; {mode}; parameters {kind}; {verdict.num_steps} steps")
    for note in verdict.notes:
        print(f"note               {note}")
    cost = f"{parallel_seconds:.1f} s for the parallel run, {verdict.seconds:.1f} s for the references"
    print(f"cost               {cost}")
    print(verdict.render())
    sys.stdout.flush()
