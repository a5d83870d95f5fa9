"""Every key of a plan has its effect, or is refused or warned of in words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from tests.settings.laboratory import Laboratory, further, of_field
from tests.settings.plan_rows import PLAN, SLOW
from tests.usual import parametrize

import shoal

pytestmark = pytest.mark.ranks


@parametrize("key", PLAN, rare={*SLOW, *further(PLAN)})
def test_of_a_plan(key: str, laboratory: Laboratory) -> None:
    PLAN[key].observe(laboratory)


def keys() -> Iterator[str]:
    """The keys of a plan file, with their sections."""
    for name, field in shoal.Plan.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from (f"{name}.{key}" for key in section.model_fields)
        else:
            yield field.alias or name


def test_each_key_of_a_plan_has_a_row() -> None:
    assert {of_field(key) for key in PLAN} == set(keys())
