"""The `shoal verify` command: starts the parallel run, computes the references, prints and writes the verdict."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace

from shoal.data.source import opened
from shoal.distributed.failures import as_shoal_error
from shoal.distributed.process_setup import prepare_process, seed_loading
from shoal.errors import ExitCode, PlanError, folded, say_labelled
from shoal.hardware.detect import cores
from shoal.jobs.job import Job
from shoal.jobs.job_file import load
from shoal.plans.plan import described
from shoal.report.quantities import several
from shoal.runs.directory import RunDirectory, write_file
from shoal.runs.options import Origin
from shoal.runs.request import RunRequest
from shoal.runs.source import write_source
from shoal.training.setup.engine import Options
from shoal.training.setup.preflight import with_judged_grains
from shoal.verification import certificate
from shoal.verification.forked import trace_forked
from shoal.verification.judge import judge_traces
from shoal.verification.traced_run import left_out, read_outcome


def verify(request: RunRequest, num_steps: int) -> ExitCode:
    """Verify the requested run, whose plan is complete. Raises: ShoalError if that is not possible."""
    folder = request.where.out / ".traces"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        began = time.monotonic()
        if request.what.plan.server.mode in ("bounded", "asynchronous"):
            raise PlanError(
                given=f'server.mode = "{request.what.plan.server.mode}"',
                conflict="its gradients are of older parameters: it does not compute what one process computes",
                remedy='verify server.mode = "synchronous"; of the others compare the loss: docs/parameter-server.md',
            )
        steps, processes = several(num_steps, "step"), several(request.what.plan.num_processes, "process")
        say_labelled("verifying", f"{request.what.job.target}: {steps} on {processes}")
        if request.what.plan.num_processes == 1:
            say_labelled("note", "one process is compared with one: say --devices N for a parallel run")

        assert request.what.judged is not None, "a request to verify is looked at"
        plan = request.what.judged.plan.uncompressed
        threads_text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        given_threads = int(threads_text) if threads_text.isdecimal() else 0
        num_threads = given_threads or request.what.threads_per_process
        judged = request.what.judged
        options = Options(may_copy=request.origin("memory.shared") is not Origin.FILE)

        def make() -> Job:
            seed_loading()
            return with_judged_grains(judged, load(request.what.job).job)

        trace_forked(make, plan, folder, num_steps, num_threads, options=options, shares_gpu=request.where.shares_gpu)
        outcome = read_outcome(folder / "parallel")
        plan = plan.with_choices(shared=None if outcome.shares_memory else False)
        parallel_seconds = time.monotonic() - began
        say_labelled("parallel run", f"done after {parallel_seconds:.1f} s; computing the references")
        prepare_process(plan.execution.exact, cores())
        seed_loading()
        loaded = load(request.what.job)
        loaded = replace(loaded, job=opened(with_judged_grains(judged, loaded.job)))
        verdict = judge_traces(loaded.job, plan, folder)
        verdict.notes += left_out(request.what.plan)
        if verdict.verified and verdict.num_steps < num_steps:
            verdict.notes.append(f"fewer steps than the {num_steps} to compare: the job ends after {verdict.num_steps}")
        mode = "exact" if plan.execution.exact else "fast"
        kind = f"{plan.precision.parameters}, compute {plan.precision.compute}"
        kind += f", products {plan.precision.products}" if plan.precision.products != "same" else ""
        say_labelled("layout", f"{described(plan)}; {mode}; parameters {kind}; {several(verdict.num_steps, 'step')}")
        for note in verdict.notes:
            say_labelled("note", note)
        of_references = f"{verdict.seconds:.1f} s for the references"
        say_labelled("cost", f"{parallel_seconds:.1f} s for the parallel run, {of_references}")
        print(folded(verdict.render()), flush=True)
        if not request.course.no_source:
            write_source(request.where.out, request.what.job.path.parent)
        document = certificate(verdict, loaded, plan, parallel_seconds)
        write_file(request.where.out / "certificate.json", json.dumps(document, indent=1) + "\n")
        say_labelled("written", f"{request.where.shown}/certificate.json")
        return ExitCode.DONE if verdict.verified else ExitCode.FAILED
    except Exception as error:
        failure = as_shoal_error(error)
        RunDirectory(request.where.out).keep_traceback("verify", failure)
        raise failure from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
