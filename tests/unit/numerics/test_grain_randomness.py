"""A grain's randomness and batch statistics do not depend on which grains share its forward."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import JobMismatchError
from shoal.numerics.generators import python_generators, seed_everything
from shoal.numerics.grain_randomness import DrawCounter, GrainScope, NotFusibleError, active_scope
from shoal.numerics.hashed_draws import dropout
from shoal.numerics.isolation import without_modes
from shoal.parallel.base import run_backward
from shoal.plans.grains import Grain

GRAINS = [Grain(0, 0, 3), Grain(1, 3, 3), Grain(2, 6, 3), Grain(3, 9, 2)]
ROWS = 11
LSTM = nn.LSTM(2, 2, 2, dropout=0.5)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
ATTENTION_OF_8 = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True), 2)
Forward = Callable[[Tensor], Tensor]


def rows(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1))


def run(forward: Forward, x: Tensor, grains: list[Grain], step: int = 4) -> tuple[Tensor, GrainScope]:
    with GrainScope(7, step, grains) as scope:
        found = forward(x)
        assert not scope.leaked()
    return found, scope


def divided(forward: Forward, x: Tensor, runs: list[list[Grain]]) -> Tensor:
    parts = []
    for grains in runs:
        torch.rand(len(parts) + 1), random.random()  # what happens between microbatches is of no account
        own = x[grains[0].start : grains[-1].start + grains[-1].size]
        parts.append(run(forward, own, grains)[0])
    return torch.cat(parts)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.6)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, dropout_p=0.4)


# function, shape of a sample
FORWARDS: dict[str, tuple[Forward, tuple[int, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), (5,)),
    "Dropout": (nn.Dropout(0.3), (5,)),
    "Dropout in place": (lambda x: nn.Dropout(0.3, inplace=True)(x * 1), (5,)),
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), (5,)),
    "dropout p=1": (lambda x: F.dropout(x, 1.0), (5,)),
    "two dropouts": (lambda x: F.dropout(F.dropout(x, 0.5) + 1, 0.5), (5,)),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5), (6, 4)),
    "Dropout2d": (nn.Dropout2d(0.5), (6, 2, 2)),
    "dropout3d": (lambda x: F.dropout3d(x, 0.5), (6, 2, 2, 2)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.4, training=True), (5,)),
    "AlphaDropout": (nn.AlphaDropout(0.4), (5,)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.4), (6, 3)),
    "rrelu": (nn.RReLU(), (5,)),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, tau=0.5), (5,)),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), (5,)),
    "Tensor.bernoulli": (lambda x: x.sigmoid().bernoulli(), (5,)),
    "drop path": (drop_path, (5,)),
    "normal_": (lambda x: x + torch.empty_like(x).normal_(), (5,)),
    "uniform_": (lambda x: x + torch.zeros(x.shape).uniform_(-1, 1), (5,)),
    "rand_like": (lambda x: x + torch.rand_like(x), (5,)),
    "randn_like": (lambda x: x + torch.randn_like(x), (5,)),
    "randint_like": (lambda x: x + torch.randint_like(x, 0, 9), (5,)),
    "rand": (lambda x: x + torch.rand(x.shape[0], 5), (5,)),
    "randn of a shape": (lambda x: x + torch.randn(x.shape), (5,)),
    "randn size=": (lambda x: x + torch.randn(size=x.shape, dtype=torch.float32), (5,)),
    "normal of a mean": (lambda x: torch.normal(x, 2.0), (5,)),
    "poisson": (lambda x: torch.poisson(x.exp()), (5,)),
    "multinomial": (lambda x: torch.multinomial(x.exp(), 2).float(), (5,)),
    "attention": (attention, (2, 4, 3)),
    "exponential_": (lambda x: x + torch.zeros_like(x).exponential_(2.0), (5,)),
    "MultiheadAttention": (lambda x: ATTENTION(x, x, x)[0], (3, 4)),
    "MultiheadAttention without weights": (lambda x: ATTENTION(x, x, x, need_weights=False)[0], (3, 4)),
    "TransformerEncoder": (lambda x: ENCODER(x), (3, 4)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (5,)),
    "BatchNorm2d": (nn.BatchNorm2d(5, track_running_stats=False), (5, 3, 3)),
    "BatchNorm1d and dropout": (nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5)), (5,)),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_fused_grains_equal_single_ones_bit_for_bit(name: str) -> None:
    """Except for a matrix product: on some processors its rounding depends on the number of rows. A mask is seen."""
    forward, shape = FORWARDS[name]
    x = rows(*shape)
    fused, scope = run(forward, x, GRAINS)
    assert scope.calls or "p=1" in name
    tolerance = 1e-5 if name == "TransformerEncoder" else 0.0
    for runs in ([[g] for g in GRAINS], [GRAINS[:1], GRAINS[1:3], GRAINS[3:]]):
        torch.testing.assert_close(divided(forward, x, runs), fused, rtol=tolerance, atol=tolerance)
    if "norm" not in name.lower() and "p=1" not in name:
        assert not torch.equal(run(forward, x, GRAINS, step=5)[0], fused)
        assert not torch.equal(fused[:3], run(forward, x[:3], [Grain(1, 3, 3)])[0])


@pytest.mark.parametrize(
    "make", [lambda x: nn.Dropout2d(0.5, inplace=True)(x * 1), lambda x: F.alpha_dropout(x * 1, 0.5, True, True)]
)
def test_dropout_of_channels_in_place(make: Forward) -> None:
    x = rows(6, 2, 2).requires_grad_()
    fused = run(make, x, GRAINS)[0]
    assert torch.equal(divided(make, x, [[g] for g in GRAINS]), fused)


@pytest.mark.parametrize(
    "forward", [nn.Dropout(0.5).eval(), nn.BatchNorm1d(5).eval(), nn.Dropout(0.0), nn.RReLU().eval()]
)
def test_what_draws_nothing_is_left_alone(forward: Forward) -> None:
    found, scope = run(forward, rows(5), GRAINS)
    assert scope.calls == 0
    assert torch.equal(found, forward(rows(5)))


def test_dropout_keeps_the_mean_and_scales_what_stays() -> None:
    grains = [Grain(i, 1000 * i, 1000) for i in range(4)]
    found, _ = run(lambda x: F.dropout(x, 0.25), torch.ones(4000, 8), grains)
    assert found.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    # 32000 draws: the standard deviation of their mean is 0.0033.
    assert abs(float(found.mean()) - 1.0) < 6 * 0.0033
    assert not torch.equal(found[:1000], found[1000:2000])


def test_gradients_pass_through_the_same_mask() -> None:
    x = rows(5).requires_grad_()
    found, _ = run(lambda x: F.dropout(x, 0.5), x, GRAINS)
    found.sum().backward()
    assert torch.equal(x.grad, (found != 0).float() * 2)  # type: ignore[arg-type]


def test_batch_statistics_are_the_grains_and_the_running_ones_their_mean() -> None:
    fused, single = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    run(fused, rows(5), GRAINS)
    means, variances = [], []
    for grain in GRAINS:
        own = nn.BatchNorm1d(5)
        own.load_state_dict(single.state_dict())
        own(rows(5)[grain.start : grain.start + grain.size])
        means.append(own.running_mean * grain.size / ROWS)  # type: ignore[operator]
        variances.append(own.running_var * grain.size / ROWS)  # type: ignore[operator]
    torch.testing.assert_close(fused.running_mean, sum(means))
    torch.testing.assert_close(fused.running_var, sum(variances))
    assert int(fused.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_batch_norm_gradients_are_the_grains() -> None:
    fused, single = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    weights = rows(5).roll(1, 0)
    (run(fused, rows(5), GRAINS)[0] * weights).sum().backward()
    for g in GRAINS:
        part = slice(g.start, g.start + g.size)
        (single(rows(5)[part]) * weights[part]).sum().backward()
    torch.testing.assert_close(fused.weight.grad, single.weight.grad)
    torch.testing.assert_close(fused.bias.grad, single.bias.grad)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.rand(),
        lambda: random.random(),
        lambda: torch.randperm(3),
        lambda: torch.manual_seed(3),
        lambda: LSTM(torch.zeros(ROWS, 3, 2)),
    ],
)
def test_draws_past_the_scope_are_seen(draw: Callable[[], object]) -> None:
    with GrainScope(0, 0, GRAINS) as scope:
        F.dropout(torch.ones(ROWS, 5), 0.5)
        assert not scope.leaked()
        draw()
        assert scope.leaked()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: F.dropout(torch.ones(4, 5), 0.5),
        lambda: F.dropout(torch.tensor(1.0), 0.5),
        lambda: torch.rand(5, 3),
        lambda: torch.rand(()),
        lambda: torch.randint(0, 3, (ROWS,)),
        lambda: torch.normal(0.0, 1.0, (ROWS, 2)),
        lambda: torch.rand(ROWS, generator=torch.Generator()),
        lambda: torch.empty(ROWS).normal_(generator=torch.Generator()),
        lambda: torch.empty(5).bernoulli_(0.5),
        lambda: F.batch_norm(torch.ones(22, 3), None, None, training=True),
        lambda: F.dropout2d(torch.ones(22, 3, 2, 2), 0.5, True),
    ],
)
def test_what_cannot_be_told_apart_is_refused(draw: Callable[[], object]) -> None:
    with pytest.raises(NotFusibleError), GrainScope(0, 0, GRAINS):
        draw()
    # One grain alone is judged alike: how a model is computed must not depend on a rank's share.
    if "ROWS" not in draw.__code__.co_names:
        with pytest.raises(NotFusibleError), GrainScope(0, 0, [Grain(0, 0, 3)]):
            draw()


def test_a_mask_of_attention_is_no_batch() -> None:
    q, mask = rows(2, ROWS, 3), torch.ones(ROWS, ROWS).tril().log()
    with GrainScope(0, 0, GRAINS):
        try:
            found = F.scaled_dot_product_attention(q, q, q, mask, 1e-6)
        except NotFusibleError:
            return
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q, mask))


def test_recomputation_in_the_backward_draws_the_same() -> None:
    layers = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5), nn.Dropout(0.3))
    leaks: list[bool] = []

    def gradients(recompute: bool) -> list[Tensor]:
        layers.zero_grad()
        x = rows(5)
        with GrainScope(7, 4, GRAINS) as scope:
            out = checkpoint(layers, x, use_reentrant=False) if recompute else layers(x)
            F.dropout(out, 0.1)
            run_backward(out.square().sum())
            leaks.append(scope.leaked())
        return [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    plain, again = gradients(False), gradients(True)
    assert len(plain) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert leaks[0] is False
    assert leaks[1] is False


def test_seeding_reaches_every_generator() -> None:
    seed_everything(2**63 - 5)
    first = random.random(), np.random.rand(), float(torch.rand(()))
    states = python_generators()
    seed_everything(2**63 - 5)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == first
    assert python_generators() == states
    random.random()
    assert python_generators() != states


def test_the_half_of_a_pair_that_gauss_keeps_is_state() -> None:
    random.seed(1)
    random.gauss(0, 1)
    states = python_generators()
    random.gauss(0, 1)  # draws nothing: the other half
    assert python_generators() != states


@pytest.mark.parametrize("words", [1, 7, 624, 625, 6240])
def test_any_number_of_draws_of_python_is_noticed(words: int) -> None:
    """624 words are made at once, after which as many of them are left as before."""
    random.seed(1)
    random.getrandbits(32)
    states = python_generators()
    for _ in range(words):
        random.getrandbits(32)
    assert python_generators() != states


def test_a_mask_does_not_depend_on_strides() -> None:
    """Rows of one sample are contiguous alone and not among others: the draws must be the same ones."""
    sizes, key = [3, 1], 5
    grains = [Grain(0, 0, 3), Grain(1, 3, 1)]
    x = torch.ones(7, sum(sizes), 6).transpose(0, 1)  # samples second in memory, as an LSTM leaves them
    with GrainScope(key, 0, grains):
        together = F.dropout(x, 0.5)
    alone = []
    for grain, part in zip(grains, x.split(sizes), strict=True):
        with GrainScope(key, 0, [grain]):
            alone.append(F.dropout(part, 0.5))
    assert torch.equal(together, torch.cat(alone))


class Shared(nn.Module):
    """Draws by a module that is called twice, by a function, and by a module of its own in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.inner, self.last = (
            nn.Dropout(0.5),
            nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)),
            nn.Dropout(),
        )

    def forward(self, x: Tensor, before: int = 0, *, recompute: bool = False) -> Tensor:
        for _ in range(before):
            F.dropout(x, 0.5)
        x = self.drop(self.drop(x))
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=False) if recompute else self.inner(x)
        return self.last(x)


