"""What editors and type checkers see of the package: py.typed, a Session's keywords."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Required, get_type_hints

import shoal
from shoal.training.session.arguments import Training, TrainingKeywords


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(shoal.__file__).parent / "py.typed").is_file()


def test_a_sessions_keywords_are_the_fields_of_its_training() -> None:
    assert get_type_hints(TrainingKeywords) == get_type_hints(Training)
    extras = get_type_hints(TrainingKeywords, include_extras=True)
    assert [name for name, kind in extras.items() if kind == Required[int]] == ["global_batch"]
    assert [field.name for field in fields(Training)] == list(get_type_hints(TrainingKeywords))
