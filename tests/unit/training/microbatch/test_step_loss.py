"""How a model has to be computed is found on the first batch, and what a loss returns is checked."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.data.loader import DataRank, MapLoader, Microbatch
from shoal.data.order import Order
from shoal.data.source import MapSource, open_data
from shoal.errors import JobError, LossError, UserCodeError
from shoal.jobs.job import Job, Steps
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.losses import mse
from shoal.numerics.precision import Precision, ProductsInFloat32
from shoal.plans.plan import PrecisionSection
from shoal.training.microbatch.look import Look
from shoal.training.microbatch.loss_pair import check_pair
from shoal.training.microbatch.policy import GrainLoss, MicrobatchPolicy, ProbeResult, RedoError, refuse_other_losses
from shoal.training.microbatch.step import LossComputer

X = torch.linspace(-1, 1, 96).view(32, 3)
Loss = Callable[[nn.Module, Any], Any]


def plain(model: nn.Module, batch: Any) -> Any:
    return mse(model(batch[0]), batch[1])


def first_batch() -> Microbatch:
    source = open_data("train_data", (X, X.sum(1, keepdim=True)), None).source
    assert isinstance(source, MapSource)
    order = Order(32, 16, 4, seed=0, shuffle=True, length=Steps(4))
    data = MapLoader(source, order, DataRank(0, 1), 0, pin_memory=False).step(0)
    (microbatch,) = data.microbatches
    return microbatch


def computer(
    model: nn.Module, loss: Loss = plain, computation: MicrobatchPolicy | None = None, **precisions: str
) -> LossComputer:
    job = Job(model=lambda: model, loss=loss, optimizer=print, train_data=X, global_batch=16, grains=4)
    precision = Precision.of(PrecisionSection(**precisions), torch.device("cpu"))  # type: ignore[arg-type]
    return LossComputer(job, model, precision, computation or MicrobatchPolicy(4))


def look_at(computer: LossComputer, batch: Microbatch, buffers: StepBuffers) -> ProbeResult:
    return Look(computer).policy(batch, batch, buffers)


def proposed(model: nn.Module, loss: Loss = plain, **precisions: str) -> MicrobatchPolicy:
    before = {name: b.clone() for name, b in model.named_buffers()}
    buffers = StepBuffers(model)
    finding = look_at(computer(model, loss, **precisions), first_batch(), buffers)
    assert finding.conclusive
    found = finding.computation
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert buffers.names == found.buffers
    return found


def contrastive(model: nn.Module, batch: Any) -> Any:
    features = F.normalize(model(batch[0]).repeat(1, 3) + batch[0], dim=1)
    return F.cross_entropy(features @ features.T, torch.arange(len(features)), reduction="sum"), len(features)


def mean_of_batch(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1]), 1


class Draws(nn.Module):
    """Runs `draw` on the features before `rest`."""

    def __init__(self, draw: Callable[[Tensor], Tensor], rest: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.draw = nn.Linear(3, 4), draw
        self.rest = rest or nn.Identity()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rest(self.draw(self.first(x))))


def test_a_plain_model_is_fused() -> None:
    assert proposed(nn.Linear(3, 1)) == MicrobatchPolicy(4, "none", fuse=True, buffers=())


def test_dropout_is_scoped_and_fused() -> None:
    assert proposed(Draws(lambda x: F.dropout(x, 0.5))) == MicrobatchPolicy(4, "scoped", fuse=True)


def test_batch_norm_is_scoped_and_its_statistics_are_watched() -> None:
    found = proposed(Draws(torch.relu, nn.BatchNorm1d(4)))
    names = ("rest.num_batches_tracked", "rest.running_mean", "rest.running_var")
    assert found == MicrobatchPolicy(4, "scoped", fuse=True, buffers=names)


@pytest.mark.parametrize("loss", [contrastive, mean_of_batch])
def test_a_loss_that_is_no_sum_over_samples_is_not_fused(loss: Loss) -> None:
    found = proposed(nn.Linear(3, 1), loss)
    assert (found.randomness, found.fuse, found.effective_grains) == ("none", False, 1)


NARROW = [{"compute": "bfloat16"}, {"compute": "float16"}, {"parameters": "bfloat16", "compute": "bfloat16"}]


@pytest.mark.parametrize("precisions", NARROW)
def test_a_narrow_dtype_hides_no_loss_that_is_no_sum(precisions: dict[str, str]) -> None:
    def centred(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0].to(model.weight.dtype)).float()  # type: ignore[union-attr]
        return (outputs - batch[1] - 0.05 * outputs.mean()).square().sum(), len(outputs)

    model = nn.Linear(3, 1).to(torch.bfloat16 if "parameters" in precisions else torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    assert not proposed(model, centred, **precisions).fuse
    assert all(torch.equal(p, b) and p.dtype == b.dtype for p, b in zip(model.parameters(), before, strict=True))
    assert proposed(model, **precisions).fuse


def test_a_model_that_runs_in_its_own_dtype_only_is_not_fused() -> None:
    def own_dtype(model: nn.Module, batch: Any) -> Any:
        return mse(model(batch[0].bfloat16()), batch[1].bfloat16())

    found = proposed(nn.Linear(3, 1).bfloat16(), own_dtype, parameters="bfloat16", compute="bfloat16")
    assert (found.fuse, found.randomness) == (False, "none")


def test_a_batch_that_is_not_finite_tells_nothing() -> None:
    def infinite(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).sum() * math.inf, len(batch[0])

    model = nn.Linear(3, 1)
    buffers = StepBuffers(model)
    assert not look_at(computer(model, infinite), first_batch(), buffers).conclusive


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.rand(1),
        lambda x: x * float(np.random.rand()),
        lambda x: x[torch.randperm(len(x))],
        lambda x: x + torch.rand(4, generator=torch.Generator()),
        lambda x: F.dropout(x.flatten(), 0.5).view_as(x),
    ],
)
def test_randomness_that_cannot_be_told_apart_is_opaque(draw: Callable[[Tensor], Tensor]) -> None:
    found = proposed(Draws(draw))
    assert found.randomness == "opaque"
    assert found.effective_grains == 1


def test_statistics_after_opaque_randomness_are_watched() -> None:
    found = proposed(Draws(lambda x: x + torch.rand(1), nn.BatchNorm1d(4)))
    assert "rest.running_mean" in found.buffers


@pytest.mark.parametrize("randomness", ["none", "scoped", "opaque"])
def test_a_scope_gives_a_grain_the_same_randomness_again(randomness: str) -> None:
    model = Draws(lambda x: F.dropout(x, 0.5)) if randomness != "none" else nn.Linear(3, 1)
    engine = computer(model, computation=MicrobatchPolicy(1, randomness))
    totals = []
    for _ in range(2):
        torch.rand(3)
        for part in first_batch().split():
            with engine.scope(part):
                totals.append(engine.loss(part.batch)[0].item())
    assert totals[:4] == totals[4:]
    assert len(set(totals)) == 4


def test_a_scope_that_proves_too_careless_asks_for_another() -> None:
    (part, *_) = first_batch().split()
    for draw in (lambda x: F.dropout(x, 0.5), lambda x: x * float(np.random.rand()), lambda x: x * random.random()):
        none = computer(Draws(draw), computation=MicrobatchPolicy(4, "none"))
        with pytest.raises(RedoError) as caught, none.scope(part):
            none.loss(part.batch)
        assert caught.value.proposal.randomness == "scoped"
    for draw in (lambda x: x + torch.rand(1), lambda x: x * float(np.random.rand())):
        opaque = computer(Draws(draw), computation=MicrobatchPolicy(4, "scoped"))
        with pytest.raises(RedoError) as caught, opaque.scope(part):
            opaque.loss(part.batch)
        assert caught.value.proposal.randomness == "opaque"


def test_the_more_careful_of_two_computations() -> None:
    one = MicrobatchPolicy(8, "none", fuse=True, buffers=("b",))
    two = MicrobatchPolicy(4, "scoped", fuse=False, buffers=("a", "b"))
    both = MicrobatchPolicy(4, "scoped", fuse=False, buffers=("a", "b"))
    assert one.with_care_of(two) == two.with_care_of(one) == both
    assert MicrobatchPolicy.from_json(both.to_json()) == both
    assert [c.effective_grains for c in (one, two, MicrobatchPolicy(8, "opaque"))] == [8, 1, 1]


def test_a_checkpoint_of_before_knows_no_draws_by_hash() -> None:
    """Its policy does not say how numbers are drawn."""
    now = MicrobatchPolicy(4)
    saved = {name: value for name, value in now.to_json().items() if name != "by_hash"} | {"by_position": True}
    assert not now.with_care_of(MicrobatchPolicy.from_json(saved)).by_hash
    assert now.with_care_of(MicrobatchPolicy.from_json(now.to_json())).by_hash


def test_a_model_that_raises_is_told_with_its_place() -> None:
    def broken(model: nn.Module, batch: Any) -> Any:
        return model(batch[0].view(-1, 5))

    with pytest.raises(UserCodeError) as caught:
        computer(nn.Linear(3, 1), broken).loss([X, X])
    assert "test_step_loss.py:" in caught.value.conflict
    assert "in broken" in caught.value.conflict


def test_a_pair_of_sums_passes() -> None:
    total, weight = check_pair("loss", (torch.tensor([[2.0]]), torch.tensor([3])))
    assert (total.shape, weight.shape) == ((), ())  # type: ignore[union-attr]
    assert check_pair("loss", [2.0, 3])[1] == 3
    assert float(check_pair("metric 'm'", (torch.tensor(2), 3))[0]) == 2.0


@pytest.mark.parametrize(
    ("pair", "given"),
    [
        (torch.tensor(1.0), "a loss that returned a tensor of shape [], torch.float32"),
        (torch.ones(2), "a loss that returned a tensor of shape [2], torch.float32"),
        (1.0, "a loss that returned float"),
        (None, "a loss that returned NoneType"),
        ((torch.tensor(1.0),), "a loss that returned tuple"),
        ((torch.ones(3), 3), "a loss whose total is a tensor of shape [3], torch.float32"),
        ((torch.tensor(2), 3), "a loss whose total is a tensor of shape [], torch.int64"),
        ((torch.tensor(1.0), torch.ones(3)), "a loss whose weight is a tensor of shape [3], torch.float32"),
        ((torch.tensor(1.0), None), "a loss whose weight is NoneType"),
        ((torch.tensor(1.0), "3"), "a loss whose weight is str"),
    ],
)
def test_what_is_no_pair_is_refused_with_the_fix(pair: Any, given: str) -> None:
    with pytest.raises(LossError) as caught:
        check_pair("loss", pair)
    assert caught.value.given == given
    assert "shoal.cross_entropy(logits, targets)" in caught.value.remedy


@pytest.mark.parametrize("pair", ["text", torch.tensor(1.0), (torch.tensor(1.0), "4")])
def test_a_metric_that_is_no_pair_is_told_of_metrics(pair: Any) -> None:
    with pytest.raises(LossError) as caught:
        check_pair("metric 'm'", pair)
    assert "cross_entropy" not in caught.value.remedy
    assert "(logits.argmax(-1) == targets).sum(), len(targets)" in caught.value.remedy


@pytest.mark.parametrize("what", ["loss", "metric 'm'"])
@pytest.mark.parametrize("pair", [(10**400, 4), (torch.tensor(1.0), 10**400)])
def test_an_integer_beyond_float64_is_refused(what: str, pair: Any) -> None:
    with pytest.raises(LossError, match=f"a {what} whose (total|weight) is an integer of 1329 bits"):
        check_pair(what, pair)
    assert float(check_pair(what, (1.0, 10**300))[1]) == 1e300


@pytest.mark.parametrize("total", [None, "high"])
def test_a_total_that_is_no_number_is_refused(total: Any) -> None:
    with pytest.raises(LossError):
        check_pair("loss", (total, 3))


@pytest.mark.parametrize("randomness", ["none", "scoped", "opaque"])
def test_the_scope_of_forward_and_backward_holds_the_processors_products(
    randomness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.numerics.precision.is_slow", lambda kind: kind == torch.bfloat16)
    narrow = computer(nn.Linear(3, 1), computation=MicrobatchPolicy(4, randomness), compute="bfloat16")
    with narrow.scope(first_batch()):
        assert isinstance(_get_current_dispatch_mode(), ProductsInFloat32)
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (GrainLoss(0, 7, 1.001, 2.0), None),  # rounding
        (GrainLoss(0, 7, 1.5, 2.0), "the total 1 on rank 1 and 1.5 on rank 2"),
        (GrainLoss(0, 7, 1.0, 3.0), "the weight 2 on rank 1 and 3 on rank 2"),
        (GrainLoss(1, 7, 1.5, 2.0), None),  # another grain
        (GrainLoss(0, 8, 1.5, 2.0), None),  # other samples, which is told elsewhere
        (GrainLoss(0, 7, math.nan, 2.0), None),
    ],
)
def test_ranks_that_give_the_same_samples_other_losses_are_refused(other: GrainLoss, said: str | None) -> None:
    told = [None, GrainLoss(0, 7, 1.0, 2.0), other]
    if said is None:
        refuse_other_losses(told)
    else:
        with pytest.raises(JobError, match=said):
            refuse_other_losses(told)


def test_a_look_gives_the_loss_of_a_grain_that_ranks_compare() -> None:
    model, batch = nn.Linear(3, 1), first_batch()
    seen = look_at(computer(model), batch, StepBuffers(model)).seen
    grain = batch.split()[0]
    total, weight = plain(model, grain.batch)
    assert seen is not None
    assert (seen.grain, seen.weight) == (grain.grains[0].index, weight)
    assert seen.total == pytest.approx(float(total))
