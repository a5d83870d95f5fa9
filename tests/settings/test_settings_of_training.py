"""Every field of a Job and of a Session has its effect, or is refused or warned of in words."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from tests.settings.laboratory import Laboratory, further, of_field
from tests.settings.training_rows import JOB, SESSION
from tests.usual import parametrize

import shoal
from shoal.training.session import Training

pytestmark = pytest.mark.ranks


# Of values that unit tests see too.
RARE = ("clip_norm: and clip_value", "eval_data: several sets", "fuse: with a pipeline")


@parametrize("key", JOB, rare={*RARE, *further(JOB)})
def test_of_a_job(key: str, laboratory: Laboratory) -> None:
    JOB[key].observe(laboratory)


@parametrize("key", SESSION, rare=further(SESSION))
def test_of_a_session(key: str, laboratory: Laboratory) -> None:
    SESSION[key].observe(laboratory)


def test_each_field_of_a_job_has_a_row() -> None:
    assert {of_field(key) for key in JOB} == {field.name for field in dataclasses.fields(shoal.Job)}


def test_each_field_of_a_session_has_a_row() -> None:
    own = set(inspect.signature(shoal.Session.__init__).parameters) - {"self", "training"}
    assert {of_field(key) for key in SESSION} == own | {field.name for field in dataclasses.fields(Training)}
