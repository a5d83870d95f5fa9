"""One process at a time has a directory, whoever shares it, and its death gives it back."""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InUseError, RunDirectoryError
from shoal.runs.directory import NAME, DirectoryLock, Holder, Patience, claim

QUICK = Patience(beat_seconds=0.05, missed_beats=6, ending_seconds=0.3, settling_seconds=0.0, poll_seconds=0.01)


def quietly(text: str) -> None:
    raise AssertionError(f"nothing is to be said here: {text}")


def left_by(folder: Path, holder: Holder, seconds_ago: float = 0.0) -> Path:
    """A lock that is there without a process of this kernel that has it."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(vars(holder)), encoding="utf-8")
    then = time.time() - seconds_ago
    os.utime(folder / NAME, (then, then))
    return folder


def elsewhere() -> Holder:
    return replace(Holder.here(), host="node7", boot="another", pid=4321, token="theirs", command="shoal run a.py")


def test_what_a_process_has_it_cannot_take_again(tmp_path: Path) -> None:
    with claim(tmp_path, quietly) as lock:
        with pytest.raises(InUseError, match="close the Session of this process"):
            claim(tmp_path, quietly)
        lock.release()
        claim(tmp_path, quietly).release()


def test_a_directory_is_made_in_its_mode_and_taken_away_only_where_it_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with claim(folder, quietly, mode=0o700):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []
    with claim(folder, quietly):
        (folder / "job.json").touch()
    assert [path.name for path in folder.iterdir()] == ["job.json"]


def test_a_holder_elsewhere_that_gives_signs_of_life_keeps_it(tmp_path: Path) -> None:
    target, over = left_by(tmp_path, elsewhere()) / NAME, threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(target)

    heart = threading.Thread(target=beat)
    heart.start()
    said: list[str] = []
    try:
        with pytest.raises(InUseError, match=r"in use by pid 4321 on node7 since .* \(shoal run a\.py\)"):
            claim(tmp_path, said.append, patience=replace(QUICK, missed_beats=10_000))
    finally:
        over.set()
        heart.join()
    assert said in ([], [f"{tmp_path} is held by pid 4321 on node7: waiting up to 500 s for a sign of life"])
    assert json.loads(target.read_text())["token"] == "theirs"


@pytest.mark.parametrize("seconds_ago", [0.0, -3600.0, 3600.0])  # by a clock that may be another one's
def test_a_holder_elsewhere_that_gives_none_loses_it_aloud(tmp_path: Path, seconds_ago: float) -> None:
    left_by(tmp_path, elsewhere(), seconds_ago)
    said: list[str] = []
    began = time.monotonic()
    with claim(tmp_path, said.append, patience=QUICK) as lock:
        assert time.monotonic() - began >= QUICK.limit_seconds
        assert json.loads((tmp_path / NAME).read_text())["token"] == lock.holder.token
        assert len(said) == 2
        assert "pid 4321 on node7 has shown no sign of life for" in said[-1]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_lock_at_all_is_taken_over_as_late(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("")
    said: list[str] = []
    claim(tmp_path, said.append, patience=QUICK).release()
    assert "a process that cannot be named" in said[-1]


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_without_locks_of_the_system_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    with claim(tmp_path, quietly, patience=QUICK), pytest.raises(InUseError):
        claim(tmp_path, quietly, patience=QUICK)
    gone = replace(Holder.here(), process_started=1)  # its number is another process's by now
    claim(left_by(tmp_path, gone), quietly, patience=QUICK).release()


def test_without_hard_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    with claim(tmp_path, quietly, patience=QUICK):
        assert [path.name for path in tmp_path.iterdir()] == [NAME]
        with pytest.raises(InUseError):
            claim(tmp_path, quietly, patience=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="nothing can be written there"):
        claim(Path("/proc/nowhere/run"), quietly)
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="nothing can be written there"):
        claim(tmp_path / "file", quietly)


def test_it_renews_its_sign_of_life(tmp_path: Path) -> None:
    with claim(tmp_path, quietly, patience=QUICK):
        os.utime(tmp_path / NAME, (1.0, 1.0))
        while (tmp_path / NAME).stat().st_mtime == 1.0:
            time.sleep(0.01)


def test_giving_back_leaves_another_ones_alone(tmp_path: Path) -> None:
    lock: DirectoryLock = claim(tmp_path, quietly)
    (tmp_path / NAME).unlink()  # by hand
    with claim(tmp_path, quietly):
        lock.release()
        assert (tmp_path / NAME).exists()


def test_links_may_lead_to_the_directory_itself_but_not_out_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "latest").symlink_to("checkpoints")
    claim(folder, quietly).release()
    (folder / "errors").symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="errors in it is a link out of it"):
        claim(folder, quietly)
