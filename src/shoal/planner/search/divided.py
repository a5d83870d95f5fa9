"""Search of a large space in parts, each in a process of its own: the answer is that of one process.

The degrees that share grains are dealt to the parts, so that each keeps what it computed for the next pass. In a pass
each part goes through its own plans, up to a ceiling that all of them lower, and what they found is merged.
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
    """The degrees of each part: about as many, and together those of which a pass computes the same bounds.

    Those are the degrees that differ in the pipeline alone. Where there is no context axis a search goes deepest, so
    that they are dealt one by one, to and fro: even pipelines have more schedules than odd ones.
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
    """A search in so many parts, whose processes end with the context. `costed`: of what its costs are."""
    first, *others = dealt(whole.space.cuts, number)
    own = Search(replace(whole.space, only=first), whole.costs, whole.grain_size, whole.watch)
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * number)
        # Not one of the first three, which the processes have otherwise: a command may have been started without them.
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
    """Search whose passes go through all parts at once; `own` is that of this process."""

    def __init__(self, whole: Search, own: Search, processes: PartProcesses, more_bytes: int = 0) -> None:
        super().__init__(whole.space, whole.costs, whole.grain_size, whole.watch)
        self._own, self._processes, self._more_bytes = own, processes, more_bytes

    def with_more_memory(self, num_bytes: int) -> DividedSearch:
        """The search of devices with so many more bytes each."""
        larger = super().with_more_memory(num_bytes)
        own = self._own.with_more_memory(num_bytes)
        return DividedSearch(larger, own, self._processes, self._more_bytes + num_bytes)

    def passes(self) -> SearchPasses:
        """Passes of one answer."""
        return DividedPasses(self._own, self._processes, self._more_bytes)


class DividedPasses(SearchPasses):
    """Passes through all parts, and what they noted."""

    def __init__(self, own: Search, processes: PartProcesses, more_bytes: int) -> None:
        super().__init__(own)
        self._processes = processes
        self._number = processes.begin(more_bytes)

    def _every(self, name: str, *arguments: object) -> list[Any]:
        """What a method of this process's passes and of the others' returns."""
        self._processes.ask(self._number, name, *arguments)
        return [getattr(super(), name)(*arguments), *self._processes.answers()]

    def take(self, wanted: Wanted) -> list[Candidate]:
        """The wanted plans in order; equal keys by simplicity."""
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
        """Numbers of plans that were predicted, and that bounds alone excluded."""
        predicted, bounded = zip(*self._every("counts"), strict=True)
        return sum(predicted), sum(bounded)

    def least_missing(self) -> float | None:
        """The least that a plan of any place lacks; None where none does."""
        return min((least for least in self._every("least_missing") if least is not None), default=None)

    def nearest_missing(self) -> tuple[float, Degrees] | None:
        """Bytes that the plan lacks that lacks least, and its place; None where none lacks any."""
        return min((found for found in self._every("nearest_missing") if found is not None), default=None)

    def refused(self) -> dict[Degrees, str]:
        """Why plans of places are illegal, where some are."""
        return {place: why for found in self._every("refused") for place, why in found.items()}

    def nearest(self) -> dict[int, Nearest]:
        """Of each number of devices the place with the best plan that was predicted, the first where none was."""
        found: dict[int, Nearest] = {}
        for devices, one in chain(*(of_part.items() for of_part in self._every("nearest"))):
            found[devices] = min(one, found.get(devices, one))
        return found

    def looked_at(self, places: Sequence[Degrees]) -> dict[Degrees, Looked]:
        """The state of places, from the parts that have them."""
        return {place: looked for found in self._every("looked_at", places) for place, looked in found.items()}


class PartProcesses:
    """Processes of all parts but the first; `shared`: the numbers of their ceilings."""

    def __init__(self, shared: memoryview[float]) -> None:
        self.shared, self._numbers = shared, count()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, part: SearchPart) -> None:
        """Starts the process of a part."""
        # Of this shoal, and of packages where this process finds them, but for those of the language.
        command = [sys.executable, "-P", "-c", _PROGRAM, str(Path(shoal.__file__).parents[1]), *sys.path]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [part.shared]}
        # In a session of its own: ^C is this process's affair.
        self._processes.append(subprocess.Popen(command, start_new_session=True, **pipes))
        self._send(self._processes[-1], part)

    def begin(self, more_bytes: int) -> int:
        """Begins passes, of devices with so many more bytes each, and returns their number."""
        number = next(self._numbers)
        self.ask(number, "begin", more_bytes)
        return number

    def ask(self, number: int, name: str, *arguments: object) -> None:
        """Calls a method of these passes in each process."""
        for process in self._processes:
            self._send(process, (number, name, arguments))

    def answers(self) -> list[Any]:
        """The answer of each process to the first call that it has not answered yet."""
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
        """Ends the processes, whatever they are at."""
        for process in self._processes:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # of what it had not read
                    if pipe is not None:
                        pipe.close()
            process.wait()


def _ended(process: subprocess.Popen[bytes]) -> LaunchError:
    with suppress(subprocess.TimeoutExpired):  # else its code would be that of the kill
        process.wait(_ENDING_SECONDS)
    process.kill()
    return LaunchError(
        given="a search in several processes",
        conflict=f"one of them ended with code {process.wait()}",
        remedy="see above what it wrote; where memory is short, search in one process: taskset -c 0 shoal plan",
    )
