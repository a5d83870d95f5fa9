"""Steps that a graph replays: the course of steps that are queued one operation after the other, bit for bit.

The graph is the CPU's stand-in (`tests/jobs/replayed.py`), which runs nothing of Python in a replay.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.jobs.read_late import DATA, STEPS, Course, job, trained, waiting
from tests.jobs.replayed import Replays, replaying
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.distributed.mesh import alone
from shoal.numerics import captured_draws
from shoal.plans.plan import Plan
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import RunControl
from shoal.training.loop.captured_step import StepGraph
from shoal.training.observe.metering import MEASURED_STEPS, StepMeter

PLAN = Plan().with_sections(execution={"cuda_graph": True})
ROWS = DATA.tensors[0]
SAID = "execution.cuda_graph"


def both(made: dict[str, Any], plan: Plan = PLAN, **how: Any) -> tuple[Course, Course, Counter[str]]:
    """The courses without a graph and with one, and what was called of the recorder."""
    folder = how.pop("folder", None)
    makes, observer = how.pop("makes", ()), how.pop("observer", None)
    long_step = how.pop("long_step_seconds", math.inf)
    found = []
    for name, own in (("queued", plan.with_sections(execution={"cuda_graph": False})), ("captured", plan)):
        options = {**how, "callbacks": [make() for make in makes]}
        if observer is not None:
            options["observer"] = observer()
        with waiting(late=True, long_step_seconds=long_step), replaying() as counted:
            found.append(trained(job(**made), own, folder=folder and folder / name, **options))
    return found[0], found[1], counted


def said_of_graph(course: Course) -> list[str]:
    return [note for note in course.notes if note.startswith(SAID)]


def same(course: Course) -> tuple[Any, ...]:
    """All that has to be the same, with or without a graph."""
    notes = [note for note in course.notes if not note.startswith(SAID)]
    return course.weights, course.state, course.records, notes, course.error


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))


class LeNet(nn.Module):
    """LeNet's layers in small, with dropout of channels and of features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.drop, self.hidden, self.head = nn.Dropout2d(0.25), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = self.drop(F.relu(self.second(x)))
        x = F.dropout(F.relu(self.hidden(x.flatten(1))), 0.5, self.training)
        return self.head(x)


IMAGES = TensorDataset(torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(4)), torch.arange(64) % 3)


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:1], "lr": 0.25}, {"params": parameters[1:], "weight_decay": 0.125}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.5, nesterov=True)


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "clipped by value": {"clip_value": 0.01},
    "batch statistics, dropout, AdamW": {"model": normed, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
    "LeNet with dropout, clipping, momentum": {"model": LeNet, "train_data": IMAGES, "clip_norm": 1.0},
    "LeNet with dropout, AdamW, a schedule": {
        "model": LeNet,
        "train_data": IMAGES,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.125),
        "schedule": lambda progress: 0.5**progress.step,
    },
    "a schedule of two groups": {"optimizer": two_groups, "schedule": lambda progress: 0.75**progress.step},
    "a scheduler of torch": {
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.25),
        "schedule": shoal.Schedule(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    },
    "a loss of numbers": {"loss": lambda m, b: (m(b[0]).square().sum(), len(b[1]))},
    "mse": {"loss": lambda m, b: shoal.mse(m(b[0]), b[0][:, :3])},
    "no momentum": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_replayed_step_is_the_step_that_is_queued(name: str) -> None:
    """Weights, records and state; all steps but the first are replayed, and not one number is read in a steady one."""
    queued, captured, counted = both(JOBS[name], counts_reads=True)
    assert same(captured) == same(queued)
    assert captured.error == ""
    # One more replay than steps is the trial.
    assert counted == {"warm_up": 3, "record": 1, "replay": 1 + STEPS - 1}, captured.notes
    assert said_of_graph(captured) == [f"{SAID}: steps are replayed from step 2 on"]
    assert sum(captured.reads.values()) == 0, captured.reads


