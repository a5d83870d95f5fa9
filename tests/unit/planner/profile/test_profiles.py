"""Profiles hold what is counted on the real thing: FLOPs, what autograd keeps, parameters, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.unit.planner.profile.models import CASES, HEADS, WIDTH, Case, T, Written, gpt, next_token, tokens
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.numerics.grain_randomness import GrainScope
from shoal.numerics.precision import Precision
from shoal.planner.profile.profiles import profile
from shoal.planner.profile.values import Operation, OperationKind, Phase, Profile
from shoal.plans.grains import Grain
from shoal.plans.plan import PrecisionSection
from shoal.training.observe.metering import SavedTensors

WIDE = PrecisionSection()
MIXED = PrecisionSection(compute="bfloat16")
NARROW = PrecisionSection(parameters="bfloat16", compute="bfloat16")
SAMPLES = 4
# Fake CPU kernels of batch normalisation keep its statistics in the input's dtype under autocast, real ones in
# float32: two vectors of the channels a layer, beside activations of the channels times thousands of pixels.
STATISTICS = 1e-3


def operations(found: Profile, phase: Phase | None = None) -> list[Operation]:
    return [o for u in found.units for o in u.body.operations if phase is None or o.phase is phase]


def flops(found: Profile, *phases: Phase) -> float:
    return sum(
        o.flops.at(SAMPLES) for o in operations(found) if o.phase in phases and o.kind is not OperationKind.ATTENTION
    )


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    case = CASES[name]
    model, batch = case.make(), case.batch(SAMPLES)
    backends = torch.nn.attention.SDPBackend
    with torch.nn.attention.sdpa_kernel(backends.FLASH_ATTENTION):  # which the counter does not know on the CPU
        with FlopCounterMode(display=False) as forward:
            total, _ = case.loss(model, batch)
        with FlopCounterMode(display=False) as backward:
            total.backward()
    found = profile(*case, device="cpu")
    skipped = {"aten._scaled_dot_product_flash_attention_for_cpu"}
    for counter, phases in (
        (forward, (Phase.FORWARD,)),
        (backward, (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)),
    ):
        counted = {str(k): v for k, v in counter.get_flop_counts()["Global"].items()}
        assert flops(found, *phases) == sum(v for k, v in counted.items() if not k.startswith(tuple(skipped)))


def test_attention_is_one_operation_and_causal_is_half() -> None:
    """Two products forward, five backward (the scores again), over half of the scores."""

    class Attending(nn.Module):
        def __init__(self, is_causal: bool) -> None:
            super().__init__()
            self.qkv, self.is_causal = nn.Linear(WIDTH, 3 * WIDTH), is_causal

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

    def attentions(is_causal: bool) -> list[Operation]:
        found = profile(partial(Attending, is_causal), lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, T, WIDTH))
        return [o for o in operations(found) if o.kind is OperationKind.ATTENTION]

    whole, half = attentions(False), attentions(True)
    product = 2 * SAMPLES * T * T * WIDTH
    assert [o.flops.at(SAMPLES) for o in whole] == [2 * product, 5 * product]
    assert [o.flops.at(SAMPLES) for o in half] == [product, 2.5 * product]
    sizes = [(o.m.at(SAMPLES), o.n.at(SAMPLES), o.k.at(SAMPLES), o.batch.at(SAMPLES)) for o in whole]
    assert sizes == [(T, T, WIDTH // HEADS, SAMPLES * HEADS)] * 2
    moved = SAMPLES * T * WIDTH * 4
    logsumexp = SAMPLES * HEADS * T * 4
    assert whole[0].read_bytes.at(SAMPLES) == 3 * moved
    assert whole[0].written_bytes.at(SAMPLES) == moved + logsumexp
    assert whole[0].saved_bytes.at(SAMPLES) == 4 * moved + logsumexp


def test_keys_of_fewer_heads_are_read_as_they_are() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.scaled_dot_product_attention(model(batch[0]), batch[1], batch[1], enable_gqa=True).sum(), 1

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(n, 8, T, 16), torch.zeros(n, 2, T, 16)

    found = profile(partial(nn.Linear, 16, 16), loss, batch)
    attention = next(o for o in operations(found) if o.kind is OperationKind.ATTENTION)
    assert attention.read_bytes.at(1) == (8 + 2) * T * 16 * 4  # the same tensor as key and value is read once


@pytest.mark.parametrize("precision", [WIDE, MIXED, NARROW], ids=["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_what_autograd_keeps_is_what_the_engine_counts(name: str, precision: PrecisionSection) -> None:
    case = CASES[name]
    found = profile(*case, precision=precision, device="cpu", by_grain=True)
    own = sum(o.saved_bytes.at(SAMPLES) for o in operations(found)) + found.saved_batch.at(SAMPLES)
    counted = kept(case, precision)
    if name == "resnet" and precision is MIXED:
        assert own == pytest.approx(counted, rel=STATISTICS)
    else:
        assert own == counted


def kept(case: Case, section: PrecisionSection) -> int:
    """The engine's own count of a forward, with real tensors."""
    precision = Precision.of(section, torch.device("cpu"))
    model = case.make().train().to(precision.parameters)
    batch = precision.inputs(case.batch(SAMPLES))
    count = SavedTensors()
    count.exclude(model.parameters())
    with GrainScope(0, 0, [Grain(0, 0, SAMPLES)]):
        count.start()
        with precision.autocast():
            case.loss(model, batch)  # kept until here by the count's own hooks
        return count.stop()


