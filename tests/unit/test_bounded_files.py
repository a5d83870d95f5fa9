"""Files that a user names may be pipes and links, within bounds; files inside a run are neither."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shoal.bounded_files import RefusedFileError, read_bytes, read_named


def test_a_named_pipe_is_read_until_its_writer_closes_it(tmp_path: Path) -> None:
    pipe, text = tmp_path / "pipe", b"x" * 200_000
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    assert read_named(pipe) == text
    writer.join()
    with pytest.raises(RefusedFileError, match="no regular file"):
        read_bytes(pipe)


def test_a_pipe_that_is_already_closed_by_its_writer_is_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[layout]")
    os.close(writer)
    assert read_named(Path(f"/dev/fd/{reader}")) == b"[layout]"
    os.close(reader)


def test_a_pipe_without_a_writer_and_one_without_an_end_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedFileError, match="has not closed it within 0 s"):
        read_named(tmp_path / "pipe", seconds=0.05)
    (tmp_path / "long").write_bytes(b"x" * 11)
    with pytest.raises(RefusedFileError, match="more than 10 bytes"):
        read_named(tmp_path / "long", most_bytes=10)
    with pytest.raises(RefusedFileError, match="no pipe"):
        read_named(Path("/dev/zero"))


def test_a_link_is_followed_where_a_user_names_it_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_named(tmp_path / "link") == b"a"
    with pytest.raises(RefusedFileError, match="a link"):
        read_bytes(tmp_path / "link")
