"""What a verification of a script reads of its processes' output."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.programs.command import Processes


@pytest.mark.parametrize(("after", "first"), [(1, "RuntimeError: no GPU"), (30, "RuntimeError: no GPU")])
def test_an_error_that_other_threads_print_after_is_among_the_last_lines(
    after: int, first: str, tmp_path: Path
) -> None:
    printed = ["Traceback (most recent call last):", first, *(f"[W] frame {number}" for number in range(after))]
    (tmp_path / "output-0.txt").write_text("\n".join(printed), encoding="utf-8")
    lines = Processes.last_lines(SimpleNamespace(folder=tmp_path), 0, 2)  # type: ignore[arg-type]
    assert lines == [first, f"[W] frame {after - 1}"]
