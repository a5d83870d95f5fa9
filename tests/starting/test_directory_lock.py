"""Of many processes one has a directory, and its death gives it back."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest
from tests.forks import Popen
from tests.unit.runs.test_directory_lock import QUICK, elsewhere, left_by, quietly

from shoal.errors import InUseError
from shoal.runs.directory import NAME, claim

# Reads a directory a line, tries to take it, says how that went, and gives it back at the next line.
_TAKER = """
import sys
from pathlib import Path
from shoal.runs.directory import Patience, claim
from shoal.errors import InUseError
for line in sys.stdin:
    try:
        lock = claim(Path(line.strip()), lambda text: None)
    except InUseError:
        lock = None
    print("refused" if lock is None else "won", flush=True)
    sys.stdin.readline()
    if lock is not None:
        lock.release()
    print("released", flush=True)
"""


class Taker:
    """A process that runs `_TAKER`."""

    def __init__(self) -> None:
        self.process = Popen([sys.executable, "-c", _TAKER], stdin=PIPE, stdout=PIPE, text=True)

    def say(self, text: str) -> None:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def takers(number: int) -> Iterator[list[Taker]]:
    found = [Taker() for _ in range(number)]
    try:
        yield found
    finally:
        for taker in found:
            taker.end()


def test_of_many_at_the_same_moment_exactly_one_wins(tmp_path: Path) -> None:
    with takers(4) as all_of_them:
        for number in range(50):
            folder = tmp_path / f"run-{number % 7}"  # new ones, and ones that were given back
            for taker in all_of_them:
                taker.say(str(folder))
            heard = [taker.hear() for taker in all_of_them]
            assert sorted(heard) == ["refused", "refused", "refused", "won"], number
            for taker in all_of_them:
                taker.say("release")
            assert {taker.hear() for taker in all_of_them} == {"released"}
            assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


def test_of_many_after_a_kill_exactly_one_wins(tmp_path: Path) -> None:
    for _ in range(6):
        with takers(1) as (killed,):
            killed.say(str(tmp_path))
            assert killed.hear() == "won"
        assert (tmp_path / NAME).exists()
        with takers(3) as others:
            for taker in others:
                taker.say(str(tmp_path))
            assert sorted(taker.hear() for taker in others) == ["refused", "refused", "won"]


def test_who_has_it_is_named(tmp_path: Path) -> None:
    with takers(1) as (holder,):
        holder.say(str(tmp_path))
        assert holder.hear() == "won"
        with pytest.raises(InUseError) as caught:
            claim(tmp_path, quietly)
        pid = holder.process.pid
        assert f"it is in use by pid {pid} on {os.uname().nodename} since 20" in caught.value.conflict
        assert "UTC (-c)" in caught.value.conflict, "its command line"
        assert f"kill {pid}" in caught.value.remedy
    claim(tmp_path, quietly).release()
    assert list(tmp_path.iterdir()) == []


def test_it_lasts_as_long_as_a_process_that_inherited_it(tmp_path: Path) -> None:
    """A launcher that was killed, and a rank that still runs."""
    script = f"{_TAKER}\n"
    child = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], pass_fds=(lock.descriptor,)).pid, flush=True)"
    )
    script = script.replace('    print("refused" if', f'    {child}\n    print("refused" if')
    process = Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(f"{tmp_path}\n")
        process.stdin.flush()
        child_pid = int(process.stdout.readline())
        assert process.stdout.readline().strip() == "won"
        process.kill()
        process.wait()
    with pytest.raises(InUseError, match=f"pid {process.pid}"):
        claim(tmp_path, lambda text: None, patience=QUICK)
    os.kill(child_pid, signal.SIGKILL)
    claim(tmp_path, lambda text: None).release()


def test_who_has_lost_it_ends(tmp_path: Path) -> None:
    """A host that stood still for long enough to be given up."""
    code = f"""
import sys, time
from pathlib import Path
from shoal.runs.directory import Patience, claim
claim(Path({str(tmp_path)!r}), print, patience=Patience(beat_seconds=0.02))
print("won", flush=True)
time.sleep(60)
"""
    process = Popen([sys.executable, "-c", code], stdout=PIPE, stderr=PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "won\n"
        left_by(tmp_path, elsewhere())
        said = process.communicate(timeout=50)[1]
    assert process.returncode == 69
    assert "was taken over by pid 4321 on node7: this run ends" in said
