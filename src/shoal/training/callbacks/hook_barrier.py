"""HookBarrier: barrier of all ranks within a hook that detects ranks with a hook that has raised or ended."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.distributed.collectives.shared_memory.peers import has_ended
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh
from shoal.errors import JobError, PeerError

# States of a rank: waiting within a hook, hook ended, hook raised, or gone and calling no more hooks.
_WAITS, _ENDED, _RAISED, _GONE = "waits", "ended", "raised", "gone"
_SOONEST_SECONDS, _LATEST_SECONDS = 0.0005, 0.02


class MissingRankError(JobError):
    """Error at a barrier that another rank does not reach. `derived`: that rank's hook raised, which is the cause."""

    def __init__(self, *, given: str, conflict: str, remedy: str, derived: bool = False) -> None:
        super().__init__(given=given, conflict=conflict, remedy=remedy)
        self.derived = derived


class HookBarrier:
    """Barrier within a hook, through the ranks' key-value store.

    A collective would wait for a rank after an error in its hook. Instead, each rank writes its state when a hook ends,
    which costs some microseconds and no wait. Only ranks at a barrier wait. They also watch the other processes of
    their own host, since without a launcher nobody else does.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh, self._store = mesh, mesh.store if mesh is not None else None
        self._hook = self._calls = 0  # hooks that have begun, the same number on all ranks; barriers within this hook
        self._raised = 0  # number of the last hook that raised
        self._met = (0, 0)  # hook and number of the last barrier that this rank has passed
        self._gone = False
        if self._mesh is not None and self._store is not None:
            process = [self._mesh.host, _process_numbers(), os.getpid()]
            self._store.set(f"process {self._mesh.rank}", json.dumps(process))

    def begin(self) -> None:
        """Record the beginning of a hook."""
        self._hook, self._calls = self._hook + 1, 0

    def end(self, raised: bool) -> None:
        """Record the end of a hook, with or without an error."""
        self._raised = self._hook if raised else self._raised
        self._say(_RAISED if raised else _ENDED)

    def leave(self) -> None:
        """Record that an error ends this rank, which reaches no barrier any more."""
        self._gone = True
        self._say(_GONE)

    def _say(self, how: str) -> None:
        if self._mesh is not None and self._store is not None:
            how = _GONE if self._gone else how
            with contextlib.suppress(dist.DistError, RuntimeError):  # rank 0 is gone, and has its own error
                row = [self._hook, self._calls, how, self._raised, self._met]
                self._store.set(str(self._mesh.rank), json.dumps(row))

    def wait(self, what: str) -> None:
        """Wait until every rank is at the same barrier. `what`: the call that waits, for messages.

        With one rank this returns at once. Raises: MissingRankError, on every waiting rank, if a rank will not come;
        PeerError if its process has ended.
        Collective: all ranks' hooks.
        """
        if self._mesh is None or self._store is None:
            return
        self._calls += 1
        self._say(_WAITS)
        pause, until = _SOONEST_SECONDS, time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
        ahead = [rank for rank in range(self._mesh.world_size) if rank != self._mesh.rank]
        while ahead:
            ahead = [rank for rank in ahead if not self._has_come(self._store, rank, what)]
            for rank in ahead:
                if not self._store.check([f"process {rank}"]):
                    continue
                host, numbers, pid = json.loads(self._store.get(f"process {rank}"))
                is_visible = (host, numbers) == (self._mesh.host, _process_numbers())
                if is_visible and has_ended(pid) and not self._has_come(self._store, rank, what):
                    raise PeerError(
                        given=f"rank {rank} (process {pid})",
                        conflict=f"it ended while rank {self._mesh.rank} waited for it in {what}",
                        remedy="look at what that rank said; --resume goes on from the newest checkpoint",
                    )
            if ahead and time.monotonic() > until:
                raise _missing(what, self._mesh.rank, ahead[0], "has not come within 10 minutes")
            time.sleep(pause if ahead else 0.0)
            pause = min(2 * pause, _LATEST_SECONDS)
        self._met = self._hook, self._calls

    def _has_come(self, store: Store, rank: int, what: str) -> bool:
        """Return True if a rank is at this rank's barrier. Raises: MissingRankError if it will not come."""
        if not store.check([str(rank)]):
            return False
        hook, calls, how, raised, met = json.loads(store.get(str(rank)))
        if tuple(met) >= (self._hook, self._calls) or (hook == self._hook and calls >= self._calls):
            return True
        assert self._mesh is not None, "there is a store"
        if how == _GONE or raised == self._hook:
            raise _missing(what, self._mesh.rank, rank, "has raised before it", derived=True)
        if hook > self._hook or (hook == self._hook and how == _ENDED):
            raise _missing(what, self._mesh.rank, rank, "has ended its hook without it")
        return False


def _process_numbers() -> str:
    """Return the namespace of process ids, since containers on one host may have their own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _missing(what: str, here: int, there: int, why: str, **more: Any) -> MissingRankError:
    return MissingRankError(
        given=f"{what} in a hook of rank {here}",
        conflict=f"it gathers from all ranks, and rank {there} {why}",
        remedy=f"call {what} in the same hook of every rank, and do what is for one rank with the result",
        **more,
    )
