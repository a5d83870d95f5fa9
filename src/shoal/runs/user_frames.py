"""Tracebacks of errors in a job's own code: the line that is the user's, and the whole text."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input", "<input>")  # code without a file that is the user's too
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own code on the way to the exception, as ` at FILE:LINE in FUNCTION`."""
    foreign = (_OWN, *_LIBRARIES, "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(_TYPED_IN) or not f.filename.startswith(foreign)]
    return f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def raised_by_library(error: BaseException) -> bool:
    """Whether the innermost line on the way to the exception is one of a library, not of the user's own code."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_LIBRARIES)


def raised_in_derivative(error: BaseException) -> bool:
    """Whether an exception comes out of a derivative that the user's code asks torch for."""
    files = ("torch/autograd/__init__.py", "torch/_functorch/eager_transforms.py")
    return any(f.filename.endswith(files) for f in traceback.extract_tb(error.__traceback__))


def traceback_of(error: BaseException) -> str:
    """The whole traceback, for the run directory."""
    return "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
