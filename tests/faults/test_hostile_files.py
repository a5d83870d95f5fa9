"""Damaged and hostile files of a run: each command ends soon, in words, and touches nothing outside of the run."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launching import JOBS

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:mlp"
# A command may take this much more than on the undamaged run.
MORE_SECONDS, MORE_BYTES = 5.0, 200_000_000
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
CASES = [(file, kind) for file in (*DOCUMENTS, *LOGS, *SAVED) for kind in KINDS]
