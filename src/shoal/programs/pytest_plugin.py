"""Fixture of pytest that verifies a training script as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def shoal_script(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `shoal verify --script`, and fails the test with the first divergence."""

    def verify(command: str, **options: Any) -> dict[str, Any]:
        """Return what script.json has. Options are those of the command: devices=2, steps=4, cpu=True."""
        words = [sys.executable, "-m", "shoal", "verify", "--script", command, "--out", str(tmp_path / "script")]
        for name, value in options.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        ended = subprocess.run(words, capture_output=True, text=True)
        if ended.returncode:
            _, first, rest = ended.stdout.partition("first divergence")
            pytest.fail(first + rest or ended.stdout + ended.stderr, pytrace=False)
        document: dict[str, Any] = json.loads((tmp_path / "script/script.json").read_text())
        return document

    return verify
