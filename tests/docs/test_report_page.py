"""The commands of docs/report.md are run as they stand there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.docs.pages import write_first_job
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_in_its_order(tmp_path: Path) -> None:
    commands = [line.split() for block in blocks("sh", PAGE) for line in block.splitlines()]
    assert [words[1] for words in commands] == ["run", "run", "report", "report", "watch", "watch"]
    write_first_job(tmp_path)
    for words in commands:
        done = run([sys.executable, "-m", *words], cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "one" / "report.html").is_file()
    assert (tmp_path / "compared.html").is_file()
    assert (tmp_path / "digits.prom").read_text().endswith("# EOF\n")


def test_every_part_of_the_wall_clock_is_explained() -> None:
    from shoal.report.wall_clock import PARTS

    assert [name for name in PARTS if f"`{name}`" not in PAGE] == []
