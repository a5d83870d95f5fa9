"""Worker process of one part of a search. It calls methods of its passes on request of the parent process."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle  # noqa: TID251 - only private pipes between a command and the processes that it started
import sys
from typing import IO, Any, NamedTuple

from shoal.hardware.values import Cluster
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.search.aims import Ceiling
from shoal.planner.search.costs import costs_of
from shoal.planner.search.passes import SearchPasses
from shoal.planner.search.search import Search
from shoal.planner.search.space import Space


class Costed(NamedTuple):
    """Inputs of the cost model for every number of devices."""

    work: Workload
    cluster: Cluster
    program: Program
    correction: Correction


class SearchPart(NamedTuple):
    """Part of a divided search: its space, and the index `place` of its number in the shared file.

    `shared`: descriptor of a file with `number` float64 values, one ceiling per part.
    """

    space: Space
    costed: Costed
    grain_size: int
    shared: int
    number: int
    place: int
    parent: int


def send(message: object, to: IO[bytes]) -> None:
    """Write a message to a stream."""
    pickle.dump(message, to)
    to.flush()


def received(of: IO[bytes]) -> Any:
    """Read the next message of a stream.

    Raises: EOFError if there is none.
    """
    try:
        return pickle.load(of)  # noqa: S301 - see the import
    except pickle.UnpicklingError as error:  # the sender was killed within a message
        raise EOFError from error


def main() -> None:
    """Answer the parent's requests on the original standard output until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(OSError):  # the standard error may be closed
        os.dup2(2, 1)
    gc.disable()  # takes a third of the time of a long search and frees nothing
    part: SearchPart = received(sys.stdin.buffer)

    def watch() -> None:
        if os.getppid() != part.parent:
            os._exit(1)

    watch()
    search = Search(part.space, costs_of(*part.costed), part.grain_size, watch)
    shared = memoryview(mmap.mmap(part.shared, 8 * part.number)).cast("d")
    passes: dict[int, SearchPasses] = {}
    while True:
        try:
            number, name, arguments = received(sys.stdin.buffer)
        except EOFError:
            return
        if name == "begin":
            (more_bytes,) = arguments
            passes[number] = (search.with_more_memory(more_bytes) if more_bytes else search).passes()
            continue
        if name == "run":
            arguments = *arguments, Ceiling(shared, part.place)
        send(getattr(passes[number], name)(*arguments), answers)
