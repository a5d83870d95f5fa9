"""Bugs that parallel training is known for, by their reports: what shows each of them, in shoal, to be absent.

Where, in the table: `layouts` are the tests of this file by the name of the mistake that they would show; `zoo` is
tests/bugs/zoo.py, where the mistake is planted into the engine and caught; `case` is a case of tests/conformance, which
every strategy runs; a path is a test file. What begins with "no:" says why shoal cannot have the bug.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.bugs.zoo import ZOO
from tests.conformance.cases import CASES, IGNORED
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.errors import ShoalError
from shoal.launch.environment import Environment
from shoal.numerics.generators import seed_everything
from shoal.parallel import base
from shoal.parallel.model.sharded_model import ShardedModel, whole_tensors
from shoal.parallel.shard.update_division import UpdateDivision
from shoal.plans.grains import random_key
from shoal.runs.records import StepRecord
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

BUGS: dict[str, tuple[str, ...]] = {
    # The run silently trains something else.
    "Megatron-LM #7452": ("layouts: weighed by each part's own tokens", "zoo: dropout mask by rank"),
    "Megatron-LM #7498": ("layouts: every gradient", "tests/ranks/test_context.py"),
    "Megatron-LM #1754": ("case: vocabulary 50257", "layouts: every gradient", "zoo: shard boundary off by one"),
    "Megatron-LM #1736": ("no: a question, which tolerance is right; verify measures it",),
    "Megatron-LM #1446": ("layouts: parameters without a cut left partial", "zoo: a parameter that is not reduced"),
    "Megatron-LM #673": ("layouts: weighed by each part's own tokens", "tests/ranks/test_context.py"),
    "torchtitan #3412": ("layouts: chunked",),
    "torchtitan #1732": ("layouts: a moving average of microbatches", "zoo: gradients not cleared"),
    "DeepSpeed #8154": ("layouts: scaled once a stage", "zoo: last stage's gradient scaled per stage"),
    "DeepSpeed #7985": ("layouts: the last microbatch left out", "zoo: last microbatch left out of the sum"),
    "DeepSpeed #7981": ("layouts: the last microbatch left out",),
    "DeepSpeed #7967": ("layouts: the last microbatch left out", "layouts: norm of one rank's part"),
    "DeepSpeed #7839": ("case: bf16", "case: pure bf16", "zoo: norm before unscaling"),
    "DeepSpeed #8195": ("zoo: stale gathered shard", "no: the rest of it is about experts, which no axis divides"),
    "DeepSpeed #8089": ("zoo: initial values by rank", "layouts: every gradient"),
    "PyTorch #176076": ("layouts: the last rows never updated", "zoo: tied weights updated on one rank"),
    "Lightning #6789": ("layouts: every gradient", "case: mlp"),
    "Accelerate #2651": ("layouts: every gradient", "case: mlp"),
    "Accelerate #2393": ("layouts: every gradient", "case: mlp"),
    "DeepSpeed #5583": ("layouts: every gradient", "case: accumulation of 4"),
    "DeepSpeed #4550": ("layouts: every gradient", "case: accumulation of 4"),
    # The norm that gradients are clipped by.
    "PyTorch #170862": ("layouts: norm of one rank's part", "zoo: local norm in clipping"),
    "Accelerate #4219": ("layouts: norm of one rank's part", "zoo: clipped one by one"),
    "Lightning #19235": ("layouts: not clipped",),
    "torchtune #2420": ("layouts: norm of one rank's part", "case: clipping that bites"),
    "torchtune #2641": ("layouts: norm of one rank's part", "case: clipping that bites"),
    "Megatron-LM #5916": ("layouts: norm counts what is not cut on every rank", "zoo: local norm in clipping"),
    "OpenDiloco #6": ("layouts: norm of one rank's part", "layouts: not clipped"),
    "LoongForge #152": ("layouts: norm of one rank's part",),
    # Tied parameters, and sizes that do not divide.
    "Accelerate #3154": ("layouts: every gradient", "case: tied embeddings"),
    "Accelerate #4171": ("layouts: every gradient", "case: vocabulary 50257"),
    "NeMo-RL #227": ("layouts: tied weights come apart",),
    "NeMo-RL #264": ("layouts: tied weights come apart",),
    "Megatron-LM #6164": ("layouts: norm counts tied weights twice", "layouts: tied weights come apart"),
    "Megatron-LM #7166": ("layouts: norm counts tied weights twice", "layouts: tied weights come apart"),
    "torchtitan #2522": ("layouts: tied weights come apart", "case: tied embeddings"),
    "torchtitan #1136": ("tests/ranks/test_relayout.py", "tests/ranks/test_tensor.py"),
}

VOCABULARY, WIDTH, HEADS, LENGTH = 17, 8, 2, 9
SAMPLES, BATCH, GRAINS, CLIP = 21, 8, 4, 0.5  # two steps of four grains of two samples; one of 2 + 2 + 1

# A step's loss and gradients are sums over some 100 tokens in float32: rounding of 100 * 2^-24, twice, as both have it.
TOLERANCE = 200 * 2.0**-24
# So much farther than the tolerance a mistake must be, or the comparison could not tell it.
CLEARLY = 10.0


class Block(nn.Module):
    """Causal attention and a perceptron: [B, T, 8] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        of = (layer(self.norm(x)).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        query, key, value = (heads.transpose(1, 2) for heads in of)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Awkward(nn.Module):
    """Tied embeddings of an odd number of rows, a scalar, what is frozen, what nothing uses, and four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(tokens))
        return logits


def ragged() -> tuple[Tensor, Tensor]:
    """Inputs and, of each position, the next two tokens: int64 [N, T] and [N, T, 2], -100 behind a sample's end."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 2), generator=draw)
    ends = torch.randint(2, LENGTH + 2, (SAMPLES, 1), generator=draw)
    known = tokens.masked_fill(torch.arange(LENGTH + 2) >= ends, IGNORED)
    return tokens[:, :LENGTH].contiguous(), torch.stack([known[:, 1:-1], known[:, 2:]], -1)


def two_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The next token, and with half the weight the one after, of which there are fewer: as multi-token prediction."""
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    total, weight = shoal.cross_entropy(logits, targets[..., 0].flatten(), ignore_index=IGNORED)
    further, _ = shoal.cross_entropy(logits, targets[..., 1].flatten(), ignore_index=IGNORED)
    return total + 0.5 * further, weight


def chunked(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The same from the logits of three positions at a time, so that they are never all there."""
    inputs, targets = batch
    features = model.features(inputs)
    parts = [(features[:, i : i + 3], targets[:, i : i + 3]) for i in range(0, LENGTH, 3)]
    pairs = [two_tokens(model.head, part) for part in parts]
    return torch.stack([t for t, _ in pairs]).sum(), torch.stack([torch.as_tensor(w) for _, w in pairs]).sum()


def job(loss: Any = two_tokens) -> shoal.Job:
    """By SGD with momentum: what Adam would divide away, as gradients of twice the size, is seen."""
    return shoal.Job(
        model=Awkward,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.01),
        train_data=ragged,
        global_batch=BATCH,
        grains=GRAINS,
        length=shoal.Epochs(1),
        shuffle=False,
        clip_norm=CLIP,
    )


