"""Table of wrong set-ups, from the tests that make them: SHOAL_WRONG_TABLE=ROWS scripts/test-engines ...

Then `python -m tests.engines.wrong_table ROWS` writes benchmarks/results/engines_wrong_set_ups.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "engines_wrong_set_ups.md"
_BEATS = re.compile(r"you gave: +(?P<given>.*?)\n +conflicts with: +(?P<conflict>.*?)\n +write instead:", re.DOTALL)
_OF_RANK = re.compile(r"^error on .*?: \w+: (?P<conflict>.*?)\n +you gave: +(?P<given>.*?)\n", re.DOTALL | re.MULTILINE)
_HEAD = """\
# Wrong set-ups

What each says, as the tests on real engines saw it, and the seconds from the command to its end with that message.
Two hosts are network namespaces of one machine of two cores. A test gives the whole command 60 s
to end by itself. `scripts/test-engines` repeats all of them; paths, addresses and process ids are left out here.

| Set-up | Message | Seconds |
|---|---|---|
"""


def note(name: str, began: float, said: str) -> None:
    """Notes a command that began then, on the monotonic clock, and has ended now with these words."""
    rows = os.environ.get("SHOAL_WRONG_TABLE")
    if rows is None:
        return
    found = [*_OF_RANK.finditer(said), *_BEATS.finditer(said)]
    last = found[-1] if found else {"given": "", "conflict": said.strip().splitlines()[-1]}
    with open(rows, "a", encoding="utf-8") as file:
        row = {
            "name": name,
            "message": _short(f"{last['given']}: {last['conflict']}"),
            "seconds": round(time.monotonic() - began, 1),
        }
        file.write(json.dumps(row) + "\n")


def _short(text: str) -> str:
    text = " ".join(text.split())
    for pattern, shown in (
        (r"/tmp/\S*?([\w.-]+)(?=[\s,;:\"]|$)", r".../\1"),
        (r"\b10\.\d+\.\d+\.\d+", "ADDRESS"),
        (r"process \d+", "process N"),
        (r"\[pid \d+\]|pid \d+", "pid N"),
    ):
        text = re.sub(pattern, shown, text)
    return textwrap.shorten(text, 200, placeholder=" ...").replace("|", "\\|")


def main(rows: str) -> None:
    """Writes the page."""
    lines = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    table = {line["name"]: f"| {line['name']} | {line['message']} | {line['seconds']} |\n" for line in lines}
    PAGE.write_text(_HEAD + "".join(table[name] for name in sorted(table)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
