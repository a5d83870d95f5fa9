"""Pieces: a rank's share is written from its own memory, and where that runs out the checkpoint is left out whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.checkpoint.pieces import described, index, share, write_together
from shoal.checkpoint.state import optimizer_state
from shoal.checkpoint.store import Snapshot, Store
from shoal.parallel.model.sharded_model import TensorSlice, TensorSlices


class Full(Store):
    """A store in whose process memory runs out."""

    error: Exception = MemoryError()

    def add(self, aside: Path, name: str, tensors: dict[str, Any]) -> Any:
        raise self.error


ALONE: Any = SimpleNamespace(rank=0, world_size=1, gather_json=lambda value: [value])


def held() -> dict[str, TensorSlices]:
    return {"model": {"weight": (TensorSlice.whole((2, 3)), torch.ones(2, 3))}}


@pytest.mark.parametrize(
    "error", [MemoryError("no more"), RuntimeError("DefaultCPUAllocator: can't allocate memory: no more")]
)
def test_running_out_of_memory_is_a_reason_and_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    store = Full(tmp_path / "checkpoints")
    store.error = error
    failure = write_together(ALONE, store, Snapshot(3, {}, {}), held())
    assert failure is not None
    assert failure.text.startswith("memory ran out")
    assert "no more" in failure.text
    assert list(store.folder.iterdir()) == []


def test_another_error_is_raised(tmp_path: Path) -> None:
    store = Full(tmp_path / "checkpoints")
    store.error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        write_together(ALONE, store, Snapshot(3, {}, {}), held())


def test_what_is_written_is_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    assert write_together(ALONE, store, Snapshot(3, {}, {}), held()) is None
    assert torch.equal(store.read(3).read("model")["weight"], torch.ones(2, 3))


def test_a_share_is_the_tensors_themselves() -> None:
    tensors = held()
    found = dict(share(tensors, index([described(tensors)]), 0, 1))
    assert found["model"]["weight"].data_ptr() == tensors["model"]["weight"][1].data_ptr()


@pytest.mark.parametrize("copy", [True, False])
def test_the_state_of_an_optimizer_is_copied_where_it_is_asked_for(copy: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors, _ = optimizer_state(optimizer, model, copy)
    own = optimizer.state[model.weight]["exp_avg"]
    assert (tensors["weight/exp_avg"].data_ptr() == own.data_ptr()) is not copy
    assert torch.equal(tensors["weight/exp_avg"], own)
