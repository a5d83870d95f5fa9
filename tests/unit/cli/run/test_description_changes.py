"""What a resume may change without being asked, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.run.description import accepted_changes, fields_changed
from shoal.errors import JobMismatchError
from shoal.jobs.differences import changed
from shoal.jobs.job_file import JobModule, JobRequest, code, load

pytestmark = pytest.mark.usefixtures("no_other_test")

JOB = """
import shoal

def job(epochs: int = 2, patience: int = 2, delta: float = 0.0) -> shoal.Job:
    return shoal.Job(
        model=print, loss=print, optimizer=print, train_data=[1], eval_data=[1], global_batch=8,
        length=shoal.Epochs(epochs), predict=None,
        callbacks=[shoal.EarlyStopping("loss", patience=patience, min_delta=delta), shoal.EMA(0.9)],
    )
"""


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ((("patience", "9"),), []),
        ((("patience", "9"), ("epochs", "5")), []),
        ((("delta", "0.1"),), ["callbacks"]),
        ((("patience", "9"), ("delta", "0.1")), ["callbacks"]),
        ((), None),
    ],
)
def test_patience_is_a_length(settings: tuple[tuple[str, str], ...], fields: list[str] | None, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(JOB)
    saved = {"settings": load(JobRequest(path)).settings}
    assert fields_changed(JobRequest(path, settings=settings), saved) == fields


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("patience=patience", "patience=7", True),
        ("predict=None", "predict=print", True),
        ("shoal.Epochs(epochs)", "shoal.Epochs(7)", True),
        ("min_delta=delta", "min_delta=0.5", False),
        ("0.9", "0.99", False),
    ],
)
def test_patience_in_the_file_is_a_length(old: str, new: str, same: bool, tmp_path: Path) -> None:
    found = []
    for text in (JOB, JOB.replace(old, new)):
        (tmp_path / "own.py").write_text(text)
        found.append(code(JobModule.of_file(tmp_path / "own.py"), "job"))
    assert (changed(*found) == []) is same


def test_a_job_object_is_not_compared_with_a_function_of_a_file() -> None:
    """Their settings and digests are recorded in different forms."""
    saved = {"file": "train.py", "by_value": True, "code": {"the job file": {"loss": "1"}}}
    now = {"file": "train.py", "by_value": False, "code": {"the job file": {"loss": "2"}}}
    with pytest.raises(JobMismatchError, match=r"a job object of train\.py") as caught:
        accepted_changes(saved, now, None, accepted=False)
    assert "the job function of train.py, by name" in caught.value.given
    assert accepted_changes(saved, now, None, accepted=True) == [
        "the job was changed, as accepted: other code in the job file: loss"
    ]


def test_settings_as_older_versions_recorded_them() -> None:
    """They recorded a dataclass and a pydantic model as text, and `**settings` as a parameter without a default."""
    saved = {
        "model": "Net(width=8, name='a')",
        "data": "root='x' size=3",
        "others": "<class 'inspect._empty'>",
    }
    now = {"model": {"width": 8, "name": "a"}, "data": {"root": "x", "size": 3}}
    document = {"file": "train.py", "by_value": False}
    before, after = document | {"settings": saved}, document | {"settings": now}
    assert accepted_changes(before, after, None, accepted=False) == []
    with pytest.raises(JobMismatchError, match="the setting model:"):
        accepted_changes(before, document | {"settings": now | {"model": {"width": 9}}}, None, accepted=False)


@pytest.mark.parametrize("name", ["batch_norm", "sampler"])
def test_a_setting_that_has_an_entry_only_where_it_is_set(name: str) -> None:
    document = {"file": "train.py", "by_value": False}
    for saved, now in ((document, document | {name: "other"}), (document | {name: "other"}, document)):
        with pytest.raises(JobMismatchError, match=f"{name} = other"):
            accepted_changes(saved, now, None, accepted=False)
        assert accepted_changes(now, now, None, accepted=False) == []
