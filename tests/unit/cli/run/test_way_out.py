"""A layout that fits is named for a rank that the kernel probably killed, and for no other lost rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.options import RunOptions
from shoal.cli.run import way_out
from shoal.cli.run.start import requested
from shoal.errors import RankLostError


class Advising:
    """The planner's process, with its answer."""

    def __init__(self, words: list[str], **_: Any) -> None:
        self.folder = Path(words[-1])

    def finish(self, _: float) -> int:
        (self.folder / "advice.json").write_text(json.dumps("write --layout data=2,tensor=2: 1 GiB a device"))
        return 0


@pytest.mark.parametrize(
    ("conflict", "killed", "num_gpus", "guessed"),
    [
        ("it was killed by SIGKILL without a word", True, 0, True),
        ("it was killed by SIGKILL without a word", False, 0, False),
        ("it was killed by SIGKILL without a word", True, 2, False),
        ("it has been in step 3 for 60 s, and was killed", True, 0, False),
        ("it ended with code 1 without a word", True, 0, False),
    ],
)
def test_a_guess_for_what_the_kernel_killed(
    conflict: str, killed: bool, num_gpus: int, guessed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_out, "Child", Advising)
    monkeypatch.setattr(way_out, "visible_gpus", lambda: num_gpus)
    (tmp_path / "net.py").write_text("")
    request = requested(RunOptions(job=str(tmp_path / "net.py"), out=str(tmp_path / "out")))
    error = RankLostError(given="rank 1", conflict=conflict, remedy="--resume goes on")
    found = way_out.with_way_out(error, request, killed=killed)
    words = "probably the kernel killed it, for memory: write --layout data=2,tensor=2: 1 GiB a device; or "
    assert found.remedy == f"{words if guessed else ''}--resume goes on"
