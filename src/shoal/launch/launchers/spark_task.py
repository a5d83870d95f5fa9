"""Task of a rank in a barrier stage of Spark, and the channel between the tasks and the driver.

The channel is a multiprocessing connection, authenticated by a shared secret. Messages are JSON, never pickles.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from shoal.launch.environment import RESTARTS
from shoal.launch.launchers.engine_rank import EngineRank, RankCommand, RankLook, environments

_LOOK_SECONDS = 0.3
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class BarrierTask:
    """Ranks of a barrier stage: the command of each, and the driver's channel."""

    arguments: tuple[str, ...]
    folder: str
    logs: str
    channel: tuple[str, int]
    secret: bytes = field(repr=False)
    threads: int = 1

    def __call__(self, _: Iterable[Any]) -> Iterator[str]:
        """Start this task's rank, watch it until it ends, and yield its end as JSON, the task's result."""
        from pyspark import BarrierTaskContext

        context, rank = BarrierTaskContext.get(), EngineRank()
        try:
            number = context.partitionId()
            with Client(self.channel, authkey=self.secret) as driver:
                driver.send_bytes(json.dumps({"rank": number}).encode())
                restarts = json.loads(driver.recv_bytes())["restarts"]
                rank.start(self._command(context, rank, restarts))
                yield json.dumps({"rank": number, **_watched(rank, driver, number == 0)._asdict()})
        finally:
            rank.close()

    def _command(self, context: Any, rank: EngineRank, restarts: int) -> RankCommand:
        number = context.partitionId()
        places = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
        address = _LOOPBACK if len(set(places)) == 1 else places[0]
        port = rank.listen(address) if number == 0 else 0
        said = [json.loads(text) for text in context.allGather(json.dumps([port, restarts]))]
        own = environments("spark", places, (address, said[0][0]))[number]
        count = max(restarts for _, restarts in said)
        again = {RESTARTS: str(count)} if count else {}
        variables = {"OMP_NUM_THREADS": str(self.threads), **own.variables(), **again}
        return RankCommand(self.arguments, self.folder, variables, self.logs if number else "")


def _watched(rank: EngineRank, driver: Connection[Any, Any], shown: bool) -> RankLook:
    """Watch a rank until it ends or the driver is gone. Send its text to the driver, and the driver's signals to it."""
    while True:
        look = rank.look(_LOOK_SECONDS)
        try:
            if shown and look.text:
                driver.send_bytes(json.dumps({"text": look.text}).encode())
            if look.code is not None:
                return look._replace(text="")
            while driver.poll():
                rank.tell(int(json.loads(driver.recv_bytes())["signal"]))
        except (EOFError, OSError):
            rank.close()
            raise


class TaskChannel:
    """The driver's end of the channel. It sends each task its number of restarts and shows rank 0's text."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._listener = Listener((host, 0), authkey=secret)
        self._lock = threading.Lock()
        self._tasks: dict[int, Connection[Any, Any]] = {}
        self._starts: Counter[int] = Counter()
        self._closed = False
        threading.Thread(target=self._accept, name="shoal-tasks", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which tasks connect."""
        host, port = self._listener.address
        return str(host), int(port)

    def tell(self, number: int) -> None:
        """Send a signal to every rank."""
        with self._lock:
            for task in self._tasks.values():
                with contextlib.suppress(OSError):
                    task.send_bytes(json.dumps({"signal": int(number)}).encode())

    def close(self) -> None:
        """Close all connections, whereupon the tasks end their ranks."""
        self._closed = True
        with self._lock:
            for task in self._tasks.values():
                task.close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                task = self._listener.accept()
            except Exception:  # noqa: S112  (not one of ours, or closed: the loop's condition says)
                continue
            threading.Thread(target=self._serve, args=(task,), name="shoal-task", daemon=True).start()

    def _serve(self, task: Connection[Any, Any]) -> None:
        with contextlib.suppress(EOFError, OSError):
            rank = int(json.loads(task.recv_bytes())["rank"])
            with self._lock:
                self._starts[rank] += 1
                self._tasks[rank] = task
                task.send_bytes(json.dumps({"restarts": self._starts[rank] - 1}).encode())
            while True:
                print(json.loads(task.recv_bytes())["text"], end="", flush=True)
