"""Barrier counters of the ranks of one host, and detection of a peer that died, stalled or made another call.

Each rank has a page that only it writes: counters, the headers of its last calls, and a verdict. A rank that detects a
dead, stalled or different peer writes a verdict. All others then report the same culprit instead of each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from shoal.distributed.collectives.shared_memory.region import SharedRegion, Words, is_behind
from shoal.errors import CollectiveError, PeerError, ShoalError

# A rank's page, in bytes: counters in separate cache lines, the verdict, headers.
PAGE_BYTES = 8192
POSTED, FINISHED, PHASE, VERDICT = 0, 64, 128, 192
_TEXT, _TEXT_BYTES = 256, 1792
_HEADERS, HEADER_BYTES = 2048, 64
NUM_HEADERS = 64
# How often a waiting rank checks whether the others are alive.
_SLICE_SECONDS = 0.05
# If every rank has its own core, a wait first spins for about as long as sleeping and waking take in a virtual machine
# whose idle cores halt (100 to 400 us; an all-reduce of 256 KB takes 28 to 68 us).
SPIN_SECONDS = 400e-6
_EXITING = 0x4  # the kernel's flag of an exiting process


class Peers:
    """View of the other ranks through `region`, whose slots begin with their pages."""

    def __init__(self, region: SharedRegion, rank: int, pids: list[int], timeout: timedelta, num_here: int = 0) -> None:
        """Open the other processes. `num_here`: how many ranks of the run are on this host, at least these."""
        self._region, self.rank, self._pids = region, rank, pids
        self._timeout = timeout.total_seconds()
        self.others = [r for r in range(len(pids)) if r != rank]
        self._words = Words(region.memory)
        self._bases = [r * region.slot_bytes for r in range(len(pids))]
        self._spins = len(os.sched_getaffinity(0)) >= max(num_here, len(pids))
        self._processes: dict[int, int] = {}
        for other in self.others:
            with contextlib.suppress(OSError):  # forbidden in some containers; /proc is the fallback
                self._processes[other] = os.pidfd_open(pids[other])

    def publish(self, counter: int, value: int) -> None:
        """Set one of this rank's counters, after all its earlier writes."""
        self._words.publish((self._bases[self.rank] + counter) >> 2, value)

    def reached(self, counter: int, value: int) -> bool:
        """Return True if every other rank's counter has reached `value`."""
        values = self._words.values
        for other in self.others:
            if is_behind(values[(self._bases[other] + counter) >> 2], value):
                return False
        self._words.fence()
        return True

    def wait(self, counter: int, value: int, what: Callable[[], str]) -> None:
        """Wait until every other rank's counter has reached `value`; `what` describes the waiting call.

        Raises: PeerError if a rank dies or is late; the error of another rank's verdict.
        """
        values = self._words.values
        for other in self.others:
            index = (self._bases[other] + counter) >> 2
            if is_behind(values[index], value):
                self._wait(other, index, value, what)
        self._words.fence()

    def _wait(self, other: int, index: int, value: int, what: Callable[[], str]) -> None:
        values = self._words.values
        if self._spins:
            limit = time.perf_counter() + SPIN_SECONDS
            while time.perf_counter() < limit:
                if not is_behind(values[index], value):
                    return
        waited, before = 0.0, time.monotonic()
        while True:
            seen = values[index]
            if not is_behind(seen, value):
                return
            self._raise_verdict()
            if waited >= self._timeout:
                states = {"T": "it is stopped", "t": "a debugger has stopped it", "D": "it waits for a disk or device"}
                state = next(iter(_fields(self._pids[other])), "")  # empty if the process is gone
                doing = states.get(state, "it is alive and elsewhere")
                self._fail(
                    PeerError(
                        given=f"rank {other} (process {self._pids[other]})",
                        conflict=f"it did not come to {what()} within {self._timeout:g} s: {doing}",
                        remedy="let it go on (SIGCONT) or look at what it does; --resume goes on from the newest "
                        "checkpoint",
                    )
                )
            self._words.wait(index, seen, min(_SLICE_SECONDS, self._timeout))
            now = time.monotonic()
            # Time in which this process itself was stopped does not count.
            waited, before = waited + min(now - before, 2 * _SLICE_SECONDS), now
            if is_behind(values[index], value):
                for peer in self.others:
                    descriptor = self._processes.get(peer)
                    if descriptor is None:
                        ended = has_ended(self._pids[peer])
                    else:
                        poll = select.poll()
                        poll.register(descriptor, select.POLLIN)
                        ended = bool(poll.poll(0))
                    if ended:
                        self._raise_verdict()  # a rank that ended after it wrote a verdict was not the cause
                        self._fail(
                            PeerError(
                                given=f"rank {peer} (process {self._pids[peer]})",
                                conflict=f"it ended while rank {self.rank} waited for it in {what()}",
                                remedy="look at what that rank said; --resume goes on from the newest checkpoint",
                            )
                        )

    # --------------------------------------------------------------------------------------------------- headers

    def write_header(self, number: int, header: bytes) -> None:
        """Publish the header of this rank's call `number`."""
        start = self._bases[self.rank] + _HEADERS + number % NUM_HEADERS * HEADER_BYTES
        self._region.memory[start : start + HEADER_BYTES] = header

    def check_headers(self, number: int, header: bytes, describe: Callable[[bytes], str]) -> None:
        """Raise CollectiveError, on every rank, if the ranks do not make the same call."""
        place = _HEADERS + number % NUM_HEADERS * HEADER_BYTES
        memory = self._region.memory
        for other in self.others:
            start = self._bases[other] + place
            if memory[start : start + HEADER_BYTES] != header:
                break
        else:
            return
        starts = [base + place for base in self._bases]
        headers = [bytes(memory[start : start + HEADER_BYTES]) for start in starts]
        most = max(headers, key=headers.count)  # the first of the most frequent calls
        odd = [r for r, own in enumerate(headers) if own != most]
        usual = [r for r, own in enumerate(headers) if own == most]
        self._fail(
            CollectiveError(
                given="; ".join(f"rank {r} calls {describe(headers[r])}" for r in odd),
                conflict=f"rank {', '.join(map(str, usual))} calls {describe(most)}",
                remedy="call the same collective with the same shape and dtype on every rank, in the same order",
            )
        )

    # ---------------------------------------------------------------------------------------------------- faults

    def _fail(self, error: ShoalError) -> NoReturn:
        """Write the verdict, wake all ranks, and raise the error."""
        beats = {name: getattr(error, name)[:500] for name in ("given", "conflict", "remedy")}
        text = json.dumps({"kind": type(error).__name__, **beats}).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        start = self._bases[self.rank] + _TEXT
        self._region.memory[start : start + _TEXT_BYTES] = text
        self.publish(VERDICT, 1)
        for counter in (POSTED, FINISHED, PHASE):
            self.publish(counter, self._words.values[(self._bases[self.rank] + counter) >> 2])
        raise error

    def _raise_verdict(self) -> None:
        for other in self.others:
            if self._words.values[(self._bases[other] + VERDICT) >> 2]:
                start = self._bases[other] + _TEXT
                text = bytes(self._region.memory[start : start + _TEXT_BYTES]).rstrip(b"\0")
                try:
                    verdict = json.loads(text)
                except ValueError:
                    verdict = {"kind": "PeerError", "given": f"rank {other}", "conflict": "it failed", "remedy": ""}
                kind = CollectiveError if verdict.pop("kind") == "CollectiveError" else PeerError
                self._fail(kind(**verdict))

    def close(self) -> None:
        """Close the descriptors of the other processes."""
        while self._processes:
            os.close(self._processes.popitem()[1])


def has_ended(pid: int) -> bool:
    """Return True if a process of this host is gone, or exiting with its sockets already closed."""
    fields = _fields(pid)
    return not fields or fields[0] in ("Z", "X") or bool(int(fields[6]) & _EXITING)


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, from the state on; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
