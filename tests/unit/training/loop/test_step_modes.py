"""Modes of a live training: what a switch changes, that replays have eager's bits, and candidates that fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.jobs.read_late import Course, job, trained, waiting
from tests.jobs.replayed import Replays, replaying
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.distributed.mesh import alone
from shoal.errors import NonFiniteError, PeerError, PlanError, ShoalError, StorageError, UserCodeError
from shoal.parallel.blocks.compiled import Regions
from shoal.plans.plan import Plan
from shoal.runs import step_trial
from shoal.runs.step_trial import CHANNELS_LAST, StepMode, StepTrial, TrialCandidate, read_trial
from shoal.training.loop import step_modes
from shoal.training.loop.captured_step import Body, Recording
from shoal.training.loop.step_modes import RunTrial, StepModes
from shoal.training.setup.preflight import judged

STEPS = 24
LAST = "eager, channels last"


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of three steps, one a warm-up; all modes but eager take half of a second."""
    for name, value in {"WARM_UPS": 1, "LEAST_STEPS": 2, "LEAST_SECONDS": 0.0, "MOST_OF_RUN": 1.0}.items():
        monkeypatch.setattr(step_trial, name, value)
    now, take = 0.0, StepModes.take

    def taken(modes: StepModes, step: int) -> None:
        nonlocal now
        now += 1.0 if modes._mode.name == "eager" else 0.5
        take(modes, step)

    monkeypatch.setattr(StepModes, "take", taken)
    monkeypatch.setattr(step_modes, "seconds_now", lambda: now)


def tried(*names: str, folder: Path | None = None) -> RunTrial:
    trial = StepTrial("eager", "net", STEPS, [TrialCandidate(name) for name in names])
    return RunTrial(trial, plan=folder and folder / "plan.toml", path=folder and folder / "trial.json")


def course(run: RunTrial | None, **changes: Any) -> Course:
    return trained(job(length=shoal.Steps(STEPS), **changes), trial=run)


def test_replayed_steps_have_the_bits_of_eager_ones(tmp_path: Path) -> None:
    run = tried("graph", folder=tmp_path)
    with waiting(late=True), replaying() as counted:
        found, eager = course(run), course(None)
    assert run.trial.chosen == "graph"
    assert counted["record"] == 2, "once in its turn, and once when it was chosen"
    assert counted["replay"] > 10
    assert found.weights == eager.weights
    assert found.records == eager.records
    assert read_trial(tmp_path / "trial.json") == run.trial
    assert "cuda_graph = true" in (tmp_path / "plan.toml").read_text()


class Refusing(Replays):
    """Recorder of which every capture fails."""

    def record(self, body: Body) -> Recording:
        raise RuntimeError("no graph today")


def test_a_step_that_is_not_captured_leaves_the_graph_out() -> None:
    run = tried("graph")
    with waiting(late=True), replaying(Refusing):
        found, eager = course(run), course(None)
    assert run.trial.chosen == "eager"
    assert "no graph today" in run.trial.verdicts["graph"].reason
    assert found.weights == eager.weights


def test_without_a_compiler_compiled_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise PlanError(given="a plan", conflict="this machine has no C++ compiler", remedy="install one")

    monkeypatch.setattr(step_modes, "compile_blocks", refuse)
    run = tried("compiled")
    assert course(run).weights == course(None).weights
    assert run.trial.verdicts["compiled"].reason == "left out: this machine has no C++ compiler"
    assert [turn.mode for turn in run.trial.turns] == ["eager"]


IMAGES = TensorDataset(torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(4)), torch.arange(64) % 3)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3))


def pictured(fails: bool) -> dict[str, Any]:
    """A job of images; its second step with channels last fails."""
    seen: list[None] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if batch[0].stride()[1] == 1 and model.training:
            seen.append(None)
            if fails and len(seen) == 2:
                raise RuntimeError("not with channels last")
        return shoal.cross_entropy(model(batch[0]), batch[1])

    return {"model": net, "train_data": IMAGES, "loss": loss}


