"""Steps that are queued before the one before them is read: no read in a steady step, and the same course."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.jobs.read_late import DATA, STEADY, STEPS, Course, job, trained, waiting
from torch import Tensor, nn

import shoal
from shoal.plans.plan import Plan, PrecisionSection
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import Ending, RunControl
from shoal.training.microbatch.step import FetchedStep, Row, StepRunner, UnreadStep

ROWS = DATA.tensors[0]


def both(**how: Any) -> tuple[Course, Course]:
    """The courses where every step is read at once, and where steps are queued."""
    made = how.pop("job", {})
    found = []
    for late in (False, True):
        folder = how.pop("folder", None)
        callbacks = [make() for make in how.get("makes", ())]
        with waiting(late):
            options = {key: value for key, value in how.items() if key != "makes"}
            if folder is not None:
                options["folder"] = folder / str(late)
                how["folder"] = folder
            found.append(trained(job(**made), callbacks=callbacks, **options))
    return found[0], found[1]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def is_late(course: Course, step: int) -> bool:
    """Whether the step after `step` had begun before that was recorded."""
    return course.order.index(("forward", step + 1)) < course.order.index(("record", step))


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "clipped by value": {"clip_value": 0.01},
    "batch statistics, dropout, AdamW": {"model": normed, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
    "a schedule": {"schedule": lambda progress: 1.0 / (1.0 + progress.samples), "global_batch": 12},
}


@pytest.mark.parametrize("name", JOBS)
def test_no_read_in_a_steady_step(name: str) -> None:
    """One a step where each is read at once; none where the next one is queued first. The same bits as on a host."""
    at_once, late = both(job=JOBS[name], counts_reads=True)
    assert set(at_once.reads) == {"parallel/data/replicated.py _sum"}
    assert sum(at_once.reads.values()) == STEPS - STEADY
    assert sum(late.reads.values()) == 0, late.reads
    assert late.result == at_once.result == trained(job(**JOBS[name])).result
    # All but the first, in which the optimizer makes its state, the last of a pass over the data, and that before each.
    assert sum(is_late(late, step) for step in range(1, STEPS)) >= 4
    assert not any(is_late(at_once, step) for step in range(1, STEPS))


def spoilt(value: float, row: int) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor]]:
    """A loss to which one sample adds a value."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
        return total + torch.where((batch[0] == ROWS[row]).all(1), value, 0.0).sum(), weight

    return loss


def test_a_step_that_is_not_finite_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """Each policy: masked on the device, named with its sample, and the course is the one where it is read at once."""
    for policy in ("skip", "stop", "rollback"):
        wanted = {"loss": spoilt(torch.inf, 35), "on_nonfinite": policy, "model": normed, "shuffle": False}
        at_once, late = both(job=wanted, folder=tmp_path / policy, checkpoint_every=100)
        assert late.result == at_once.result
        said = late.error or " ".join(late.notes)
        assert re.search(r"samples \[[0-9, ]*35", said), said
        assert is_late(late, 2)
        assert "step 2" in said


def test_a_loss_scale_falls_and_grows_as_where_it_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.numerics.precision._GROWTH_STEPS", 4)
    plan = Plan(precision=PrecisionSection(compute="float16", loss_scale="dynamic"))
    at_once, late = both(job={"length": shoal.Steps(20)}, plan=plan)
    scales = [record["loss_scale"] for record in late.records]
    assert late.result == at_once.result
    assert any(a > b for a, b in itertools.pairwise(scales)), scales
    assert any(a < b for a, b in itertools.pairwise(scales)), scales


def masking(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Weightless where the first sample's first number is small."""
    total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
    keep = (batch[0][0, 0] > -0.5).to(total.dtype)
    return total * keep, weight * keep


class Branching(nn.Module):
    """A part of it has gradients in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + (self.second(x) if float(x[0, 0]) > 0 else 0.0)


ODD: dict[str, dict[str, Any]] = {
    "without a weight": {"loss": masking, "global_batch": 1, "length": shoal.Steps(20)},
    "other parameters": {"model": Branching, "global_batch": 1, "length": shoal.Steps(20)},
    "a gradient of zero": {"loss": lambda m, b: (m(b[0]).sum() * 0.0, len(b[1])), "length": shoal.Steps(20)},
}


@pytest.mark.parametrize("name", ODD)
def test_a_step_that_the_host_has_to_look_at(name: str) -> None:
    at_once, late = both(job=ODD[name])
    assert late.result == at_once.result
    assert len(late.records) == 20


def failing(step: int) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor]]:
    """A loss that raises once, in the forward of that step; 8 of a step's grains are together."""
    calls = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if len(batch[1]) == 16 and torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == step:
                raise ValueError("once")
        return shoal.cross_entropy(model(batch[0]), batch[1])

    return loss


def constant_from(step: int) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor]]:
    """A loss without a gradient from the forward of that step on; 8 of a step's grains are together."""
    calls = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
        calls.append(len(batch[1]) == 16 and torch.is_grad_enabled())
        return total.detach() if sum(calls) >= step else total, weight

    return loss


def test_a_batch_without_a_gradient_is_an_error_and_trains_nothing() -> None:
    found = []
    for late in (False, True):
        with waiting(late):
            found.append(trained(job(loss=constant_from(6))))
    at_once, late_one = found
    assert "depends on no trainable parameter" in late_one.error
    assert late_one.error == at_once.error
    assert late_one.state["step"] == at_once.state["step"]
    assert late_one.result == at_once.result


