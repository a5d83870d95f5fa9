"""Argument of `--on NAME:ARG`: an optional first word, then settings KEY=VALUE, separated by commas."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, TypeVar

from shoal.errors import CommandError, nearest

T = TypeVar("T")
# A comma within brackets belongs to the value: local-cluster[2,1,1024].
_COMMA = re.compile(r",(?![^\[]*\])")


def parsed(kind: type[T], name: str, argument: str, word: str | None = None) -> T:
    """Parse the argument of `--on NAME:ARG` into a frozen dataclass of a kind, whose fields are the settings.

    `word`: the field of the first part, if that part may come without a key. Raises: CommandError with every mistake.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for place, part in enumerate(_COMMA.split(argument) if argument else []):
        key, equals, text = part.partition("=")
        if not equals and place == 0 and word is not None:
            key, text = word, part
        key = key.strip()
        if not text:
            wrong.append(f"{part!r} is not KEY=VALUE")
        elif key not in known:
            wrong.append(f"{key!r} is no setting of it{nearest(key, list(known))}")
        elif key in values:
            wrong.append(f"{key} is given twice")
        else:
            values[key] = text.strip()
            if str(known[key].type).startswith("int"):
                if text.strip().isdecimal():
                    values[key] = int(text)
                else:
                    wrong.append(f"{key}={text.strip()} is no whole number")
    if wrong:
        raise CommandError(
            given=f"--on {name}:{argument}",
            conflict="; ".join(wrong),
            remedy=f"write --on {name}:{'WORD,' if word else ''}KEY=VALUE,...; its settings are {', '.join(known)}",
        )
    return kind(**values)
