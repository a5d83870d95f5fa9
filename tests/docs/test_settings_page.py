"""docs/settings.md names every field of a Job, a Session and a Plan and every option, with its default."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import shoal
from shoal.cli.main import _parser
from shoal.training.session import Training

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\S+)`(?: `(.*?)`)? \| (.+?) \|", re.MULTILINE)
SAME = re.compile(r"^As for (?:a |`)(.+?)`?: (.+)\.$", re.MULTILINE)


def documented(heading: str) -> dict[str, str]:
    """The defaults in the table under a heading, by name; of names that are as under another heading, those there."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    same = {name: other for other, names in SAME.findall(section) for name in re.findall(r"`(\S+)`", names)}
    defaults = {name: documented(other)[name] for name, other in same.items()}
    return defaults | {name: default or "none" for name, default, _ in ROW.findall(section)}


def shown(value: Any) -> str:
    """A default as the page spells it."""
    if value is None or value == () or value == []:
        return "none" if value is None else "[]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def of_fields(kind: Any) -> dict[str, str]:
    found = {}
    for field in dataclasses.fields(kind):
        default = "required" if field.default is dataclasses.MISSING else shown(field.default)
        found[field.name] = default if field.default_factory is dataclasses.MISSING else "{}"
    return found


def of_plan() -> Iterator[tuple[str, str]]:
    for name, field in shoal.Plan.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from ((f"{name}.{key}", shown(of.default)) for key, of in section.model_fields.items())
        else:
            yield field.alias or name, shown(field.default) if field.default_factory is None else "{}"


def test_the_fields_of_a_job() -> None:
    assert documented("Job") == of_fields(shoal.Job)


def test_the_fields_of_a_session() -> None:
    assert documented("Session") == dict.fromkeys(("plan", "exact", "precision"), "none") | of_fields(Training)


def test_the_keys_of_a_plan() -> None:
    assert documented("Plan") == dict(of_plan())


def test_the_options_of_each_command() -> None:
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        wanted = {(a.option_strings or [a.dest])[-1]: shown(a.default) for a in actions}
        assert documented(f"shoal {name}") == wanted
