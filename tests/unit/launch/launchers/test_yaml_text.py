"""What is written as YAML is read back the same, by a reader that knows nothing of the writer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.launch.launchers.yaml_text import documents

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra hf")

SCALARS = (
    st.text()
    | st.integers()
    | st.booleans()
    | st.none()
    | st.sampled_from(["no", "on", "1e3", "0x1", "~", "- a", "a: b", "#", "2026-11-23", "\n", "{}"])
)
# YAML reads a key of at most 1,024 characters, escaped.
KEYS = st.text(max_size=100)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_every_value_comes_back(value: Any) -> None:
    assert yaml.safe_load(documents([value])) == value


def test_several_documents_and_how_they_look() -> None:
    text = documents([{"a": [{"b": 1, "c": []}, "x"]}, {"on": {}}])
    assert text == 'a:\n  - b: 1\n    c: []\n  - "x"\n---\n"on": {}\n'
    assert list(yaml.safe_load_all(text)) == [{"a": [{"b": 1, "c": []}, "x"]}, {"on": {}}]
