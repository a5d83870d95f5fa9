"""Comparison of a run on an engine with the undisturbed one of a single process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.launching import Ended

SAME = ("weights_sha256", "sample_digest", "steps", "samples", "train_loss")


def result(out: Path) -> dict[str, Any]:
    """The result of a run directory."""
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return found


def assert_same(out: Path, undisturbed: Ended) -> None:
    """Raises: AssertionError where the run has not ended with the very values of the other."""
    found = result(out)
    assert found["status"] == "completed"
    assert {name: found[name] for name in SAME} == {name: undisturbed.result[name] for name in SAME}
