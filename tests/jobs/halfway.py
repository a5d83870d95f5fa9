"""The GPT of tiny.py, of which ranks are killed in the midst of an update of parameters that they share.

$TEST_HALFWAY is a folder of files NUMBER-RANK-WHEN-COUNT. The one with the lowest number when the ranks are started
kills its rank, once, in its COUNT-th update: `before` its own part is updated, or `after`, while the others go on with
theirs. One of them is for each start: the next would else kill another rank in the same update.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import tiny

import shoal
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
        die(self._rank, "before")
        step()
        die(self._rank, "after")

    whole_update(self, between)


def gpt(steps: int = 16) -> shoal.Job:
    if "TEST_HALFWAY" in os.environ:
        wanted[:] = sorted(Path(os.environ["TEST_HALFWAY"]).iterdir())[:1]  # before any rank has begun a step
        OneCopyUpdate.update = update  # type: ignore[method-assign]
    return tiny.gpt(steps)
