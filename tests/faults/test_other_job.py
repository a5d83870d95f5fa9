"""Ranks, and a resumed run, whose job is not the same: refused before the first step, naming what differs and where."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.test_joining import free_port
from tests.launching import JOBS, Ended, Run, run, start
from tests.usual import parametrize

pytestmark = pytest.mark.faults

# Names, numbers and shapes are the same on all ranks.
SOURCE = """
import os, sys
sys.path.insert(0, {folder!r})
import tiny
from beside import scaled

OTHER = os.environ.get("RANK") == os.environ.get("OTHER_RANK", "none")


def model():
    return tiny.nn.Sequential(tiny.nn.Linear(6, 16), tiny.nn.Dropout({dropout}), tiny.nn.Linear(16, 3))


def data():
    return tiny.vectors(203, {seed})


def job(steps: int = {steps}):
    return tiny.mlp(steps=steps, model=model, train_data=data, loss=scaled)
"""
BESIDE = """
import tiny


def scaled(model, batch):
    total, weight = tiny.classify(model, batch)
    return total * {factor}, weight
"""
USUAL = {"dropout": "0.1", "seed": "1", "steps": "16", "folder": str(JOBS)}


def written(folder: Path, factor: str = "1.0", **changes: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text(BESIDE.format(factor=factor), encoding="utf-8")
    path = folder / "mine.py"
    path.write_text(SOURCE.format(**{**USUAL, **changes}), encoding="utf-8")
    return path


@parametrize(
    ("changes", "named"),
    [
        ({"dropout": "0.5 if OTHER else 0.1"}, "the model's structure"),
        ({"seed": "2 if OTHER else 1"}, "some samples of train_data"),
    ],
    ids=["dropout", "data"],
)
def test_ranks_with_another_model_or_other_data(changes: dict[str, str], named: str, tmp_path: Path) -> None:
    variables = {"OTHER_RANK": "1"}
    ended = run(Run(written(tmp_path / "job", **changes), tmp_path / "run", 2, environment=variables)).fails(2)
    assert "rank 1 on" in ended.stderr
    assert named in ended.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def begun(folder: Path, out: Path) -> Ended:
    return run(Run(written(folder), out, 1, arguments=("--steps", "4", "--checkpoint-every", "2"))).expect(0)


def resumed(job: Path, out: Path, *arguments: str) -> Ended:
    return run(Run(job, out, 1, arguments=("--resume", "--steps", "6", *arguments)))


@parametrize(
    ("changes", "place"),
    [({"dropout": "0.2"}, "the job file: model"), ({"factor": "2.0"}, "beside.py: scaled")],
    ids=["job file", "beside it"],
)
def test_a_resume_with_other_code(changes: dict[str, str], place: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "job", tmp_path / "run"
    begun(folder, out)
    path = written(folder, **changes)
    refused = resumed(path, out).fails(2)
    assert f"other code in {place}" in refused.stderr
    assert "--accept-changes" in refused.stderr
    accepted = resumed(path, out, "--accept-changes").expect(0)
    assert f"the job was changed, as accepted: other code in {place}" in accepted.stdout
    assert (accepted.result["resumed_from"], accepted.result["steps"]) == (4, 6)
    resumed(path, out).expect(0)  # it is the run's own now


def test_a_resume_over_other_data_and_files(tmp_path: Path) -> None:
    """Its code and its settings are those of the run."""
    folder, out = tmp_path / "job", tmp_path / "run"
    path = written(folder, dropout="RATE", seed="int(os.environ['SEED'])")
    (folder / "rate.json").write_text("0.1", encoding="utf-8")
    reads = "import json, os, sys\nRATE = json.load(open(os.path.join(os.path.dirname(__file__), 'rate.json')))"
    path.write_text(path.read_text(encoding="utf-8").replace("import os, sys", reads), encoding="utf-8")

    def resumed_with(seed: str) -> Ended:
        return run(Run(path, out, 1, arguments=("--resume", "--steps", "4"), environment={"SEED": seed}))

    run(Run(path, out, 1, arguments=("--steps", "2"), environment={"SEED": "1"})).expect(0)
    (folder / "rate.json").write_text("0.2", encoding="utf-8")
    refused = resumed_with("2").fails(2)
    assert "another rate.json, which the job reads" in refused.stderr
    assert "other samples in train_data" in refused.stderr
    (folder / "rate.json").write_text("0.1", encoding="utf-8")
    resumed_with("1").expect(0)


def test_a_resume_with_comments_and_another_length(tmp_path: Path) -> None:
    folder, out = tmp_path / "job", tmp_path / "run"
    begun(folder, out)
    path = written(folder)
    text = path.read_text(encoding="utf-8").replace("def data():", 'def data():\n    """The data."""  # of old\n')
    path.write_text(text, encoding="utf-8")
    resumed(path, out).expect(0)


def test_a_resume_whose_job_json_is_damaged(tmp_path: Path) -> None:
    folder, out = tmp_path / "job", tmp_path / "run"
    begun(folder, out)
    (out / "job.json").write_text("{", encoding="utf-8")
    refused = resumed(written(folder), out).fails(74)
    assert "job.json is damaged" in refused.stderr
    resumed(written(folder), out, "--accept-changes").expect(0)


@parametrize("option", ["--check-replicas", "--bad-samples"], usual=["--check-replicas"])
def test_ranks_with_another_option(option: str, tmp_path: Path) -> None:
    """They would meet in collectives of different steps, or read other samples."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    job = written(tmp_path / "job")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start(Run(job, tmp_path / "run", None, arguments=own, environment={**variables, "RANK": rank}))
            )
            for rank, own in (("0", ()), ("1", (option, "3")))
        ]
        ends = [rank.wait(60.0).fails(2) for rank in ranks]
    assert f"{option} = 3" in ends[0].stderr
