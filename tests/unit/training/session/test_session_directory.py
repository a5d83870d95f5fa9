"""A Session's directory of checkpoints is one training's at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import InUseError, RunDirectoryError


def steps(session: shoal.Session) -> Iterator[Any]:
    model = torch.nn.Linear(2, 2)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))):
        for inputs, labels in step:
            step.backward(*shoal.cross_entropy(model(inputs), labels))
        yield step


def test_a_second_session_is_refused_until_the_first_is_over(tmp_path: Path) -> None:
    def session(**more: Any) -> shoal.Session:
        return shoal.Session(global_batch=4, grains=2, checkpoints=tmp_path / "kept", **more)

    with session() as first:
        going = steps(first)
        next(going)
        with session() as second, pytest.raises(InUseError, match="close the Session of this process"):
            next(steps(second))
    assert kept(tmp_path) == ["step-00000001"]  # it was left after one
    with session() as third, pytest.raises(RunDirectoryError, match="resume=True"):
        next(steps(third))
    with session(resume=True) as fourth:
        assert [step.number for step in steps(fourth)] == [2]
        assert kept(tmp_path) == ["step-00000001", "step-00000002"]
        with session(resume=True) as fifth:
            assert list(steps(fifth)) == []


def kept(folder: Path) -> list[str]:
    records = {"attempts.jsonl", "job.json", "plan.toml", "records.jsonl", "result.json", "source"}
    return sorted({path.name for path in (folder / "kept").iterdir()} - records)
