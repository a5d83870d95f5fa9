"""Files that a job reads while it is loaded: which count, and what a digest of one sees."""

from __future__ import annotations

import builtins
import io
import json
import sys
from pathlib import Path

import pytest

from shoal.jobs.job_file import digests_of, files_read, load, parse_target

pytestmark = pytest.mark.usefixtures("no_other_test")

JOB = """
import json, pathlib, shoal
import reads_at_import
HERE = pathlib.Path(__file__).parent
NUMBERS = json.loads((HERE / "numbers.json").read_text())
def job():
    with open(HERE / "words.txt") as file:
        words = file.read().split()
    with open(HERE / "log.txt", "a+") as file:
        file.write("loaded")
    (HERE / "cache.txt").write_text("made")
    (HERE / "cache.txt").read_text()
    return shoal.Job(model=list, loss=print, optimizer=list, train_data=words, global_batch=1)
"""


def test_files_that_a_job_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"job_reads.py": JOB, "numbers.json": "[1]", "words.txt": "a b", "more.txt": "",
             "reads_at_import.py": f"with open({str(tmp_path / 'more.txt')!r}) as file: file.read()\n"}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    plain = builtins.open
    loaded = load(parse_target(str(tmp_path / "job_reads.py"), ()))
    assert builtins.open is io.open is plain
    assert loaded.files == tuple(str(tmp_path / name) for name in ("more.txt", "numbers.json", "words.txt"))
    for name in ("job_reads", "reads_at_import"):
        del sys.modules[name]


def test_what_a_library_reads_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own settings, say, of which the job knows nothing; what it reads for the job counts."""
    library, file = tmp_path / "library", tmp_path / "values.json"
    library.mkdir()
    file.write_text("{}", encoding="utf-8")
    (library / "reading.py").write_text(
        f"import json\nwith open({str(file)!r}) as own:\n    own.read()\n"
        "def read(path):\n    with open(path) as own:\n        return json.load(own)\n"
    )
    monkeypatch.setattr("shoal.jobs.job_file._is_library", lambda path: "/library/" in path or "/json/" in path)
    monkeypatch.syspath_prepend(str(library))
    with files_read() as found:
        import reading  # type: ignore[import-not-found]
    assert found == []
    with files_read() as found:
        reading.read(file)
    assert found == [str(file)]
    del sys.modules["reading"]


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_digest_sees_a_change(size: int, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "numbers"
    path.parent.mkdir()
    seen = set()
    for place in (None, 0, size - 1):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        found = digests_of([str(path), str(tmp_path / "gone")], [str(tmp_path / "other"), str(tmp_path)])
        assert found.keys() == {"sub/numbers"}
        seen.add(json.dumps(found))
    assert len(seen) == 3