def test_equal_blocks_share_a_body_and_are_what_tracing_each_would_give() -> None:
    found = profile(partial(gpt, 6), next_token, tokens)
    blocks = [u for u in found.units if u.body.repeated]
    assert [u.name for u in blocks] == [f"blocks.{i}" for i in range(6)]
    assert len({id(u.body) for u in blocks}) == 1
    few = profile(partial(gpt, 2), next_token, tokens)
    body = blocks[0].body
    assert found.flops(3) - few.flops(3) == 4 * body.flops(3)
    assert found.num_parameters - few.num_parameters == 4 * sum(w.numel for w in body.weights)
    assert [u.name for u in found.units if not u.body.repeated] == ["before blocks.0", "after blocks.5"]


def test_blocks_that_differ_in_a_plain_attribute_do_not() -> None:
    def stacked() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 3, padding=p), nn.ReLU()) for p in (1, 0, 1)))

    found = profile(stacked, lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, 1, 8, 8))
    bodies = [u.body for u in found.units if u.body.repeated]
    assert len(bodies) == 3
    assert bodies[0].output_bytes.at(1) == 64 * 4
    assert bodies[1].output_bytes.at(1) == 36 * 4


def test_what_units_hand_on_and_hold() -> None:
    found = profile(*CASES["gpt"])
    first, *blocks, last = found.units
    stream = T * WIDTH * 4
    assert [u.body.input_bytes.at(1) for u in found.units] == [0, *[stream] * (len(blocks) + 1)]
    assert [u.body.output_bytes.at(1) for u in found.units] == [*[stream] * (len(blocks) + 1), 0]
    assert found.tied == (("embedding.weight", last.name),)
    assert "head.weight" not in {w.name for w in last.body.weights}
    assert "embedding.weight" in {w.name for w in first.body.weights}
    assert found.num_parameters == sum(p.numel() for p in gpt().parameters())
    assert found.heads == HEADS
    assert found.sample_bytes == 2 * T * 8


