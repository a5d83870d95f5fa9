"""Buffers change once a step, to the mean of what the microbatches made of them."""

from itertools import chain
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.numerics import batch_statistics
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.grain_randomness import GrainScope
from shoal.parallel.base import NUM_SUMS, buffer_sums
from shoal.parallel.data.replicated import from_limbs, to_limbs
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


@pytest.mark.parametrize(("sizes", "is_one"), [((4, 4, 4), True), ((4, 4, 3), False)], ids=["alike", "a shorter last"])
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


def test_a_backward_to_come_has_what_its_forward_left() -> None:
    """A stage of a pipeline computes other microbatches before a microbatch's backward."""
    model = nn.Module()
    model.register_buffer("seen", torch.ones(2))
    buffers = StepBuffers(model)
    buffers.watch(["seen"])
    buffers.begin()
    weight = torch.ones(2, requires_grad=True)
    totals = []
    for number in (2.0, 3.0):
        model.seen.mul_(number)
        totals.append((weight * model.seen).sum())
        buffers.restore(in_graph=True)
        assert torch.equal(model.seen, torch.ones(2))
    gradients = [torch.autograd.grad(total, weight)[0].tolist() for total in totals]
    assert gradients == [[2.0, 2.0], [3.0, 3.0]]


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
    assert buffers.num_values == 2 + 2 + (1 + 4) + 1 + 2  # a counter travels as a key and words of 16 bits
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


# ---------------------------------------------------------------------------------- rules, over ranks and microbatches


class Ruled(nn.Module):
    """A buffer of each rule, in dtypes of each width."""

    RULES: ClassVar = {
        "calls": "same", "samples": "sum", "load": "sum", "coarse": "sum", "here": "total", "long": "total",
        "largest": "max", "bytes": "max", "lowest": "min", "flag": "max", "newest": "last", "turn": "last",
        "mean": "mean",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        whole = torch.tensor(2**61 + 1)
        for name, value in {
            "calls": whole, "samples": whole.clone(), "load": torch.zeros(2), "coarse": torch.zeros(2).bfloat16(),
            "here": torch.zeros(2), "long": torch.zeros(2, dtype=torch.int64), "largest": torch.full((2,), -torch.inf),
            "bytes": torch.zeros(2, dtype=torch.uint8), "lowest": torch.tensor(torch.inf).double(),
            "flag": torch.tensor([False, False]), "newest": torch.zeros(2).double(),
            "turn": torch.zeros(2, dtype=torch.complex64), "mean": torch.ones(2),
        }.items():  # fmt: skip
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> None:
        hits = (x > 0).sum(0)
        self.calls += 1
        self.samples += len(x)
        self.load += hits
        self.coarse += hits
        self.here = hits.float()
        self.long.copy_(-(2**40) * hits)
        self.largest = torch.maximum(self.largest, x.amax(0))
        self.bytes.copy_(torch.maximum(self.bytes, (x.abs() * 50).byte().amax(0)))
        self.lowest.copy_(torch.minimum(self.lowest, x.min()))
        self.flag |= x.amax(0) > 1
        self.newest.copy_(x[-1])
        self.turn.copy_(x[-1] * 1j)
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)


@pytest.mark.parametrize("streams", [False, True], ids=["known last grain", "streams"])
@pytest.mark.parametrize(
    "shares", [[[6, 2]], [[2, 2], [4]], [[2], [], [2, 4]], [[1], [1], [1], [1, 1, 1], [2]]], ids=str
)
@pytest.mark.parametrize("is_narrow", [False, True], ids=["float64", "float32"])
def test_rules_over_ranks_are_those_of_one_forward(shares: list[list[int]], is_narrow: bool, streams: bool) -> None:
    """Bit by bit but for means, with sums in float64, and in float32 as between ranks in fast mode; of two steps."""
    x, one = torch.randn(16, 2, generator=torch.Generator().manual_seed(0)), Ruled()
    ranks, buffers = [Ruled() for _ in shares], []
    for rank, model in enumerate(ranks):
        last = None if streams else lambda step: len(list(chain.from_iterable(shares))) - 1
        buffers.append(StepBuffers(model, slots=len(shares), last_grain=last))
        buffers[rank].slot = rank
        buffers[rank].watch(rules=Ruled.RULES)
    for step in range(2):
        samples = iter(x[8 * step : 8 * step + 8].split(list(chain.from_iterable(shares))))
        one(x[8 * step : 8 * step + 8])
        total, grain = torch.zeros(NUM_SUMS + buffers[0].num_values, dtype=torch.float64), 0
        total = to_limbs(total) if is_narrow else total
        for model, own, sizes in zip(ranks, buffers, shares, strict=True):
            sums = torch.zeros(NUM_SUMS + own.num_values, dtype=torch.float64)
            own.begin()
            for size in sizes:
                model(next(samples))
                sums += buffer_sums(own.weighted(size, step=step, grain=grain))
                own.restore()
                grain += 1
            total += to_limbs(sums) if is_narrow else sums
        found = (from_limbs(total) if is_narrow else total)[NUM_SUMS:].numpy()
        for model, own in zip(ranks, buffers, strict=True):
            own.assign(found, 8)
            for name, value in model.named_buffers():
                torch.testing.assert_close(value, one.get_buffer(name), rtol=0, atol=1e-6 if name == "mean" else 0)


def test_a_later_stage_of_the_same_rank_adds_its_own_buffers() -> None:
    """A pipeline's rank with two stages notes each microbatch twice, after each stage's forward."""
    x, one = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), nn.ModuleList([Ruled(), Ruled()])
    model = nn.ModuleList([Ruled(), Ruled()])
    buffers = StepBuffers(model, slots=2, last_grain=lambda step: 1)
    buffers.slot = 1
    buffers.watch(rules={f"{stage}.{name}": rule for stage in (0, 1) for name, rule in Ruled.RULES.items()})
    for _ in range(2):
        sums = buffers.zeros()
        buffers.begin()
        for number, stage in ((0, 0), (1, 0), (0, 1), (1, 1)):
            model[stage](x[2 * number : 2 * number + 2])
            sums += buffers.weighted(2, grain=number, again=stage == 1)
            buffers.restore()
        buffers.assign(sums.numpy(), 4)
        for stage in one:
            stage(x)
        for name, value in model.named_buffers():
            is_mean = "mean" in name  # of values below 4, in float32
            torch.testing.assert_close(value, one.get_buffer(name), rtol=0, atol=1e-6 if is_mean else 0)


def test_what_a_step_does_not_reach_stays() -> None:
    """A masked step, and buffers that no microbatch has written."""
    model = Ruled()
    buffers = StepBuffers(model)
    buffers.watch(rules=Ruled.RULES)
    before = buffers.model.values()
    buffers.begin()
    model(torch.randn(4, 2))
    sums = buffers.weighted(4)
    buffers.restore()
    buffers.queue_assign(sums, torch.tensor(4.0), torch.tensor(False))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    buffers.queue_assign(sums, torch.tensor(4.0), torch.tensor(True))
    assert int(model.calls) == 2**61 + 2  # type: ignore[arg-type]


def test_a_buffer_that_is_written_with_its_own_value_has_not_moved() -> None:
    model = Counter()
    buffers = StepBuffers(model)
    buffers.watch(())
    buffers.begin()
    model.fixed.fill_(1.0)  # type: ignore[operator]
    assert "fixed" in buffers.changed()
    assert buffers.moved() == set()
    model.fixed.fill_(2.0)  # type: ignore[operator]
    model.norm.running_mean.data.fill_(2.0)  # type: ignore[operator,union-attr]
    assert "fixed" in buffers.moved()
