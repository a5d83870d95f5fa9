"""Detection of collectives that a job calls itself, in its loss, metrics or model, before the first step."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.errors import JobError

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
# Folders of shoal and torch as frames name them: by the path of the import, which may lead over links.
_SHOAL = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.dirname(dist.__file__)) + os.sep
# The functions of torch that authors of a loss call.
_FOR_USERS = os.path.join(_TORCH, "distributed", "nn", "functional.py")


@contextlib.contextmanager
def own_collectives_refused(what: str) -> Iterator[None]:
    """Refuse collectives of the job's code, such as `what`, while the context calls it on several ranks.

    Raises: JobError, before anything is sent, for a collective that neither shoal nor torch itself calls.
    """
    allowed: list[str] = []  # the calls in progress: torch passes them to function modes, which call once more
    functions = [(module, name, getattr(module, name)) for module in (dist, distributed_c10d) for name in _NAMES]
    try:
        for module, name, function in functions:
            setattr(module, name, _refusing(what, name, function, allowed))
        yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)


def _refusing(what: str, name: str, function: Callable[..., Any], allowed: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        if name not in allowed and (file == _FOR_USERS or not file.startswith((_SHOAL, _TORCH))):
            raise JobError(
                given=f"torch.distributed.{name} within {what}, at {file}:{frame.f_lineno}",
                conflict="a rank computes as many microbatches as it has grains for: ranks do not meet there, or add "
                "samples of different microbatches; and shoal adds up over ranks what the loss returns",
                remedy="return the sum over this batch and its weight, without torch.distributed",
            )
        allowed.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            allowed.remove(name)

    return call
