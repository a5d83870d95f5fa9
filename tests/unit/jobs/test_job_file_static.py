"""How many grains a job file admits to, without being run."""

from pathlib import Path

import pytest

from shoal.jobs.job_file import JobModule, least_grains


def least(folder: Path, **files: str) -> int | None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return least_grains(JobModule.of_file(folder / "a.py"))


JOB = "from shoal import Job\ndef job(): return Job({})\n"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (JOB.format(""), 8),
        (JOB.format("grains=3"), 3),
        (JOB.format("grains=512"), 8),  # another job of the file may leave it out
        (JOB.format("grains=2 * 4"), None),
        (JOB.format("grains=True"), None),
        (JOB.format("**{'grains': 3}"), None),
        ("from shoal import Job\ndef job(grains: int = 8): return Job(grains=grains)\n", None),
        ("from elsewhere import job\n", None),
        ("import shoal\nj = shoal.Job()\nprint(j.grains)\n", None),
        ("import shoal\nj = shoal.Job()  # of eight grains\n", 8),
        ("def job(:", None),
    ],
)
def test_what_a_file_says(tmp_path: Path, text: str, known: int | None) -> None:
    assert least(tmp_path, a=text) == known


def test_what_lies_beside_it_is_read_too(tmp_path: Path) -> None:
    assert least(tmp_path, a="from b import job", b="import c\n" + JOB.format(""), c="import a\n") == 8
    assert least(tmp_path, c="from shoal import Job\nx = Job(grains=5)\n") == 5
    assert least(tmp_path, c="fields = dict(grains=5)\n") == 5
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "__init__.py").write_text("from .e import x")
    (tmp_path / "d" / "e.py").write_text("x = {'grains': 2}")
    assert least(tmp_path, c="import d.e\n") is None


def test_a_missing_file_says_nothing(tmp_path: Path) -> None:
    assert least_grains(JobModule.of_file(tmp_path / "a.py")) is None
