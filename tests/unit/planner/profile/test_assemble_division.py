"""What tensor parallelism does to each operator: cuts, exchanges, and which parameters are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.unit.planner.profile.models import HEADS, WIDTH, T, Written, gpt, next_token, tokens
from torch import Tensor, nn

from shoal.planner.profile.assemble import CutParameters
from shoal.planner.profile.profiles import Tensors, profile
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase, Profile, TensorCut

STREAM = T * WIDTH * 4


def pair(*columns: str, row: str) -> Tensors:
    """Cuts modules of every block by name."""

    def cut(model: nn.Module) -> dict[str, int]:
        dims = {f"{name}.{kind}": 0 for name in columns for kind in ("weight", "bias")} | {f"{row}.weight": 1}
        names = [name for name, _ in model.named_parameters()]
        return {name: dims[name.partition(".")[2]] for name in names if name.partition(".")[2] in dims}

    return cut


def block_of(found: Profile) -> Body:
    return next(u.body for u in found.units if u.body.repeated)


def products(body: Body, phase: Phase) -> list[Operation]:
    return [o for o in body.operations if o.kind is OperationKind.MATMUL and o.phase is phase]


@pytest.fixture(scope="module")
def cut_gpt() -> Profile:
    return profile(gpt, next_token, tokens)


def test_every_product_of_a_block_is_divided(cut_gpt: Profile) -> None:
    body = block_of(cut_gpt)
    cuts = {phase: {o.module: o.cut for o in products(body, phase)} for phase in Phase}
    columns = ("attention.query", "attention.key", "attention.value", "up")
    for name in columns:
        assert [cuts[p][name] for p in Phase] == [TensorCut.N, TensorCut.K, TensorCut.M], name
    for name in ("attention.out", "down"):
        assert [cuts[p][name] for p in Phase] == [TensorCut.K, TensorCut.N, TensorCut.N], name
    assert {o.cut for o in body.operations if o.kind is OperationKind.ATTENTION} == {TensorCut.ALL}
    assert {o.cut for o in body.operations if "gelu" in o.name} == {TensorCut.ALL}
    for name in ("layer_norm", "dropout"):
        assert {o.cut for o in body.operations if name in o.name} == {TensorCut.SEQUENCE}


def test_two_exchanges_a_block_in_each_direction(cut_gpt: Profile) -> None:
    sent = [(e.kind, e.phase, e.bytes.at(3)) for e in block_of(cut_gpt).exchanges]
    forward, backward = Phase.FORWARD, Phase.BACKWARD_INPUT
    assert sent == [("all_reduce", p, 3 * STREAM) for p in (forward, forward, backward, backward)]


def test_the_vocabulary_stays_divided_through_the_loss(cut_gpt: Profile) -> None:
    first, last = cut_gpt.units[0].body, cut_gpt.units[-1].body
    assert [(e.phase, e.bytes.at(1)) for e in first.exchanges] == [(Phase.FORWARD, STREAM)]
    losses = [o for o in last.operations if "softmax" in o.name or "nll" in o.name]
    assert {o.cut for o in losses} == {TensorCut.ALL}
    large = [e.bytes.at(1) for e in last.exchanges if e.bytes.at(1) >= STREAM]
    assert large == [STREAM]  # the gradient of what the head takes in; the loss itself needs some numbers a row


def test_weights_tell_which_dim_is_cut(cut_gpt: Profile) -> None:
    dims = {w.name: w.tensor_dim for w in block_of(cut_gpt).weights}
    assert dims["up.weight"] == dims["up.bias"] == dims["attention.query.weight"] == 0
    assert dims["down.weight"] == dims["attention.out.weight"] == 1
    assert dims["down.bias"] is dims["norm1.weight"] is None


def test_attention_written_out_is_divided_over_heads() -> None:
    model = lambda: nn.Sequential(*(Written() for _ in range(2)))  # noqa: E731
    loss = lambda m, b: (m(b).sum(), 1)  # noqa: E731
    found = profile(model, loss, lambda n: torch.zeros(n, T, WIDTH), tensor=pair("q", "k", "v", row="out"))
    body = found.units[-1].body if found.units[-1].body.repeated else found.units[-2].body  # its input has a gradient
    assert {o.cut for o in body.operations if o.name == "aten.bmm"} == {TensorCut.BATCH}
    assert {o.cut for o in body.operations if "softmax" in o.name or "dropout" in o.name} == {TensorCut.ALL}
    assert [e.phase for e in body.exchanges] == [Phase.FORWARD, Phase.BACKWARD_INPUT]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Normed(Gated):
    """A norm over all features in between: no slice can compute it alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.layer_norm(self.up(x), (16,)))


class Heads(nn.Module):
    """Queries are normalised head by head, which slices can."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(16, 48), nn.LayerNorm(4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (4, 12)).split(4, -1))
        mixed = F.scaled_dot_product_attention(self.norm(q), k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def body_of(make: type[nn.Module], width: int, tensor: Tensors | None = None) -> Body:
    model = lambda: nn.Sequential(make(), make())  # noqa: E731
    return block_of(profile(model, lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, 3, width), tensor=tensor))


def dims_of(body: Body) -> dict[str, int | None]:
    return {w.name: w.tensor_dim for w in body.weights}


def test_pairs_are_found_where_slices_suffice() -> None:
    assert dims_of(body_of(Gated, 8)) == {
        "gate.weight": 0,
        "gate.bias": 0,
        "up.weight": 0,
        "up.bias": 0,
        "down.weight": 1,
        "down.bias": None,
    }
    normed = body_of(Normed, 8)  # each layer by itself: its inputs stay whole
    assert dims_of(normed)["up.weight"] == dims_of(normed)["down.weight"] == 0
    assert {e.kind for e in normed.exchanges if e.phase is Phase.FORWARD} == {"all_gather"}


def test_a_norm_of_each_head_is_divided_over_heads() -> None:
    body = body_of(Heads, 16, pair("qkv", row="out"))
    assert {o.cut for o in body.operations if "layer_norm" in o.name and o.phase is Phase.FORWARD} == {TensorCut.ALL}
    assert [(e.kind, e.phase) for e in body.exchanges] == [("all_reduce", Phase.FORWARD)]  # no gradient before it
    assert dims_of(body)["norm.weight"] is None


def test_a_layer_that_is_gathered_hands_on_the_whole() -> None:
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))  # noqa: E731
    cut = CutParameters({"0.weight": 0, "0.bias": 0}, frozenset(("0.weight",)))
    found = profile(model, lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, 8), tensor=lambda m: cut)
    body = found.units[0].body
    assert [(e.kind, e.bytes.at(1)) for e in body.exchanges] == [("all_gather", 16 * 4)]
    assert [o.cut for o in products(body, Phase.FORWARD)] == [TensorCut.N]
    assert [o.cut for o in products(body, Phase.BACKWARD_WEIGHT)] == [TensorCut.M]


def test_a_cut_halves_what_it_divides(cut_gpt: Profile) -> None:
    body = block_of(cut_gpt)
    whole = sum(o.flops.at(1) for o in body.operations)
    divided = {TensorCut.M, TensorCut.N, TensorCut.K, TensorCut.BATCH, TensorCut.ALL}
    assert sum(o.flops.at(1) / (2 if o.cut in divided else 1) for o in body.operations) == whole / 2
    assert cut_gpt.heads == HEADS
