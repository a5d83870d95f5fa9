"""Barrier within a hook: of ranks in threads that share one store, as processes do."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shoal.distributed.mesh import alone
from shoal.errors import PeerError
from shoal.plans.plan import Layout
from shoal.training.callbacks.calls import HookBarrier, MissingRankError


def hooks(*ranks: list[str]) -> list[list[str]]:
    """Results of each rank's hooks: of each it is said whether it waits (as often as `w`), raises, ends or leaves."""
    store, mesh = HashStore(), replace(alone(torch.device("cpu")), layout=Layout(data=len(ranks)))

    def rank(number: int) -> list[str]:
        barrier = HookBarrier(replace(mesh, rank=number, store=store))
        found = []
        for hook in ranks[number]:
            barrier.begin()
            try:
                for _ in range(hook.count("w")):
                    barrier.wait("whole()")
                found.append("met" if "w" in hook else "")
            except MissingRankError as error:
                found.append(("raised" if error.derived else "ended") + f" {error.conflict.split(',')[1].split()[2]}")
            if hook.endswith("left"):
                barrier.leave()
            barrier.end("raised" in hook)
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, range(len(ranks))))


CASES: list[tuple[Any, Any]] = [
    ([["w", "ww", "w"], ["w", "ww", "w"], ["w", "ww", "w"]], [["met"] * 3] * 3),
    ([["w"], ["raised"], ["w"]], [["raised 1"], [""], ["raised 1"]]),
    ([["w", "w"], ["ended", "w"]], [["ended 1", "met"], ["", "met"]]),
    ([["ww", "w"], ["w raised", "w"]], [["raised 1", "met"], ["met", "met"]]),
    ([["w"], ["raised", "ended", "ended"]], [["raised 1"], ["", "", ""]]),
    ([["w"], ["left"]], [["raised 1"], [""]]),
]


@pytest.mark.parametrize(("ranks", "found"), CASES)
def test_all_meet_or_those_that_wait_are_told(ranks: Any, found: Any) -> None:
    assert hooks(*ranks) == found


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    store, mesh = HashStore(), replace(alone(torch.device("cpu")), layout=Layout(data=2))
    barrier = HookBarrier(replace(mesh, store=store))
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host, numbers, _ = json.loads(store.get("process 0"))
    store.set("process 1", json.dumps([host, numbers, killed.pid]))
    barrier.begin()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(barrier.wait, "whole()")
        assert not waiting.done()
        killed.kill()
        with pytest.raises(PeerError, match=r"it ended while rank 0 waited for it in whole\(\)"):
            waiting.result(20)
    killed.communicate()


def test_one_process_meets_itself() -> None:
    barrier = HookBarrier(alone(torch.device("cpu")))
    barrier.begin()
    barrier.wait("whole()")
