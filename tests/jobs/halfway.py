"""The GPT of tiny.py, of which ranks are killed in the midst of an update of parameters that they share.

$TEST_HALFWAY is a folder of files NUMBER-RANK-WHEN-COUNT. The one with the lowest number when the ranks are started
kills its rank, once, in its COUNT-th update: `before` its own part is updated, or `after`, while the others go on with
theirs. One of them is for each start: the next would else kill another rank in the same update.

$TEST_KILLED_IN is "copy" or "commit": of the third checkpoint, by the second rank or the first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny

import shoal
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.store import Store
from shoal.parallel.shard.one_copy import OneCopyUpdate

updates = [0]
wanted: list[Path] = []
whole_update = OneCopyUpdate.update


def die(rank: int, when: str) -> None:
    if wanted and wanted[0].name.split("-")[1:] == [str(rank), when, str(updates[0])]:
        wanted[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def update(self: OneCopyUpdate, step: Callable[[], None], *, queued: bool = False) -> None:
    updates[0] += 1

    def between() -> None:
        die(self._mesh.rank, "before")
        step()
        die(self._mesh.rank, "after")

    whole_update(self, between)


def kill_in(kind: type, name: str, rank: int) -> None:
    """Kills a rank once it has called a method for the third time, before the method does anything."""
    calls, whole = [0], getattr(kind, name)

    def counted(*of: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3 and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*of, **named)

    setattr(kind, name, counted)


def gpt(steps: int = 16) -> shoal.Job:
    if "TEST_HALFWAY" in os.environ:
        wanted[:] = sorted(Path(os.environ["TEST_HALFWAY"]).iterdir())[:1]  # before any rank has begun a step
        OneCopyUpdate.update = update  # type: ignore[method-assign]
    if "TEST_KILLED_IN" in os.environ:
        kill_in(*{"copy": (HostMemory, "_copy", 1), "commit": (Store, "commit", 0)}[os.environ["TEST_KILLED_IN"]])
    return tiny.gpt(steps)
