"""Records of a Session: what report, watch and doctor read in the directory of its checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.test_session import BATCH, EPOCHS, STEPS_AN_EPOCH, Told, cross_entropy, dataset, in_ranks, network

import shoal
from shoal.cli.main import main
from shoal.errors import RunDirectoryError
from shoal.runs.directory import RunDirectory
from shoal.runs.run_files import read_run
from shoal.training.observe.step_records import RecordWriter
from shoal.training.session import recording

pytestmark = pytest.mark.ranks


def trained(
    folder: Path, epochs: int = EPOCHS, leaves_at: int = 0, fails_at: int = 0, fails_after: int = 0, **changes: Any
) -> Told:
    """Train a loop, and return the loss of each of its steps."""
    losses = []
    with shoal.Session(
        global_batch=BATCH, grains=4, checkpoints=folder, **{"checkpoint_every": 3, **changes}
    ) as session:
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in session.steps(dataset(), epochs=epochs):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
                if step.number == fails_at:
                    raise ZeroDivisionError
            losses.append(step.loss)
            if step.number == fails_after:
                raise ZeroDivisionError
            if step.number == leaves_at:
                break
    return {"losses": losses}


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_step_has_a_record(world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    (told, *_) = in_ranks(world_size, lambda: trained(folder), tmp_path / "ranks")
    found = read_run(folder)
    assert [record.step for record in found.records] == list(range(1, EPOCHS * STEPS_AN_EPOCH + 1))
    assert [record.loss for record in found.records] == told["losses"]
    assert [record.epoch for record in found.records] == [0] * STEPS_AN_EPOCH + [1] * STEPS_AN_EPOCH
    assert all(record.spans["forward"] > 0 and record.spans["optimizer"] > 0 for record in found.records)
    assert all(record.samples == BATCH * record.step for record in found.records)
    assert (found.result["status"], found.result["world_size"]) == ("completed", world_size)
    assert [record.step for record in found.records if record.spans["checkpoint"] > 0] == [4, 7]  # saved as they begin
    if world_size > 1:  # the last step's measures have no meeting after them but the one at the end
        assert all("busy_seconds" in record.ranks for record in found.records)
    for command in ("report", "watch", "doctor"):
        assert main([command, str(folder)]) == 0
    said = capsys.readouterr().out
    assert "completed after step 8" in said
    assert "step 8/8" in said


def test_a_resume_replaces_the_records_of_steps_after_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = trained(tmp_path / "whole")["losses"]
    assert trained(folder, leaves_at=5)["losses"] == whole[:5]
    assert read_run(folder).result["status"] == "preempted"
    newest = max(folder.glob("step-*"))  # the next run begins from the one before it, as if it was damaged
    (newest / "manifest.json").write_text("")
    with pytest.warns(RuntimeWarning, match="step 5"):
        assert trained(folder, resume=True)["losses"] == whole[3:]
    found = read_run(folder)
    assert [record.loss for record in found.records] == whole
    assert [attempt.resumed_from for attempt in found.attempts] == [None, 3]
    assert [undone.steps for undone in found.attempts[1].undone] == [2]


def test_an_error_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, fails_at=3)
    found = read_run(tmp_path)
    assert (len(found.records), found.attempts[0].step) == (2, 2)
    assert found.result["status"] == "failed"


def test_an_error_between_two_passes_is_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, fails_after=2)
    found = read_run(tmp_path)
    assert (found.result["status"], found.attempts[0].status) == ("failed", "failed")
    assert [record.step for record in found.records] == [1, 2]


def test_an_evaluation_after_the_loop_is_in_the_result(tmp_path: Path) -> None:
    with shoal.Session(global_batch=BATCH, grains=4, checkpoints=tmp_path) as session:
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(dataset()):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
        values, _ = session.evaluate(dataset(), {"loss": lambda model, batch: cross_entropy(model, batch)})
    found = read_run(tmp_path)
    assert found.result["metrics"] == values
    assert found.result["status"] == "completed"
    assert (tmp_path / "source" / "command.json").exists()


def test_records_of_a_session_become_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = functools.partial(RecordWriter, whole_steps=2)
    monkeypatch.setattr(recording, "RecordWriter", write)
    trained(tmp_path, checkpoint_every=5)
    # The checkpoint of step 5 is written before step 6, whose record has its time.
    assert [(record.first, record.step) for record in read_run(tmp_path).records] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 8),
    ]


def test_without_checkpoints_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with shoal.Session(global_batch=BATCH, grains=4) as session:
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(dataset()):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_of_a_job_does_not_go_on_there(resume: bool, tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"shoal\.Session") as caught:
        RunDirectory(tmp_path / "run").check(resume)
    assert "resume=True" in caught.value.remedy
