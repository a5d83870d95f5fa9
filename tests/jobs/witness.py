"""What the jobs of the tests tell, and where they wait, as the environment asks; without it they do neither."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shoal.launch.supervise import heartbeat


def rank() -> str:
    """The number of this rank, as text; asked each time, since a fork may become another."""
    return os.environ.get("RANK", "0")


def log_ids(kind: str, ids: Tensor) -> None:
    """Appends the ids to $TEST_IDS/KIND-RANK.txt."""
    folder = os.environ.get("TEST_IDS")
    if folder:
        with Path(folder, f"{kind}-{rank()}.txt").open("a", encoding="utf-8") as file:
            file.write("".join(f"{i}\n" for i in ids.flatten().tolist()))


def trained(ids: Tensor) -> None:
    """Logs ids that a gradient is computed from, and not those of a look before a step."""
    if torch.is_grad_enabled() and not is_look():
        log_ids("train", ids)


def is_look() -> bool:
    """Whether a look of shoal's calls this, and no step."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "shoal.training.microbatch.look":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def wait_at_gate(step: int) -> None:
    """Waits where $TEST_GATE=FOLDER:STEP:RANK says so ('all' for every rank), until FOLDER/open is there.

    Several are divided by semicolons. Who waits shows the launcher signs of life, however long it takes until the test
    opens the gate; with $TEST_HANG it does not, and with $TEST_GIL it waits for ever and holds the interpreter's lock.
    """
    for text in filter(None, os.environ.get("TEST_GATE", "").split(";")):
        folder, at, ranks = text.rsplit(":", 2)
        if step != int(at) or ranks not in ("all", rank()):
            continue
        Path(folder, f"reached-{rank()}").touch()
        if os.environ.get("TEST_GIL") and not Path(folder, "open").exists():
            ctypes.PyDLL(None).sleep(600)  # a call of C that keeps every other thread of Python from running
        while not Path(folder, "open").exists():
            time.sleep(0.005)
            if not os.environ.get("TEST_HANG"):
                show_life()


def set_clock(step: int) -> None:
    """Moves the clocks of this process where $TEST_CLOCK=STEP:RANK:HOW says so.

    "wall -5" sets the date back by 5 s. All else is for libfaketime, which moves the monotonic clock too.
    """
    at, ranks, how = (os.environ.get("TEST_CLOCK") or "-1::").split(":")
    if step == int(at) and rank() == ranks:
        if how.startswith("wall "):
            date, seconds = time.time, float(how.removeprefix("wall "))
            time.time = lambda: date() + seconds
        else:
            os.environ["FAKETIME"] = how


def show_life() -> None:
    """Begins this rank's phase anew in the file that its launcher reads."""
    path = os.environ.get(heartbeat.HEARTBEAT_FILE)
    if path:
        with open(path, "r+b") as file:
            steps, phase, _ = heartbeat._NOW.unpack(file.read(heartbeat._NOW.size))
            file.seek(0)
            file.write(heartbeat._NOW.pack(steps, phase, time.perf_counter()))


class Gated:
    """A schedule that passes the gate first: called once a step on every rank, after the sums, before the optimizer."""

    def __init__(self, schedule: Callable[[float], float] | None = None) -> None:
        self._schedule = schedule

    def __call__(self, progress: float) -> float:
        set_clock(getattr(progress, "step", -1))
        wait_at_gate(getattr(progress, "step", -1))
        return self._schedule(progress) if self._schedule else 1.0