def in_scope(call: Callable[[], Tensor], model: nn.Module) -> tuple[Tensor, list[Any]]:
    with GrainScope(7, 4, GRAINS, {module: name for name, module in model.named_modules()}) as scope:
        found = call()
        assert not scope.leaked()
    return found, [site for sites in scope.sites.in_order for site in sites]


def test_a_module_draws_what_its_name_and_its_own_count_say() -> None:
    model, x = Shared(), torch.ones(ROWS, 5)
    found, sites = in_scope(lambda: model(x), model)
    assert sites == [("drop", 0), ("drop", 1), ("inner.1", 0), ("inner.1", 1), ("last", 0)]
    _, sites = in_scope(lambda: F.dropout(model(F.dropout(x) * 0 + x, 2)), model)
    assert sites[:3] == [("", 0), ("", 1), ("", 2)]
    assert torch.equal(in_scope(lambda: model(x, 2), model)[0], found), "others' draws are of no account"
    # An error that leaves a forward ends the module's turn; a call past the model belongs to no module.
    with contextlib.suppress(RuntimeError):
        in_scope(lambda: model(torch.ones(ROWS, 4)), model)
    assert in_scope(lambda: nn.Dropout()(x), model)[1] == [("", 0)]


def test_recomputation_finds_the_draws_of_its_forward() -> None:
    """Modules that are called twice are recomputed in the reverse order."""
    model, x = Shared(), rows(5)
    found = []
    for recompute in (False, True):
        model.zero_grad()

        def call(recompute: bool = recompute) -> Tensor:
            output = model(x, recompute=recompute)
            run_backward(output.square().sum())
            return output

        output, _ = in_scope(call, model)
        found.append([output, *(p.grad for p in model.parameters())])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_a_compiled_region_draws_at_the_same_sites() -> None:
    """`inside` names modules whose calls torch has traced away; `keys_at` gives the keys of all draws in one tensor."""
    model, x = Shared(), torch.ones(ROWS, 5)
    device = x.device

    def region() -> Tensor:
        with active_scope().sites.inside("inner.1"):  # type: ignore[union-attr]
            return F.dropout(x, 0.25)

    with GrainScope(7, 4, GRAINS) as scope:
        keys = scope.keys_at(["drop", "inner.1", "drop"], device)
        assert scope.calls == 3
    with GrainScope(7, 4, GRAINS):
        assert torch.equal(region(), dropout(x, 0.25, keys[1]))
    with GrainScope(7, 4, GRAINS, {module: name for name, module in model.named_modules()}):
        model.drop(x)
        assert torch.equal(model.drop(x), dropout(x, 0.5, keys[2]))


