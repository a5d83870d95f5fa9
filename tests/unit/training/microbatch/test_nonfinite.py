"""Who brought the NaN, whatever stands in the way of looking."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conformance.cases import Recomputed, mlp
from torch import nn

import shoal
from shoal.data.loader import DataRank, MapLoader
from shoal.data.order import Order
from shoal.data.source import MapSource, open_data
from shoal.distributed.mesh import alone
from shoal.jobs.job import Job, Steps
from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection
from shoal.training.microbatch.nonfinite import NOBODY, NonFiniteStep, find_nonfinite
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import LossComputer

DEVICE = torch.device("cpu")


def found(make: Callable[[], nn.Module], bad: int, break_at: int | None = None) -> dict[str, Any]:
    """What a search finds in 16 samples, of which `bad` is NaN; a dataset that raises on its second reading."""
    inputs = torch.ones(16, 6)
    inputs[bad] = torch.nan
    labels = torch.zeros(16, dtype=torch.int64)
    source = open_data("train_data", (inputs, labels), None).source
    assert isinstance(source, MapSource)
    loader = MapLoader(source, Order(16, 16, 4, 0, shuffle=False, length=Steps(1)), DataRank(0, 1), 0, pin_memory=False)
    microbatches = list(loader.step(0).microbatches)
    model = make()
    job = Job(
        model=make,
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=print,
        train_data=[0],
        global_batch=16,
        grains=4,
    )
    precision = Precision.of(PrecisionSection(), DEVICE)
    computer = LossComputer(job, model, precision, MicrobatchPolicy(4, "scoped"))
    if break_at is not None:
        loader._reader._fetcher.source = None  # type: ignore[assignment]
    return find_nonfinite(computer, precision, list(model.parameters()), alone(DEVICE), microbatches)


@pytest.mark.parametrize("make", [mlp, lambda: Recomputed(True), lambda: Recomputed(False)])
def test_down_to_the_sample(make: Callable[[], nn.Module]) -> None:
    assert (found(make, 6)["grains"], found(make, 6)["samples"]) == ([1], [6])


def test_what_cannot_be_read_again_is_all_under_suspicion() -> None:
    told = found(mlp, 6, break_at=0)
    assert told["grains"] == [0, 1, 2, 3]
    assert told["samples"] == list(range(16))


def test_a_loss_that_no_sample_makes_alone_names_no_rank() -> None:
    """As in a loss over the global batch."""
    assert str(NonFiniteStep(0, float("nan"), NOBODY, 1, "stop")).endswith("no sample brings it by itself: stop")
