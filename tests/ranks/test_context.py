"""The context axis: blocks that compute with some positions of a sequence give what the whole gives, and learn it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.models import GPT
from tests.conformance.cases import language as small
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.errors import JobError, PlanError, ShoalError
from shoal.launch.environment import Environment
from shoal.numerics.grain_randomness import GrainScope
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.sequence.context_parallel import apply_context, plan_context
from shoal.plans.grains import Grain
from shoal.plans.plan import Layout
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

# Everything is computed in float64; transformers goes through float32 in some norms.
EXACT, THROUGH_FLOAT32 = 1e-9, 1e-5
ROWS = 4
VOCABULARY = 61
Case = Callable[[], nn.Module]


def language(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch[:2]
    found = model(inputs, *batch[2:])
    logits = found if isinstance(found, Tensor) else found.logits
    return shoal.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(length: int, padded: bool = False) -> tuple[Tensor, ...]:
    """Inputs and targets, and for `padded` what is there."""
    found = torch.randint(VOCABULARY, (ROWS, length + 1), generator=torch.Generator().manual_seed(length))
    there = torch.arange(length) < torch.tensor([[length], [1 + length // 2], [1], [length]])
    return (found[:, :-1], found[:, 1:], *([there] if padded else []))


class Attention(nn.Module):
    """Grouped queries, rotary positions from the caller, a mask with a row for each head, learned by the model."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * self.head * groups)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
        key, value = self.key_value(x).unflatten(-1, (-1, self.head)).transpose(1, 2).chunk(2, 1)
        query, key = query * rotation, key * rotation
        found = F.scaled_dot_product_attention(query, key, value, mask, scale=0.4, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """With dropout by a function, in place, and on as many dims as it likes."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, heads, groups), nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.2, inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, state: dict[str, Tensor], *, mask: Tensor, table: list[Tensor], scale: Tensor) -> Tensor:
        x = state["x"]
        x = (
            x
            + F.dropout(self.attention(self.norm(x), table[0], mask), 0.1, self.training)
            * F.dropout(scale, 0.5, self.training)[:, None]
        )
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Masked(nn.Module):
    """Blocks with arguments of all kinds; between the second and the third something happens."""

    def __init__(self, heads: int = 5, groups: int = 5, layers: int = 3) -> None:
        super().__init__()
        width = 4 * heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups) for _ in range(layers))
        self.bias = nn.Parameter(torch.randn(heads, 1, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.rotation = nn.Parameter(torch.randn(64, 4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        places = torch.arange(length, device=ids.device)
        mask = self.bias * (places - places[:, None]) + torch.where(places > places[:, None], -torch.inf, 0.0)
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            scale = self.scale.expand(len(ids), 1)
            x = block({"x": x}, mask=mask, table=[self.rotation[:length]], scale=scale)
            x = x * 1.5 if i == 1 else x
        return self.head(x)


def hugging_face(name: str, **config: Any) -> Case:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        kind, task = name.split("/")
        given = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, vocab_size=VOCABULARY, **config)
        return getattr(transformers, f"{kind}{task}")(given)

    return make


SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 44}
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 64}
llama = hugging_face("Llama/ForCausalLM", num_key_value_heads=2, **SIZES)
bert = hugging_face("Bert/ForMaskedLM", attention_probs_dropout_prob=0.0, **SIZES)
gpt2 = hugging_face("GPT2/LMHeadModel", attn_pdrop=0.0, **GPT2)

CASES: dict[str, tuple[Case, float]] = {
    "gpt": (partial(GPT, layers=2, width=32, heads=4, block=64, dropout=0.1), EXACT),
    "masks and rotations": (Masked, EXACT),
    "one group": (partial(Masked, 4, 1), EXACT),
    "llama": (llama, THROUGH_FLOAT32),
    "gpt2": (gpt2, THROUGH_FLOAT32),
    "bert": (bert, THROUGH_FLOAT32),
    "padded bert": (bert, THROUGH_FLOAT32),
}
# The first is the one that is traced.
LENGTHS = (23, 16, 3, 1)


def trained(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with GrainScope(3, 1, [Grain(0, 0, 2), Grain(1, 2, 2)]):
        total, _ = language(model, batch)
        total.backward()
    return total.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def divided(model: nn.Module, axis: TensorAxis, padded: bool = False) -> tuple[str, ...]:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    subject = ModelTrial(model, language, tokens(LENGTHS[0], padded), lambda name: held[name].detach())
    plan = plan_context(subject, axis, torch.device("cpu"))
    apply_context(model, plan, axis)
    return plan.partial


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    floor = 0.01 * max(float(t.norm()) for t in wanted.values())
    for name, value in wanted.items():
        distance = float((found[name].double() - value.double()).norm())
        assert distance <= tolerance * max(float(value.norm()), floor), (name, distance, float(value.norm()))


def in_ranks(world_size: int, work: Callable[[TensorAxis], Any], folder: Path) -> list[Any]:
    def rank(environment: Environment) -> None:
        with open_mesh(environment, Layout(context=world_size)) as mesh:
            torch.manual_seed(11)
            told = work(TensorAxis(world_size, mesh.rank, mesh.group("context")))
            (folder / f"told-{mesh.rank}.json").write_text(json.dumps(told))

    with forked(world_size, rank, folder) as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(world_size)]


def check(case: Case, tolerance: float, padded: bool) -> Callable[[TensorAxis], Any]:
    def work(axis: TensorAxis) -> Any:
        model = case().double()
        model.train()
        whole = copy.deepcopy(model)
        partial = divided(model, axis, padded)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
        for length in LENGTHS:
            batch = tokens(length, padded)
            wanted_loss, wanted = trained(whole, batch)
            found_loss, found = trained(model, batch)
            assert abs(found_loss - wanted_loss) <= tolerance * abs(wanted_loss), (length, found_loss, wanted_loss)
            for name in partial:
                dist.all_reduce(found[name], group=axis.group)
            assert_close(found, wanted, tolerance)
            with torch.no_grad():
                pair = [language(m.eval(), batch)[0] for m in (whole, model)]
            assert abs(pair[0] - pair[1]) <= tolerance * abs(pair[0])
            whole.train(), model.train()
        return len(partial)

    return work


@parametrize(("name", "world_size"), product(CASES, [2, 3]), usual=["gpt-2", "masks and rotations-3"])
def test_the_gradient_of_one_process(name: str, world_size: int, tmp_path: Path) -> None:
    case, tolerance = CASES[name]
    case()  # imports here what each rank would import for itself
    told = in_ranks(world_size, check(case, tolerance, name.startswith("padded")), tmp_path / "ranks")
    assert told[0] > 4


def saved_bytes(model: nn.Module, batch: Any) -> int:
    """Kept for the backward by the blocks of a GPT, each storage once; not their parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    x = model.embedding(batch[0])
    with hooks:
        for block in model.blocks:
            x = block(x)
    return sum(storages.values())


def test_the_blocks_keep_a_part_of_the_activations(tmp_path: Path) -> None:
    def work(axis: TensorAxis) -> Any:
        model = GPT(layers=4, width=32, heads=4, block=64, dropout=0.1)
        whole = copy.deepcopy(model)
        divided(model, axis)
        batch = tokens(64)
        return saved_bytes(model, batch) / saved_bytes(whole, batch)

    for told in in_ranks(2, work, tmp_path / "ranks"):
        assert told < 0.56, told


# ------------------------------------------------------------------------------------------------- what is refused


class Lone(nn.Module):
    """Two blocks of whatever kind."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixing(nn.Module):
    """Does `how` to [B, T, 8]."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return x + self.how(self, self.linear(x))


def heads(x: Tensor, count: int = 2) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def eager(module: Any, x: Tensor) -> Tensor:
    scores = heads(x) @ heads(x).mT
    return (scores.softmax(-1) @ heads(x)).transpose(1, 2).flatten(2)


def attention(x: Tensor, count: int = 2, **options: Any) -> Tensor:
    split = heads(x, count)
    return F.scaled_dot_product_attention(split, split, split, **options).transpose(1, 2).flatten(2)


def keeping(module: Any, x: Tensor) -> Tensor:
    """What a forward leaves in a module cannot be copied while it belongs to a graph."""
    module.kept = x.cumsum(1)
    return module.kept


MIXING: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "convolution": (lambda m, x: m.conv(x.mT).mT, "mixes positions other than"),
    "cumulative": (lambda m, x: x.cumsum(1), "mixes positions other than"),
    "keeping": (keeping, "mixes positions other than"),
    "eager": (eager, "by a softmax of its own.*attn_implementation"),
    "batch norm": (lambda m, x: m.norm(x.mT).mT, r"batch_norm\(\)"),
    "attention dropout": (lambda m, x: attention(x, dropout_p=0.1), "its attention drops weights"),
    "few heads": (lambda m, x: attention(x, 1), "use a context of at most 1"),
    "flat dropout": (lambda m, x: F.dropout(x.flatten(0, 1), 0.1).view(x.shape), "not a dim of their own"),
    "noise": (lambda m, x: x + torch.rand_like(x), "rand_like"),
    "own mask": (
        lambda m, x: attention(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()),
        "its attention mask is of shape",
    ),
    "cross": (lambda m, x: attention(torch.cat([x, x], 1))[:, : x.shape[1]], "it attends from"),
}


