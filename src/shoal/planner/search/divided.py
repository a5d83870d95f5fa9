"""Search of a large space in parts, one process per part. The answer is that of one process.

The model-parallel degrees are dealt to the parts, so that each part keeps its caches for the next pass. In a pass each
part searches its own plans up to a common ceiling that all parts lower. Their results are merged.
Source: Gendron and Crainic, Parallel branch-and-bound algorithms: survey and synthesis, Operations Research 42 (1994).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import shoal
from shoal.errors import LaunchError
from shoal.planner.search.aims import Ceiling
from shoal.planner.search.candidates import Candidate
from shoal.planner.search.part import Costed, SearchPart, received, send
from shoal.planner.search.passes import Looked, Nearest, SearchPasses, Wanted
from shoal.planner.search.search import Search
from shoal.planner.search.space import Degrees, ModelDegrees, simplicity

_NEVER = float("inf")
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.path += sys.argv[2:]
from shoal.planner.search.part import main
main()
"""
_ENDING_SECONDS = 5.0


def dealt(cuts: Sequence[ModelDegrees], number: int) -> list[tuple[ModelDegrees, ...]]:
    """Deal the degrees to parts of about equal size. Degrees whose passes share bounds go to one part.

    These are the degrees that differ only in the pipeline. Without a context axis a search goes deepest, so those
    degrees are dealt one by one, to and fro: even pipelines have more schedules than odd ones.
    """
    groups: dict[tuple[int, ...], list[ModelDegrees]] = {}
    for cut in cuts:
        groups.setdefault((cut.tensor, cut.context) if cut.context > 1 else tuple(cut), []).append(cut)
    found: list[list[ModelDegrees]] = [[] for _ in range(number)]
    for turn, (_, group) in enumerate(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))):
        min(found if turn // number % 2 == 0 else found[::-1], key=len).extend(group)
    return [tuple(part) for part in found]


@contextmanager
def in_parts(whole: Search, costed: Costed, number: int) -> Iterator[Search]:
    """Yield a search in `number` parts and end their processes with the context. `costed`: inputs of its costs."""
    first, *others = dealt(whole.space.cuts, number)
    own = Search(replace(whole.space, only=first), whole.costs, whole.grain_size, whole.watch)
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * number)
        # Not descriptor 0, 1 or 2, which the processes need: the command may have been started without them.
        descriptor = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        with mmap.mmap(descriptor, 8 * number) as memory, memoryview(memory).cast("d") as shared:
            processes = PartProcesses(shared)
            try:
                for place, cuts in enumerate(others, 1):
                    space = replace(whole.space, only=cuts)
                    part = SearchPart(space, costed, whole.grain_size, descriptor, number, place, os.getpid())
                    processes.start(part)
                yield DividedSearch(whole, own, processes)
            finally:
                processes.end()
                os.close(descriptor)


class DividedSearch(Search):
    """Search whose passes go through all parts at once. `own`: the part of this process."""

    def __init__(self, whole: Search, own: Search, processes: PartProcesses, more_bytes: int = 0) -> None:
        super().__init__(whole.space, whole.costs, whole.grain_size, whole.watch)
        self._own, self._processes, self._more_bytes = own, processes, more_bytes

    def with_more_memory(self, num_bytes: int) -> DividedSearch:
        """Return a search of devices with more memory."""
        larger = super().with_more_memory(num_bytes)
        own = self._own.with_more_memory(num_bytes)
        return DividedSearch(larger, own, self._processes, self._more_bytes + num_bytes)

    def passes(self) -> SearchPasses:
        """Return new passes through all parts, for one answer."""
        return DividedPasses(self._own, self._processes, self._more_bytes)


