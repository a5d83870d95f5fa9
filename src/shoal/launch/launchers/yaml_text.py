"""YAML of plain values in block style, for kubectl and for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

Value = Mapping[str, "Value"] | Sequence["Value"] | str | int | bool | None

# A key that every YAML reader takes for a text.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def documents(values: Iterable[Value]) -> str:
    """Return YAML documents. Scalars are in JSON, a subset of YAML, so that no reader guesses a text's type."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(value)) for value in values)


def _lines(value: Value) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            plain = _PLAIN.fullmatch(key) and key.lower() not in _WORDS
            head = f"{key if plain else _scalar(key)}:"
            if isinstance(inner, Mapping | Sequence) and not isinstance(inner, str) and inner:
                yield head
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{head} {next(_lines(inner))}"
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for inner in value:
            first, *others = _lines(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        yield _scalar(value)


def _scalar(value: Value) -> str:
    # JSON's own escapes are UTF-16 halves, which YAML reads as two characters.
    return re.sub(r"[^\x20-\x7e]", lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))
