"""Damaged and hostile files of a run: each command ends soon, in words, and touches nothing outside of the run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, newest_checkpoint, run, start_command
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:mlp"
# A command may take this much more than on the undamaged run.
MORE_SECONDS, MORE_BYTES = 5.0, 200_000_000
MOST_ADDRESSES = 8 << 30
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
DOCUMENTS = ("job.json", "result.json", "saved.json", "lock.json", "plan.toml")
LOGS = ("records.jsonl", "attempts.jsonl", "events.jsonl")
SAVED = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
COMMANDS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "report": lambda out: ("report", str(out), "-o", str(out / "page.html")),
    "watch": lambda out: ("watch", str(out), "--once"),
    "doctor": lambda out: ("doctor", str(out)),
    "runs": lambda out: ("runs", "list", str(out.parent)),
    "export": lambda out: ("export", str(out), "-o", str(out / "exported")),
    "evaluate": lambda out: ("evaluate", JOB, str(out)),
    "resume": lambda out: ("run", JOB, "--out", str(out), "--resume", "--steps", "12", "--max-restarts", "0"),
}


def outside(path: Path) -> Path:
    """A file out of the run, which no command may change."""
    return path.parents[next(i for i, p in enumerate(path.parents) if p.name == "run")].parent / "outside"


def fifo(path: Path, content: bytes) -> None:
    os.mkfifo(path)


def folder(path: Path, content: bytes) -> None:
    path.mkdir()


def bound_socket(path: Path, content: bytes) -> None:
    place = os.getcwd()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
        os.chdir(path.parent)  # the name of a socket has 107 bytes
        bound.bind(path.name)
        os.chdir(place)


def link_outside(path: Path, content: bytes) -> None:
    outside(path).write_bytes(content)
    path.symlink_to(outside(path))


def link_to_zero(path: Path, content: bytes) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.truncate(path, 1 << 40)


def nested(path: Path, content: bytes) -> None:
    path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n" + content)


def nested_value(path: Path, content: bytes) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(re.sub(rb"([:=] ?)(-?\d[\d.e+-]*)", rb"\g<1>@@", content, count=1).replace(b"@@", deep))


def numbers(text: str) -> Callable[[Path, bytes], None]:
    """Put a number in place of each, one file by one field would hide what comes after the first error."""

    def damage(path: Path, content: bytes) -> None:
        path.write_bytes(re.sub(rb"([:=\[,] ?)-?\d[\d.e+-]*(?=[,\s}\]])", rb"\g<1>" + text.encode(), content))

    return damage


def one_number(seed: int) -> Callable[[Path, bytes], None]:
    """Put a hostile number in place of one."""

    def damage(path: Path, content: bytes) -> None:
        chosen = random.Random(seed)
        places = list(re.finditer(rb"(?<=[:=\[, ])-?\d[\d.e+-]*(?=[,\s}\]])", content))
        if not places:
            path.write_bytes(content[:-1])
            return
        place = chosen.choice(places)
        text = chosen.choice(
            [b"9" * 400, b"1000000000000", b"-1", b"-7.5", b"0", b"1e400", b"NaN", b'"x"', b"null", b"1e300"]
        )
        path.write_bytes(content[: place.start()] + text + content[place.end() :])

    return damage


def escapes(path: Path, content: bytes) -> None:
    path.write_bytes(re.sub(rb'"([A-Za-z][^"\n]*)"(?=[,\s}\]])', rb'"\\u001b]0;owned\\u0007\\u001b[2J\\n\1"', content))


def flips(seed: int) -> Callable[[Path, bytes], None]:
    def damage(path: Path, content: bytes) -> None:
        chosen, spoilt = random.Random(seed), bytearray(content)
        for _ in range(chosen.choice([1, 3, 20])):
            spoilt[chosen.randrange(len(spoilt))] ^= 1 << chosen.randrange(8)
        path.write_bytes(spoilt)

    return damage


def cut(seed: int) -> Callable[[Path, bytes], None]:
    def damage(path: Path, content: bytes) -> None:
        path.write_bytes(content[: random.Random(seed).randrange(len(content))])

    return damage


def noise(seed: int) -> Callable[[Path, bytes], None]:
    def damage(path: Path, content: bytes) -> None:
        path.write_bytes(random.Random(seed).randbytes(len(content)))

    return damage


KINDS = {
    "fifo": fifo,
    "folder": folder,
    "socket": bound_socket,
    "link outside": link_outside,
    "link to zero": link_to_zero,
    "endless": endless,
    "nested": nested,
    "nested value": nested_value,
    "400 digits": numbers("9" * 400),
    "10^12": numbers("1000000000000"),
    "negative": numbers("-3"),
    "zero": numbers("0"),
    "escapes": escapes,
    **{f"number {seed}": one_number(seed) for seed in range(12)},
    **{f"flips {seed}": flips(seed) for seed in range(6)},
    **{f"cut {seed}": cut(seed) for seed in range(3)},
    **{f"noise {seed}": noise(seed) for seed in range(2)},
}
FILES = (*DOCUMENTS, *LOGS, *SAVED)
CASES = [f"{file}, {kind}" for file in FILES for kind in KINDS]
# In place of a file that an undisturbed run does not have.
ABSENT = {
    "lock.json": json.dumps({"pid": 1, "host": "other", "boot": "x", "process_started": 3, "of_version": 9}),
    "events.jsonl": json.dumps({"at": "2026-01-01T00:00:00.000+00:00", "kind": "lost", "rank": 1, "seconds": 2.0})
    + "\n",
}


@dataclass(frozen=True)
class Cost:
    """What a command took, and how it ended."""

    seconds: float
    peak_bytes: int
    ended: Ended


@pytest.fixture(scope="module")
def whole(shared: Shared) -> Path:
    """A run of nine steps with checkpoints after 3, 6 and 9."""
    return shared.run(Run(JOB, Path(), 1, arguments=("--steps", "9", "--checkpoint-every", "3"))).out


def cost(command: str, out: Path) -> Cost:
    """Run a command, in at most 8 GB of addresses, and note the most memory that was seen."""
    began, peak = time.monotonic(), 0
    with start_command([sys.executable, "-m", "shoal", *COMMANDS[command](out)], out.parent / "said") as started:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(started.pid, resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
        while started.process.poll() is None and time.monotonic() < began + 40.0:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text(encoding="ascii")
                for pid in (started.pid, *children.split()):  # a run trains in a child
                    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                    peak = max(peak, *(int(kb) * 1024 for kb in re.findall(r"VmHWM:\s+(\d+)", status)), 0)
            time.sleep(0.005)
        ended = started.wait(0.1)
    return Cost(time.monotonic() - began, peak, ended)


@pytest.fixture(scope="module")
def undamaged(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cost]:
    """The cost of each command on the undamaged run."""
    costs = {}
    for command in COMMANDS:
        out = Path(shutil.copytree(whole, tmp_path_factory.mktemp("undamaged") / "run"))
        costs[command] = cost(command, out)
        costs[command].ended.expect(0)
    return costs


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, time and size of everything beside the run."""
    beside = (path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "run")
    return {str(path): (s.st_ino, s.st_mtime_ns, s.st_size) for path in beside for s in [path.lstat()]}


