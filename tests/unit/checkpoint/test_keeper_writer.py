"""Checkpoints are written by a thread; a disk that refuses is a warning."""

import errno
import threading
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import shoal.checkpoint.keeper
from shoal.checkpoint.keeper import CheckpointWriter, Keeper, RunState, SnapshotMemory, interval_seconds
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


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    store, reasons = Gated(), list[str]()
    writer = CheckpointWriter(store, patience_seconds=0.05)
    writer.report = lambda reason, done: reasons.append(reason)
    writer.write(taken(1))
    assert not writer.due()
    with pytest.warns(RuntimeWarning, match="the one before is still being written"):
        assert not writer.is_free()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not writer.is_free()
    assert len(reasons) == 1
    store.gate.set()
    writer.wait()
    assert writer.is_free()
    writer.write(taken(2))
    writer.close()
    assert store.written == [1, 2]


def test_the_interval_follows_what_a_checkpoint_costs_and_how_often_ranks_are_lost() -> None:
    assert interval_seconds(0.01, None) == 5.0
    assert interval_seconds(1.0, None) == 100.0
    assert interval_seconds(0.02, 25.0) == pytest.approx(1.0)  # the root of 2 * 0.02 * 25
    assert interval_seconds(1.0, 3600.0) == pytest.approx(84.85, abs=0.01)
    assert interval_seconds(0.001, 10.0) == 0.5
    assert interval_seconds(10.0, 10.0) == 100.0  # no more than a tenth of the time
    assert interval_seconds(0.1, 1e9) == 10.0  # as without losses


def test_snapshots_share_their_memory() -> None:
    memory = SnapshotMemory()
    one, two = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).t()
    first = memory.copied("model", {"a": one})["a"]
    second = memory.copied("model", {"a": two})["a"]
    assert first.data_ptr() == second.data_ptr()
    assert second.is_contiguous()
    assert torch.equal(second, two)
    other = memory.copied("optimizer", {"a": one})["a"]
    assert other.data_ptr() != second.data_ptr()
    grown = memory.copied("model", {"a": torch.ones(9)})["a"]
    assert torch.equal(grown, torch.ones(9))


def test_the_best_is_saved_once_the_one_before_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what the run names as its best would not be there."""
    store, started = Gated(), list[int]()
    keeper = Keeper(alone(torch.device("cpu")), store, Mock(callbacks=None), 1)
    writer = keeper.writer
    assert writer is not None
    writer._patience = 0.01
    monkeypatch.setattr(keeper._snapshots, "take", lambda state: started.append(state.step))
    writer.write(taken(1))
    threading.Timer(0.2, store.gate.set).start()
    keeper.save_best(RunState(step=2))
    assert (store.written, started) == ([1], [2])
    keeper.close()


def test_a_write_that_hangs_is_reported_though_no_other_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reasons = Gated(), list[str]()
    writer = CheckpointWriter(store)
    writer.report = lambda reason, done: reasons.append(reason)
    writer.write(taken(1))
    assert not writer.due()
    assert reasons == []
    monkeypatch.setattr(shoal.checkpoint.keeper, "_HUNG_SECONDS", 0.0)
    with pytest.warns(RuntimeWarning, match="the one before is still being written"):
        assert not writer.due()
    assert not writer.due()  # it is reported once
    assert len(reasons) == 1
    store.gate.set()
    writer.close()
