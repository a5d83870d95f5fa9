"""Coupling: a model that mixes samples of a batch is told with the place; one that does not is not called so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.loader import DataRank, MapLoader
from shoal.data.order import Order
from shoal.data.source import MapSource, source_of
from shoal.jobs.job import Job, Steps
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.losses import mse
from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection
from shoal.training.microbatch.coupling import IN_THE_LOSS, MIXES, PADS, REREAD, meaning
from shoal.training.microbatch.look import Look
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import LossComputer

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module, Any], Any]


def found(model: nn.Module, loss: Loss, collate: Any = None, data: Any = None, **precisions: str) -> MicrobatchPolicy:
    """What the first batch of 4 grains of 4 samples shows; model and buffers stay as they were."""
    source = source_of("train_data", data or [(row, row.sum()[None]) for row in X], collate)
    assert isinstance(source, MapSource)
    order = Order(32, 16, 4, seed=0, shuffle=True, length=Steps(4))
    (first,) = MapLoader(source, order, DataRank(0, 1), 0, pin_memory=False).step(0).microbatches
    job = Job(model=lambda: model, loss=loss, optimizer=print, train_data=X, global_batch=16, grains=4)
    precision = Precision.of(PrecisionSection(**precisions), torch.device("cpu"))  # type: ignore[arg-type]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    finding = Look(LossComputer(job, model, precision, MicrobatchPolicy(4))).policy(first, first, StepBuffers(model))
    assert finding.conclusive
    for name, now in model.state_dict().items():
        assert now.dtype == before[name].dtype
        assert torch.equal(now, before[name])
    return finding.computation


def plain(model: nn.Module, batch: Any) -> Any:
    return mse(model(batch[0]), batch[1])


class Center(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Inside(nn.Module):
    """Mixes between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(hidden / hidden.norm(dim=0))
        return out


class Replaced(nn.Module):
    """Puts another tensor in its buffer's place, as running centres do, and mixes."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("centre", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return out - out.mean(0)


def info_nce(model: nn.Module, batch: Any) -> Any:
    features = F.normalize(model(batch[0]) * batch[0] + batch[0], dim=1)
    return F.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)), reduction="sum"), len(features)


def hardest(model: nn.Module, batch: Any) -> Any:
    features = model(batch[0]) * batch[0]
    apart = (features[:, None] - features).square().sum(2) + 9.0 * torch.eye(len(features))
    return F.relu(1.0 - apart.min(1).values).sum(), len(features)


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pads to the largest first number of the batch."""
    rows = torch.stack([row for row, _ in samples])
    return rows * rows[:, 0].abs().max(), torch.stack([target for _, target in samples])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2)), nn.Linear(4, 1))


def mixing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(inplace=True), Center()), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("made", "loss", "where"),
    [
        (mixing, plain, "in module '1.1' (Center)"),
        (Inside, plain, "in the forward of Inside itself"),
        (lambda: nn.Sequential(nn.Linear(3, 3), Inside()), plain, "in module '1' (Inside)"),
        (Replaced, plain, "in the forward of Replaced itself"),
        (model, info_nce, "in the loss function"),
        (model, hardest, "in the loss function"),
    ],
)
@pytest.mark.parametrize("precisions", [{}, {"compute": "bfloat16"}, {"parameters": "bfloat16", "compute": "bfloat16"}])
def test_the_place_is_found(made: Callable[[], nn.Module], loss: Loss, where: str, precisions: dict[str, str]) -> None:
    precision = torch.bfloat16 if "parameters" in precisions else torch.float32
    computation = found(made().to(precision), loss, **precisions)
    assert not computation.fuse
    assert computation.coupled == f"{MIXES}, {where}"
    assert MicrobatchPolicy.from_json(computation.to_json()) == computation
    assert MicrobatchPolicy(4).with_care_of(computation).coupled == computation.coupled


def test_what_collates_is_told_as_that() -> None:
    assert "collate" in found(model(), plain, padded).coupled


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences of as many numbers as the first number says, padded to the longest."""
    rows = [torch.ones(2 + int(8 * float(row[0].abs())), 1) * row[1] for row, _ in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack([target for _, target in samples])


class Both(nn.Module):
    """Reads padded sequences in both directions; or masks what is padding."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.rnn, self.head, self.masks = nn.GRU(1, 4, batch_first=True, bidirectional=True), nn.Linear(8, 1), masks

    def forward(self, x: Tensor) -> Tensor:
        if self.masks:
            lengths = (x[..., 0] != 0).sum(1)
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out: Tensor = self.head(self.rnn(x)[1].transpose(0, 1).flatten(1))
        return out


