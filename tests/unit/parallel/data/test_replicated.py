"""One process: both ways of summing give the gradient of the whole batch and the same account of its samples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.data.loader import DataRank, MapLoader
from shoal.data.order import DIGEST_WORDS, Order, grain_words
from shoal.data.source import MapSource, open_data
from shoal.distributed.mesh import Mesh
from shoal.errors import PlanError
from shoal.jobs.job import Steps
from shoal.numerics.losses import mse
from shoal.parallel.assemble import assemble
from shoal.parallel.base import NUM_SUMS, Flags, LateTerms, StepSums, Strategy, microbatch_sums
from shoal.parallel.data.replicated import DataParallel, ExactDataParallel, from_limbs, to_limbs
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans import Layout, Plan
from shoal.plans.resolve import complete

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
MESH = Mesh(Layout(), 0, torch.device("cpu"), "here")
ORDER = Order(20, 16, 4, seed=0, shuffle=True, length=Steps(9))


def strategy(model: nn.Module, exact: bool) -> Strategy:
    plan = Plan().with_sections(execution={"exact": exact})
    found = assemble(plan, ShardedModel(MESH, model), list(model.parameters()), 4, lambda span: None)
    assert type(found) is (ExactDataParallel if exact else DataParallel)
    return found


def computed(model: nn.Module, how: Strategy, step: int, per: int, flags: Flags = Flags()) -> StepSums:  # noqa: B008
    source = open_data("d", (X, Y), None).source
    assert isinstance(source, MapSource)
    loader = MapLoader(source, ORDER, DataRank(0, 1), 0, pin_memory=False)
    loader.seek(step, per)
    microbatches: list[Any] = list(loader.step(step).microbatches)
    how.begin()
    for number, microbatch in enumerate(microbatches):
        total, weight = mse(model(microbatch.batch[0]), microbatch.batch[1])
        sums = microbatch_sums(microbatch, total, weight, torch.ones(2, dtype=torch.float64) * microbatch.num_samples)
        how.backward(microbatch, total, sums, number == len(microbatches) - 1)
    return how.finish(flags, NUM_SUMS + 2, [1.0])


class Turned(nn.Module):
    """A complex parameter after a real one of an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.turn = (
            nn.Parameter(torch.ones(3)),
            nn.Parameter(torch.polar(torch.ones(3, 1), torch.ones(3, 1))),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = ((inputs * self.scale).to(torch.complex64) @ self.turn).abs()
        return found


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 1), Turned], ids=["real", "complex"])
@pytest.mark.parametrize(("exact", "per"), [(True, 1), (False, 1), (False, 3), (False, 4)])
@pytest.mark.parametrize("step", [0, 1])
def test_sums_and_gradients_are_those_of_the_whole_batch(
    exact: bool, per: int, step: int, make: Callable[[], nn.Module]
) -> None:
    model = make()
    how = strategy(model, exact)
    sums = computed(model, how, step, per)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    grains = ORDER.grains(step)
    ids = ORDER.ids(step, grains)
    rows = torch.from_numpy(np.concatenate(ids))
    model.zero_grad()
    total, weight = mse(model(X[rows]), Y[rows])
    total.backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert sums.num_samples == sums.weight == int(weight) == (16, 4)[step]
    assert sums.loss == pytest.approx(float(total.detach() / weight), rel=1e-6)
    digests = [np.array(grain_words(step, [g.index], [i])) for g, i in zip(grains, ids, strict=True)]
    assert np.array_equal(sums.digest, sum(digests, np.zeros(DIGEST_WORDS)))
    assert sums.buffers.tolist() == [sums.num_samples] * 2
    how.close()


def test_exact_sums_do_not_depend_on_the_order_of_the_grains() -> None:
    model = nn.Linear(3, 1)
    how = strategy(model, exact=True)
    computed(model, how, 0, 1)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    source = open_data("d", (X, Y), None).source
    assert isinstance(source, MapSource)
    loader = MapLoader(source, ORDER, DataRank(0, 1), 0, pin_memory=False)
    (whole,) = loader.step(0).microbatches
    how.begin()
    for part in reversed(whole.split()):
        total, weight = mse(model(part.batch[0]), part.batch[1])
        how.backward(part, total, microbatch_sums(part, total, weight, torch.zeros(0, dtype=torch.float64)), False)
    how.finish(Flags(), NUM_SUMS, [])
    second = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if b is not None)


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_without_microbatches_has_no_weight_and_no_gradient(exact: bool) -> None:
    model = nn.Linear(3, 1)
    how = strategy(model, exact)
    computed(model, how, 0, 1)
    how.begin()
    sums = how.finish(Flags(), NUM_SUMS + 2, [])
    assert (sums.weight, sums.num_samples, len(sums.buffers)) == (0.0, 0, 2)
    assert np.isnan(sums.loss)
    grads = [p.grad for p in model.parameters()]
    assert all(g is None or not exact for g in grads)
    assert all(g is None or not g.any() for g in grads)
    how.close()


@pytest.mark.parametrize("exact", [True, False])
def test_flags_travel_with_the_sums(exact: bool) -> None:
    model = nn.Linear(3, 1)
    assert computed(model, strategy(model, exact), 0, 1, Flags(errors=1)).flags == Flags(errors=1)
    assert computed(model, strategy(model, exact), 0, 1, Flags(redo=1)).flags == Flags(redo=1)


def test_what_is_not_executed_is_refused() -> None:
    plan = Plan().with_sections(
        layout={"data": 2}, collectives={"compression": "int8"}, precision={"reduce": "bfloat16"}
    )
    with pytest.raises(PlanError, match=r"collectives\.compression"):
        complete(plan, 4, 1)


def test_sums_survive_their_way_in_float32() -> None:
    """Whole numbers over many ranks come out exact, fractions and losses as float32 has them, NaN as NaN."""
    ranks = 300
    generator = torch.Generator().manual_seed(1)
    sums = torch.cat(
        [
            torch.tensor([12345.678901, 2.0**33 + 12345, 4097.0, 7.0]),
            torch.randint(0, 2**32, (DIGEST_WORDS,), generator=generator),
            torch.tensor([0.1, 3e5]),
        ]
    ).double()
    added = to_limbs(sums)
    for _ in range(ranks - 1):
        added = added + to_limbs(sums)
    found = from_limbs(added)
    assert torch.equal(found[1:NUM_SUMS], sums[1:NUM_SUMS] * ranks)
    # 300 additions in float32: at most 300 units in the last place, 2^-24 each.
    assert torch.allclose(found, sums * ranks, rtol=ranks * 2.0**-24, atol=0.0)
    assert from_limbs(to_limbs(torch.full((NUM_SUMS,), 0.3, dtype=torch.float64)))[1] == pytest.approx(0.3, rel=2**-24)
    assert torch.isnan(from_limbs(to_limbs(torch.full((NUM_SUMS,), torch.nan, dtype=torch.float64)))).all()


def test_a_weight_on_the_host_is_sent_to_the_device_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU."""
    monkeypatch.setattr("shoal.numerics.device_reads.waits", lambda device: device.type == "meta")
    source = open_data("d", (X, Y), None).source
    assert isinstance(source, MapSource)
    (microbatch,) = MapLoader(source, ORDER, DataRank(0, 1), 0, pin_memory=False).step(0).microbatches
    total = torch.zeros((), device="meta")
    for weight in (torch.tensor(4), 4):
        late = microbatch_sums(microbatch, total, weight, torch.zeros(0), is_alone=True)
        assert isinstance(late, LateTerms)
        assert late.weight.device == total.device