def test_an_error_ends_the_run_after_the_last_good_step(tmp_path: Path) -> None:
    """Also one that would not come again; the state of the step before is saved, as where each is read at once."""
    found = []
    for late in (False, True):
        with waiting(late):
            found.append(trained(job(loss=failing(6)), folder=tmp_path / str(late), checkpoint_every=100))
    at_once, late_one = found
    assert "once" in late_one.error
    assert late_one.state["step"] == 5
    assert late_one.result == at_once.result
    saved = [sorted(p.name for p in (tmp_path / str(late)).iterdir()) for late in (False, True)]
    assert saved[0] == saved[1]


def test_a_stop_an_evaluation_and_checkpoints_come_after_the_same_step(tmp_path: Path) -> None:
    wanted = {"length": shoal.Steps(12), "eval_data": DATA, "metrics": {"accuracy": shoal.accuracy}}
    at_once, late = both(job=wanted, folder=tmp_path, checkpoint_every=5, stops=lambda recorded: recorded >= 9)
    assert {**late.state, "step": 0} != {**at_once.state, "step": 1}
    assert late.records[: len(at_once.records)] == at_once.records[: len(late.records)]
    # A request is seen when the next step is queued: by then one step more than recorded is on its way.
    assert at_once.state["step"] <= late.state["step"] <= at_once.state["step"] + 1
    assert (tmp_path / "True" / "step-00000005").exists() == (tmp_path / "False" / "step-00000005").exists()


class Ends(shoal.Callback):
    """Asks for the end after a step, by its weights."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        self.seen.append(float(sum(p.double().sum() for _, p in run.parameters())))
        if record.step == 6:
            run.request_end("enough")

    def on_end(self, run: RunControl, ending: Ending) -> None:
        run.note(f"{ending.status} {ending.step} {self.seen}")


class Watches(shoal.Callback):
    """Takes the record alone."""

    watches_only = True

    def at_once(self, step: int) -> bool:
        return step == 6

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        if record.step == 6:
            run.note(f"{record.step} {record.loss} {float(next(run.parameters())[1].double().sum())}")
        run.note(f"{run.step} {record.step} {record.loss}")


class Wrong(Watches):
    """Asks for a model that is of another step by then."""

    required = True

    def at_once(self, step: int) -> bool:
        return False


def test_a_callback_that_asks_has_each_step_before_the_next_begins() -> None:
    at_once, late = both(makes=[Ends])
    assert late.result == at_once.result
    assert late.state["step"] == 6
    assert not any(is_late(late, step) for step in range(1, 6))


def test_a_callback_that_watches_gets_records_late_but_right() -> None:
    at_once, late = both(makes=[Watches])
    assert late.result == at_once.result
    assert [is_late(late, step) for step in (3, 4, 5, 6, 7)] == [True, False, True, False, True]
    with waiting(late=True):
        wrong = trained(job(), callbacks=[Wrong()])
    assert "the model is not that of this step any more" in wrong.error, wrong.error


class Unsure(Watches):
    """Cannot say whether it comes at once after a later step."""

    def at_once(self, step: int) -> bool:
        if step == 5:
            raise ValueError("unsure")
        return False


def test_a_callback_whose_at_once_raises_is_named_and_switched_off() -> None:
    with waiting(late=True):
        course = trained(job(), callbacks=[Unsure()])
    assert course.error == ""
    assert course.state["step"] == STEPS
    assert [note for note in course.notes if "Unsure raised in at_once" in note and "switched off" in note], (
        course.notes
    )
    assert is_late(course, 6)


def test_an_error_behind_a_masked_step_leaves_the_state_to_be_saved(tmp_path: Path) -> None:
    """Of a step that was masked and not read yet nothing is left: the error did not come in an update."""
    queue, calls = StepRunner.queue, list[int]()

    def raising(self: StepRunner, fetched: FetchedStep, factor: float, row: Row) -> UnreadStep:
        calls.append(fetched.step)
        if fetched.step == 3:
            raise ValueError("once")
        return queue(self, fetched, factor, row)

    wanted = job(loss=spoilt(torch.inf, 35), on_nonfinite="skip", shuffle=False)
    with waiting(late=True), mock.patch.object(StepRunner, "queue", raising):
        course = trained(wanted, folder=tmp_path, checkpoint_every=100)
    assert calls[-2:] == [2, 3]
    assert course.state["step"] == 2
    assert (tmp_path / "step-00000002").exists()


OTHERS: dict[str, dict[str, Any]] = {
    "an optimizer without a masked step": {"optimizer": lambda p: torch.optim.RMSprop(p, lr=0.01)},
    "a chosen kernel": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)},
    "float64": {
        "model": lambda: nn.Linear(6, 3).double(),
        "loss": lambda m, b: shoal.mse(m(b[0].double()), b[0][:, :3].double()),
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_masked_is_read_at_once(name: str) -> None:
    at_once, late = both(job=OTHERS[name])
    assert late.result == at_once.result
    assert not any(is_late(late, step) for step in range(1, STEPS))


def overwriting(model: nn.Module, batch: Any, earlier: list[Tensor] = []) -> tuple[Tensor, Tensor]:  # noqa: B006
    """A loss whose memory the next forward writes, as that of a CUDA graph of torch.compile."""
    total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
    for one in earlier:
        one.fill_(1e6)
    earlier[:] = [total.detach()]
    return total, weight


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_is_copied_before_the_next_forward_writes_over_it(late: bool) -> None:
    plan = Plan().with_sections(batch={"grains_per_microbatch": 1})
    with waiting(late):
        assert trained(job(grains=4, loss=overwriting), plan).result == trained(job(grains=4), plan).result