@dataclass
class Trained:
    """Losses, norms of the gradient before clipping, and the model's state dict at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]

    def differences(self, other: Trained) -> dict[str, float]:
        """How far each thing is from the other's, relative to the other's, or for small tensors to the largest's."""
        assert len(self.losses) == len(other.losses) == -(-SAMPLES // BATCH)
        assert self.weights.keys() == other.weights.keys()
        found = {}
        for what, own, wanted in (("loss", self.losses, other.losses), ("norm", self.norms, other.norms)):
            found |= {f"{what} {i}": abs(a - b) / b for i, (a, b) in enumerate(zip(own, wanted, strict=True))}
        floor = 0.1 * max(float(t.norm()) for t in other.weights.values())
        for name, wanted_tensor in other.weights.items():
            distance = float((self.weights[name] - wanted_tensor).norm())
            found[name] = distance / max(float(wanted_tensor.norm()), floor)
        return found


# ------------------------------------------------------------------------ one process, and the mistakes, in plain torch

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a step is made of its grains' gradients; each field as it should be, to be replaced by a mistake."""

    combine: Callable[[list[Gradients], list[float]], Gradients] = lambda grains, weights: {
        name: sum(g[name] for g in grains) / sum(weights) for name in grains[0]
    }  # type: ignore[assignment]
    norm: Callable[[Gradients], float] = lambda gradients: _norm(list(gradients.values()))
    clip: float = CLIP
    after: Callable[[nn.Module, Gradients], None] = lambda model, before: None


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())