def test_amounts_are_lines_and_what_is_none_is_said() -> None:
    case = CASES["lenet"]
    found = profile(*case)
    assert found.notes == ()
    assert found.flops(7) == pytest.approx(7 * found.flops(1))

    def pairs(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        features = model(batch)
        return (features @ features.T).sum(), len(batch)

    bent = profile(partial(nn.Linear, 6, 6), pairs, lambda n: torch.zeros(n, 6))
    assert any(note.startswith("not linear in the samples: flops of aten.mm") for note in bent.notes)


def test_gradients_of_weights_alone_are_told_apart() -> None:
    found = profile(*CASES["gpt"], precision=MIXED)
    body = next(u.body for u in found.units if u.body.repeated)
    products = [o for o in body.operations if o.kind is OperationKind.MATMUL]
    by_phase = {phase: [o for o in products if o.phase is phase] for phase in Phase}
    assert len({len(found) for found in by_phase.values()}) == 1
    assert sum(o.flops.at(1) for o in by_phase[Phase.FORWARD]) == sum(
        o.flops.at(1) for o in by_phase[Phase.BACKWARD_WEIGHT]
    )
    late = {o.name for o in body.operations if o.phase is Phase.BACKWARD_WEIGHT}
    assert late == {"aten.mm", "aten.sum", "aten._to_copy"}  # weights, biases, and both cast


def test_autocast_casts_each_weight_once_and_widens_norms_as_the_device_does() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.linear(x)))

    def seen(device: str) -> list[Operation]:
        loss = lambda m, b: (m(b).float().sum(), 1)  # noqa: E731
        found = profile(Twice, loss, lambda n: torch.zeros(n, 8), precision=MIXED, device=device)
        return operations(found, Phase.FORWARD)

    casts = [o for o in seen("cuda") if o.name == "aten._to_copy" and o.read_bytes.per_sample == 0]
    assert [o.written_bytes.at(1) for o in casts] == [8 * 8 * 2]
    norms = {device: next(o for o in seen(device) if "layer_norm" in o.name) for device in ("cuda", "cpu")}
    assert {device: o.dtype for device, o in norms.items()} == {"cuda": "float32", "cpu": "bfloat16"}


def test_dropout_is_the_devices_or_shoals_own() -> None:
    case = Case(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
        lambda m, b: (m(b).sum(), 1),
        lambda n: torch.zeros(n, 6),
    )
    by_device = {o.name: o for o in operations(profile(*case))}
    assert by_device["aten.native_dropout"].saved_bytes.at(1) == 6  # booleans
    by_grain = {o.name: o for o in operations(profile(*case, by_grain=True), Phase.FORWARD)}
    assert "aten.native_dropout" not in by_grain
    assert by_grain["aten.mul"].saved_bytes.at(1) == 6 * 4


def test_bytes_are_those_of_real_operands() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        hidden = model(x).view(-1, 2, 3).transpose(1, 2)  # nothing moves
        return (hidden + torch.ones(1, 1, 1).expand(1, 3, 2)).sum(), 1  # one number is read

    found = operations(profile(partial(nn.Linear, 6, 6), loss, lambda n: torch.zeros(n, 6)), Phase.FORWARD)
    names = [o.name for o in found]
    assert names == ["aten.addmm", "aten.ones", "aten.add", "aten.sum"]
    assert found[2].read_bytes.at(5) == 5 * 6 * 4 + 4
    assert found[2].written_bytes.at(5) == 5 * 6 * 4


def test_attention_written_out_is_traced_as_it_is() -> None:
    found = profile(Written, lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, T, WIDTH))
    assert found.heads == HEADS
    softmax = next(o for o in operations(found, Phase.FORWARD) if o.name == "aten._softmax")
    assert softmax.written_bytes.at(1) == HEADS * T * T * 4


@pytest.mark.parametrize(("tokens", "times"), [(12_000, 0), (13_000, 1)])
def test_a_softmax_of_more_than_48_kib_a_row_is_read_again(tokens: int, times: int) -> None:
    """Its input thrice for its maximum, sum and results; backward the gradient twice."""
    found = profile(
        partial(nn.Linear, 8, tokens), lambda m, b: (m(b).log_softmax(1).sum(), 1), lambda n: torch.zeros(n, 8)
    )
    ways = {o.name: o for phase in Phase for o in operations(found, phase) if "softmax" in o.name}
    row = 4 * tokens * times
    assert ways["aten._log_softmax"].reread_bytes.at(3) == 3 * 2 * row
    assert ways["aten._log_softmax_backward_data"].reread_bytes.at(3) == 3 * row


def test_what_selective_recomputation_keeps() -> None:
    """The results of products and of attention; not what the block gives out."""
    found = profile(partial(gpt, 2, 0.0), next_token, tokens, device="cpu", by_grain=True)
    body = next(u.body for u in found.units if u.body.repeated)
    stream, logsumexp = T * WIDTH * 4, HEADS * T * 4
    # q, k, v, out, attention, up (four times as wide), down
    assert sum(o.selected_bytes.at(1) for o in body.operations) == 5 * stream + 5 * stream + logsumexp


