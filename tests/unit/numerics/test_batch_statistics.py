"""Buffers change once a step, to the mean of what the microbatches made of them."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.numerics import batch_statistics
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.grain_randomness import GrainScope
from shoal.plans.grains import Grain


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("fixed", torch.ones(3))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(len(x))  # type: ignore[operator]
        self.replaced = self.replaced + 1
        return self.norm(x)


CHANGING = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen", "replaced"}


def test_what_a_forward_writes_or_replaces_is_found() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    buffers.watch()
    assert set(buffers.names) == CHANGING | {"fixed"}
    buffers.begin()
    assert buffers.changed() == set()
    x = torch.randn(4, 2)
    with GrainScope(0, 0, [Grain(0, 0, 4)]):  # batch_norm itself writes past the version counters
        model(x)
    assert buffers.changed() == CHANGING
    buffers.restore()
    assert buffers.changed() == CHANGING  # of the whole step
    buffers.begin()
    assert buffers.changed() == set()


@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm1d of sequences", "BatchNorm2d", "BatchNorm3d"])
@pytest.mark.parametrize("given", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_grains_as_channels_are_normalised_as_each_by_itself(
    kind: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients and running statistics; the shape is one that a GPU's grains get, on whatever device."""
    shape = {"BatchNorm1d": (), "BatchNorm1d of sequences": (4,), "BatchNorm2d": (4, 3), "BatchNorm3d": (4, 3, 2)}[kind]
    found = []
    for together in (False, True):
        monkeypatch.setattr(batch_statistics, "_is_launch_bound", lambda input, parts, is_one=together: is_one)
        torch.manual_seed(0)
        model = getattr(nn, kind.partition(" ")[0])(5, dtype=torch.float64, **given)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(12, 5, *shape, dtype=torch.float64, requires_grad=True)
        with GrainScope(0, 0, [Grain(0, 0, 4), Grain(1, 4, 4), Grain(2, 8, 4)]):
            out = model(x * 3 + torch.arange(12.0).view(-1, 1, *(1 for _ in shape)))
            (out * torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)).square().sum().backward()
        assert x.grad is not None
        found.append([out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    apart, beside = found
    for a, b in zip(apart, beside, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # both float64, of sums over 96 numbers at most


@pytest.mark.parametrize(
    ("sizes", "is_one"), [((4, 4, 4), True), ((4, 4, 3), False), ((12,), False)], ids=["alike", "a shorter last", "one"]
)
def test_which_grains_become_channels(sizes: tuple[int, ...], is_one: bool) -> None:
    """Grains of one size on a GPU, whose device alone is asked for here."""
    input = mock.Mock(is_cuda=True, is_contiguous=lambda: True)
    assert batch_statistics._is_launch_bound(input, torch.zeros(sum(sizes)).split(list(sizes))) is is_one
    assert not batch_statistics._is_launch_bound(torch.zeros(12, 1), torch.zeros(12, 1).split(4))


def test_every_microbatch_starts_from_the_steps_values() -> None:
    model = Counter()
    before = {name: b.clone() for name, b in model.named_buffers()}
    buffers = StepBuffers(model)
    buffers.watch(CHANGING)
    buffers.begin()
    for _ in range(3):
        model(torch.randn(4, 2))
        buffers.restore()
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_the_new_value_is_the_mean_weighted_by_samples() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    buffers.watch(CHANGING)
    parts = [torch.randn(6, 2), torch.randn(2, 2)]
    means, weighted = [], torch.zeros(buffers.num_values, dtype=torch.float64)
    buffers.begin()
    for part in parts:
        model(part)
        means.append(model.norm.running_mean.clone() * len(part) / 8)  # type: ignore[operator]
        weighted += buffers.weighted(len(part))
        buffers.restore()
    assert buffers.num_values == 2 + 2 + 1 + 1 + 2
    buffers.assign(weighted.numpy(), 8)
    torch.testing.assert_close(model.norm.running_mean, sum(means))
    assert int(model.norm.num_batches_tracked) == 1  # type: ignore[arg-type]
    assert int(model.seen) == 5  # type: ignore[arg-type]  # (6 * 6 + 2 * 2) / 8
    assert model.replaced.tolist() == [1.0, 1.0]


def test_both_parts_of_a_complex_value_are_means() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
    buffers = StepBuffers(model)
    buffers.watch()
    buffers.begin()
    weighted = torch.zeros(buffers.num_values, dtype=torch.float64)
    for value, num_samples in ((4 + 8j, 3), (8 - 4j, 1)):
        model.turn += torch.tensor([value, -value])  # type: ignore[operator]
        weighted += buffers.weighted(num_samples)
        buffers.restore()
    buffers.assign(weighted.numpy(), 4)
    assert buffers.num_values == 4
    assert model.turn.tolist() == [5 + 5j, -5 - 5j]  # type: ignore[operator]


def test_lazy_views_go_back_too() -> None:
    """Conjugate and negative ones, among others of their dtypes."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("conjugate", torch.ones(2, dtype=torch.complex64).mul(1j).conj())
    model.register_buffer("plain", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("negative", torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag)
    assert model.conjugate.is_conj()  # type: ignore[operator]
    assert model.negative.is_neg()  # type: ignore[operator]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = StepBuffers(model)
    buffers.watch()
    buffers.begin()
    model(torch.randn(4, 2))
    model.plain += 1  # type: ignore[operator]
    weighted = buffers.weighted(4)
    buffers.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    buffers.assign(weighted.numpy(), 4)
    assert torch.equal(model.conjugate, before["conjugate"])  # type: ignore[arg-type]
    assert torch.equal(model.plain, before["plain"] + 1)  # type: ignore[arg-type]
    assert not torch.equal(model.running_mean, before["running_mean"])  # type: ignore[arg-type]


def test_a_step_without_samples_assigns_nothing() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    buffers.watch(CHANGING)
    buffers.assign(torch.full((8,), torch.nan, dtype=torch.float64).numpy(), 0)
    assert model.seen == 0


def test_a_model_without_buffers() -> None:
    buffers = StepBuffers(nn.Linear(1, 1))
    buffers.watch()
    buffers.begin()
    buffers.restore()
    assert buffers.changed() == set()
    assert buffers.num_values == 0
    assert buffers.weighted(3).shape == (0,)
    buffers.assign(torch.zeros(0, dtype=torch.float64).numpy(), 3)


def test_a_removed_buffer_is_a_fault() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    model.fixed = None  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="fixed was removed"):
        buffers.begin()


def test_a_buffer_that_begins_to_change_goes_back_too() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    buffers.watch(())
    for _ in range(2):
        buffers.begin()
        buffers.restore()
    model.seen += 8
    model.replaced = torch.ones(2)
    before = buffers.num_values
    buffers.watch(("seen", "replaced"))  # agreed on by the ranks before the step is computed again
    assert (before, buffers.num_values) == (0, 3)
    buffers.restore()
    assert model.seen == 0
    assert torch.equal(model.replaced, torch.zeros(2))
    buffers.begin()
    model.seen += 4
    buffers.assign(buffers.weighted(2).numpy(), 2)
    buffers.restore()
    assert model.seen == 4


def test_a_buffer_of_another_dtype_is_put_back_as_it_was() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    buffers.watch()
    buffers.begin()
    model.replaced = torch.ones(2, dtype=torch.bfloat16)
    values = buffers.weighted(1).numpy()
    buffers.restore()
    assert torch.equal(model.replaced, torch.zeros(2))
    buffers.assign(values, 1)
    assert model.replaced.dtype == torch.float32
    assert torch.equal(model.replaced, torch.ones(2))


def test_the_ranks_vectors_match_where_a_buffer_grows_on_one() -> None:
    model = nn.Sequential(Counter())
    buffers = StepBuffers(model)
    buffers.watch()
    buffers.begin()
    expected = buffers.num_values
    model[0].replaced = torch.zeros(3)
    assert buffers.num_values == expected


def test_a_buffer_that_grows_is_refused_by_name() -> None:
    model = nn.Sequential(Counter())
    buffers = StepBuffers(model)
    buffers.watch()
    buffers.begin()
    model[0].replaced = torch.zeros(3)
    with pytest.raises(JobError, match=r"buffer 0.replaced of shape \[2\], which a forward gives the shape \[3\]"):
        buffers.restore()
