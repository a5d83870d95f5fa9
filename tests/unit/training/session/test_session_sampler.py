"""The sampler of a Session: compared on all ranks and on a resume, or refused in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import shoal
from shoal.errors import JobError, JobMismatchError
from shoal.training.session import session as module

ROWS = TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))


def train(data: Any, **settings: Any) -> None:
    with shoal.Session(global_batch=4, grains=2, **settings) as session:
        model = torch.nn.Linear(2, 2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(data):
            for inputs, labels in step:
                step.backward(*shoal.cross_entropy(model(inputs), labels))


def test_the_ranks_compare_the_sampler_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    compare: Callable[..., None] = module.refuse_differences

    def seen(mesh: Any, mine: dict[str, Any]) -> None:
        compared.append(mine.get("job", {}).get("sampler"))
        compare(mesh, mine)

    monkeypatch.setattr(module, "refuse_differences", seen)
    train(DataLoader(ROWS, 4, sampler=WeightedRandomSampler(torch.arange(8.0), 8)))
    assert compared[-1] == shoal.Weighted(torch.arange(8.0)).describe()


def test_a_mixture_reads_its_own_data() -> None:
    mixture = shoal.Mixture({"a": ROWS}, {"a": 1})
    train(mixture, sampler=mixture)
    with pytest.raises(JobError, match="a mixture reads its own datasets"):
        train(ROWS, sampler=mixture)


def test_a_resume_with_other_weights_is_refused(tmp_path: Path) -> None:
    train(ROWS, checkpoints=tmp_path / "kept", sampler=shoal.Weighted([1] * 8))
    train(ROWS, checkpoints=tmp_path / "kept", sampler=shoal.Weighted([1] * 8), resume=True)
    with pytest.raises(JobMismatchError, match="to resume has sampler"):
        train(ROWS, checkpoints=tmp_path / "kept", sampler=shoal.Weighted([2] * 8), resume=True)


def test_a_budget_is_refused() -> None:
    with pytest.raises(JobError, match="steps have global_batch samples"):
        train(ROWS, sampler=shoal.TokenBudget([2] * 8, 8))
