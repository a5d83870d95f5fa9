"""The adapter: how a framework trains a case. Another framework writes one of these and runs the same suite.

Set SHOAL_CONFORMANCE_ADAPTER to MODULE:CLASS to use another than shoal's own.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Protocol

import shoal
from shoal.verification.forked import trace_forked


class Adapter(Protocol):
    """Trains a job under a plan for some steps, on as many processes as the plan says."""

    def trace(self, job: shoal.Job, plan: shoal.Plan, folder: Path, num_steps: int) -> None:
        """Leaves the ranks' traces in `folder`/parallel, as docs/verify.md says; `plan` is complete."""


class Shoal:
    """shoal itself, in forked processes."""

    def trace(self, job: shoal.Job, plan: shoal.Plan, folder: Path, num_steps: int) -> None:
        trace_forked(lambda: job, plan, folder, num_steps)


def chosen() -> Adapter:
    """The adapter that the environment names, or shoal's own."""
    name = os.environ.get("SHOAL_CONFORMANCE_ADAPTER")
    if not name:
        return Shoal()
    module, _, attribute = name.partition(":")
    found: Adapter = getattr(importlib.import_module(module), attribute)()
    return found
