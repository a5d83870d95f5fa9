"""Public signatures change with a changelog fragment alone, and pages name the version that pip installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.public_api import ROOT, changed, read, signatures, unnamed

import shoal


def test_public_signatures_are_those_of_the_file() -> None:
    """Else: write a fragment in changelog.d/ that names what changed, and call python scripts/public_api.py."""
    assert changed(signatures(shoal.__all__), read()) == []


def test_a_changed_signature_is_found_and_needs_a_fragment() -> None:
    now = signatures(shoal.__all__)
    assert changed({**now, "run": "()"}, now) == ["run"]
    assert changed({name: text for name, text in now.items() if name != "Run.model"}, now) == ["Run"]
    assert changed(now | {"Quux": "()"}, now) == ["Quux"]
    assert unnamed(["Quux"]) == ["Quux"]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("A job runs; `job.py` is no Job, and `Jobs` are not one.", ["Job", "run"]),
        ("`Job(grains=3)` divides more evenly, see `run`.", ["run"]),
        ("`shoal.run` takes a `shoal.Job`.", []),
    ],
)
def test_a_fragment_names_a_class_in_backticks(text: str, missing: list[str], tmp_path: Path) -> None:
    (tmp_path / "+one.change.md").write_text(text, "utf-8")
    assert unnamed(["Job", "run"], tmp_path) == missing


def test_install_lines_name_this_version() -> None:
    pages = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md")}
    named = {version for page in pages.values() for version in re.findall(r"shoal-([\w.]+)-py3-none-any\.whl", page)}
    named |= set(re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE))
    assert named == {shoal.__version__}
