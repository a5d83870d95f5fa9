"""Profiles of jobs: every case of the conformance suite, from the Job alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conformance.cases import CASES, job, tokens
from tests.usual import parametrize
from torch import nn

import shoal
from shoal.errors import UserCodeError
from shoal.planner.profile.profiles import profile_job
from shoal.plans.plan import Plan


@parametrize(
    "name",
    CASES,
    usual=[
        "frozen, unused, conditional",
        "pure bf16",
        "reentrant checkpointing",
        "a loss over pairs",
        "blocks computed again",
    ],
)
def test_each_case_of_the_conformance_suite(name: str) -> None:
    case = CASES[name]
    made = case.job()
    found = profile_job(made, Plan(**{k: v for k, v in case.sections.items() if k == "precision"}), device="cpu")
    assert found.num_parameters == sum(p.numel() for p in made.model().parameters())
    assert found.flops(2) > found.flops(1) > 0
    assert all(o.read_bytes.at(4) >= 0 and o.written_bytes.at(4) >= 0 for u in found.units for o in u.body.operations)
    assert not [note for note in found.notes if "optimizer" in note]


def test_a_constructor_that_computes_with_values() -> None:
    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate)) for rate in rates)
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    assert profile_job(job(model=Scheduled)).num_parameters == 3 * 42 + 21


def test_ragged_samples_are_as_long_as_a_grains_longest() -> None:
    """[1, 2, 3, ...] tokens a sample, padded by the collate function."""

    def pad(samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    data = [torch.zeros(1 + i, dtype=torch.int64) for i in range(64)]
    made = shoal.Job(
        model=lambda: nn.Embedding(16, 8),
        loss=lambda m, b: (m(b).sum(), b.numel()),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        train_data=data,
        collate=pad,
        global_batch=32,
        grains=4,
    )
    assert profile_job(made).sample_bytes == 8 * 8


def test_a_stream_is_looked_at_and_not_used_up() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from zip(*tokens(8), strict=True)

    made = job(
        model=lambda: nn.Embedding(16, 16),
        loss=lambda m, b: shoal.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), ignore_index=-100),
        train_data=Stream(),
        metrics={},
        eval_data=None,
    )
    assert profile_job(made).sample_bytes == 2 * 12 * 8


def test_what_is_cut_of_a_model_that_looks_at_numbers() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.isnan().any():
                raise ValueError("nothing is known of these samples")
            return self.down(torch.relu(self.up(x)))

    found = profile_job(job(model=Looking))
    dims = {weight.name: weight.tensor_dim for unit in found.units for weight in unit.body.weights}
    assert dims["up.weight"] == dims["up.bias"] == 0
    assert not [note for note in found.notes if "not known" in note]


def test_a_loss_that_reads_each_sample_back() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        assert [row.item() for row in inputs.sum(1)]
        return shoal.cross_entropy(model(inputs), labels)

    assert profile_job(job(loss=loss)).num_parameters == profile_job(job()).num_parameters


def test_a_job_that_raises_is_told_so() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise KeyError("no such column")

    with pytest.raises(UserCodeError, match="KeyError: 'no such column'"):
        profile_job(job(loss=loss))
