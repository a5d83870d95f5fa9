"""Modules of jobs: how a target is read, under which name a file is loaded, and from which folders it imports."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import JobFileError
from shoal.jobs.differences import changed
from shoal.jobs.job_file import JobModule, code, load, parse_target, split_target

JOB = """
import shoal
{imports}
def job(lr: float = 0.1):
    return shoal.Job(model=net, loss=print, optimizer=list, train_data=[lr], global_batch=1)
"""
FILES = {
    "jobs_of/__init__.py": "",
    "jobs_of/nets.py": "from .sizes import WIDTH\ndef net():\n    return WIDTH\n",
    "jobs_of/sizes.py": "WIDTH = 3\n",
    "jobs_of/unused.py": "def nothing():\n    return 1\n",
    "jobs_of/train/__init__.py": "",
    "jobs_of/train/one.py": JOB.format(imports="from ..nets import net"),
    "jobs_of/train/absolute.py": JOB.format(imports="import jobs_of.nets\nfrom beside_it import net"),
    "jobs_of/train/beside_it.py": "from common_things import net\n",
    "jobs_of/train/by_name.py": JOB.format(
        imports="import importlib\nnet = importlib.import_module('jobs_of.' + 'nets').net"
    ),
    "common_things.py": "def net():\n    return 4\n",
    "alone.py": JOB.format(imports="from common_things import net"),
    "alone.v2.py": JOB.format(imports="from common_things import net"),
    "src/laid_out/__init__.py": "",
    "src/laid_out/jobs.py": JOB.format(imports="from .nets import net"),
    "src/laid_out/nets.py": "def net():\n    return 5\n",
    "portion_1/spread/jobs.py": JOB.format(imports="from .there.nets import net\nfrom . import beside_it, there"),
    "portion_1/spread/beside_it.py": "",
    "portion_2/spread/there/nets.py": "def net():\n    return 6\n",
    "portion_2/spread/unused.py": "",
    "in_no_package/deep.py": JOB.format(imports="from common_things import net"),
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("job.py", ("job.py", None)),
        ("job.py:", ("job.py", None)),
        ("job.py:train", ("job.py", "train")),
        ("a:b/job.py:train", ("a:b/job.py", "train")),
        ("a:b/job.py", ("a:b/job.py", None)),
        ("package.module:train", ("package.module", "train")),
        ("package.module", ("package.module", None)),
    ],
)
def test_the_last_colon_begins_the_function(target: str, parts: tuple[str, str | None]) -> None:
    assert split_target(target) == parts


@pytest.mark.parametrize(
    ("target", "name", "path"),
    [
        ("jobs_of/train/one.py", "jobs_of.train.one", "jobs_of/train/one.py"),
        ("jobs_of.train.one:job", "jobs_of.train.one", "jobs_of/train/one.py"),
        ("jobs_of/train/__init__.py", "jobs_of.train", "jobs_of/train/__init__.py"),
        ("jobs_of", "jobs_of", "jobs_of/__init__.py"),
        ("alone.py", "alone", "alone.py"),
        ("alone", "alone", "alone.py"),
        ("in_no_package/deep.py", "deep", "in_no_package/deep.py"),
        ("alone.v2.py", "alone.v2", "alone.v2.py"),
        ("in_no_package.deep", "in_no_package.deep", "in_no_package/deep.py"),
        ("json.tool", "json.tool", str(Path(os.__file__).parent / "json" / "tool.py")),
    ],
)
def test_a_module_has_its_full_name(target: str, name: str, path: str) -> None:
    request = parse_target(target, ())
    assert (request.module.name, str(request.path), request.name) == (name, path, name)


@pytest.mark.parametrize(
    "target", ["jobs_of/train/one.py", "jobs_of.train.one", "jobs_of.train.absolute", "jobs_of/train/by_name.py"]
)
def test_a_job_in_packages_is_loaded(target: str, project: Path) -> None:
    loaded = load(parse_target(target, ()))
    job = loaded.job
    assert job.model.__module__ == ("common_things" if "absolute" in target else "jobs_of.nets")
    assert sys.modules[loaded.module].__dict__["job"].__module__ == loaded.module
    assert (sys.path[0], sys.path[-1]) == (str(project), str(project / "jobs_of" / "train"))
    assert {"jobs_of/__init__.py", "jobs_of/nets.py", "jobs_of/sizes.py"} <= loaded.code.keys()
    assert "jobs_of/unused.py" not in loaded.code


def test_a_file_with_a_dot_in_its_name(project: Path) -> None:
    loaded = load(parse_target("alone.v2.py", ()))
    assert (loaded.job.model(), loaded.module, sys.path[0]) == (4, "alone.v2", str(project))


@pytest.mark.parametrize("target", ["in_no_package/deep.py", "in_no_package.deep"])
def test_the_current_folder_is_on_the_import_path(target: str, project: Path) -> None:
    loaded = load(parse_target(target, ()))
    assert loaded.job.model() == 4
    assert "common_things.py" in loaded.code
    first = [str(project / "in_no_package"), str(project)] if target.endswith(".py") else [str(project)]
    assert sys.path[: len(first)] == first


def test_changes_of_modules_that_a_job_imports_are_named(project: Path) -> None:
    module = JobModule.of_file(Path("jobs_of/train/one.py"))
    before = code(module, "job")
    (project / "jobs_of/sizes.py").write_text("WIDTH = 4\n", encoding="utf-8")
    (project / "jobs_of/unused.py").write_text("def nothing():\n    return 2\n", encoding="utf-8")
    assert changed(before, code(module, "job")) == ["jobs_of/sizes.py: (other lines)"]


def test_a_module_is_the_jobs_wherever_it_is_imported(project: Path) -> None:
    statements = [
        "try:\n    {}\nexcept ImportError:\n    pass",
        "try:\n    1 / 0\nexcept ArithmeticError:\n    {}",
        "for _ in ():\n    pass\nelse:\n    {}",
        "match 1:\n    case 1:\n        {}",
        "def late():\n    if late:\n        {}",
        "with open('/dev/null') as file:\n    {}",
    ]
    text = "\n".join(statement.format(f"import part_{n}") for n, statement in enumerate(statements))
    (project / "parted.py").write_text(JOB.format(imports=text), encoding="utf-8")
    names = {f"part_{n}.py" for n in range(len(statements))}
    for name in names:
        (project / name).write_text("", encoding="utf-8")
    assert code(JobModule.of_file(Path("parted.py")), "job").keys() == {"the job file", *names}


@pytest.mark.parametrize(
    ("target", "folders", "result", "files"),
    [
        ("laid_out.jobs:job", (), 5, {"laid_out/__init__.py", "laid_out/nets.py"}),
        ("src/laid_out/jobs.py", (), 5, {"laid_out/__init__.py", "laid_out/nets.py"}),
        ("spread.jobs", ("portion_1", "portion_2"), 6, {"spread/beside_it.py", "portion_2/spread/there/nets.py"}),
        ("zipped.jobs", ("archive.zip",), 7, {"zipped/__init__.py", "zipped/nets.py"}),
    ],
)
def test_layouts_of_packages(
    target: str, folders: tuple[str, ...], result: int, files: set[str], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders named src, namespace packages in two places, and archives; each with the change of an imported module."""

    def archive(number: int) -> None:
        with zipfile.ZipFile(project / "archive.zip", "w") as opened:
            opened.writestr("zipped/__init__.py", "")
            opened.writestr("zipped/jobs.py", JOB.format(imports="from .nets import net"))
            opened.writestr("zipped/nets.py", f"def net():\n    return {number}\n")

    archive(7)
    for folder in folders:
        monkeypatch.syspath_prepend(str(project / folder))
    request = parse_target(target, ())
    assert request.least_grains == 8
    loaded = load(request)
    assert (loaded.job.model(), loaded.module) == (
        result,
        target.partition(":")[0].replace("src/laid_out/jobs.py", "laid_out.jobs"),
    )
    assert loaded.code.keys() == {"the job file", *files}
    nets = next(file for file in files if file.endswith("nets.py"))
    if "zipped" in target:
        archive(8)
    else:
        (project / (f"src/{nets}" if "laid_out" in nets else nets)).write_text(
            "def net():\n    return 8\n", encoding="utf-8"
        )
    assert changed(loaded.code, code(request.module, "job")) == [f"{nets}: net"]


