"""Jobs from TrainingArguments beside the real `transformers.Trainer`, and with its datasets and collators."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching import JOBS, Ended, Run, run, run_all, start_command
from tests.usual import parametrize

import shoal

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Relative, of float32: a step rounds every sum of about a hundred terms anew, in another order than the Trainer's.
STEPS, TERMS = 6, 100
TOLERANCE = STEPS * TERMS * 2.0**-24

TRAINER = """
import json, sys
import torch
sys.path.insert(0, {folder!r})
import arguments
from transformers import Trainer

model, collate, changes = arguments.CASES[{case!r}]
model = model()
written = arguments.written(**changes, output_dir="trainer")
trainer = Trainer(model=model, args=written, train_dataset=arguments.texts(), data_collator=collate)
trainer.train()
log = [entry for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps({{
    "losses": [entry["loss"] for entry in log],
    "norms": [entry["grad_norm"] for entry in log],
    "rates": [entry["learning_rate"] for entry in log],
}}))
torch.save(model.state_dict(), "trainer.pt")
"""


def of_trainer(case: str, folder: Path) -> dict[str, Any]:
    (folder / "trainer.py").write_text(TRAINER.format(folder=str(JOBS), case=case), encoding="utf-8")
    command = [sys.executable, "trainer.py"]
    with start_command(command, folder / "none", ONE_THREAD, cwd=folder, fresh=True) as started:
        ended = started.wait(100.0).expect(0)
    line = next(line for line in ended.stdout.splitlines() if line.startswith('{"losses"'))
    found: dict[str, Any] = json.loads(line)
    return found


def trained(out: Path, devices: int = 1, function: str = "job", /, **settings: Any) -> Run:
    return Run(f"{JOBS / 'arguments.py'}:{function}", out, devices, settings=settings, environment=ONE_THREAD)


@parametrize("case", ["next token", "smoothed", "classes", "numbers", "several labels"])
def test_as_the_trainer(case: str, tmp_path: Path) -> None:
    """Losses, norms, rates and weights, step by step, of two epochs whose last steps are short."""
    theirs = of_trainer(case, tmp_path)
    ours = run(trained(tmp_path / "run", 2, case=case)).expect(0)
    assert len(ours.records) == STEPS
    for name, key in (("losses", "loss"), ("norms", "grad_norm"), ("rates", "learning_rate")):
        assert [record[key] for record in ours.records] == pytest.approx(theirs[name], rel=TOLERANCE, abs=1e-12), name
    weights = shoal.load(ours.out)
    for name, value in torch.load(tmp_path / "trainer.pt", weights_only=True).items():
        if name.endswith(
            "key.bias"
        ):  # no loss depends on it: its gradient is rounding alone, which Adafactor scales up
            continue
        torch.testing.assert_close(weights[name], value, rtol=TOLERANCE, atol=1e-5)


def test_the_number_of_devices_is_a_number(tmp_path: Path) -> None:
    """Written for two: sixteen samples a step, on one process or three the same bits."""
    calls = [trained(tmp_path / str(n), n, devices=2) for n in (1, 3)]
    for call in calls:
        call.exact = True
    ended = [one.expect(0) for one in run_all(calls)]
    assert len({one.result["weights_sha256"] for one in ended}) == 1
    assert ended[0].records[0]["num_samples"] == 16


def test_what_is_not_in_the_job_is_told_once(tmp_path: Path) -> None:
    ended = run(trained(tmp_path / "run", 2)).expect(0)
    assert ended.output.count("TrainingArguments in the job: ") == 1
    assert "save_strategy (--checkpoint-every)" in ended.output


def resumed(first: Ended, epochs: int) -> Run:
    call = trained(first.out, 1, epochs=epochs)
    call.arguments = ("--resume",)
    return call


def test_more_epochs_of_such_a_job(tmp_path: Path) -> None:
    """The arguments make another job for another length; of it nothing but the length differs."""
    first = run(trained(tmp_path / "run", 1, epochs=1)).expect(0)
    longer = run(resumed(first, 2)).expect(0)
    assert "of the job they change nothing but how long" in longer.stdout
    assert "not as 2 epochs at once" in longer.stdout


def test_a_dataset_and_a_collator_of_hugging_face(tmp_path: Path) -> None:
    """Read by item on one and two processes, its text column left out."""
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    one, two = (run(trained(tmp_path / str(n), n, "of_datasets")).expect(0) for n in (1, 2))
    assert one.result["steps"] == two.result["steps"] == STEPS
    assert one.records[-1]["loss"] == pytest.approx(two.records[-1]["loss"], rel=TOLERANCE)
