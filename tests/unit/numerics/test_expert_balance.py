"""The bias of a router by the counts of a step's microbatches."""

from __future__ import annotations

import pytest
import torch
from tests.jobs.balanced_experts import RATE, Experts, job
from torch import nn

from shoal.errors import JobError
from shoal.numerics.batch_statistics import StepBuffers


def test_the_bias_follows_the_choices_of_all_microbatches() -> None:
    torch.manual_seed(0)
    model, data = Experts(), torch.randn(12, 8)
    buffers = StepBuffers(model, declared={"router.bias": f"balance:{RATE}"})
    buffers.watch(["router.num_chosen"])
    _, _, chosen = model.eval().router(data)
    buffers.begin()
    total = torch.zeros(buffers.num_values, dtype=torch.float64)
    for rows in data.split([5, 7]):
        model.train()(rows)
        total += buffers.weighted(len(rows))
        buffers.restore()
    buffers.assign(total.numpy(), len(data))
    counts = chosen.flatten().bincount(minlength=4)
    assert len(counts.unique()) > 1
    assert model.router.bias.tolist() == (RATE * (6.0 - counts).sign()).tolist()
    assert model.router.get_buffer("num_chosen").tolist() == [0, 0, 0, 0]
    assert "router.num_chosen" not in model.state_dict()


def test_a_buffer_that_is_no_bias_is_refused() -> None:
    model = nn.BatchNorm1d(3)
    StepBuffers(model, declared={"running_mean": "balance:0.1"})
    with pytest.raises(JobError, match="returns no indices"):
        model(torch.randn(4, 3))
    with pytest.raises(JobError, match=r"is int64 of shape \[\]"):
        StepBuffers(nn.BatchNorm1d(3), declared={"num_batches_tracked": "balance:0.1"})
    with pytest.raises(JobError, match="balance:RATE"):
        job(buffers={"router.bias": "balance:-1"})