def test_a_step_that_fails_in_a_candidate_is_computed_again() -> None:
    run = tried(CHANNELS_LAST)
    found = course(run, **pictured(fails=True))
    assert not found.error
    assert "not with channels last" in run.trial.verdicts[CHANNELS_LAST].reason
    turns = [(turn.mode, turn.after, turn.until) for turn in run.trial.turns]
    assert turns == [("eager", 0, 3), (LAST, 3, 4)]
    assert len(found.records) == STEPS
    again = course(RunTrial(run.trial), **pictured(fails=False))
    assert again.weights == found.weights


def test_the_same_turns_have_the_same_bits_and_evaluations_follow() -> None:
    run = tried(CHANNELS_LAST)
    found = course(run, **pictured(fails=False))
    assert run.trial.chosen == LAST
    assert course(RunTrial(run.trial), **pictured(fails=False)).weights == found.weights
    assert course(None, **pictured(fails=False)).weights != found.weights


def undecided(mesh: Any, run: RunTrial) -> StepModes:
    """The modes of a run that needs nothing but its plan and mesh."""
    late: Any = SimpleNamespace(why_no_graph=None)
    parts: Any = SimpleNamespace(plan=judged(job(), Plan()).plan, mesh=mesh)
    return StepModes(parts, late, late, lambda note: None, run)


def test_a_turn_that_an_earlier_start_has_not_decided_is_repeated(tmp_path: Path) -> None:
    run = tried(CHANNELS_LAST, folder=tmp_path)
    modes = undecided(alone(torch.device("cpu")), run)
    modes.go_to(3)
    assert modes.ends_at == 6
    assert [(turn.mode, turn.after, turn.until) for turn in run.trial.turns] == [("eager", 0, 3), ("eager", 3, 6)]
    assert read_trial(tmp_path / "trial.json") == run.trial


@pytest.mark.parametrize(
    ("error", "everywhere", "kinds"),
    [
        (RuntimeError("of this rank"), False, ()),
        (UserCodeError(given="", conflict="", remedy=""), False, ()),
        (PeerError(given="", conflict="", remedy=""), True, ("UserCodeError", "DataError")),
        (StorageError(given="", conflict="", remedy=""), True, ()),
        (NonFiniteError(given="", conflict="", remedy=""), True, ()),
    ],
    ids=["one rank", "user code of one rank", "data of another rank", "a disk", "a loss"],
)
def test_no_error_but_a_modes_own_on_every_rank_leaves_a_candidate_out(
    error: Exception, everywhere: bool, kinds: tuple[str, ...]
) -> None:
    """The mesh has no collectives: a call of one would fail."""
    run = tried(CHANNELS_LAST)
    modes = undecided(SimpleNamespace(world_size=2), run)
    run.trial.decide(1.0)
    modes._mode = StepMode.named(LAST)
    if isinstance(error, ShoalError):
        error.everywhere, error.kinds = everywhere, frozenset(kinds)
    assert not modes.refuses(error, 4)
    assert run.trial.candidates


def test_a_metric_that_fails_in_a_candidates_turn_ends_the_run() -> None:
    def broken(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no metric today")

    run = tried(CHANNELS_LAST)
    found = course(run, **pictured(fails=False), eval_data=IMAGES, metrics={"broken": broken})
    assert "no metric today" in found.error
    assert CHANNELS_LAST not in run.trial.verdicts


def test_compiled_steps_of_which_nothing_was_compiled_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_modes, "compile_blocks", lambda *given, **more: Regions())
    run = tried("compiled")
    assert course(run).weights == course(None).weights
    assert run.trial.verdicts["compiled"].reason == "left out: torch compiles no part of the model"
    assert run.trial.chosen == "eager"


def test_the_plan_has_a_prediction_in_its_first_mode_only() -> None:
    modes = undecided(alone(torch.device("cpu")), tried(CHANNELS_LAST))
    modes._parts.plan = predicted = modes._parts.plan.model_copy(update={"prediction": {"terms": {}}})  # type: ignore[misc]
    assert modes.plan == predicted
    modes._mode = StepMode.named(LAST)
    assert modes.plan.prediction == {}
    assert modes.plan.execution.channels_last