@parametrize("case", CASES, usual=["job.json, fifo", "records.jsonl, endless", "plan.toml, negative"])
def test_a_damaged_or_hostile_file(case: str, whole: Path, undamaged: dict[str, Cost], tmp_path: Path) -> None:
    """A lock is aged, since a holder that cannot be named is waited for while its file is young."""
    file, kind = case.split(", ")
    for command in COMMANDS:
        folder = tmp_path / command
        out = Path(shutil.copytree(whole, folder / "run"))
        path = newest_checkpoint(out) / file if file in SAVED else out / file
        content = path.read_bytes() if path.exists() else ABSENT[file].encode()
        path.unlink(missing_ok=True)
        (folder / "outside").write_bytes(b"")
        KINDS[kind](path, content)
        if file == "lock.json":
            os.utime(path, (0, 0), follow_symlinks=False)
        before = listing(folder)
        found, usual = cost(command, out), undamaged[command]
        assert found.ended.code in (0, 2, 73, 74), found.ended
        assert found.seconds < usual.seconds + MORE_SECONDS, found.ended
        assert found.peak_bytes < max(one.peak_bytes for one in undamaged.values()) + MORE_BYTES, found.ended
        assert "Traceback" not in found.ended.output, found.ended
        assert not CONTROL.search(found.ended.output), found.ended
        assert listing(folder) == before, found.ended


@parametrize("name", ["generations", "attempts.jsonl", "events.jsonl", "records.jsonl", "errors"])
def test_nothing_behind_a_link_is_written(name: str, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    path, target = out / name, tmp_path / "target"
    if name in ("generations", "errors"):
        target.mkdir()
        (target / "000000").write_text("mine")
        shutil.rmtree(path, ignore_errors=True)
    else:
        target.write_text("mine\n")
        path.unlink(missing_ok=True)
    path.symlink_to(target)
    before = listing(tmp_path)
    ended = run(Run(JOB, out, 1, arguments=("--resume", "--steps", "12"))).fails(2)
    assert f"{name} in it is a link" in ended.stderr
    assert listing(tmp_path) == before
