"""Callbacks of a Session: one result on one and two processes, requests of one rank, failures, and resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.test_session import BATCH, EPOCHS, STEPS_AN_EPOCH, Told, cross_entropy, dataset, in_ranks, network

import shoal
from shoal.errors import JobError, UserCodeError

pytestmark = pytest.mark.ranks

STEPS = EPOCHS * STEPS_AN_EPOCH


class Noting(shoal.Callback):
    """Notes each call, and requests something after certain steps on one rank."""

    def __init__(self, asks: Mapping[int, str] | None = None, rank: int = 0) -> None:
        self.asks, self.rank, self.seen, self.calls = dict(asks or {}), rank, 0, list[Any]()

    def on_start(self, run: Any) -> None:
        self.calls.append(["start", run.step, self.seen, run.num_steps, run.metric_names])

    def on_step(self, run: Any, record: Any) -> None:
        self.seen += 1
        torch.rand(3)  # changes nothing
        self.calls.append(["step", run.step, record.loss, record.samples])
        what = self.asks.get(run.step, "")
        if what and run.rank == self.rank:
            getattr(run, f"request_{what}")(*(["enough"] if what == "end" else []))

    def on_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        whole = run.whole_model()
        weights = shoal.weights_sha256(whole.state_dict()) if whole is not None else None
        self.calls.append(["evaluation", run.step, dict(metrics), weights])

    def on_checkpoint(self, run: Any, folder: Path) -> None:
        self.calls.append(["checkpoint", run.step, folder.name])

    def on_end(self, run: Any, ending: Any) -> None:
        self.calls.append(["end", ending.status, ending.step, ending.reason, sorted(ending.metrics)])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def trained(
    folder: Path | None, callbacks: Sequence[shoal.Callback], *, every: int = 2, stop: int = 0, **changes: Any
) -> Told:
    """Train the network, and evaluate every so many steps and after the loop."""
    settings = {"global_batch": BATCH, "grains": 4, "exact": True, "checkpoints": folder, "callbacks": callbacks}
    losses = []
    model = network()
    with shoal.Session(**{**settings, **changes}) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        metrics = {"accuracy": shoal.accuracy, "loss": cross_entropy}
        for step in session.steps(dataset(), epochs=EPOCHS):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
            losses.append(step.loss)
            if step.number % every == 0:
                session.evaluate(dataset(20), metrics)
            if step.number == stop:
                break
        else:
            session.evaluate(dataset(20), metrics)
    return {"losses": losses, "weights": shoal.weights_sha256(model.state_dict())}


def everything(folder: Path) -> Told:
    noting = Noting({3: "checkpoint"}, rank=1)
    callbacks = [
        noting,
        shoal.EMA(0.9),
        shoal.EarlyStopping("ema_loss", patience=3),
        shoal.KeepBest("accuracy", mode="max"),
    ]
    told = trained(folder, callbacks)
    average = shoal.load(folder, network(), ema=True) if noting.calls[-1][1] == "completed" else network()
    return {**told, "calls": noting.calls, "average": shoal.weights_sha256(average.state_dict())}


def test_one_result_on_any_number_of_processes(tmp_path: Path) -> None:
    (one,) = in_ranks(1, lambda: json.loads(json.dumps(everything(tmp_path / "one"))), tmp_path / "ranks")
    first, second = in_ranks(2, lambda: everything(tmp_path / "two"), tmp_path / "ranks")
    assert {**first, "calls": None} == {**one, "calls": None} == {**second, "calls": None}
    # A request of rank 1 alone, which one process does not have.
    assert [call for call in first["calls"] if call[0] != "checkpoint"] == [
        call for call in one["calls"] if call[0] != "checkpoint"
    ]
    assert [call[:2] for call in first["calls"]] == [call[:2] for call in second["calls"]]
    assert [call[:2] for call in first["calls"]] == [
        ["start", 0],
        ["step", 1],
        ["step", 2],
        ["evaluation", 2],
        ["checkpoint", 2],
        ["step", 3],
        ["checkpoint", 3],
        ["step", 4],
        ["evaluation", 4],
        ["step", 5],
        ["step", 6],
        ["evaluation", 6],
        ["step", 7],
        ["step", 8],
        ["evaluation", 8],
        ["checkpoint", 8],
        ["evaluation", 8],
        ["end", "completed"],
    ]
    assert (tmp_path / "two" / "best").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_request_ends_the_loop_and_a_watcher_gets_its_metric(world_size: int, tmp_path: Path) -> None:
    def train(folder: Path, *callbacks: shoal.Callback, every: int = 2) -> Told:
        noting = Noting({5: "end"}, rank=world_size - 1)
        return {**trained(folder, [noting, *callbacks], every=every), "calls": noting.calls}

    told = in_ranks(world_size, lambda: train(tmp_path / "run"), tmp_path / "ranks")
    plain = trained(None, [])
    for own in told:
        assert own["losses"] == plain["losses"][:5]
        assert own["calls"][-1][:4] == ["end", "completed", 5, "enough"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("completed", 5)
    assert result["ended_by"] == {"callback": "Noting", "reason": "enough", "step": 5}
    early = shoal.EarlyStopping("accuracy", patience=1, min_delta=1.0, mode="max")
    (one,) = in_ranks(1, lambda: trained(None, [early]), tmp_path / "one")
    assert len(one["losses"]) == 4


def test_a_resume_goes_on_with_the_states(tmp_path: Path) -> None:
    whole = everything(tmp_path / "whole")
    trained(tmp_path / "run", [Noting(), shoal.EMA(0.9)], stop=5)
    noting = Noting()

    def rest() -> Told:
        told = trained(tmp_path / "run", [noting, shoal.EMA(0.9)], resume=True)
        return {**told, "calls": noting.calls}

    first, _ = in_ranks(2, rest, tmp_path / "ranks")
    assert first["weights"] == whole["weights"]
    assert first["calls"][0] == ["start", 5, 5, STEPS, []]
    average = shoal.load(tmp_path / "run", network(), ema=True)
    assert shoal.weights_sha256(average.state_dict()) == whole["average"]


class Raising(shoal.Callback):
    def __init__(self, rank: int, required: bool) -> None:
        self.rank, self.required = rank, required

    def on_step(self, run: Any, record: Any) -> None:
        if run.rank == self.rank and run.step >= 3:
            raise ValueError("no such file")


class Meddling(shoal.Callback):
    def on_step(self, run: Any, record: Any) -> None:
        next(iter(run.model.parameters())).mul_(0.5)


class Evaluating(shoal.Callback):
    required = True

    def on_step(self, run: Any, record: Any) -> None:
        run.request_evaluation()


def test_a_failed_callback_is_switched_off_on_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = in_ranks(2, lambda: trained(None, [Raising(1, required=False)]), tmp_path / "ranks")
    assert told[0]["losses"] == trained(None, [])["losses"]
    said = capfd.readouterr().err
    assert said.count("callback Raising raised in on_step after step 3 on rank 1") == 1
    assert "it is switched off on all ranks" in said


def test_a_required_callback_ends_the_loop_of_all_ranks(tmp_path: Path) -> None:
    def train() -> Told:
        with pytest.raises(UserCodeError, match="callback Raising; its on_step raised ValueError"):
            trained(tmp_path / "run", [Raising(0, required=True)])
        return {}

    in_ranks(1, train, tmp_path / "one")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("failed", 3)
    assert max((tmp_path / "run").glob("step-*")).name.endswith("3"), "the last finished step is saved"


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Meddling(), "callback Meddling, whose on_step changes 0.weight"),
        (Evaluating(), "a loop of your own evaluates"),
        (shoal.KeepBest("loss"), "KeepBest without checkpoints"),
        (shoal.EMA, "a callback is an object with hooks"),
    ],
)
def test_what_a_callback_cannot_do_here(callback: Any, words: str) -> None:
    with pytest.raises((JobError, UserCodeError), match=words):
        trained(None, [callback])


@pytest.mark.parametrize("within", [False, True])
def test_an_error_of_the_loop_is_a_failed_end(within: bool) -> None:
    noting = Noting()

    def train(session: shoal.Session) -> None:
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(dataset()):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
                if step.number == 3 and within:
                    raise ZeroDivisionError
            if step.number == 2 and not within:
                raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        shoal.Session(global_batch=BATCH, grains=4, callbacks=[noting]) as session,
    ):
        train(session)
    assert noting.calls[-1][:3] == ["end", "failed", 2]


TRACKIO = """
import json

class Run:
    def log(self, values, step=None):
        with open({path!r}, "a") as file:
            print(json.dumps([step, values]), file=file)

    def finish(self):
        self.log("finished")

def init(**settings):
    return Run()
"""


def test_a_tracker_gets_steps_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "logged.jsonl"
    (tmp_path / "trackio.py").write_text(TRACKIO.format(path=str(path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    told, _ = in_ranks(2, lambda: trained(tmp_path / "run", [shoal.track("trackio")]), tmp_path / "ranks")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[step, values["train/loss"]] for step, values in entries if "train/loss" in values] == [
        [number, loss] for number, loss in enumerate(told["losses"], 1)
    ]
    assert [step for step, values in entries if "eval/accuracy" in values] == [2, 4, 6, 8, 8]
    assert entries[-2][1]["result/status"] == "completed"
    assert entries[-1] == [None, "finished"]