def alone(way: Way) -> Trained:
    """The training as torch's documentation would write it, without anything of the engine."""
    seed_everything(random_key(job().seed, "initial values"))
    model = Awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    inputs, targets = ragged()
    losses, norms = [], []
    for start in range(0, SAMPLES, BATCH):
        grains, totals, weights = [], [], []
        for first in range(start, min(start + BATCH, SAMPLES), BATCH // GRAINS):
            until = min(first + BATCH // GRAINS, SAMPLES)
            total, weight = two_tokens(model, (inputs[first:until], targets[first:until]))
            used = {n: p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("unused")}
            grains.append(dict(zip(used, torch.autograd.grad(total, list(used.values())), strict=True)))
            totals.append(float(total.detach()))
            weights.append(float(weight))
        mean = way.combine(grains, weights)
        norms.append(way.norm(mean))
        losses.append(sum(totals) / sum(weights))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, gradient in mean.items():
            model.get_parameter(name).grad = gradient * min(1.0, way.clip / norms[-1])
        optimizer.step()
        way.after(model, before)
    return Trained(losses, norms, {n: t.detach() for n, t in model.state_dict().items()})


def last_left_out(grains: list[Gradients], weights: list[float]) -> Gradients:
    return Way().combine([*grains[:-1], {n: torch.zeros_like(g) for n, g in grains[-1].items()}], weights)


def moving_average(grains: list[Gradients], weights: list[float]) -> Gradients:
    found = grains[0]
    for grain in grains[1:]:
        found = {n: (found[n] + grain[n]) / 2 for n in found}
    return {n: g * len(grains) / sum(weights) for n, g in found.items()}


def mean_of_means(grains: list[Gradients], weights: list[float]) -> Gradients:
    return {n: sum(g[n] / w for g, w in zip(grains, weights, strict=True)) / len(grains) for n in grains[0]}  # type: ignore[misc]


def times(factor: float, names: str) -> Callable[[list[Gradients], list[float]], Gradients]:
    def combine(grains: list[Gradients], weights: list[float]) -> Gradients:
        found = Way().combine(grains, weights)
        return {n: g * factor if re.match(names, n) else g for n, g in found.items()}

    return combine


def norm_with(names: str, factor: float) -> Callable[[Gradients], float]:
    """Of the square, what these parameters add is counted so often."""

    def norm(gradients: Gradients) -> float:
        return _norm([g * factor**0.5 if re.match(names, n) else g for n, g in gradients.items()])

    return norm


def last_rows_kept(model: nn.Module, before: Gradients) -> None:
    with torch.no_grad():
        model.get_parameter("embedding.weight")[12:] = before["embedding.weight"][12:]


MISTAKES: dict[str, Way] = {
    "the last microbatch left out": Way(last_left_out),
    "a moving average of microbatches": Way(moving_average),
    "weighed by each part's own tokens": Way(mean_of_means),
    "scaled once a stage": Way(times(2.0, "blocks.3")),
    "parameters without a cut left partial": Way(times(0.5, r"blocks.\d.norm")),
    "norm of one rank's part": Way(
        norm=lambda gradients: _norm([g[: (len(g) + 1) // 2] if g.ndim else g for g in gradients.values()])
    ),
    "norm counts tied weights twice": Way(norm=norm_with("embedding", 2.0)),
    "norm counts what is not cut on every rank": Way(
        norm=norm_with(r"blocks.\d.norm|scale|.*out.bias|.*down.bias", 2.0)
    ),
    "not clipped": Way(clip=float("inf")),
    "the last rows never updated": Way(after=last_rows_kept),
}
# What every comparison below looks at beyond these.
ALWAYS = {"every gradient", "tied weights come apart", "chunked"}


@pytest.fixture(scope="module")
def wanted() -> Trained:
    return alone(Way())


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_would_show_it(name: str, wanted: Trained) -> None:
    assert max(alone(MISTAKES[name]).differences(wanted).values()) > CLEARLY * TOLERANCE


def test_the_gradient_is_clipped_at_every_step(wanted: Trained) -> None:
    assert min(wanted.norms) > 1.2 * CLIP


def test_every_report_names_what_is_there() -> None:
    for report, places in BUGS.items():
        for place in places:
            kind, _, name = place.partition(": ")
            root = Path(__file__).resolve().parents[2]
            known = {"layouts": {*MISTAKES, *ALWAYS}, "zoo": ZOO, "case": CASES, "no": {name}}
            assert name in known[kind] if kind in known else (root / place).exists(), (report, place)


# ------------------------------------------------------------------------------------------------------ the real ranks

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "zero 3 on 3": {"layout": {"shard": 3}, "shard": {"level": "parameters"}},
    "zero 2, offloaded": {"layout": {"shard": 2}, "shard": {"level": "gradients", "offload": True}},
    "zero 3 x data, a rank without samples": {"layout": {"data": 2, "shard": 2}, "shard": {"level": "parameters"}},
    "tensor 2": {"layout": {"tensor": 2}},
    "pipeline of 4 stages": {
        "layout": {"pipeline": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    },
    "context 2": {"layout": {"context": 2}},
    "tensor 2 x zero 3": {"layout": {"tensor": 2, "shard": 2}, "shard": {"level": "parameters"}},
}


def in_ranks(made: shoal.Job, sections: dict[str, dict[str, Any]], folder: Path) -> Trained:
    """The job on forked ranks, grain by grain."""
    plan = shoal.Plan().with_sections(**sections, batch={"grains_per_microbatch": 1})
    plan = judged(made, plan).plan

    def work(environment: Environment) -> None:
        records: list[StepRecord] = []
        around = Surroundings(lambda line: None, lambda record, rank: records.append(record), lambda: False)
        with open_mesh(environment, plan.layout) as mesh:
            engine = build(made, plan, mesh, Options(telemetry=False))
            try:
                engine.trainer(None, engine.order.num_steps, around, RecordWriter(None)).train()
                held = {f"model/{name}": entry for name, entry in engine.sharded_model.state_dict().items()}
                wholes = {
                    n.removeprefix("model/"): t for n, t in whole_tensors(engine.sharded_model, held) if t is not None
                }
            finally:
                engine.close()
            if mesh.rank == 0:
                save_file({n: t.clone().contiguous() for n, t in wholes.items()}, folder / "weights.safetensors")
                told = [[r.loss for r in records], [r.grad_norm for r in records]]
                (folder / "told.json").write_text(json.dumps(told))

    with forked(plan.layout.world_size, work, folder) as wait:
        wait()
    losses, norms = json.loads((folder / "told.json").read_text())
    return Trained(losses, norms, load_file(folder / "weights.safetensors"))


def assert_same(found: Trained, wanted: Trained) -> None:
    far = {name: value for name, value in found.differences(wanted).items() if not value <= TOLERANCE}
    assert not far, far
    assert torch.equal(found.weights["head.weight"], found.weights["embedding.weight"])


@pytest.mark.ranks
@parametrize("name", LAYOUTS, usual=["zero 3 on 3", "tensor 2 x zero 3", "context 2"])
def test_the_training_of_plain_torch(name: str, wanted: Trained, tmp_path: Path) -> None:
    assert_same(in_ranks(job(), LAYOUTS[name], tmp_path / "ranks"), wanted)


# What is planted into the engine, where, and what then differs.
PLANTED: dict[str, tuple[Any, str, Any, str, str]] = {
    "norm of one rank's part": (UpdateDivision, "norm", lambda self, own: own, "zero 3 on 3", "norm 0"),
    "norm counts what is not cut on every rank": (
        ShardedModel,
        "counts",
        lambda self, name: True,
        "tensor 2",
        "norm 0",
    ),
    "norm counts tied weights twice": (
        ShardedModel,
        "counts",
        lambda self, name: True,
        "pipeline of 4 stages",
        "norm 0",
    ),
    "parameters without a cut left partial": (
        base,
        "add_partial",
        lambda model: None,
        "context 2",
        "blocks.0.norm.weight",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", PLANTED)
def test_planted_into_the_engine_it_is_seen(
    name: str, wanted: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, name_there, mistake, layout, where = PLANTED[name]
    monkeypatch.setattr(home, name_there, mistake)
    found = in_ranks(job(), LAYOUTS[layout], tmp_path / "ranks")
    assert found.differences(wanted)[where] > CLEARLY * TOLERANCE


@pytest.mark.ranks
@parametrize("name", ["tensor 2", "context 2"], usual=["tensor 2"])
def test_a_chunked_loss(name: str, wanted: Trained, tmp_path: Path) -> None:
    assert_same(in_ranks(job(chunked), LAYOUTS[name], tmp_path / "ranks"), wanted)


@pytest.mark.ranks
def test_a_loss_that_calls_parts_of_a_sharded_model_is_refused(tmp_path: Path) -> None:
    """What the model's own forward does not gather is not there; nothing is trained with a part of it."""
    with pytest.raises(ShoalError, match=r"parts of the model by themselves"):
        in_ranks(job(chunked), {"layout": {"shard": 2}, "shard": {"level": "parameters"}}, tmp_path / "ranks")