def test_it_begins_after_the_steps_that_are_measured() -> None:
    """As in each `shoal run`, whose first steps are looked at."""
    queued, captured, counted = both({}, observer=StepMeter)
    assert same(captured) == same(queued)
    assert said_of_graph(captured) == [f"{SAID}: steps are replayed from step {MEASURED_STEPS + 1} on"]
    assert counted == {"warm_up": 3, "record": 1, "replay": 1 + STEPS - MEASURED_STEPS}


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_narrow_compute_and_a_fixed_loss_scale(compute: str) -> None:
    narrow = PLAN.with_sections(precision={"compute": compute, "loss_scale": 100.0 if compute == "float16" else "none"})
    queued, captured, counted = both({"model": normed}, narrow)
    assert same(captured) == same(queued)
    assert counted["replay"] == STEPS


@pytest.mark.parametrize("name", ["plain", "LeNet with dropout, AdamW, a schedule"])
def test_a_step_of_several_microbatches_is_one_graph(name: str) -> None:
    per = PLAN.with_sections(batch={"grains_per_microbatch": 2})
    queued, captured, counted = both(JOBS[name], per, counts_reads=True)
    assert same(captured) == same(queued)
    assert counted == {"warm_up": 3, "record": 1, "replay": STEPS}, captured.notes
    assert sum(captured.reads.values()) == 0, captured.reads


def test_grains_that_share_no_forward() -> None:
    queued, captured, counted = both({"fuse": False})
    assert same(captured) == same(queued)
    assert counted["replay"] == STEPS


def test_a_loss_scale_falls_and_grows_without_another_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.numerics.precision._GROWTH_STEPS", 4)
    plan = PLAN.with_sections(precision={"compute": "float16", "loss_scale": "dynamic"})
    queued, captured, counted = both({"length": shoal.Steps(20)}, plan)
    assert same(captured) == same(queued)
    assert len({record["loss_scale"] for record in captured.records}) > 2
    assert counted["record"] == 1
    assert counted["replay"] > 2


def test_a_short_last_batch_is_queued_without_the_graph() -> None:
    """Of 64 samples 12 a step: the last of each pass has 4; the graph goes on after it."""
    made = {"model": normed, "global_batch": 12, "length": shoal.Steps(18)}
    queued, captured, counted = both(made)
    assert same(captured) == same(queued)
    assert {record["num_samples"] for record in captured.records} == {12, 4}
    assert counted == {"warm_up": 3, "record": 1, "replay": 1 + 17 - 3}


def spoilt(value: float, row: int) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor]]:
    """A loss to which one sample adds a value."""
    rows: dict[torch.device, Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
        if batch[0].device not in rows:  # brought there once: a graph takes nothing from the host
            rows[batch[0].device] = ROWS[row].to(batch[0].device)
        return total + torch.where((batch[0] == rows[batch[0].device]).all(1), value, 0.0).sum(), weight

    return loss


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(policy: str, tmp_path: Path) -> None:
    """Masked within the graph, and with it the next one; the course goes on as without a graph."""
    made = {
        "loss": spoilt(torch.inf, 35),
        "on_nonfinite": policy,
        "model": normed,
        "shuffle": False,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01),
        "length": shoal.Steps(16),
    }
    queued, captured, counted = both(made, folder=tmp_path, checkpoint_every=100)
    assert same(captured) == same(queued)
    said = captured.error or " ".join(captured.notes)
    assert re.search(r"samples \[[0-9, ]*35", said), said
    # After a rollback the optimizer's state lies elsewhere or not: either way the graph is one of where it lies now.
    assert counted["replay"] > counted["record"] >= 1


def test_evaluations_checkpoints_and_a_callback(tmp_path: Path) -> None:
    class Watches(shoal.Callback):
        """Takes the record alone, and draws from a global generator, whose state is as without a graph."""

        watches_only = True

        def at_once(self, step: int) -> bool:
            return step == 6

        def on_step(self, run: RunControl, record: StepRecord) -> None:
            weights = float(next(run.parameters())[1].double().sum()) if record.step == 6 else None
            run.note(f"{record.step} {record.loss} {weights} {float(torch.rand(())) if record.step == 6 else None}")

    made = {"model": normed, "length": shoal.Steps(12), "eval_data": DATA, "metrics": {"accuracy": shoal.accuracy}}
    queued, captured, counted = both(made, folder=tmp_path, checkpoint_every=5, makes=[Watches])
    assert same(captured) == same(queued)
    # After pauses the graph goes on: it is captured once. Steps 2 to 12 but those that are read before another one.
    # The other graph is that of the evaluations.
    assert counted["record"] == 2
    assert counted["replay"] >= 6
    assert (tmp_path / "captured" / "step-00000005").exists()


