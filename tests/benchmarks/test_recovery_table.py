"""The page on recovery has the table that its benchmark makes of its results."""

from benchmarks.recovery import ROOT, table


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "benchmarks" / "results" / "recovery.md").read_text(encoding="utf-8")
