"""What failures say, by the matrix's rows: a table of messages that tests have seen, for benchmarks/results/faults.md.

Repeat with `SHOAL_TEST_TOLD=told.jsonl scripts/test --all tests/faults`, then `python -m tests.faults.told told.jsonl`.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

from tests.faults.matrix import ROWS, Row


def shown(text: str) -> str:
    """A line without what is this machine's: folders, process ids, the host's name."""
    text = re.sub(r"(?:/[^\s/:,;'\"]+)+/", ".../", text.replace(socket.gethostname(), "HOST"))
    text = re.sub(r"\bprocess \d+", "process N", text).replace("|", "\\|")
    text = re.sub(r"\[?\d+\.\d+\.\d+\.\d+(:\d+|\](:\d+)?)?", "ADDRESS", text)
    return text if len(text) <= 320 else text[:317] + "..."


def of_row(row: Row, told: list[dict[str, str | None]]) -> dict[str, str | None] | None:
    """The first message that a test of the row has seen; of its own tests before those that it shares."""
    for test in (*row.usual, *row.soak):
        for message in told:
            name = str(message["test"]).removeprefix("tests/")
            if name == test or name.startswith(f"{test}["):
                return message
    return None


def table(told: list[dict[str, str | None]]) -> str:
    """A row for each fault whose test ends with an error."""
    lines = ["| # | First line |", "|---|---|"]
    for row in ROWS:
        message = of_row(row, told)
        if message is not None:
            lines.append(f"| {row.number} | {shown(str(message['headline']))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]), end="")
