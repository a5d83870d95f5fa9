"""Looks at programs that people write leave batch, model, optimizer and generators as they were, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from benchmarks.habits import programs
from benchmarks.habits.fingerprint import fingerprint
from tests.unit.training.setup.test_engine import engine
from tests.usual import parametrize

from shoal.errors import ShoalError
from shoal.planner.profile.trace import OperatorTracer
from shoal.plans.plan import PrecisionSection
from shoal.training.microbatch.look import Look
from shoal.training.microbatch.nonfinite import find_nonfinite
from shoal.training.setup.memory_format_choice import why_not_channels_last

PROGRAMS = programs()
# One of each kind; `scripts/test --all` takes every program.
USUAL = {program.kind: name for name, program in reversed(PROGRAMS.items())}.values()


@parametrize("name", PROGRAMS, usual=set(USUAL))
def test_a_look_leaves_no_trace(name: str) -> None:
    try:
        made = engine(PROGRAMS[name].job())
    except ShoalError as refused:
        pytest.skip(f"refused before anything is looked at: {refused.given}")
    data = made.loader.step(0)
    if data is None or not data.num_microbatches:
        pytest.skip("a stream without samples")
    first = next(data.microbatches)
    grains = made.loader.first_grains(0) or first
    looks: dict[str, Callable[[], object]] = {
        "policy": lambda: Look(made.computer).policy(first, grains, made.buffers),
        "state": lambda: Look(made.computer).state(grains),
        "rehearsal": lambda: made.evaluator.rehearse(made.model),
        "format": lambda: why_not_channels_last(made.job, made.model, made.precision, made.job.train_data),
        "nonfinite": lambda: find_nonfinite(made.computer, made.precision, made.parameters, made.mesh, [first]),
        "trace": lambda: OperatorTracer(made.model, made.job.loss, PrecisionSection(), device="cpu").trace(
            lambda _: first.batch, first.num_samples
        ),
    }
    functions = made.job.loss, *made.job.metrics.values()
    try:
        for what, look in looks.items():
            before = fingerprint(first.batch, made.model, made.updater.optimizer, functions)
            # What is refused, or cannot be traced, must leave no trace either.
            with contextlib.suppress(ShoalError, RuntimeError, TypeError, NotImplementedError, AttributeError):
                look()
            assert fingerprint(first.batch, made.model, made.updater.optimizer, functions) == before, what
    finally:
        made.close()
        torch.manual_seed(0)
