"""User errors: places in a job's own code that exceptions come from, and remedies for them."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import text_of
from shoal.installed import is_installed

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # as frames name it: the import may lead over links
_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input", "<input>")  # the user's code that is in no file


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback, as ` at FILE:LINE in FUNCTION`, or ""."""
    frames = [(f.filename, f) for f in traceback.extract_tb(error.__traceback__)]
    own = [f for n, f in frames if n.startswith(_TYPED_IN) or not (n.startswith((_OWN, "<")) or is_installed(n))]
    return f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def raised_by_library(error: BaseException) -> bool:
    """Check whether the innermost line of the traceback is in a library."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return is_installed(file) and not file.startswith(_OWN)


def raised_in_derivative(error: BaseException) -> bool:
    """Check whether the exception comes from a derivative that the user's code requested from torch."""
    files = ("torch/autograd/__init__.py", "torch/_functorch/eager_transforms.py")
    return any(f.filename.endswith(files) for f in traceback.extract_tb(error.__traceback__))


def traceback_of(error: BaseException) -> str:
    """Return the whole traceback as text, for the run directory."""
    return "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()


# Patterns in torch's messages about incompatible tensors.
_DEVICES = re.compile(r"same device|device type|on device|found at least two devices|expected device|is on cpu", re.I)
_DTYPES = re.compile(r"dtype|scalar type|\b(Float|Double|Half|BFloat16|Long|Int)(Tensor)?\b|floating point")
_SHAPES = re.compile(
    r"\bshapes?\b|\bsizes?\b|\bdim(ension)?s?\b|dimensional|size of tensor|must match|out of bounds|broadcast"
    r"|input\[|channels|numel|elements|normalized_shape|batch_size",
    re.I,
)
_NUMBERED = re.compile(r"index out of range in self|Target -?\d+ is out of bounds|Assertion .*n_classes", re.I)
_UNPACKED = re.compile(r"values to unpack|cannot unpack")
# Python's message for a relative import outside of a package.
NO_PACKAGE = "no known parent package"
OF_THE_DATASET = "shapes and dtypes of the batch are those of the dataset after collation"


def remedy(error: BaseException, *, has_line: bool, batch: Any = None, shapes: str = OF_THE_DATASET) -> str:
    """Return the remedy for an exception of the job's code.

    `has_line`: whether the message already names a line of the user's code.
    `batch`: the input of the code, if known. The remedy describes it for errors of shapes and unpacking.
    `shapes`: a sentence on where the shapes and dtypes that the code receives come from.
    """
    line = "that line" if has_line else "what raised it (the traceback is in errors/ of the run directory)"
    text = text_of(error)
    if _UNPACKED.search(text):
        return f"mend {line}: unpack as many values as there are{_given(batch)}"
    if _of_tensors(error):
        if "more than 1 value per channel" in text:
            return (
                "give Job(grains=...) fewer grains, so that each has two samples or more: batch statistics are those "
                f"of a grain; a last step of one sample has none{_given(batch)}"
            )
        if _NUMBERED.search(text):
            return f"mend {line}: a label or a token is beyond what the layer or the loss has{_given(batch)}"
        if _DEVICES.search(text):
            return (
                f"mend {line}: shoal moves the model and the batch; a tensor that the code makes itself needs "
                "device=x.device of one of them, or is a buffer of the model (register_buffer)"
            )
        if _DTYPES.search(text) or _SHAPES.search(text):
            return f"mend {line}; {shapes}{_given(batch)}"
    if isinstance(error, SystemExit):
        return "let the job's code return, or raise what is wrong"
    if isinstance(error, ImportError) and NO_PACKAGE in text_of(error):
        return "put an __init__.py into the package's folder, or give the dotted name: shoal run package.module:job"
    if isinstance(error, ImportError):
        name = getattr(error, "name", None)
        package = f" ({name.partition('.')[0]})" if name else ""
        return f"install what is imported{package} in the environment that runs shoal, or put it beside the job file"
    if isinstance(error, OSError) and getattr(error, "filename", None) is not None:
        return (
            "give a path that is there wherever a rank runs: a relative one begins in the folder in which shoal was "
            "started, and one made from __file__ beside the job file"
        )
    if isinstance(error, NotImplementedError) and 'required "forward"' in text_of(error):
        return "give that module a method forward"
    if isinstance(error, AttributeError | TypeError) and "NoneType" in text_of(error):
        return f"mend {line}: a value there is None; what should have made it may lack a return"
    if isinstance(error, KeyError):
        return f"mend {line}: ask for a key that is there"
    if isinstance(error, AssertionError):
        return f"mend what {line} asserts, or what it is asserted of"
    return f"mend {line}"


def _of_tensors(error: BaseException) -> bool:
    """Check whether torch raised the error because of its operands."""
    if isinstance(error, NotImplementedError | RecursionError):
        return False
    if isinstance(error, RuntimeError | IndexError):
        return True
    if not isinstance(error, ValueError | TypeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    from_torch = bool(frames and torch) and Path(frames[-1].filename).is_relative_to(Path(str(torch)).parent)
    return "tensor" in text_of(error).lower() or (from_torch and isinstance(error, ValueError))


def _given(batch: Any) -> str:
    return "" if batch is None else f"; the batch was {described(batch)}"


def described(value: Any, depth: int = 0) -> str:
    """Describe a batch briefly: the dtypes and shapes of its tensors, in their structure."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if depth < 2 and isinstance(value, Mapping):
        parts = [f"{key!r}: {described(item, depth + 1)}" for key, item in list(value.items())[:8]]
        return "{" + ", ".join(parts) + (", ..." if len(value) > 8 else "") + "}"
    if depth < 2 and isinstance(value, list | tuple):
        parts = [described(item, depth + 1) for item in value[:8]]
        inside = ", ".join(parts) + (", ..." if len(value) > 8 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return type(value).__name__