def test_rates_of_a_schedule_are_float32_whether_steps_are_captured_or_not() -> None:
    """A graph has them so; a step that is queued without it, as of a run without graphs at all, is the same step."""
    made = {"schedule": lambda progress: 1.0 / (1.0 + progress.samples), "global_batch": 12, "length": shoal.Steps(18)}
    queued, captured, counted = both(made)
    assert counted["replay"] == 15
    assert same(captured) == same(queued)
    rates = [record["learning_rate"] for record in captured.records]
    assert rates == [float(np.float32(rate)) for rate in rates]
    assert len(set(rates)) == 18


class Reading(nn.Linear):
    """Looks at a value in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > 1e9 else x * 1.0)


class Replacing(nn.Module):
    """Puts another tensor in its buffer's place, and not the same one's values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean()
        return self.linear(x)


class Poisson(nn.Linear):
    """Adds numbers of a function that has no form by hash."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.poisson(torch.ones(len(x), 3))


def drawing(draw: Callable[[], float]) -> type[nn.Module]:
    class Draws(nn.Module):
        """Batch statistics, and from the second step on a draw that belongs to no grain."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = normed(), 0

        def forward(self, x: Tensor) -> Tensor:
            found = self.layers(x)
            self.calls += self.training and torch.is_grad_enabled()
            return found * draw() if self.calls >= 2 else found

    return Draws