def test_a_scope_that_is_left_goes_on_where_it_was() -> None:
    """A pipeline runs other microbatches between the forward and the backward of one."""
    x = torch.ones(4, 8)
    grains = [Grain(0, 0, 4)]
    with GrainScope(1, 2, grains):
        wanted = [F.dropout(x) for _ in range(3)]
    scope = GrainScope(1, 2, grains)
    with scope:
        found = [F.dropout(x)]
    with GrainScope(1, 2, [Grain(1, 4, 4)]):
        F.dropout(x)
    with scope:
        scope.pass_over({"": 1})  # what the module draws on another rank
        found.append(F.dropout(x))
        assert not scope.leaked()
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[2])


def test_draws_are_counted_without_drawing() -> None:
    dropping = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Dropout(), ATTENTION_OF_8)
    x = torch.ones(4, 8)
    with GrainScope(1, 2, [Grain(0, 0, 4)]) as scope:
        with without_modes(), DrawCounter({module: name for name, module in dropping.named_modules()}) as counter:
            dropping[:4](x)
            ATTENTION_OF_8(x[None], x[None], x[None])
            torch.rand(4, 8)
        assert scope.calls == 0
    assert counter.counts == {"0": 1, "3": 1, "4": 1, "": 1}


def test_a_training_of_an_older_version_must_not_draw() -> None:
    x = rows(5)
    with GrainScope(0, 0, GRAINS, is_older=True):
        nn.BatchNorm1d(5)(x)  # draws nothing
        with pytest.raises(JobMismatchError, match="begin the training anew"):
            F.dropout(x)