class DividedPasses(SearchPasses):
    """Passes through all parts, and their notes."""

    def __init__(self, own: Search, processes: PartProcesses, more_bytes: int) -> None:
        super().__init__(own)
        self._processes = processes
        self._number = processes.begin(more_bytes)

    def _every(self, name: str, *arguments: object) -> list[Any]:
        """Call a method of the passes in this process and in all others, and return all results."""
        self._processes.ask(self._number, name, *arguments)
        return [getattr(super(), name)(*arguments), *self._processes.answers()]

    def take(self, wanted: Wanted) -> list[Candidate]:
        """Return the wanted plans in order; equal keys by simplicity."""
        shared = self._processes.shared
        for place in range(len(shared)):
            shared[place] = _NEVER
        self._processes.ask(self._number, "run", wanted)
        found = [self.run(wanted, Ceiling(shared)), *self._processes.answers()]
        in_order = sorted(chain(*found), key=lambda candidate: (wanted.key(candidate), simplicity(candidate.plan)))
        ceiling = Ceiling()
        taken = list(wanted.taken(in_order, ceiling))
        self._every("settle", ceiling.key)
        return taken

    def counts(self) -> tuple[int, int]:
        """Return the numbers of predicted plans and of plans that only bounds excluded."""
        predicted, bounded = zip(*self._every("counts"), strict=True)
        return sum(predicted), sum(bounded)

    def least_missing(self) -> float | None:
        """Return the least bytes that a plan of any place lacks, or None if none lacks any."""
        return min((least for least in self._every("least_missing") if least is not None), default=None)

    def nearest_missing(self) -> tuple[float, Degrees] | None:
        """Return the least bytes that any plan lacks, and its place, or None if none lacks any."""
        return min((found for found in self._every("nearest_missing") if found is not None), default=None)

    def refused(self) -> dict[Degrees, str]:
        """Return a reason for each place with illegal plans."""
        return {place: why for found in self._every("refused") for place, why in found.items()}

    def nearest(self) -> dict[int, Nearest]:
        """Return for each number of devices the place with the best predicted plan, or the first place."""
        found: dict[int, Nearest] = {}
        for devices, one in chain(*(of_part.items() for of_part in self._every("nearest"))):
            found[devices] = min(one, found.get(devices, one))
        return found

    def looked_at(self, places: Sequence[Degrees]) -> dict[Degrees, Looked]:
        """Return the results for places, each from the part that has the place."""
        return {place: looked for found in self._every("looked_at", places) for place, looked in found.items()}


class PartProcesses:
    """Processes of all parts but the first. `shared`: one ceiling per part."""

    def __init__(self, shared: memoryview[float]) -> None:
        self.shared, self._numbers = shared, count()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, part: SearchPart) -> None:
        """Start the process of a part."""
        # This shoal first, then the search path of this process.
        command = [sys.executable, "-P", "-c", _PROGRAM, str(Path(shoal.__file__).parents[1]), *sys.path]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [part.shared]}
        # Own session, so that only this process receives ^C.
        self._processes.append(subprocess.Popen(command, start_new_session=True, **pipes))
        self._send(self._processes[-1], part)

    def begin(self, more_bytes: int) -> int:
        """Begin passes on devices with more memory in each process, and return their number."""
        number = next(self._numbers)
        self.ask(number, "begin", more_bytes)
        return number

    def ask(self, number: int, name: str, *arguments: object) -> None:
        """Request a method call of these passes from each process."""
        for process in self._processes:
            self._send(process, (number, name, arguments))

    def answers(self) -> list[Any]:
        """Return the answer of each process to its oldest unanswered request."""
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None
        try:
            return received(process.stdout)
        except EOFError as error:
            raise _ended(process) from error

    def _send(self, process: subprocess.Popen[bytes], message: object) -> None:
        assert process.stdin is not None
        try:
            send(message, process.stdin)
        except BrokenPipeError as error:
            raise _ended(process) from error

    def end(self) -> None:
        """Kill the processes, in any state."""
        for process in self._processes:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # unread requests
                    if pipe is not None:
                        pipe.close()
            process.wait()


def _ended(process: subprocess.Popen[bytes]) -> LaunchError:
    with suppress(subprocess.TimeoutExpired):  # wait first, so that the code is not that of the kill
        process.wait(_ENDING_SECONDS)
    process.kill()
    return LaunchError(
        given="a search in several processes",
        conflict=f"one of them ended with code {process.wait()}",
        remedy="see above what it wrote; where memory is short, search in one process: taskset -c 0 shoal plan",
    )
