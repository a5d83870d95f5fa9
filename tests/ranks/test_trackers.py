"""Trackers: what a run hands to the real packages, offline, and that one that fails or hangs costs the run nothing."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run
from tests.usual import parametrize

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'hooked.py'}"

# Packages in place of Trackio's, each wrong in its own way.
FAKES = {
    "raises at its import": "raise ImportError('a part of it is missing')",
    "raises": "def init(**settings):\n    raise OSError('the server said no')",
    "exits": "import sys\ndef init(**settings):\n    sys.exit('no key')",
    "hangs": "import time\ndef init(**settings):\n    time.sleep(600)",
    "is killed": "import os, signal\ndef init(**settings):\n    os.kill(os.getpid(), signal.SIGKILL)",
    "hangs at its import": "import time\ntime.sleep(600)",
}
SAID = {
    "raises at its import": "ImportError: a part of it is missing",
    "raises": "OSError: the server said no",
    "exits": "SystemExit: no key",
    "hangs": "it has not taken everything within 1 s of the run's end",
    "is killed": "its process ended with -9",
    "hangs at its import": "it has not taken everything within 1 s of the run's end",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    out = tmp_path_factory.mktemp("plain") / "run"
    return run(Run(f"{JOB}:plain", out, 1, arguments=("--steps", "8"))).expect(0)


@parametrize("kind", FAKES, usual=["raises", "hangs"])
def test_one_that_fails_costs_nothing(kind: str, plain: Ended, tmp_path: Path) -> None:
    (tmp_path / "trackio.py").write_text(FAKES[kind])
    call = Run(f"{JOB}:tracked", tmp_path / "run", 1, environment={"PYTHONPATH": str(tmp_path)})
    ended = run(call).expect(0)
    assert ended.output.count(f"tracker trackio: {SAID[kind]}; the run goes on without it") == 1
    assert ended.result["weights_sha256"] == plain.result["weights_sha256"]


@pytest.mark.slow
def test_only_rank_0_tells_a_tracker(tmp_path: Path) -> None:
    noting = "import os\ndef init(**settings):\n    open('opened.txt', 'a').write('once ')\n    raise OSError('done')\n"
    (tmp_path / "trackio.py").write_text(noting)
    call = Run(f"{JOB}:tracked", tmp_path / "run", 2, environment={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    run(call).expect(0)
    assert (tmp_path / "opened.txt").read_text() == "once "


# -------------------------------------------------------------------------------------------- the packages themselves


def tracked(tmp_path: Path, *tracker: str, **environment: str) -> Path:
    """The directory of a run of eight steps that was ended and resumed, by the plain command."""
    package = tracker[0].partition(":")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'the package {package} is not installed: pip install "shoal[{package}]"')
    out = tmp_path / "first"
    tracks = [argument for name in tracker for argument in ("--track", name)]
    for more in (("--steps", "5"), ("--steps", "8", "--resume")):
        call = Run(f"{JOB}:job", out, 1, False, (*more, *tracks), {"model": "mlp"}, environment, cwd=tmp_path)
        ended = run(call, timeout=150).expect(0)
        assert "the run goes on without it" not in ended.output
    return out


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["", ":elsewhere"])
def test_tensorboard(where: str, tmp_path: Path) -> None:
    out = tracked(tmp_path, f"tensorboard{where}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "elsewhere" / "first" if where else out / "tensorboard"))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(r["step"], pytest.approx(r["loss"], rel=1e-6)) for r in records(out)]
    assert {event.step for event in found.Scalars("eval/accuracy")} == {4, 5, 8}
    text = found.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| settings.model | mlp |" in text
    assert "| plan.layout.data | 1 |" in text
    assert "status: completed" in found.Tensors("result/text_summary")[-1].tensor_proto.string_val[0].decode()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("said", ["by the option", "by the environment"])
def test_mlflow(said: str, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    if said == "by the option":
        out = tracked(tmp_path, f"mlflow:{uri}")
    else:
        out = tracked(
            tmp_path, "mlflow", MLFLOW_TRACKING_URI=uri, MLFLOW_EXPERIMENT_NAME="mine", MLFLOW_RUN_NAME="this"
        )
    with sqlite3.connect(tmp_path / "runs.db") as base:
        (run_id, name, status), *others = base.execute("select run_uuid, name, status from runs").fetchall()
        losses = base.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
        tags = dict(base.execute("select key, value from tags").fetchall())
        experiments = {row[0] for row in base.execute("select name from experiments")}
    base.close()
    assert not others, "a resume goes on with the same run"
    assert (name, status) == ("first" if said == "by the option" else "this", "FINISHED")
    assert ("shoal" if said == "by the option" else "mine") in experiments
    assert losses == [(r["step"], pytest.approx(r["loss"])) for r in records(out)]
    assert params["settings.model"] == "mlp"
    assert params["job.global_batch"] == "16"
    assert tags["result.status"] == "completed"
    assert json.loads((out / "trackers.json").read_text()) == {"mlflow": run_id}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wandb(tmp_path: Path) -> None:
    out = tracked(tmp_path, "wandb:digits", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = json.loads((out / "trackers.json").read_text())["wandb"]
    assert [path.name for path in files] == [f"run-{identity}.wandb"] * 2, "a resume goes on with the same run"
    content = b"".join(path.read_bytes() for path in files)
    for text in (b"digits", b"train/loss", b"eval/accuracy", b"settings", b"result/status"):
        assert text in content, text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trackio(tmp_path: Path) -> None:
    out = tracked(tmp_path, "trackio", TRACKIO_PROJECT="mine", TRACKIO_DIR=str(tmp_path / "kept"))
    with sqlite3.connect(tmp_path / "kept" / "mine.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
        config = base.execute("select config from configs").fetchall()[0][0]
    base.close()
    assert {row[0] for row in rows} == {"first"}
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = {step: values["train/loss"] for step, values in found if "train/loss" in values}
    assert losses == {r["step"]: pytest.approx(r["loss"]) for r in records(out)}
    assert any(values.get("result/status") == "completed" for _, values in found)
    assert json.loads(config)["settings.model"] == "mlp"
