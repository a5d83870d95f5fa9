"""Separation of installed code from the user's: files of Python, of shoal and of packages."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from pathlib import Path

_SHOAL = Path(__file__).resolve().parent
# Names of folders of installed packages. Such a folder may be on PYTHONPATH, or in a .pth file of another environment.
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_of_jobs: list[str] = []


def is_installed(path: str | Path) -> bool:
    """Check whether a file belongs to Python, shoal or an installed package that is not the job's own."""
    text = str(path)
    return (text.startswith(_folders()) or any(name in text for name in _SITES)) and not text.startswith(
        tuple(_of_jobs)
    )


def own_package(folder: Path | None) -> None:
    """Let the folder of the job's package count as the user's code from now on, although it may be installed."""
    if folder is not None and f"{folder}{os.sep}" not in _of_jobs:
        _of_jobs.append(f"{folder}{os.sep}")


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return folder prefixes with a trailing slash, since comparing strings is fast for thousands of modules."""
    known = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    # `pip install --target DIR` leaves records of its packages there.
    known += [f for f in sys.path if f not in ("", os.getcwd()) and next(Path(f).glob("*.dist-info"), None)]
    folders = [_SHOAL, *(path for folder in known for path in (Path(folder), Path(folder).resolve()))]
    return tuple({f"{folder}{os.sep}": None for folder in folders})
