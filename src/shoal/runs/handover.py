"""Handover of values between the processes of a run, as JSON."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def dumped(value: object) -> str:
    """A frozen value as JSON."""
    # Not pydantic's own writer: it has null for the numbers that JSON lacks, which a plan's [prediction] may have.
    return json.dumps(TypeAdapter(type(value)).dump_python(value, by_alias=True), default=str)


def loaded(kind: type[T], text: str) -> T:
    """The value of that kind that `dumped` was given."""
    return TypeAdapter(kind).validate_json(text)
