"""Text that is written from the declarations of options, and the command that writes it again.

    python -m tests.unit.option_pages

The signature and the table of `shoal.run` are in the source, since type checkers and editors read them there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shoal.cli.commands import COMMANDS
from shoal.cli.options import RunOptions
from shoal.runs.options import DeclaredOption, declared

ROOT = Path(__file__).resolve().parents[2]
CALL = ROOT / "src" / "shoal" / "cli" / "from_python.py"
PAGE = ROOT / "docs" / "settings.md"


def shown(value: Any) -> str:
    """A default as the page of settings spells it."""
    if value is None or value in ((), []):
        return "none" if value is None else "[]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def keywords() -> list[DeclaredOption]:
    """The options that `shoal.run` has too, beside the job."""
    return [one for one in declared(RunOptions) if one.option.keyword is not None and one.name != "job"]


def signature() -> str:
    """The keywords of `shoal.run`, a line each."""
    lines = []
    for one in keywords():
        default = f'"{one.default}"' if isinstance(one.default, str) else str(one.default)
        lines.append(f"    {one.name}: {one.option.keyword or one.type} = {default},\n")
    return "".join(lines)


def rows() -> str:
    """The rows of the table in the docstring of `shoal.run`."""
    texts = [(one.name, one.option.call or one.option.text.replace("%%", "%")) for one in keywords()]
    return "".join(f"    | `{name}` | {text} |\n" for name, text in texts)


def table(kind: Any) -> str:
    """The rows of a command's table on the page of settings."""
    lines = []
    for one in declared(kind):
        meaning = one.option.page or one.option.text.replace("%%", "%")
        refused = f"{one.option.refused} |" if one.option.refused else "|"
        default = "" if one.default is None else f" `{shown(one.default)}`"
        lines.append(f"| `{one.flag}`{default} | {meaning} | {refused}\n")
    return "".join(lines)


def written_call(text: str) -> str:
    """The source of `shoal.run` with its keywords and rows written again."""
    before, start, rest = text.partition(
        "def run(\n    job: JobLike,\n    *,\n    settings: Mapping[str, Any] | None = None,\n"
    )
    _, end, after = rest.partition("    **job_settings: Any,\n")
    text = f"{before}{start}{signature()}{end}{after}"
    pattern = re.compile(r"(    \| `settings` \|[^\n]*\n)(?:    \|[^\n]*\n)*")
    return pattern.sub(lambda found: found[1] + rows(), text, count=1)


def written_page(text: str) -> str:
    """The page of settings with the tables of the commands written again, but for `shoal verify`.

    Most options of `shoal verify` are those of `shoal run`, and its table says so.
    """
    for name, command in COMMANDS.items():
        pattern = re.compile(rf"(^## shoal {name}$.*?^\|---\|[^\n]*\n)(?:\|[^\n]*\n)*", re.MULTILINE | re.DOTALL)
        if name != "verify":
            rows = table(command.options)
            text = pattern.sub(lambda found, rows=rows: found[1] + rows, text, count=1)  # type: ignore[misc]
    return text


def main() -> None:
    """Write both files."""
    for path, write in ((CALL, written_call), (PAGE, written_page)):
        path.write_text(write(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
