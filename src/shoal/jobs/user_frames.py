"""Tracebacks of errors in a job's own code: the line in the user's code, and the whole text."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input", "<input>")  # the user's code that is in no file
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback, as ` at FILE:LINE in FUNCTION`, or ""."""
    foreign = (_OWN, *_LIBRARIES, "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(_TYPED_IN) or not f.filename.startswith(foreign)]
    return f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def raised_by_library(error: BaseException) -> bool:
    """Check whether the innermost line of the traceback is in a library."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_LIBRARIES)


def raised_in_derivative(error: BaseException) -> bool:
    """Check whether the exception comes from a derivative that the user's code requested from torch."""
    files = ("torch/autograd/__init__.py", "torch/_functorch/eager_transforms.py")
    return any(f.filename.endswith(files) for f in traceback.extract_tb(error.__traceback__))


def traceback_of(error: BaseException) -> str:
    """Return the whole traceback as text, for the run directory."""
    return "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
