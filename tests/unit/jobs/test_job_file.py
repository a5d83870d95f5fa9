"""Job files are run as scripts; the parameters of the job function are the settings, with their types."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import JobError, JobFileError, SettingError
from shoal.jobs.job_file import JobRequest, LoadedJob, load, parse_target
from shoal.jobs.settings import bind, setting_of

pytestmark = pytest.mark.usefixtures("no_other_test")

JOB = "return shoal.Job(model=object, loss=print, optimizer=print, train_data=[1], global_batch=8, seed=seed)"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(text: str) -> Path:
        path = tmp_path / f"file{len(list(tmp_path.iterdir()))}_job.py"
        path.write_text(text)
        return path

    return put


def loaded(path: Path, function: str | None = None, **settings: str) -> LoadedJob:
    return load(JobRequest(path, function, tuple(settings.items())))


def parsed(function: Callable[..., Any], **texts: str) -> dict[str, Any]:
    return bind(function, texts, where="f.py:job")[0]


# ------------------------------------------------------------------------------------------------------------ settings


def typed(
    lr: float = 0.1,
    layers: int = 2,
    name: str = "a",
    fast: bool = False,
    clip: Optional[float] = None,  # noqa: UP045  (both spellings are met)
    norm: Literal["batch", "layer"] = "batch",
    sizes: list[int] = [1],  # noqa: B006
    betas: tuple[float, float] = (0.9, 0.99),
    extra: dict[str, int] | None = None,
) -> None: ...


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "0.25", 0.25),
        ("lr", "1e-3", 1e-3),
        ("lr", "3", 3.0),
        ("layers", "12", 12),
        ("name", "12", "12"),
        ("name", "[x", "[x"),
        ("name", "none", "none"),
        ("name", "", ""),
        ("fast", "true", True),
        ("fast", "False", False),
        ("fast", "1", True),
        ("fast", "no", False),
        ("clip", "none", None),
        ("clip", "None", None),
        ("clip", "2.5", 2.5),
        ("norm", "layer", "layer"),
        ("sizes", "[1, 2, 3]", [1, 2, 3]),
        ("betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("extra", '{"a": 1}', {"a": 1}),
        ("extra", "null", None),
    ],
)
def test_a_setting_takes_the_type_of_its_parameter(name: str, text: str, value: object) -> None:
    found = parsed(typed, **{name: text})
    assert found == {name: value}
    assert type(found[name]) is type(value)


@given(st.floats(allow_nan=False), st.integers(), st.booleans())
def test_numbers_survive_as_text(lr: float, layers: int, fast: bool) -> None:
    texts = {"lr": str(lr), "layers": str(layers), "fast": str(fast)}
    assert parsed(typed, **texts) == {"lr": lr, "layers": layers, "fast": fast}


def test_every_wrong_setting_is_told_at_once() -> None:
    wrong = {"lr": "fast", "layers": "2.5", "fast": "perhaps", "clip": "x", "norm": "group", "sizes": "[1,", "lrr": "1"}
    with pytest.raises(SettingError) as caught:
        parsed(typed, **wrong)
    assert caught.value.given.splitlines() == [f"--set {name}={text}" for name, text in wrong.items()]
    assert "lr is of type float" in caught.value.conflict
    assert "has no parameter lrr" in caught.value.conflict
    assert "did you mean 'lr'?" in caught.value.remedy


def test_an_untyped_parameter_takes_the_type_of_its_default() -> None:
    def untyped(lr=0.1, layers=2, fast=True, name="a", other=None): ...

    found = parsed(untyped, lr="2", layers="3", fast="off", name="7", other="7")
    assert found == {"lr": 2.0, "layers": 3, "fast": False, "name": "7", "other": "7"}
    with pytest.raises(SettingError):
        parsed(untyped, layers="many")


def test_a_parameter_without_a_default_must_be_set() -> None:
    def needy(lr: float, layers: int = 1) -> None: ...

    assert parsed(needy, lr="1") == {"lr": 1.0}
    with pytest.raises(JobFileError, match="parameter lr has no default"):
        parsed(needy, layers="2")


def test_a_parameter_of_a_strange_type_is_told() -> None:
    class Strange: ...

    def job(strange: Strange = Strange()) -> None: ...  # noqa: B008

    with pytest.raises(SettingError):
        bind(job, {"strange": "1"}, where="f.py:job")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("untyped", 5),
        ("untyped", None),
        ("untyped", False),
        ("untyped", {"a": [1, 2.5, None]}),
        ("untyped", "none"),
        ("tag", None),
        ("either", "none"),
        ("either", "[1]"),
        ("either", None),
        ("number", 5),
        ("number", 0.1 + 0.2),
        ("number", float("inf")),
        ("pair", (1, 2)),
        ("path", Path("none")),
        ("depth", 50),
    ],
)
def test_a_value_of_python_keeps_its_type(name: str, value: object) -> None:
    def job(
        untyped=None,
        tag: str = None,  # type: ignore[assignment]  # noqa: RUF013  (met in the wild)
        either: str | None = "x",
        number: float | int = 1,
        pair: tuple[int, ...] = (),
        path: Path | None = None,
        depth: Literal[18, 50] = 18,
    ) -> None: ...

    sent = json.loads(json.dumps(setting_of(name, value)))
    found, _ = bind(job, {name: sent}, where="f.py:job")
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "value"), [("layers", 2.0), ("layers", True), ("fast", 1), ("name", 5), ("name", None), ("lr", "x")]
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{name} is of type"):
        bind(typed, {name: setting_of(name, value)}, where="f.py:job")
    assert bind(typed, {"lr": setting_of("lr", 5)}, where="f.py:job")[0] == {"lr": 5.0}


def test_a_literal_of_numbers() -> None:
    def job(depth: Literal[18, 50] = 18) -> None: ...

    assert parsed(job, depth="50") == {"depth": 50}


# ------------------------------------------------------------------------------------------------------------- targets


def test_a_target_is_a_file_and_a_function(write: Write) -> None:
    path = write("")
    request = parse_target(f"{path}:other", ["lr = 1", "name=a=b"])
    assert request == JobRequest(path, "other", (("lr", " 1"), ("name", "a=b")))
    assert request.name == f"{path.stem}-other"
    assert parse_target(str(path), []).name == path.stem
    assert parse_target(f"{path}:job", []).name == path.stem


def test_a_missing_file_is_refused_with_the_nearest(write: Write) -> None:
    path = write("")
    with pytest.raises(JobFileError, match=r"did you mean 'file0_job\.py'"):
        parse_target(str(path.with_name("file0_jub.py")), [])
    with pytest.raises(JobFileError, match="it is a directory, not a job file"):
        parse_target(str(path.parent), [])
    with pytest.raises(JobFileError, match="no such file"):
        parse_target(str(path.parent / "nowhere" / "a.py"), [])


@pytest.mark.parametrize("text", ["lr", "=3", " =3", ""])
def test_a_setting_is_name_and_value(write: Write, text: str) -> None:
    with pytest.raises(SettingError, match="a setting is name=value"):
        parse_target(str(write("")), [text])


# ---------------------------------------------------------------------------------------------------------------- load


def test_a_job_and_its_complete_settings(write: Write) -> None:
    text = f"import shoal\ndef job(seed: int = 3, lr: float = 0.5):\n    {JOB}\n"
    found = loaded(write(text), seed="7")
    assert (found.job.seed, found.function, found.settings) == (7, "job", {"seed": 7, "lr": 0.5})
    text = f"import shoal\ndef other(seed: int = 3):\n    {JOB}\n"
    assert loaded(write(text), "other").job.seed == 3


def test_a_job_file_imports_what_lies_beside_it(write: Write, tmp_path: Path) -> None:
    (tmp_path / "beside_model.py").write_text("SEED = 11\n")
    found = loaded(write(f"import shoal\nfrom beside_model import SEED\ndef job(seed: int = SEED):\n    {JOB}\n"))
    assert found.job.seed == 11
    assert str(tmp_path) in sys.path


def test_annotations_may_be_texts(write: Write) -> None:
    text = f"from __future__ import annotations\nimport shoal\ndef job(seed: int | None = 3):\n    {JOB}\n"
    assert loaded(write(text), seed="9").job.seed == 9
    text = f"import shoal\ndef job(seed: int = 3, other: 'Nowhere' = None):\n    {JOB}\n"
    assert loaded(write(text), seed="9").job.seed == 9


@pytest.mark.parametrize(
    ("text", "conflict"),
    [
        ("1 / 0\n", "it raised ZeroDivisionError: division by zero at {path}:1"),
        ("\n\ndef job(:\n", "it raised SyntaxError: .* at {path}:3"),
        ("import no_such_module\n", "it raised ModuleNotFoundError.* at {path}:1"),
        ("def job():\n    raise KeyError('a')\n", "it raised KeyError: 'a' at {path}:2"),
        ("def job():\n    return 3\n", "a job function returns a shoal.Job"),
        ("def jobs(): ...\ndef train(): ...\n", r"no function of that name \(it has jobs, train\)"),
        ("job = 3\n", r"it has none"),
    ],
)
def test_a_file_that_gives_no_job_is_refused(write: Write, text: str, conflict: str) -> None:
    path = write(text)
    with pytest.raises(JobFileError) as caught:
        loaded(path)
    assert str(path) in caught.value.given
    assert re.search(conflict.replace("{path}", re.escape(str(path))), caught.value.conflict)


def test_a_raising_file_keeps_its_traceback(write: Write) -> None:
    with pytest.raises(JobFileError) as caught:
        loaded(write("def f():\n    1 / 0\nf()\n"))
    assert "in f" in (caught.value.traceback_text or "")


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("epochs", "Job has no epochs: write length=shoal.Epochs(N)"),
        ("clipnorm", "Job has no clipnorm: did you mean 'clip_norm'?"),
        ("zzz", "Job has no zzz: model, loss, optimizer"),
    ],
)
def test_an_argument_that_a_job_has_not_gets_the_name_of_its_own(write: Write, argument: str, remedy: str) -> None:
    path = write(f"import shoal\ndef job(seed: int = 0):\n    {JOB[:-1]}, {argument}=1)\n")
    with pytest.raises(JobFileError) as caught:
        loaded(path)
    assert remedy in caught.value.remedy


def test_a_job_of_the_file_is_taken_as_it_is(write: Write) -> None:
    path = write(f"import shoal\n{JOB.replace('return', 'job =').replace('seed=seed', 'seed=5')}\n")
    assert loaded(path).job.seed == 5
    with pytest.raises(SettingError, match="a Job is complete"):
        loaded(path, seed="9")


def test_a_function_of_another_name_is_offered(write: Write) -> None:
    path = write("def jobs(): ...\n")
    with pytest.raises(JobFileError, match="did you mean 'jobs'"):
        loaded(path)


def test_mistakes_in_the_job_itself_come_through(write: Write) -> None:
    with pytest.raises(JobError, match="seed=-1"):
        loaded(write(f"import shoal\ndef job(seed: int = -1):\n    {JOB}\n"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_text("")
    with pytest.raises(JobFileError, match=r"give a file that ends in \.py"):
        load(JobRequest(path))


def test_the_number_of_ranks_is_not_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to the file nor to its function; afterwards it is as it was."""
    path = tmp_path / "alone.py"
    path.write_text(
        "import os\nimport shoal\nHERE = 'WORLD_SIZE' in os.environ\n\n\ndef job() -> shoal.Job:\n"
        "    seen = HERE or 'LOCAL_RANK' in os.environ\n"
        "    return shoal.Job(model=dict, loss=max, optimizer=min, train_data=[1], global_batch=1 + seen)\n",
        encoding="utf-8",
    )
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    assert load(JobRequest(path)).job.global_batch == 1
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("3", "3")


def test_what_the_file_says_now_is_loaded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was changed within a second to a text of the same length."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = write(f"import shoal\ndef job(seed: int = 1):\n    {JOB}\n")
    seen = []
    for old, new in (("= 1", "= 2"), ("= 2", "= 3"), ("= 3", "= 4")):
        os.utime(file, (1e9, 1e9))
        seen.append(loaded(file).settings["seed"])
        file.write_text(file.read_text().replace(old, new))
    assert seen == [1, 2, 3]
