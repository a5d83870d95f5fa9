"""A steady step of one process: how often it is called for it, and that looking less often finds as much."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.jobs.read_late import job, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint import weights_sha256
from shoal.distributed.mesh import alone
from shoal.training.microbatch.step import StepRunner
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged

PACKAGE = str(Path(shoal.__file__).parent) + os.sep
FIRST, COUNTED = 20, 64
# As counted when this was written, 160 and 129, and what a busy machine adds, where records are written more often.
MOST_PYTHON, MOST_C, MOST_BUSY = 166, 135, 4.0
DATA = TensorDataset(torch.randn(2048, 16, generator=torch.Generator().manual_seed(0)), torch.arange(2048) % 3)


class Calls:
    """Counts calls of functions of the package, and those of C that they make, in so many steps."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._steps = 0

    def __call__(self, *record: Any) -> None:
        self._steps += 1
        if self._steps == FIRST:
            sys.setprofile(self._count)
        elif self._steps == FIRST + COUNTED:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE):
            self.found[event] += 1


def layered(num_layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(16, 16), *(nn.Linear(16, 16) for _ in range(num_layers - 2)), nn.Linear(16, 3)
    )


def calls(num_layers: int) -> tuple[float, float]:
    """Calls of Python's and of C's functions in a step."""
    counted = Calls()
    run(job(model=layered(num_layers), train_data=DATA, global_batch=8, length=shoal.Steps(100)), counted)
    assert counted.found
    return counted.found["call"] / COUNTED, counted.found["c_call"] / COUNTED


def run(of: shoal.Job, on_step: Callable[..., None], stop: Callable[[], bool] = lambda: False) -> str:
    """Trains, and gives the hash of the weights."""
    plan, mesh = judged(of, shoal.Plan()).plan, alone(torch.device("cpu"))
    engine = build(of, plan, mesh, Options())
    state, _ = engine.load()
    around = Surroundings(lambda text: None, on_step, stop)
    engine.trainer(state, engine.order.num_steps, around, RecordWriter(None)).train()
    engine.close()
    return weights_sha256(dict(engine.model.state_dict()))


def test_a_steady_step_makes_few_calls_however_many_parameters_there_are() -> None:
    """A count, not a time: three layers, and thirty."""
    few, many = calls(3), calls(30)
    assert few[0] <= MOST_PYTHON
    assert few[1] <= MOST_C
    assert abs(few[0] - many[0]) < MOST_BUSY
    assert abs(few[1] - many[1]) < MOST_BUSY


class Begins(nn.Module):
    """Draws nothing until it has been called so often, and then from one of the generators."""

    def __init__(self, draw: Callable[[], Any], after: int) -> None:
        super().__init__()
        self.layer, self.draw, self.after, self.calls = nn.Linear(6, 3), draw, after, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.after:
            self.draw()
        found: Tensor = self.layer(rows)
        return found


def test_a_model_that_begins_to_draw_later_is_found_out() -> None:
    for draw in (lambda: torch.rand(2), random.random, np.random.rand):
        found = trained(job(model=lambda draw=draw: Begins(draw, 5), length=shoal.Steps(12)))
        assert found.state["computation"]["randomness"] != "none"


def test_who_draws_between_two_steps_changes_nothing() -> None:
    """The step after it is computed once more, with a look at both of its ends, and so are those that follow."""
    found, steps = [], 12
    for draws in (False, True):
        computed: list[int] = []

        def loss(model: nn.Module, batch: Any, computed: list[int] = computed) -> tuple[Tensor, Tensor]:
            computed.append(len(batch[0]))
            return shoal.cross_entropy(model(batch[0]), batch[1])

        def stop(draws: bool = draws) -> bool:
            if draws:
                random.random()
            return False

        hashed = run(job(loss=loss, length=shoal.Steps(steps), shuffle=False), lambda *record: None, stop)
        found.append((hashed, len(computed)))
    (quiet, num_quiet), (loud, num_loud) = found
    assert loud == quiet
    assert num_loud == num_quiet + 1


def mean_over_batch(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def test_exact_mode_says_that_a_loss_is_no_sum_over_samples() -> None:
    made = job(model=layered(2), train_data=DATA, loss=mean_over_batch)
    plan = judged(made, shoal.Plan(execution={"exact": True})).plan
    engine = build(made, plan, alone(torch.device("cpu")), Options())
    notes: list[str] = []
    runner = StepRunner(engine, engine.loader, notes.append)
    runner.probe.before_step(runner.fetch(0))
    engine.close()
    assert any("the mean of theirs, and not the sum" in note for note in notes), notes


class Rounding(nn.Module):
    """Keeps a table in a buffer, in the dtype of what it computes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.table.dtype != y.dtype:
            self.table = self.table.to(y.dtype)
        return y * self.table


def test_a_buffer_that_takes_the_dtype_of_the_computation_ends_no_step_in_a_loop() -> None:
    made = job(model=Rounding, train_data=DATA, length=shoal.Steps(2))
    plan = judged(made, shoal.Plan(precision={"compute": "bfloat16"})).plan
    engine = build(made, plan, alone(torch.device("cpu")), Options())
    around = Surroundings(lambda text: None, lambda *record: None, lambda: False)
    outcome = engine.trainer(None, 2, around, RecordWriter(None)).train()
    engine.close()
    assert outcome.state.step == 2
