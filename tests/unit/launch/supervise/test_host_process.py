"""A host's process refuses what its host has not, all of it in one message."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import LaunchError
from shoal.launch.supervise.host_process import _Answers, refuse_differences
from shoal.runs.version import __version__


def message(folder: Path, seconds: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A command's request, whose clock is so many seconds ahead of this one."""
    return {
        "folder": str(folder),
        "out": str(folder),
        "address": None,
        "version": __version__,
        "time": time.time() + seconds,
        **changes,
    }


def test_a_host_like_the_command_is_taken(tmp_path: Path) -> None:
    refuse_differences(message(tmp_path, -30))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": -3600}, r"a clock that is 36\d\d s ahead"),
        ({"seconds": 3600}, r"a clock that is 3[56]\d\d s behind"),
        ({"version": "9.9"}, f"shoal {__version__}, where the command has 9.9"),
        ({"out": "/nowhere/run"}, "no folder /nowhere/run"),
        ({"out": "/nowhere/run", "version": "9.9"}, "no folder /nowhere/run, shoal"),
    ],
)
def test_differences_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=said):
        refuse_differences(message(tmp_path, **changes))


def test_a_run_directory_at_an_address_is_on_no_host(tmp_path: Path) -> None:
    refuse_differences(message(tmp_path, out="/nowhere/run", address="s3://bucket/run"))


def test_output_travels_as_json() -> None:
    stream = io.StringIO()
    answers = _Answers(stream)
    assert answers.write("a\nb") == 3
    answers.answer(port=7)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [{"output": "a\nb"}, {"port": 7}]
