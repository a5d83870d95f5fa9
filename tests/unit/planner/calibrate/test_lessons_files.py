"""What runs taught is kept for the next plan."""

import json
from pathlib import Path

import pytest

from shoal.errors import RunDirectoryError
from shoal.planner.calibrate.lessons import calibration_file, learn_from, observations, read


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(folder: Path, predicted: float, measured: float, cluster: str | None = "8xH100", steps: int = 40) -> str:
    folder.mkdir()
    found = {
        "cluster": cluster,
        "factors": {},
        "terms": {"compute": predicted},
        "num_steps": steps,
        "step_seconds": {"predicted": predicted, "measured": measured},
        "parts": {"compute": {"predicted": predicted, "measured": measured}},
    }
    (folder / "result.json").write_text(json.dumps({"prediction": found if cluster else None}))
    return str(folder)


def test_learned_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not read("8xH100")
    learn_from([run(tmp_path / "a", 1.0, 1.5), run(tmp_path / "b", 2.0, 3.0)])
    assert read("8xH100").factors == pytest.approx({"compute": 1.5})
    assert not read("here")
    out = capsys.readouterr().out
    assert "8xH100: 2 runs\n" in out
    assert "wrong by 33.3% (median) before, on these runs by 0.0% after" in out


def test_lessons_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn_from([run(tmp_path / "a", 1.0, 1.0)])
    learn_from([run(tmp_path / "b", 1.0, 2.0), run(tmp_path / "c", 1.0, 3.0)])
    assert "2 runs, with 1 learned from before" in capsys.readouterr().out
    assert read("8xH100").factors == pytest.approx({"compute": 2.0})
    learn_from([str(tmp_path / "c")])  # the same run counts once
    assert len(observations("8xH100")) == 3


def test_a_run_on_another_kind_of_device_teaches_nothing(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 1.0, 1.0)
    result = Path(folder) / "result.json"
    document = json.loads(result.read_text())
    document["prediction"]["device_kind"] = {"predicted": "gpu", "measured": "cpu"}
    result.write_text(json.dumps(document))
    with pytest.raises(RunDirectoryError, match=r"for 8xH100, a cluster of gpus, and it ran on a cpu"):
        learn_from([folder])
    assert not observations("8xH100")


def test_a_few_steps_teach_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"9 steps .* fewer than 10"):
        learn_from([run(tmp_path / "a", 1.0, 1.0, steps=9)])


def test_a_run_without_a_prediction(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no prediction"):
        learn_from([run(tmp_path / "a", 1.0, 1.0, cluster=None)])
    with pytest.raises(RunDirectoryError, match=r"no result\.json"):
        learn_from([str(tmp_path / "nowhere")])


def test_a_damaged_file_corrects_nothing(tmp_path: Path) -> None:
    path = calibration_file("8xH100")
    path.parent.mkdir(parents=True)
    path.write_text("not toml")
    assert not read("8xH100")
