"""Verification of parallel training: the comparison of a parallel run with the same steps on one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shoal.errors import JobError
from shoal.job import Job
from shoal.plans.conflicts import idle
from shoal.plans.plan import Plan
from shoal.plans.resolve import complete
from shoal.plans.unheeded import warn_of
from shoal.verification.forked import trace_forked
from shoal.verification.judge import Verdict, at_least_one, judge_traces
from shoal.verification.traced_run import left_out
from shoal.verification.traced_session import verify_session

__all__ = ["Verdict", "verify", "verify_session"]


def verify(job: Job, plan: Plan, steps: int = 3) -> Verdict:
    """Runs `steps` steps as planned, in forked processes on this host, and on one process, and compares every tensor.

    Raises: what the job or the plan raises; NotDeterministicError where one process alone does not repeat itself.
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
    complete_plan = complete(plan.uncompressed, job.grains, job.grain_size)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        trace_forked(lambda: job, complete_plan, folder, steps)
        verdict = judge_traces(job, complete_plan, folder)
        verdict.notes += notes
        return verdict
