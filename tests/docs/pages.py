"""A page of the documentation as a story: its programs are written, its commands run in order, its outputs compared."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.forks import run

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|csv))\n")
INDEX = Path(__file__).resolve().parents[2] / "docs" / "index.md"
PROGRAMS = {
    "shoal": ["-m", "shoal"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language and its text."""

    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """Blocks in their order; those with a title, as programs of other frameworks, are none."""
    return [Block(*found) for found in BLOCK.findall(page)]


def write_first_job(folder: Path) -> None:
    """Write the job file of docs/index.md, which other pages use, into a folder."""
    text = next(block.text for block in blocks_of(INDEX.read_text("utf-8")) if block.language == "python")
    (folder / "digits_job.py").write_text(text)


def command(line: str) -> list[str]:
    """A command of a page, started by this interpreter."""
    words = shlex.split(line, comments=True)
    if words[0] not in PROGRAMS:
        raise ValueError(f"a page's command has to be one of {list(PROGRAMS)}: {line}")
    return [sys.executable, *PROGRAMS[words[0]], *words[1:]]


def missing(text: str, printed: str) -> list[str]:
    """Lines of a shown output that were not printed; "..." stands for anything, and alone for any lines."""
    patterns = [(line, re.escape(line.strip()).replace(r"\.\.\.", ".*")) for line in text.splitlines()]
    return [line for line, pattern in patterns if not re.search(pattern, printed)]


def tell(page: str, folder: Path, timeout: float = 100) -> str:
    """Runs a page in a folder that has the job file of docs/index.md. Returns all that was printed.

    python, toml: written where the first line is a comment with a name. sh: run, and has to end with 0, or with the
    code that a comment "exit N" says. text: each line has to be printed by the sh block before it.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    everything, printed = "", ""
    write_first_job(folder)
    for block in blocks_of(page):
        if name := FILE.match(block.text):
            (folder / name[1]).write_text(block.text)
        elif block.language == "sh":
            printed = ""
            for line in block.text.splitlines():
                done = run(command(line), cwd=folder, env=variables, timeout=timeout)
                expected = re.search(r"# .*exit (\d+)", line)
                assert done.returncode == int(expected[1] if expected else 0), line + "\n" + done.stdout + done.stderr
                printed += done.stdout + done.stderr
            everything += printed
        elif block.language == "text":
            assert missing(block.text, printed) == [], printed
    return everything
