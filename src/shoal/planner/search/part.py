"""Process of one part of a search: calls methods of its passes, as the process that it works for asks."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle  # noqa: TID251 - between a command and processes that it has started, over pipes that nobody else has
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
    """Arguments of `costs_of`."""

    work: Workload
    cluster: Cluster
    program: Program
    correction: Correction


class SearchPart(NamedTuple):
    """SearchPart of a search: its space, and its place among the numbers of the parts' ceilings.

    shared: descriptor of the file of these numbers, which are so many.
    """

    space: Space
    costed: Costed
    grain_size: int
    shared: int
    number: int
    place: int
    parent: int


def send(message: object, to: IO[bytes]) -> None:
    """Writes a message."""
    pickle.dump(message, to)
    to.flush()


def received(of: IO[bytes]) -> Any:
    """The next message. Raises: EOFError where there is none."""
    try:
        return pickle.load(of)  # noqa: S301 - see the import
    except pickle.UnpicklingError as error:  # its sender was killed in the middle
        raise EOFError from error


def main() -> None:
    """Answers on what was the output, until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(OSError):  # of a command whose errors nobody reads
        os.dup2(2, 1)
    gc.disable()  # it takes a third of a long search, and finds nothing
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
