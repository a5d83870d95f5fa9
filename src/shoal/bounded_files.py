"""Files of a run, opened and parsed within bounds, since a run directory may come from anybody.

Only regular files are opened, and no links: a link may lead anywhere, and a pipe or a device may never end. Sizes, the
depth of tables, and numbers have limits. Control characters in texts are replaced, so that none reaches a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import printable

MOST_BYTES = 1 << 26  # of a document
# Of a file of lines: a run of a million steps writes 20,000 lines.
MOST_LOG_BYTES, MOST_LINES, MOST_LINE_BYTES = 1 << 32, 1_000_000, 1 << 23
_MOST_DEPTH = 64
_MOST_NUMBER = 1 << 128  # seeds of a job may have 128 bits
_ESCAPED_CONTROL = re.compile(r"(?<!\\)((?:\\\\)*)\\u00(?:0[0-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])", re.IGNORECASE)


class RefusedFileError(OSError, ValueError):
    """A file of a run is none that shoal writes. The message says what it is instead."""


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. Raises: RefusedFileError for any other file; OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RefusedFileError("it is a link, and links in a run are not followed") from None
        if error.errno == errno.ENXIO:  # a socket, or a pipe without a reader
            raise RefusedFileError("it is no regular file") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise RefusedFileError("it is no regular file")


def append_text(path: Path, text: str) -> None:
    """Append to a regular file, or create it. Raises: RefusedFileError; OSError."""
    with open(opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
        file.write(text)


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises: RefusedFileError; OSError."""
    with open(opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise RefusedFileError(f"it has {size:,} bytes, and the limit is {most_bytes:,}")
        return file.read(most_bytes)


def read_named(path: Path, most_bytes: int = MOST_BYTES, seconds: float = 60.0) -> bytes:
    """Return the content of a file that a user names, which may be a link, or a pipe as `<(command)` makes it.

    Raises: RefusedFileError for a directory, a device, too many bytes, or a pipe that is open longer; OSError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        mode, until, content = os.fstat(file.fileno()).st_mode, time.monotonic() + seconds, b""
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise RefusedFileError("it is no regular file and no pipe")
        while len(content) <= most_bytes:
            part = file.read(most_bytes + 1)
            if part == b"" and (content or stat.S_ISREG(mode)):
                return content
            content += part or b""
            if not part:  # its writer has written nothing now, or has not opened it yet
                if time.monotonic() > until:
                    raise RefusedFileError(f"it is a pipe whose writer has not closed it within {seconds:.0f} s")
                time.sleep(0.01)
        raise RefusedFileError(f"it has more than {most_bytes:,} bytes")


def read_object(path: Path, *, exactly: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file. `exactly`: as for `json_value`. Raises: RefusedFileError; OSError."""
    return object_of(read_bytes(path), exactly=exactly)


def object_of(text: str | bytes, *, exactly: bool = False) -> dict[str, Any]:
    """Parse a JSON object within the bounds. `exactly`: as for `json_value`. Raises: RefusedFileError."""
    value = json_value(text, exactly=exactly)
    if not isinstance(value, dict):
        raise RefusedFileError("it is no JSON object")
    return value


def objects_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the whole lines of a file, without damaged ones; none of a file that cannot be read."""
    with contextlib.suppress(OSError), open(opened(path), "rb") as file:
        for line in whole_lines(file):
            with contextlib.suppress(RefusedFileError):
                yield object_of(line)


def read_toml(path: Path, *, named: bool = False) -> dict[str, Any]:
    """Return the tables in a TOML file. `named`: by a user, as for `read_named`. Raises: RefusedFileError; OSError."""
    try:
        document = tomllib.loads((read_named(path) if named else read_bytes(path)).decode("utf-8"))
    except RecursionError:
        raise RefusedFileError("its tables are too deep") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedFileError(f"it is not TOML: {error}") from None
    _check(document)
    return document


def json_value(text: str | bytes, *, exactly: bool = False) -> Any:
    """Parse JSON within the bounds. Raises: RefusedFileError.

    NaN and infinity become None, and control characters are replaced. `exactly`: both stay, as a job's settings do.
    """
    try:
        value = json.loads(text, parse_constant=float if exactly else lambda _: None)
    except RecursionError:
        raise RefusedFileError("its tables are too deep") from None
    except ValueError as error:
        raise RefusedFileError(f"it is not JSON: {error}") from None
    _check(value, finite=not exactly)
    return value if exactly else cleaned(value)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that end with a line feed, without it, up to one that is longer than the limit.

    Control characters in texts are replaced. The file position is behind the last line at each yield. Raises: OSError.
    """
    while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n") and file.tell() <= MOST_LOG_BYTES:
        line = line[:-1]
        if b"\\u00" in line:
            text = _ESCAPED_CONTROL.sub(r"\1\\ufffd", line.decode("utf-8", "surrogateescape"))
            line = text.encode("utf-8", "surrogateescape")
        yield line


def cleaned(value: Any) -> Any:
    """Return a value of JSON or TOML in whose texts control characters are replaced."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [cleaned(one) for one in value]
    return {printable(name): cleaned(one) for name, one in value.items()} if isinstance(value, dict) else value


def _check(value: Any, depth: int = 0, *, finite: bool = True) -> None:
    if isinstance(value, dict | list):
        if depth > _MOST_DEPTH:
            raise RefusedFileError("its tables are too deep")
        for one in value.values() if isinstance(value, dict) else value:
            _check(one, depth + 1, finite=finite)
    elif isinstance(value, int):
        if not -_MOST_NUMBER <= value < _MOST_NUMBER:
            raise RefusedFileError("it has a number that no run has")
    elif finite and isinstance(value, float) and not math.isfinite(value):
        raise RefusedFileError("it has a number that is not finite")
