"""Docstrings as Markdown: lines that explain a parameter or name errors become a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

# "loss: (model, batch) -> ...", "train_data, eval_data: ..." and "Raises: JobError ..." begin a line.
ENTRY = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*|Raises|Collective): (?=\S)")


def listed(text: str) -> str:
    """A docstring's text with one list item for each entry; what is indented under an entry stays with it."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if match := ENTRY.match(line):
            names = match["names"]
            shown = f"*{names}*" if names[0].isupper() else ", ".join(f"`{name}`" for name in names.split(", "))
            lines += [] if inside else [""]
            lines.append(f"- {shown}: {line[match.end() :]}")
            inside = True
        elif inside and line.startswith(" "):
            lines.append(line)
        else:
            lines += [""] if inside else []
            lines.append(line)
            inside = False
    return "\n".join(lines)


class Entries(Extension):
    """Rewrites each docstring once it is read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
