"""Settings after an engine's name: every mistake of them in one message."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shoal.errors import CommandError
from shoal.launch.launchers.argument import parsed


@dataclass(frozen=True)
class EngineSettings:
    kind: str = "plain"
    address: str = ""
    pods: int = 1


def test_a_word_and_settings_of_their_types() -> None:
    assert parsed(EngineSettings, "x", "", "kind") == EngineSettings()
    found = parsed(EngineSettings, "x", "fancy,pods=3,address=local-cluster[2,1,1024]", "kind")
    assert found == EngineSettings("fancy", "local-cluster[2,1,1024]", 3)
    assert parsed(EngineSettings, "x", "address=a=b", "kind").address == "a=b"


def test_all_mistakes_at_once() -> None:
    with pytest.raises(CommandError) as caught:
        parsed(EngineSettings, "x", "pods=two,adress=1,pods=3,alone,kind=", "kind")
    for part in ("pods=two is no whole number", "did you mean 'address'?", "pods is given twice", "'alone' is not KEY"):
        assert part in caught.value.conflict
    assert "'kind=' is not KEY=VALUE" in caught.value.conflict
    with pytest.raises(CommandError, match="'fancy' is not KEY=VALUE"):
        parsed(EngineSettings, "x", "fancy")