def test_an_archive_is_no_job() -> None:
    with zipfile.ZipFile("archive.zip", "w") as opened:
        opened.writestr("zipped/jobs.py", "")
    with pytest.raises(JobFileError, match=r"write PYTHONPATH=archive\.zip shoal run PACKAGE\.MODULE"):
        parse_target("archive.zip", ())


@pytest.mark.parametrize("target", ["jobs_of.train.ona", "jobs_of.trane.one", "no_such", "jobs_of.train.one.job"])
def test_a_module_that_is_not_there(target: str) -> None:
    with pytest.raises(JobFileError, match="there is no such file"):
        parse_target(target, ())


def test_a_near_module_is_named() -> None:
    with pytest.raises(JobFileError) as caught:
        parse_target("jobs_of.train.ona:job", ())
    assert "did you mean 'jobs_of.train.one'" in caught.value.remedy


def test_another_package_of_the_name_is_refused(project: Path) -> None:
    (project / "json").mkdir()
    (project / "json/__init__.py").write_text("", encoding="utf-8")
    (project / "json/mine.py").write_text("", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"it is the module json\.mine") as caught:
        load(parse_target("json/mine.py", ()))
    assert f"rename the folder {project / 'json'}" in caught.value.remedy


@pytest.mark.parametrize("name", ["shoal.py", "shoal/__init__.py"])
@pytest.mark.parametrize("target", ["alone.py", "in_no_package/deep.py"])
def test_a_file_that_hides_shoal_is_refused(name: str, target: str, project: Path) -> None:
    hiding = project / ("in_no_package" if "deep" in target else "") / name
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("", encoding="utf-8")
    with pytest.raises(JobFileError, match="finds this file before the package shoal") as caught:
        parse_target(target, ())
    assert caught.value.given == str(hiding)


def test_a_file_that_parses_options_at_import(project: Path) -> None:
    text = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', required=True)\n"
    (project / "options.py").write_text(f"{text}parser.parse_args([])\n", encoding="utf-8")
    with pytest.raises(JobFileError, match="it ended the program while it was imported") as caught:
        load(parse_target("options.py", ()))
    assert "options.py:4" in caught.value.conflict
    assert "--set NAME=VALUE" in caught.value.remedy
