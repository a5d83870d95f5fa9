"""Two descriptions are compared value by value, and a value that only one of them has differs."""

from __future__ import annotations

from shoal.jobs.differences import ABSENT, Difference, changed, differences


def test_values_that_differ_are_named_with_their_sections() -> None:
    mine = {"seed": 1, "length": {"kind": "epochs", "count": 2}, "clip_norm": None, "grains": 8}
    theirs = {"seed": 1, "length": {"kind": "epochs", "count": 3}, "grains": 8, "fuse": True}
    assert differences(mine, theirs) == [
        Difference("length.count", 2, 3),
        Difference("fuse", ABSENT, True),
        Difference("clip_norm", None, ABSENT),
    ]
    assert differences(mine, mine) == []
    assert repr(ABSENT) == "nothing"


def test_files_are_named_with_their_definitions() -> None:
    before = {"a.py": {"f": "1", "g": "2"}, "b.py": {}}
    assert changed(before, {"a.py": {"f": "1", "g": "3", "h": "4"}, "c.py": {}}) == [
        "a.py: g, h",
        "b.py (gone)",
        "c.py (new)",
    ]
    assert changed(before, before) == []