def test_large_models_need_no_memory() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2**15, 2**15), nn.ReLU()) for _ in range(64)))

    found = profile(huge, lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, 2**15))
    assert found.num_parameters == 64 * (2**30 + 2**15)
    assert found.flops(1) == pytest.approx(6 * 2**30 * 64 - 2 * 2**30)  # the first needs no gradient of its input


def test_a_model_that_looks_at_numbers_is_run_with_them() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if bool((x >= 0).all()) else x

    found = profile(Looking, lambda m, b: (m(b).sum(), 1), lambda n: torch.ones(n, 4))
    assert "computed with numbers, because the model looks at them" in found.notes
    assert found.flops(1) == 2 * 2 * 16


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    before = torch.get_rng_state()
    profile(*CASES["gpt"])
    assert torch.equal(before, torch.get_rng_state())
    assert math.isfinite(float(F.dropout(torch.ones(3), 0.5).sum()))  # torch's own again


def test_convolutions_tell_what_limits_them() -> None:
    def stack() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 3, 2)
        )

    found = profile(stack, lambda m, b: (m(b).sum(), 1), lambda n: torch.zeros(n, 8, 16, 16))
    kinds = [(o.kind, o.winograd) for o in operations(found, Phase.FORWARD) if o.name == "aten.convolution"]
    assert kinds == [
        (OperationKind.CONVOLUTION, True),
        (OperationKind.MEMORY, False),
        (OperationKind.CONVOLUTION, False),
    ]
    by_channel = next(o for o in operations(found, Phase.FORWARD) if o.kind is OperationKind.MEMORY and o.flops.at(1))
    assert by_channel.flops.at(1) == 2 * 9 * 8 * 16 * 16


def test_an_lstm_is_a_product_of_what_comes_in_and_one_a_step() -> None:
    """Four gates of H, from what comes in (W) and from the step before (H), forward once, backward twice."""
    steps, width, hidden = 7, 12, 16

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch)[0].sum(), 1

    found = profile(partial(nn.LSTM, width, hidden, 2, batch_first=True), loss, lambda n: torch.zeros(n, steps, width))
    forward = 2 * SAMPLES * steps * 4 * hidden * ((width + hidden) + (hidden + hidden))
    assert flops(found, Phase.FORWARD) == forward
    products = [o for o in operations(found, Phase.FORWARD) if o.kind is OperationKind.MATMUL]
    assert len(products) == 2 * (1 + steps)
    assert flops(found, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) == 2 * forward


def rows(model: Callable[[], nn.Module]) -> list[set[float]]:
    """Elements of the rows of each product of a model of 7 vectors of 24 a sample, of which 28 are counted."""
    found = profile(model, lambda m, b: (m(b).square().sum(), 1), lambda n: torch.zeros(n, 7, 24))
    products = [o for o in operations(found) if o.kind is OperationKind.MATMUL]
    return [{getattr(o, name).at(SAMPLES) for name in o.rows} for o in products]


def test_products_tell_along_which_sizes_their_rows_lie() -> None:
    """Of a layer forward and backward along what comes in and goes out, and never along the vectors."""
    one = {24, 32}
    other = {32, 13}
    found = rows(lambda: nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 13, bias=False)))
    assert found == [one, other, other, other, one]
    assert rows(lambda: nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 13))) == found


def test_a_view_of_padded_rows_is_as_aligned_as_these_are() -> None:
    class Sliced(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(13, width))

        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x, (0, 8))[..., :21] @ self.weight[:, :21].t()

    assert rows(lambda: Sliced(32))[0] == {13}
    assert rows(lambda: Sliced(31))[0] == {21, 13}


def test_a_sparse_table_is_traced_with_a_dense_gradient_and_a_note() -> None:
    table = nn.EmbeddingBag(100_000, 8, sparse=True)
    found = profile(table, lambda m, b: (m(b).sum(), len(b)), lambda n: torch.zeros(n, 4, dtype=torch.int64))
    assert table.sparse
    assert found.num_parameters == 800_000
    (note,) = (note for note in found.notes if "dense gradient" in note)
    assert note.startswith("weight: predicted with a dense gradient of 3 MB")