def odd_batch(samples: list[Any]) -> list[Any]:
    return [torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]), {1, 2}]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer that is not masked": ({"optimizer": lambda p: torch.optim.RMSprop(p, lr=0.01)}, "RMSprop has no"),
    "a chosen kernel": ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)}, "SGD has no kernels"),
    "a model that reads": (
        {"model": lambda: nn.Sequential(Reading(6, 3))},
        "as item(), float() and bool() do: use torch.where, or a mask (in 0, test_captured_step.py:",
    ),
    "a model that draws from Python": (
        {
            "model": drawing(random.random),
            "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01),
            "allow_state": ("calls",),
        },
        "random numbers outside of torch",
    ),
    "buffers that are replaced": ({"model": Replacing}, "other tensors in the place of buffers"),
    "draws that no grain has": (
        {"model": drawing(lambda: float(torch.rand(()))), "fuse": False, "allow_state": ("calls",)},
        "cannot be told apart by grain",
    ),
    "a function without a form by hash": ({"model": lambda: Poisson(6, 3)}, "draws random numbers by poisson"),
    "a shape of values": (
        {"loss": lambda m, b: shoal.cross_entropy(m(b[0][b[1] >= 0]), b[1])},
        "shapes depend on values",
    ),
    "a batch with something else": ({"collate": odd_batch}, "a batch has a set in it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_falls_back_with_the_reason(name: str) -> None:
    """Once in the notes, and the course is as without the key."""
    made, reason = REFUSED[name]
    queued, captured, counted = both({"length": shoal.Steps(12), **made})
    assert same(captured) == same(queued)
    assert counted["record"] == counted["replay"] == 0
    (told,) = said_of_graph(captured)
    assert reason in told, told


def test_ranks_that_share_a_gpu_have_no_graph() -> None:
    shares = replace(alone(torch.device("cpu")), through_host=True)
    with waiting(late=True), replaying() as counted:
        captured = trained(job(length=shoal.Steps(12)), PLAN, shares)
    assert not counted
    assert "exchange tensors through the host" in said_of_graph(captured)[0]


class Asks(shoal.Callback):
    """May ask for something after each step, and so wants each before the next one."""

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        return


def test_a_callback_that_wants_each_step_leaves_no_graph() -> None:
    queued, captured, counted = both({}, makes=[Asks])
    assert same(captured) == same(queued)
    assert not counted
    assert "a callback wants each step" in said_of_graph(captured)[0]


def test_steps_that_take_long_are_read_at_once_and_the_run_says_so() -> None:
    queued, captured, counted = both({"length": shoal.Steps(12)}, long_step_seconds=-1.0)
    assert same(captured) == same(queued)
    assert not counted
    assert "steps take so long" in said_of_graph(captured)[0]


def lengths(samples: list[Any]) -> list[Tensor]:
    """Samples as long as the longest of them wants."""
    width = 4 + int(max(y for _, y in samples)) if len(samples) < 3 else 6
    return [F.pad(torch.stack([x for x, _ in samples])[:, :width], (0, 6 - width)), *[torch.zeros(width)] * 2]


def test_shapes_that_change_end_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.training.loop.captured_step._MOST_OTHERS", 3)
    made = {
        "collate": lengths,
        "global_batch": 2,
        "grains": 2,
        "length": shoal.Steps(30),
        "loss": lambda m, b: ((m(b[0]) * b[1].numel()).square().sum(), len(b[0])),
    }
    queued, captured, counted = both(made)
    assert same(captured) == same(queued)
    assert counted["record"] == 1
    assert any("of other shapes" in told for told in said_of_graph(captured)), captured.notes


def test_a_schedule_of_other_settings_is_queued_without_the_graph() -> None:
    """OneCycleLR sets the momentum as well, which is a constant of the graph."""
    cycle = shoal.Schedule(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=20)
    queued, captured, counted = both({"schedule": cycle, "length": shoal.Steps(12)})
    assert same(captured) == same(queued)
    assert counted["replay"] == 2  # the trial, and the step of it


def replacing(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A metric that gives each parameter other memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return shoal.accuracy(model, batch)


def test_state_that_is_replaced_is_captured_anew() -> None:
    """Where that goes on and on there is no graph."""
    made = {"length": shoal.Steps(32), "eval_data": DATA, "metrics": {"accuracy": replacing}}
    queued, captured, counted = both(made)
    assert same(captured) == same(queued)
    assert counted["record"] == 4
    assert any("replaced again and again" in told for told in said_of_graph(captured)), captured.notes


# ----------------------------------------------------------------------------- violations that the checks have to see


def test_a_graph_whose_masks_are_others_is_not_used() -> None:
    """Replays whose keys are those of another step."""
    fill = captured_draws._ReplayedKeys.fill

    def others(keys: Any, step: int) -> None:
        fill(keys, step + Replays.counted["record"])

    with waiting(late=True), replaying(), mock.patch.object(captured_draws._ReplayedKeys, "fill", others):
        course = trained(job(model=normed), PLAN)
    with waiting(late=True):
        queued = trained(job(model=normed))
    assert same(course) == same(queued)
    assert "a trial of the graph gave other numbers" in said_of_graph(course)[0]


def unfilled(what: str) -> Callable[..., None]:
    """StepGraph.fill that leaves a part of the step as it was captured."""
    fill = StepGraph.fill

    def stale(self: StepGraph, loaded: Any, scale: Any, masked: Any) -> None:
        before = [leaf.clone() for leaf in self._leaves[0]], self._numbers.clone()
        fill(self, loaded, scale, masked)
        if masked is True:
            return
        if what == "batch":
            for leaf, old in zip(self._leaves[0], before[0], strict=True):
                leaf.copy_(old)
        elif what == "numbers":
            self._numbers.copy_(before[1])
        else:
            self._masked.fill_(False)

    return stale


@pytest.mark.parametrize("what", ["batch", "numbers", "mask"])
def test_the_comparison_sees_what_is_not_filled(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepGraph, "fill", unfilled(what))
    made = {"loss": spoilt(torch.inf, 35), "on_nonfinite": "skip", "shuffle": False, "length": shoal.Steps(16)}
    schedule = {"schedule": lambda progress: 0.5**progress.step}
    queued, captured, _ = both({**made, **schedule})
    assert same(captured) != same(queued)


def test_the_stand_in_runs_no_python_in_a_replay() -> None:
    """A counter in a forward counts warm-ups and the capture, and no replay."""
    calls = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    made = {"model": lambda: Counts(6, 3), "length": shoal.Steps(20)}
    with waiting(late=True):
        trained(job(**made))
    alone = len(calls)
    with waiting(late=True), replaying() as counted:
        trained(job(**made), PLAN)
    assert len(calls) - alone == alone - 19 + 3 + 1
    assert counted["replay"] == 1 + 19