@parametrize("name", MIXING, usual=["convolution", "keeping", "attention dropout", "few heads"])
def test_what_cannot_be_divided_is_refused(name: str, tmp_path: Path) -> None:
    how, said = MIXING[name]

    def work(axis: TensorAxis) -> Any:
        divided(Lone(partial(Mixing, how)), axis)

    with pytest.raises((JobError, PlanError), match=f"(?s){said}"):
        in_ranks(2, work, tmp_path / "ranks")


@pytest.mark.slow
def test_eager_attention_of_transformers_is_refused(tmp_path: Path) -> None:
    case = hugging_face("Llama/ForCausalLM", attn_implementation="eager", **SIZES)
    case()

    def work(axis: TensorAxis) -> Any:
        divided(case(), axis)

    with pytest.raises(ShoalError, match=r'model.layers.0.*attn_implementation="sdpa"'):
        in_ranks(2, work, tmp_path / "ranks")


# ------------------------------------------------------------------------------------------------- under the engine

LAYOUTS: dict[str, dict[str, Any]] = {
    "context 4": {"layout": {"context": 4}},
    "with data": {"layout": {"context": 2, "data": 2}},
    "sharded optimizer": {"layout": {"context": 2, "shard": 2}, "shard": {"level": "optimizer"}},
    "sharded parameters": {"layout": {"context": 2, "shard": 2}, "shard": {"level": "parameters"}},
    "with tensor": {"layout": {"context": 2, "tensor": 2}},
    "recomputed": {"layout": {"context": 2}, "memory": {"recompute": "full"}},
    "recomputed in part": {"layout": {"context": 2}, "memory": {"recompute": "selective"}},
}


@parametrize("name", LAYOUTS, usual=["with data"])
def test_the_run_of_one_process(name: str) -> None:
    model = partial(GPT, layers=2, width=32, heads=4, block=16, dropout=0.1)
    job = small(model=model)
    verdict = shoal.verify(job, shoal.Plan().with_sections(**LAYOUTS[name]), steps=2)
    assert verdict.verified, verdict.render()


@pytest.mark.slow
def test_a_llama_is_that_of_one_process() -> None:
    llama()  # imports here what each rank would import for itself
    plan = shoal.Plan().with_sections(layout={"context": 2})
    verdict = shoal.verify(small(model=llama, loss=language), plan, steps=2)
    assert verdict.verified, verdict.render()
