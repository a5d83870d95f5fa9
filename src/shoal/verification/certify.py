"""Certificates of verification: job, plan, versions, verdict and largest errors, written as JSON."""

from __future__ import annotations

import math
from typing import Any

from shoal.distributed.process_setup import versions
from shoal.plans.plan import Plan
from shoal.runs.certificate import SCHEMA
from shoal.runs.job_file import LoadedJob
from shoal.verification.judge import Verdict


def certificate(verdict: Verdict, loaded: LoadedJob, plan: Plan, parallel_seconds: float) -> dict[str, Any]:
    """The certificate as a JSON value. Ratios are error over tolerance; a failed demand for equality has null."""
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
