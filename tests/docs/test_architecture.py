"""docs/architecture.md names rooms and places that exist; so do the questions that were put to its readers."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`([\w/]+\.(?:py|toml))(?::([\w.]+))?`")
QUESTIONS = tomllib.loads((ROOT / "tests" / "docs" / "where.toml").read_text(encoding="utf-8"))["question"]


def names_in(path: Path) -> set[str]:
    """Names of functions and classes of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


def missing(text: str) -> list[str]:
    """The places that a text names and that are not there."""
    lost = []
    for name, inside in PLACE.findall(text):
        path = next((base / name for base in (PACKAGE, ROOT) if (base / name).is_file()), None)
        if path is None or (inside and inside not in names_in(path)):
            lost.append(f"{name}:{inside}")
    return lost


def test_every_place_exists() -> None:
    assert len(PLACE.findall(PAGE)) > 60
    assert missing(PAGE) == []


@pytest.mark.parametrize(
    "text", ["`nowhere.py`", "`training/microbatch/step.py:Nobody`", "`training/microbatch/step.py:StepRunner.nothing`"]
)
def test_a_place_that_is_not_there_is_found(text: str) -> None:
    assert len(missing(text)) == 1
    assert missing("`training/microbatch/step.py:StepRunner.fetch` `errors.py`") == []


def test_floors_are_those_of_the_contract() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", PAGE, re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["id"] == "layers")
    contract = [(str(floor), room) for floor, layer in enumerate(layers, 1) for room in re.findall(r"\w+", layer)]
    assert sorted(rows) == sorted(pair for pair in contract if pair[1] != "__main__")


def test_the_top_of_the_package_is_these_rooms() -> None:
    rooms = {room for _, room in re.findall(r"^\| (\d+) \| `(\w+)", PAGE, re.MULTILINE)}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there == rooms | {"__init__", "__main__"}


def test_questions_have_answers_that_exist() -> None:
    assert len(QUESTIONS) == 29
    assert [name for question in QUESTIONS for name in question["files"] if not (PACKAGE / name).is_file()] == []
