"""The wheel and the sdist: their files, and the README's job from the wheel in an environment of its own."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from scripts.wheel import build, differences, environment, rebuilt, required, run_readme

PACKAGE = Path(__file__).parents[2] / "src" / "shoal"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_the_package_and_no_more(built: tuple[Path, Path]) -> None:
    assert differences(built[0]) == []


def test_a_wrong_wheel_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Without py.typed, with a template that was changed, and with a test in it."""
    wrong = tmp_path / "shoal-0-py3-none-any.whl"
    with zipfile.ZipFile(built[0]) as right, zipfile.ZipFile(wrong, "w") as archive:
        for name in right.namelist():
            if name != "shoal/py.typed":
                archive.writestr(name, right.read(name) + b" " * (name == "shoal/report/page.html"))
        archive.writestr("tests/test_wheel.py", "")
    assert differences(wrong) == [
        "shoal/py.typed: not in the wheel",
        "shoal/report/page.html: changed in the wheel",
        "tests/test_wheel.py: only in the wheel",
    ]


def test_the_sdist_gives_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    assert rebuilt(sdist, tmp_path).read_bytes() == wheel.read_bytes()


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_readmes_job_runs_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Real interpreters, which see the wheel and what it requires, and no file of this repository."""
    python = environment(tmp_path / "environment", built[0], required(built[0], "examples"))
    (tmp_path / "user").mkdir()
    run_readme(python, tmp_path / "user")