def test_padding_is_told_by_the_longest_sample() -> None:
    torch.manual_seed(0)
    computation = found(Both(masks=False), plain, pad)
    assert not computation.fuse
    said = re.fullmatch(
        rf"{PADS}: in grain \d it is sample (\d+), by which .* has length (\d+); .*", computation.coupled
    )
    assert said is not None, computation.coupled
    assert 2 + int(8 * float(X[int(said[1]), 0].abs())) == int(said[2])
    assert "pack_padded_sequence" in meaning(computation.coupled, 4, 4)


def test_padding_that_is_masked_shares_a_forward() -> None:
    torch.manual_seed(0)
    computation = found(Both(masks=True), plain, pad)
    assert (computation.fuse, computation.coupled) == (True, "")


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (lambda error: (error.mean(), 1), "the weight of several grains is 1 as of each of them, and not the sum"),
        (
            lambda error: (error.mean(), len(error)),
            "the total of several grains is the mean of theirs, and not the sum",
        ),
    ],
)
def test_a_mean_is_not_called_a_mixture(pair: Callable[[Tensor], Any], said: str) -> None:
    computation = found(model(), lambda model, batch: pair((model(batch[0]) - batch[1]).square()))
    assert not computation.fuse
    assert computation.coupled.startswith(said)
    assert "return sums" in meaning(computation.coupled, 4, 4)


def critic(model: nn.Module, batch: Any) -> Any:
    """Scores far from zero, of both signs: their sum is a small difference of large terms."""
    scores = model(batch[0]) + 1000.0
    signs = torch.tensor([1.0, -1.0]).repeat(len(scores) // 2)[:, None]
    return (scores * signs.to(scores)).sum(), len(scores)


def steep(model: nn.Module, batch: Any) -> Any:
    """Large logits that nearly agree."""
    logits = torch.cat([model(batch[0]), batch[1]], 1) * 1e-2 + 3e4
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="sum"), len(logits)


@pytest.mark.parametrize("loss", [critic, steep])
def test_rounding_is_not_called_a_mixture(loss: Loss) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        computation = found(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)), loss)
        assert (computation.fuse, computation.coupled) == (True, "")


def test_batch_norm_is_a_grains_own_and_mixes_nothing() -> None:
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert (found(norm, plain).fuse, found(norm, plain).coupled) == (True, "")
    both = found(nn.Sequential(norm, nn.Tanh(), Center()), plain)
    assert both.coupled == f"{MIXES}, in module '2' (Center)"


def test_a_model_of_its_own_dtype_is_looked_at_in_that() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) @ torch.ones(1, 1)  # float32, whatever x is
            return out

    torch.manual_seed(0)
    assert found(nn.Sequential(Own(), Center()), plain).coupled == f"{MIXES}, in module '1' (Center)"


def test_what_it_means_is_in_numbers_of_the_job() -> None:
    assert "4 at most" in meaning(f"{MIXES}, in the loss function", 4, 30)
    assert "whole batch of 30" in meaning(f"{MIXES}, in the loss function", 4, 30)


class Noisy(torch.utils.data.Dataset[Any]):
    """Adds noise by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        row = X[i] + torch.randn(3, generator=self.generator)
        return row, row.sum()[None]


def test_samples_that_differ_when_they_are_read_again_are_not_called_mixed() -> None:
    seen = found(nn.Linear(3, 1), plain, data=Noisy())
    assert seen.coupled == REREAD
    assert "global generators" in meaning(seen.coupled, 4, 4)


def normalised_in_the_loss(model: nn.Module, batch: Any) -> Any:
    x = batch[0]
    return mse(model((x - x.mean(0)) / x.std(0)), batch[1])


def test_a_loss_that_normalises_over_the_batch_is_named_and_not_collate() -> None:
    assert found(nn.Linear(3, 1), normalised_in_the_loss).coupled == f"{MIXES}, in the loss function"


def test_a_loss_that_compares_samples_is_told_of_outputs() -> None:
    said = meaning(IN_THE_LOSS, 4, 32)
    assert "Job(outputs=lambda model, batch: model(batch[0]), loss=lambda outputs, batch: (total, weight))" in said
    assert "32" in said
