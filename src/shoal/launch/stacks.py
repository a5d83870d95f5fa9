"""Python stacks of ranks: finds the collectives that the job's own code called, and names those that differ."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_FRAME = re.compile(r'File "(.+)", line (\d+),? in (\S+)')
_COLLECTIVES = re.compile(r"(.*[\\/]torch[\\/])distributed[\\/]distributed_c10d\.py$")
_OWN = str(Path(__file__).resolve().parents[1]) + os.sep


def own_call(stacks: str) -> str | None:
    """Return the collective that the job's own code called, as "all_reduce at FILE:LINE in FUNCTION".

    `stacks`: from faulthandler or an exception's traceback. None if no collective is in them, or if shoal called it.
    """
    for frames in _threads(stacks):
        called = [(place, found[1]) for place, (file, _, _) in enumerate(frames) if (found := _COLLECTIVES.match(file))]
        if not called:
            continue
        last, torch = called[-1]
        callers = [frame for frame in frames[last:] if not frame[0].startswith(torch)]
        if callers and not callers[0][0].startswith(_OWN):
            file, line, function = callers[0]
            return f"{frames[last][2]} at {file}:{line} in {function}"
    return None


def _threads(stacks: str) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the frames of each thread, the innermost first: file, line and function."""
    if stacks.startswith("Traceback"):
        yield [match.groups() for match in reversed(list(_FRAME.finditer(stacks)))]  # type: ignore[misc]
        return
    for thread in re.split(r"^(?:Current t|T)hread 0x.*$", stacks, flags=re.MULTILINE):
        yield [match.groups() for match in _FRAME.finditer(thread)]  # type: ignore[misc]


def different_calls(stacks: Mapping[int, str]) -> str:
    """Return a clause that names each rank's collective if the job's own collectives differ between ranks, else ""."""
    calls = {rank: own_call(text) for rank, text in sorted(stacks.items()) if text}
    if len(calls) < 2 or len({(call or "").partition(" ")[0] for call in calls.values()} - {""}) == 0:
        return ""
    told = (f"rank {rank} in {call or 'none of its own, or in one of shoal'}" for rank, call in calls.items())
    return f"the job's own collectives do not match: {', '.join(told)}"
