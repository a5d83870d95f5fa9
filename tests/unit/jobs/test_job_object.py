"""Job objects on their way to ranks."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CommandError, JobError
from shoal.jobs import job_object
from shoal.jobs.handed_job import HandedJob
from shoal.jobs.job import Job
from shoal.jobs.job_file import JobRequest, load
from shoal.jobs.job_object import function_name, hand_over, importable_module, place_of
from shoal.jobs.settings import setting_of
from shoal.plans.grains import FEW_GRAINS

pytestmark = pytest.mark.usefixtures("no_other_test")


def job(lr: float = 0.1) -> Job:
    return Job(model=dict, loss=print, optimizer=list, train_data=[lr], global_batch=1)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in a file, with a job function."""
    (tmp_path / "handed_module.py").write_text(
        "import shoal\ndef job(lr: float = 0.1):\n"
        "    return shoal.Job(model=dict, loss=print, optimizer=list, train_data=[lr], global_batch=1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("handed_module")
    del sys.modules["handed_module"]


def test_a_function_of_a_module_goes_by_its_name(module: Any, tmp_path: Path) -> None:
    handed = hand_over(module.job, tmp_path)
    assert (handed.module, handed.file, handed.code) == ("handed_module", None, {})
    assert place_of(module.job) == tmp_path / "handed_module.py"
    assert handed.fetch("job") is module.job
    found = load(JobRequest(place_of(module.job), "job", (("lr", "0.5"),), handed))
    of_file = load(JobRequest(place_of(module.job), "job", (("lr", "0.5"),)))
    assert found.job.train_data == [0.5]
    assert (found.settings, found.code, found.file_sha256) == (of_file.settings, of_file.code, of_file.file_sha256)


def test_a_function_of_a_package_brings_the_files_that_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "handed_package/__init__.py": "",
        "handed_package/nets.py": "WIDTH = 3\ndef net():\n    return WIDTH\n",
        "handed_package/sub/__init__.py": "",
        "handed_package/sub/jobs.py": "import shoal\nfrom ..nets import net\ndef job(lr: float = 0.1):\n"
        "    return shoal.Job(model=net, loss=print, optimizer=list, train_data=[lr], global_batch=1)\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = importlib.import_module("handed_package.sub.jobs").job
    handed = hand_over(given, tmp_path)
    found = load(JobRequest(place_of(given), "job", (), handed))
    of_file = load(JobRequest(place_of(given), "job"))
    assert (found.code, found.module) == (of_file.code, "handed_package.sub.jobs")
    assert found.code["handed_package/nets.py"].keys() == {"(other lines)", "net"}
    for name in [name for name in sys.modules if name.startswith("handed_package")]:
        del sys.modules[name]


def test_others_go_by_value(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 0.25
    handed = hand_over(lambda: job(rate), tmp_path)
    assert (handed.module, handed.file) == (None, tmp_path / "job.pickle")
    monkeypatch.setattr(sys, "path", list(sys.path))
    request = JobRequest(Path("notebook"), None, (), handed)
    assert request.by_value
    assert load(request).job.train_data == [0.25]
    assert load(request).code == handed.code
    module.job.__globals__["other"] = module.job
    assert importable_module(module.job) == "handed_module"
    assert importable_module(lambda: 1) is importable_module(job()) is None


def test_the_import_path_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["first", "own"])
    (tmp_path / "job.pickle").write_bytes(b"")
    with pytest.raises(EOFError):
        HandedJob(None, tmp_path / "job.pickle", ("given", "first")).fetch(None)
    assert sys.path == ["given", "first", "own"]


def test_how_many_grains_are_known(tmp_path: Path) -> None:
    """So that only what cannot be told otherwise takes a look."""

    def asked(given: Any) -> int | None:
        return JobRequest(Path("notebook"), None, (), hand_over(given, tmp_path)).least_grains

    assert asked(replace(job(), grains=3)) == 3
    assert asked(job()) == FEW_GRAINS
    assert asked(lambda: job()) is None


def test_names() -> None:
    assert [function_name(given) for given in (job, job(), lambda: 1)] == ["job", None, None]


def test_what_cannot_be_handed_over_is_named(tmp_path: Path) -> None:
    with (
        (tmp_path / "open").open("w") as file,
        pytest.raises(JobError, match=r"cannot be handed to the ranks: .*pickle"),
    ):
        hand_over(lambda: job(float(file.fileno())), tmp_path)


def test_without_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(CommandError, match=r"pip install 'shoal\[notebook\]'"):
        hand_over(lambda: job(), tmp_path)
    assert hand_over(module.job, tmp_path).module == "handed_module"


@pytest.mark.parametrize(
    ("script", "notebook", "kernel", "place"),
    [
        ("a/b.py", "n.ipynb", True, "a/b.py"),
        (None, "n.ipynb", True, "n.ipynb"),
        (None, "", True, "notebook"),
        (None, "", False, "interpreter"),
    ],
)
def test_the_place_of_an_object(
    script: str | None, notebook: str, kernel: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", notebook)
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert place_of(lambda: 1) == Path(place)
    assert job_object.is_job(job)
    assert not job_object.is_job("job.py")


@pytest.mark.parametrize("value", [0.1, True, None, [1, "a"], "none", "[1]", "0.1"])
def test_a_setting_is_its_value_where_a_text_does_not_tell_the_type(value: object) -> None:
    assert setting_of("name", value) == {"value": value}


@pytest.mark.parametrize(("value", "text"), [("x", "x"), (Path("a/b"), "a/b")])
def test_a_text_is_a_setting_as_the_commands(value: object, text: str) -> None:
    assert setting_of("name", value) == text
