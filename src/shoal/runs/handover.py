"""Handover of values between the processes of a run, as JSON."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import TypeAdapter

from shoal.errors import LaunchError

T = TypeVar("T")


def dumped(value: object) -> str:
    """A frozen value as JSON."""
    # Not pydantic's own writer: it has null for the numbers that JSON lacks, which a plan's [prediction] may have.
    return json.dumps(TypeAdapter(type(value)).dump_python(value, by_alias=True), default=str)


def loaded(kind: type[T], text: str) -> T:
    """The value of that kind that `dumped` was given."""
    try:
        return TypeAdapter(kind).validate_python(json.loads(text))
    except ValueError as error:
        raise LaunchError(
            given=f"a {kind.__name__} that another process of this run wrote",
            conflict=f"it cannot be read: {error}",
            remedy="start every process with the same version of shoal",
        ) from error
