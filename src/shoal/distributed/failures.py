"""Attribution of failures: the rank, the place and the message of an exception."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

from shoal.errors import (
    CollectiveError,
    InternalError,
    OutOfMemoryError,
    PeerError,
    ShoalError,
    UserCodeError,
    first_line,
    refused_by_system,
    text_of,
)
from shoal.jobs.user_errors import OF_THE_DATASET, place_of, remedy, traceback_of
from shoal.numerics.out_of_memory import is_out_of_memory


def is_lost_peer(error: BaseException) -> bool:
    """Return True if the exception comes from a collective that another rank did not finish."""
    if isinstance(error, ShoalError):
        return isinstance(error, PeerError | CollectiveError)
    return isinstance(error, dist.DistError) or "gloo" in text_of(error).lower()


def out_of_memory(what: str, error: BaseException) -> OutOfMemoryError:
    """Return a three-beat error for an exception that means that memory ran out."""
    return OutOfMemoryError(
        given=what,
        conflict=f"memory ran out: {text_of(error).strip()[:200] or type(error).__name__}{place_of(error)}",
        remedy='divide the model over more processes: [layout] shard = N, [shard] level = "parameters" in a --plan; or '
        "use smaller grains, a smaller global_batch or a smaller model",
    )


def user_error(
    what: str, error: BaseException, batch: Any = None, shapes: str = OF_THE_DATASET
) -> UserCodeError | OutOfMemoryError:
    """Return a three-beat error for an exception from the job's own code, with the traceback for the run directory.

    Args:
        what: the part of the job that raised the exception.
        error: the exception. Exhausted memory is not an error of the code and gives an OutOfMemoryError.
        batch: the batch that the code received, if any.
        shapes: what the remedy for a wrong shape or dtype says of the code's input.
    """
    if is_out_of_memory(error):
        return out_of_memory(f"{what} of this job", error)
    text = first_line(error, 300)
    place = place_of(error)
    user_code = UserCodeError(
        given=f"{what} of this job",
        conflict=f"it raised {type(error).__name__}: {text}{place}",
        remedy=remedy(error, has_line=bool(place), batch=batch, shapes=shapes),
    )
    user_code.traceback_text = traceback_of(error)
    return user_code


def as_shoal_error(error: BaseException) -> ShoalError:
    """Return the error itself if it is a ShoalError, else the ShoalError that fits it, by default an InternalError."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, SystemExit):
        return user_error("a sys.exit()", error)
    if is_out_of_memory(error):
        return out_of_memory("this run", error)
    if is_lost_peer(error):
        place = place_of(error)
        # The message without the place in Gloo's code and Gloo's advice.
        text = text_of(error).strip().splitlines()[0].partition(" This is typically caused")[0]
        text = re.sub(r"^\[\S+:\d+\] ", "", text)[-200:]
        lost = PeerError(
            given="a collective of this run",
            conflict=f"another rank is gone: {text}{place}",
            remedy="look at what the other rank said; --resume goes on from the newest checkpoint",
        )
        lost.traceback_text = traceback_of(error) if place else None  # if the job's own code called the collective
        return lost
    system = refused_by_system(error)
    if system is not None:
        return system
    text = first_line(error, 300)
    internal = InternalError(
        given="this run",
        conflict=f"{type(error).__name__} inside shoal: {text}",
        remedy="please report it with the traceback in errors/ of the run directory",
    )
    internal.traceback_text = traceback_of(error)
    return internal


def to_json(error: ShoalError, rank: int, host: str) -> dict[str, Any]:
    """Return the error as a JSON value that `errors.from_json` reads on another rank or in the launcher."""
    known = (kind for kind in type(error).__mro__ if kind.__module__ == ShoalError.__module__)  # what the reader has
    return {
        "kind": next(known).__name__,
        "given": error.given,
        "conflict": error.conflict,
        "remedy": error.remedy,
        "rank": rank if error.rank is None else error.rank,
        "host": error.host or host,
        "traceback": error.traceback_text,
    }
