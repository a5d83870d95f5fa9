"""Checkpoints are written by a thread; a disk that refuses is a warning."""

import errno
import threading
import warnings
from pathlib import Path

import pytest
import torch

import shoal.checkpoint.keeper
from shoal.checkpoint.keeper import CheckpointWriter, Keeper
from shoal.checkpoint.store import Snapshot, Store
from shoal.distributed.mesh import alone


class Gated(Store):
    """Writes nothing before its gate is open, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.gate = threading.Event()
        self.written: list[int] = []
        self.error: Exception | None = None

    def write(self, snapshot: Snapshot) -> None:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.written.append(snapshot.step)


def taken(step: int) -> Snapshot:
    return Snapshot(step, {}, {})


def test_the_training_goes_on_while_it_is_written() -> None:
    store = Gated()
    writer = CheckpointWriter(store)
    writer.write(taken(1))
    assert store.written == []
    store.gate.set()
    writer.write(taken(2))  # waits for the one before
    assert store.written[0] == 1
    writer.close()
    assert store.written == [1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


def test_a_disk_that_refuses_is_a_warning_and_is_counted() -> None:
    store = Gated()
    store.gate.set()
    writer = CheckpointWriter(store)
    store.error = OSError(errno.ENOSPC, "No space left on device")
    for step in (1, 2):
        writer.write(taken(step))
        with pytest.warns(RuntimeWarning, match="no checkpoint written: .*No space left.*the last good one stays"):
            writer.wait()
        assert writer.failure is not None
    store.error = None
    writer.write(taken(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.close()
    assert writer.failure is None
    assert store.written == [3]


def test_a_fault_of_our_own_is_not_hidden() -> None:
    store = Gated()
    store.gate.set()
    store.error = TypeError("not a tensor")
    writer = CheckpointWriter(store)
    writer.write(taken(1))
    with pytest.raises(TypeError, match="not a tensor"):
        writer.wait()
    writer.close()


def test_the_time_between_two_follows_what_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(shoal.checkpoint.keeper.time, "monotonic", lambda: now[0])

    class Slow(Store):
        def write(self, snapshot: Snapshot) -> None:
            now[0] += 2.0

    writer = CheckpointWriter(Slow(Path("nowhere")))

    def first_due() -> float:
        since = now[0]
        while not writer.due():
            now[0] += 1.0
        return now[0] - since

    assert first_due() == 5.0  # nothing is known yet
    writer.write(taken(1))
    writer.wait()
    began = now[0] - 2.0
    first_due()
    assert now[0] - began in (200.0, 202.0)  # 2 s are 1 % of that; since the writing began or ended
    writer.close()


def test_what_is_on_its_way_is_left_by_a_rollback(tmp_path: Path) -> None:
    """It is of this process; only what came before the first step is a killed writer's."""
    half = tmp_path / ".tmp-step-00000005"
    half.mkdir()
    keeper = Keeper(alone(torch.device("cpu")), Store(tmp_path), None, 1)  # type: ignore[arg-type]
    assert keeper.load(None) == (None, [])  # type: ignore[arg-type]
    assert half.exists()
    keeper.clean()
    assert not half.exists()
