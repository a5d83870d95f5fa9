"""The tensor axis: a model of which each rank holds slices computes what the whole one does, and learns the same."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.models import GPT, LeNet, ResNet18
from safetensors.torch import load_file
from tests.conformance.cases import Stacked
from tests.conformance.cases import language as language_job
from tests.launching import JOBS, Run, run
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.errors import PlanError
from shoal.launch.environment import Environment
from shoal.numerics.grain_randomness import GrainScope
from shoal.numerics.precision import Precision
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.blocks.compiled import compile_blocks
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.sequence.tensor_sequence import plan_sequence
from shoal.parallel.tensor.tensor_parallel import TensorParallel, apply, plan_model
from shoal.plans.grains import Grain
from shoal.plans.plan import Layout
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked, trace_forked
from shoal.verification.judge import judge_traces

pytestmark = pytest.mark.ranks

# Everything is computed in float64; transformers goes through float32 in some norms.
EXACT, THROUGH_FLOAT32 = 1e-9, 1e-5
ROWS = 4
JOB = f"{JOBS / 'tiny.py'}:gpt"  # AdamW with groups, tied weights, dropout, clipping, a schedule
Case = Callable[[], tuple[nn.Module, Any, Any]]


def language(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    found = model(batch[0])
    logits = found if isinstance(found, Tensor) else found.logits
    return shoal.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def images(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    found = model(batch[0])
    return shoal.cross_entropy(found if isinstance(found, Tensor) else found.logits, batch[1])


def squares(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.mse(model(batch[0]), batch[1])


def tokens(vocabulary: int, length: int = 9) -> tuple[Tensor, Tensor]:
    found = torch.randint(vocabulary, (ROWS, length + 1))
    return found[:, :-1], found[:, 1:]


def pictures(size: int, channels: int = 1, classes: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, channels, size, size, dtype=torch.float64), torch.randint(classes, (ROWS,))


def gpt() -> tuple[nn.Module, Any, Any]:
    return GPT(layers=2, width=32, heads=4, block=16, dropout=0.1), language, tokens(256)


def lenet() -> tuple[nn.Module, Any, Any]:
    return LeNet(), images, pictures(28)


def resnet() -> tuple[nn.Module, Any, Any]:
    return ResNet18(), images, pictures(28)


class Perceptron(nn.Module):
    """Gated, with dropout on what is a slice, and a scale for each feature of the slice's input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.gate, self.up = nn.Linear(10, 24), nn.Linear(10, 24, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


def perceptron() -> tuple[nn.Module, Any, Any]:
    return Perceptron(), squares, (torch.randn(ROWS, 5, 10).double(), torch.randn(ROWS, 5, 10).double())


class Stubborn(nn.Module):
    """Writes the number of heads and the width into its views, and shares one matrix among query, key and value."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.n_head, self.n_embd = 6, 24
        self.embed = nn.Embedding(50257, 24)
        self.c_attn = nn.Linear(24, 72)
        self.c_proj = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50257, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        batch, length, width = x.size()
        q, k, v = self.c_attn(F.layer_norm(x, (24,))).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return self.head(F.layer_norm(x, (24,)))


def stubborn() -> tuple[nn.Module, Any, Any]:
    return Stubborn(fused=True), language, tokens(50257)


class Mixed(nn.Module):
    """What cannot be cut, next to what can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12, padding_idx=13)
        self.small = nn.Embedding(20, 12, max_norm=1.0)
        self.lstm = nn.LSTM(12, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 7, 3, padding=1)
        self.depthwise = nn.Conv1d(7, 7, 3, padding=1, groups=7)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.head = nn.Linear(7, 20)
        self.scale = nn.Linear(20, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(ids) + self.small(ids))
        x = self.depthwise(self.conv(x.transpose(1, 2)).relu()).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x) @ self.scale.weight


def mixed() -> tuple[nn.Module, Any, Any]:
    return Mixed(), language, tokens(20)


def hugging_face(name: str, **config: Any) -> Callable[[], tuple[nn.Module, Any, Any]]:
    def make() -> tuple[nn.Module, Any, Any]:
        transformers = pytest.importorskip("transformers")
        kind, task = name.split("/")
        given = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, **{"vocab_size": 61, **config})
        model = getattr(transformers, f"{kind}{task}")(given)
        if kind == "ViT":
            return model, images, pictures(16, 3, 2)
        return model, language, tokens(61)

    return make


SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 44}
llama = hugging_face("Llama/ForCausalLM", num_key_value_heads=2, **SIZES)
qwen = hugging_face("Qwen3/ForCausalLM", num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **SIZES)
bert = hugging_face("Bert/ForMaskedLM", attention_probs_dropout_prob=0.0, **SIZES)
vit = hugging_face("ViT/ForImageClassification", image_size=16, patch_size=8, **SIZES)
phi = hugging_face("Phi3/ForCausalLM", num_key_value_heads=2, pad_token_id=0, **SIZES)


def gpt2() -> tuple[nn.Module, Any, Any]:
    return hugging_face(
        "GPT2/LMHeadModel", n_embd=32, n_head=4, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, n_positions=16
    )()


def gpt2_with_dropout() -> tuple[nn.Module, Any, Any]:
    return hugging_face("GPT2/LMHeadModel", n_embd=32, n_head=4, bos_token_id=0, eos_token_id=0, n_positions=16)()


# By case: pairs that a model must be found to have on 2 and on 3 ranks, and how exact it is.
CASES: dict[str, tuple[Case, dict[int, int], float]] = {
    "gpt": (gpt, {2: 4, 3: 4}, EXACT),
    "lenet": (lenet, {2: 1, 3: 1}, EXACT),
    "resnet": (resnet, {2: 0, 3: 0}, EXACT),
    "perceptron": (perceptron, {2: 1, 3: 1}, EXACT),
    "stubborn": (stubborn, {2: 0, 3: 0}, EXACT),
    "mixed": (mixed, {2: 0, 3: 0}, EXACT),
    "llama": (llama, {2: 4, 3: 2}, THROUGH_FLOAT32),
    "qwen": (qwen, {2: 4, 3: 2}, THROUGH_FLOAT32),
    "bert": (bert, {2: 4, 3: 4}, THROUGH_FLOAT32),
    "vit": (vit, {2: 4, 3: 4}, THROUGH_FLOAT32),
    "phi": (phi, {2: 4, 3: 2}, THROUGH_FLOAT32),
    "gpt2": (gpt2, {2: 4, 3: 4}, THROUGH_FLOAT32),
    "gpt2 with dropout": (gpt2_with_dropout, {2: 2, 3: 2}, THROUGH_FLOAT32),
}


def trained(model: nn.Module, loss: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with GrainScope(3, 1, [Grain(0, 0, 2), Grain(1, 2, 2)]):
        total, _ = loss(model, batch)
        total.backward()
    return total.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assemble(local: dict[str, Tensor], division: TensorParallel, summed: tuple[str, ...] = ()) -> dict[str, Tensor]:
    found = {}
    for name, tensor in local.items():
        part = division.parts[name]
        if part.is_whole:
            whole = tensor.clone()
            if name in summed:
                dist.all_reduce(whole)
        else:
            whole = torch.zeros(part.shape, dtype=tensor.dtype)
            part.put(whole, tensor)
            dist.all_reduce(whole)
        found[name] = whole
    return found


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    floor = 0.01 * max(float(t.norm()) for t in wanted.values())
    for name, value in wanted.items():
        distance = float((found[name].double() - value.double()).norm())
        assert distance <= tolerance * max(float(value.norm()), floor), (name, distance, float(value.norm()))


def in_ranks(world_size: int, work: Callable[[TensorAxis], Any], folder: Path) -> list[Any]:
    def rank(environment: Environment) -> None:
        layout = Layout(tensor=world_size)
        with open_mesh(environment, layout) as mesh:
            torch.manual_seed(11)
            told = work(TensorAxis(world_size, mesh.rank))
            (folder / f"told-{mesh.rank}.json").write_text(json.dumps(told))

    with forked(world_size, rank, folder) as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(world_size)]


def own_values(model: nn.Module) -> Callable[[str], Tensor]:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda name: held[name].detach()


def divide_model(model: nn.Module, axis: TensorAxis, loss: Any, batch: Any) -> TensorParallel:
    return apply(model, plan_model(ModelTrial(model, loss, batch, own_values(model)), axis), axis)


def by_positions(model: nn.Module, axis: TensorAxis, loss: Any, batch: Any) -> TensorParallel:
    """Divides with `tensor.sequence`; the notes of the blocks under "sequence"."""
    subject = ModelTrial(model, loss, batch, own_values(model))
    plan = plan_model(subject, axis)
    sequences = plan_sequence(subject, plan, axis, torch.device("cpu"))
    division = apply(model, plan, axis)
    sequences.apply(model, axis)
    together = tuple(dict.fromkeys((*division.partial, *sequences.partial)))
    return replace(division, partial=together, notes={**division.notes, "sequence": "; ".join(sequences.notes)})


def check(case: Case, tolerance: float, sequence: bool = False) -> Callable[[TensorAxis], Any]:
    def work(axis: TensorAxis) -> Any:
        model, loss, batch = case()
        model.double()
        whole = copy.deepcopy(model)
        names = [name for name, _ in model.named_parameters()]
        division = by_positions(model, axis, loss, batch) if sequence else divide_model(model, axis, loss, batch)
        assert [name for name, _ in model.named_parameters()] == names == list(division.parts)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.01) for m in (whole, model)]
        for _ in range(2):
            wanted_loss, wanted = trained(whole, loss, batch)
            found_loss, own = trained(model, loss, batch)
            assert abs(found_loss - wanted_loss) <= tolerance * abs(wanted_loss), (found_loss, wanted_loss)
            gradients = assemble(own, division, division.partial)
            assert_close(gradients, wanted, tolerance)
            for name, parameter in model.named_parameters():
                assert parameter.shape == division.parts[name].local_shape
                if name in division.partial:
                    parameter.grad = gradients[name]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            values = {name: p.detach() for name, p in model.named_parameters()}
            assert_close(assemble(values, division), {n: p.detach() for n, p in whole.named_parameters()}, tolerance)
        return division.notes

    return work


@parametrize(("name", "world_size"), product(CASES, [2, 3]), usual=["gpt-3", "perceptron-2", "stubborn-2", "llama-2"])
def test_the_training_of_one_process(name: str, world_size: int, tmp_path: Path) -> None:
    case, pairs, tolerance = CASES[name]
    if case not in (gpt, lenet, resnet, perceptron, stubborn, mixed):
        pytest.importorskip("transformers", reason="transformers is not installed")
        case()  # imports here what each rank would import for itself
    told = in_ranks(world_size, check(case, tolerance), tmp_path / "ranks")
    assert all(found == told[0] for found in told)
    assert sum(note == "cut along its inputs" for note in told[0].values()) == pairs[world_size], told[0]


ALL = "2 blocks compute 1/{} of the positions between their pairs"
# By case: what is said on 2 ranks. Sequences are of 9 tokens, or of 5 patches.
BLOCKS: dict[str, tuple[Case, str]] = {
    "gpt": (gpt, ALL),
    "llama": (llama, ALL),
    "bert": (bert, ALL),
    "vit": (vit, ALL),
    "gpt2 with dropout": (gpt2_with_dropout, ALL),
    "perceptron": (perceptron, "no block computes parts of a sequence: the model repeats none that take [batch, po"),
    "shared norm": (lambda: (Sharing(), squares, sequences()), "no block computes parts of a sequence: norm.bias is"),
    "over time": (lambda: (Timely(), squares, sequences()), "whole sequences in 0, 1: what it returns is another"),
    "in pieces": (lambda: (Pieces(), squares, sequences()), ALL),
}


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 5, 10).double(), torch.randn(ROWS, 5, 10).double()


class Sharing(nn.Module):
    """One norm for all blocks and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.blocks = nn.ModuleList(Perceptron() for _ in range(2))
        for block in self.blocks:
            block.norm = self.norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class Centred(Perceptron):
    """Subtracts the mean over time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Timely(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Centred(), Centred())


class Narrow(Perceptron):
    """Has no pair."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.gate(x).softmax(-1)[..., :10]) + self.down(self.up(x).softmax(-1))


class Pieces(nn.Sequential):
    """A block between two others that is whole."""

    def __init__(self) -> None:
        super().__init__(Perceptron(), Narrow(), Perceptron())


@parametrize(("name", "world_size"), product(BLOCKS, [2, 3]), usual=["gpt-3", "llama-2", "over time-2", "in pieces-3"])
def test_the_training_of_one_process_by_positions(name: str, world_size: int, tmp_path: Path) -> None:
    case, said = BLOCKS[name]
    if case in (llama, bert, vit, gpt2_with_dropout):
        pytest.importorskip("transformers", reason="transformers is not installed")
        case()
    tolerance = THROUGH_FLOAT32 if case in (llama, bert, vit, gpt2_with_dropout) else EXACT
    told = in_ranks(world_size, check(case, tolerance, sequence=True), tmp_path / "ranks")
    assert told[0]["sequence"].startswith(said.format(world_size)), told[0]["sequence"]


def perturbed(case: Case, spoil: Callable[[nn.Module, TensorParallel], None]) -> Callable[[TensorAxis], Any]:
    """Whether the first loss and gradients are still right after `spoil`."""

    def work(axis: TensorAxis) -> Any:
        model, loss, batch = case()
        whole = copy.deepcopy(model.double())
        division = divide_model(model, axis, loss, batch)
        spoil(model, division)
        _, wanted = trained(whole, loss, batch)
        _, own = trained(model, loss, batch)
        try:
            assert_close(assemble(own, division, division.partial), wanted, EXACT)
        except AssertionError:
            return False
        return True

    return work


def test_the_comparison_sees_a_mask_of_its_own(tmp_path: Path) -> None:
    def spoil(model: nn.Module, division: TensorParallel) -> None:
        model.dropout.__class__, model.dropout.p = nn.Dropout, 0.3  # type: ignore[union-attr]

    assert in_ranks(2, perturbed(perceptron, spoil), tmp_path / "spoilt") == [False, False]
    assert in_ranks(2, perturbed(perceptron, lambda m, d: None), tmp_path / "right") == [True, True]


def sent_by(loss: Any, model: nn.Module, batch: Any) -> list[dict[str, int]]:
    """Collectives of a forward and of its backward, by name."""
    sent: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather"):

            def count(original: Any, name: str, *args: Any, **kwargs: Any) -> Any:
                sent[name] += 1
                return original(*args, **kwargs)

            patch.setattr(dist, name, partial(count, getattr(dist, name), name))
        total, _ = loss(model, batch)
        forward = dict(sent)
        sent.clear()
        total.backward()
    return [forward, dict(sent)]


@pytest.mark.parametrize(("case", "wanted"), [(gpt, {"all_reduce": 8}), (stubborn, None)])
def test_what_a_forward_sends(case: Case, wanted: dict[str, int] | None, tmp_path: Path) -> None:
    """Two sums a block, one for each embedding, two for the loss; in the backward one for the input of a pair."""

    def work(axis: TensorAxis) -> Any:
        model, loss, batch = case()
        divide_model(model, axis, loss, batch)
        return sent_by(loss, model, batch)

    forward, backward = in_ranks(2, work, tmp_path / "ranks")[0]
    if wanted is not None:
        assert forward == wanted
        assert backward == {"all_reduce": 5}  # two a block, and the head's input
    else:
        assert forward == {"all_reduce": 3, "all_gather": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", [llama, qwen], ids=["llama", "qwen"])
def test_compiled_blocks_send_what_eager_ones_send(case: Case, tmp_path: Path) -> None:
    """Layers with one input share its sum in the backward. The collectives are the only cuts of the graphs."""

    def work(axis: TensorAxis) -> Any:
        model, loss, batch = case()
        divide_model(model, axis, loss, batch)
        eager = sent_by(loss, model, batch)
        wanted = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        plan = shoal.Plan().with_sections(layout={"tensor": 2}, execution={"compile": "default"})
        regions = compile_blocks(model, plan, Precision.of(plan.precision, torch.device("cpu")), None, loss)
        loss(model, batch)[0].backward()  # compiles
        model.zero_grad()
        compiled = sent_by(loss, model, batch)
        assert_close({name: p.grad for name, p in model.named_parameters()}, wanted, THROUGH_FLOAT32)
        return [eager, compiled, regions.names, sorted(regions.cuts)]

    eager, compiled, names, cuts = in_ranks(2, work, tmp_path / "ranks")[0]
    assert compiled == eager
    assert sum(name[-1].isdigit() for name in names) == 2
    assert cuts == ["collective in the forward"]


def smoothed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean with every option, times what it is a mean over; classes in dim 1 of three."""
    logits, weights = model(batch[0]), torch.linspace(0.5, 2.0, 61, dtype=torch.float64).to(batch[0].device)
    loss = F.cross_entropy(logits.transpose(1, 2), batch[1], weights, ignore_index=7, label_smoothing=0.1)
    return loss * len(batch[0]), torch.tensor(len(batch[0]))


def shifted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """As Hugging Face's examples do it, in float32 and on all positions but the last."""
    logits = model(batch[0])[..., :-1, :].contiguous().float()
    return shoal.cross_entropy(logits.view(-1, logits.size(-1)), batch[1][..., 1:].reshape(-1))


def watched(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A second term that needs all the logits."""
    logits = model(batch[0]).flatten(0, 1)
    total, weight = shoal.cross_entropy(logits, batch[1].flatten())
    return total + 0.01 * logits.logsumexp(-1).square().sum(), weight


def hidden(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Through a function of autograd that torch functions do not show."""
    return shoal.cross_entropy(Unknown.apply(model(batch[0]).flatten(0, 1)), batch[1].flatten())


def labelled(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The loss that a model of Hugging Face computes by itself."""
    found = model(input_ids=batch[0], labels=batch[0])
    return found.loss * batch[0].numel(), torch.tensor(batch[0].numel())


class Headed(nn.Module):
    def __init__(self, vocabulary: int = 61) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, vocabulary)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(ids)))
        return out


KEPT = "cut along its outputs, of which a cross entropy takes slices"
LOSSES: dict[str, tuple[Any, str]] = {
    "every option": (smoothed, KEPT),
    "shifted": (shifted, KEPT),
    "all logits": (watched, "cut along its outputs, gathered (logsumexp() takes all of them)"),
    "hidden": (hidden, "cut along its outputs, gathered"),
}


@parametrize(("name", "world_size"), product(LOSSES, [2, 3]), usual=["shifted-2", "all logits-3"])
def test_what_becomes_of_the_logits(name: str, world_size: int, tmp_path: Path) -> None:
    loss, note = LOSSES[name]
    tolerance = THROUGH_FLOAT32 if loss is shifted else EXACT
    told = in_ranks(world_size, check(lambda: (Headed(), loss, tokens(61)), tolerance), tmp_path / "ranks")
    assert told[0]["head"].startswith(note), told[0]
    assert told[0]["embed"] == "cut along its rows"


def test_logits_that_are_used_otherwise_than_they_were_are_gathered(tmp_path: Path) -> None:
    """The first batch shows a cross entropy alone; what comes then is right all the same."""

    def work(axis: TensorAxis) -> Any:
        model = Headed().double()
        whole, batch = copy.deepcopy(model), tokens(61)
        division = divide_model(model, axis, language, batch)
        for loss in (language, watched, hidden, lambda m, b: (m(b[0]).softmax(-1).amax(-1).sum(), 1)):
            wanted_loss, wanted = trained(whole, loss, batch)
            found_loss, own = trained(model, loss, batch)
            assert abs(found_loss - wanted_loss) <= EXACT * abs(wanted_loss)
            assert_close(assemble(own, division, division.partial), wanted, EXACT)
            for tensor in (*model.parameters(), *whole.parameters()):
                tensor.grad = None
        with torch.no_grad():
            assert torch.equal(model(batch[0]).argmax(-1), whole(batch[0]).argmax(-1))
        return division.notes["head"]

    assert in_ranks(2, work, tmp_path / "ranks") == [KEPT, KEPT]


@pytest.mark.slow
def test_a_loss_within_a_model_of_hugging_face(tmp_path: Path) -> None:
    def case() -> tuple[nn.Module, Any, Any]:
        model, _, batch = llama()
        return model, labelled, batch

    case()
    told = in_ranks(3, check(case, THROUGH_FLOAT32), tmp_path / "ranks")
    assert told[0]["lm_head"] == KEPT


@pytest.mark.slow
@pytest.mark.parametrize("by", [False, True])
def test_an_evaluation_of_torchs_own_encoder(by: bool, tmp_path: Path) -> None:
    """In evaluation it has a kernel that takes the weights of its layers and does not call them."""

    def work(axis: TensorAxis) -> Any:
        model, batch = Stacked().double(), tokens(16)
        whole = copy.deepcopy(model)
        division = by_positions(model, axis, language, batch) if by else divide_model(model, axis, language, batch)
        with torch.no_grad():
            found, wanted = model.eval()(batch[0]), whole.eval()(batch[0])
        assert float((found - wanted).abs().max()) < EXACT
        return division.notes

    notes = in_ranks(2, work, tmp_path / "ranks")[0]
    assert notes["blocks.1.linear2"] == "cut along its inputs"
    assert not by or notes["sequence"] == "4 blocks compute 1/2 of the positions between their pairs"


class Unknown(torch.autograd.Function):
    """Twice the value, through an operation that nobody has heard of."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Planned(nn.Module):
    _tp_plan = {"up": "colwise", "down": "rowwise", "kept": "replicated"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.down(Unknown.apply(self.up(x))))


def test_a_plan_of_the_models_own_is_honoured(tmp_path: Path) -> None:
    def case() -> tuple[nn.Module, Any, Any]:
        return Planned(), squares, (torch.randn(ROWS, 6).double(), torch.randn(ROWS, 6).double())

    notes = in_ranks(2, check(case, EXACT), tmp_path / "ranks")[0]
    assert notes["down"] == "cut along its inputs"
    assert notes["kept"] == "whole: as its tp_plan says"


def test_more_ranks_than_anything_has_features_are_refused(tmp_path: Path) -> None:
    def work(axis: TensorAxis) -> Any:
        model = nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1))
        divide_model(model, axis, squares, (torch.randn(2, 3), torch.randn(2, 1)))

    with pytest.raises(PlanError, match="no module of this model can be cut into 2 parts"):
        in_ranks(2, work, tmp_path / "ranks")


def examples_job(model: Callable[[], nn.Module], batch: Callable[[], Any], loss: Any, width: int = 8) -> shoal.Job:
    return shoal.Job(
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train_data=lambda: tuple(torch.cat([t, t.flip(0)]) for t in batch()),
        global_batch=width,
        grains=2,
        length=shoal.Steps(2),
        clip_norm=0.1,
    )


EXAMPLES: dict[str, Callable[[], shoal.Job]] = {
    "gpt": lambda: examples_job(partial(GPT, layers=2, width=32, heads=4, block=16), partial(tokens, 256), language, 4),
    "lenet": lambda: examples_job(LeNet, lambda: floats(pictures(28)), images),
    "resnet": lambda: examples_job(ResNet18, lambda: floats(pictures(28)), images, 4),
}


def floats(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].float(), batch[1]


SEQUENCE: dict[str, dict[str, Any]] = {
    "2": {"layout": {"tensor": 2}},
    "3": {"layout": {"tensor": 3}},
    "2, computed again": {"layout": {"tensor": 2}, "memory": {"recompute": "full"}},
    "2 x shard 2, parameters": {"layout": {"tensor": 2, "shard": 2}},
    "2, bf16": {"layout": {"tensor": 2}, "precision": {"compute": "bfloat16"}},
    "2 x pipeline 2": {"layout": {"tensor": 2, "pipeline": 2}, "batch": {"grains_per_microbatch": 1}},
    "2 x pipeline 2, zero bubble": {
        "layout": {"tensor": 2, "pipeline": 2},
        "batch": {"grains_per_microbatch": 1},
        "pipeline": {"schedule": "zero_bubble"},
    },
    "2 x pipeline 2, in turn, computed again": {
        "layout": {"tensor": 2, "pipeline": 2},
        "batch": {"grains_per_microbatch": 1},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        "memory": {"recompute": "full"},
    },
}


@parametrize("name", SEQUENCE, usual=["3"])
def test_norms_that_see_a_part_of_the_positions_are_verified(name: str, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return GPT(layers=4 if "pipeline" in name else 2, width=32, heads=4, block=16, dropout=0.2)

    job = examples_job(model, partial(tokens, 256), language, 4)
    plan = judged(job, shoal.Plan().with_sections(**SEQUENCE[name], tensor={"sequence": True})).plan
    trace_forked(lambda: job, plan, tmp_path, 2)
    verdict = judge_traces(job, plan, tmp_path)
    assert verdict.verified, verdict.render()


@parametrize("name", EXAMPLES, usual=["gpt"])
def test_the_models_of_the_examples_are_verified(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = EXAMPLES[name]()
    plan = judged(job, shoal.Plan().with_sections(layout={"tensor": 2})).plan
    trace_forked(lambda: job, plan, tmp_path, 1)
    verdict = judge_traces(job, plan, tmp_path)
    assert verdict.verified, verdict.render()


@pytest.mark.slow
def test_a_pipeline_whose_last_stage_has_a_sharded_loss_is_verified(tmp_path: Path) -> None:
    job = EXAMPLES["gpt"]()
    sections = {"layout": {"tensor": 2, "pipeline": 2}, "batch": {"grains_per_microbatch": 1}}
    plan = judged(job, shoal.Plan().with_sections(**sections)).plan
    trace_forked(lambda: job, plan, tmp_path, 1)
    verdict = judge_traces(job, plan, tmp_path)
    assert verdict.verified, verdict.render()


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "2 x data 2": {"layout": {"tensor": 2, "data": 2}},
    "2 x shard 2": {"layout": {"tensor": 2, "shard": 2}, "shard": {"level": "optimizer"}},
    "2 x shard 2, parameters": {"layout": {"tensor": 2, "shard": 2}, "shard": {"level": "parameters"}},
}


@parametrize("name", LAYOUTS, usual=["2 x shard 2, parameters"])
def test_verified_with_other_axes(name: str, tmp_path: Path) -> None:
    job = language_job(dropout=0.2)
    plan = judged(job, shoal.Plan().with_sections(**LAYOUTS[name])).plan
    trace_forked(lambda: job, plan, tmp_path, 2)
    verdict = judge_traces(job, plan, tmp_path)
    assert verdict.verified, verdict.render()


def layout(folder: Path, **degrees: int) -> tuple[str, ...]:
    path = folder / f"{'-'.join(degrees)}.toml"
    lines = [f"{axis} = {degree}" for axis, degree in degrees.items()]
    path.write_text("\n".join(["schema = 1", "[layout]", *lines, ""]))
    return ("--plan", str(path))


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(sorted((out / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [({"tensor": 2}, {"data": 2}), ({"data": 2}, {"tensor": 3})])
def test_resumed_under_another_layout(before: dict[str, int], after: dict[str, int], tmp_path: Path) -> None:
    out, alone = tmp_path / "run", tmp_path / "alone"
    run(Run(JOB, out, None, arguments=(*layout(tmp_path, **before), "--steps", "3")), 200).expect(0)
    run(Run(JOB, out, None, arguments=(*layout(tmp_path, **after), "--resume", "--steps", "6")), 200).expect(0)
    run(Run(JOB, out, None, arguments=(*layout(tmp_path, data=1), "--resume", "--steps", "8")), 200).expect(0)
    run(Run(JOB, alone, 1, arguments=("--steps", "8")), 200).expect(0)
    # In float32, and AdamW makes steps of gradients that are zero but for rounding, as of a bias before a softmax.
    assert_close(weights(out), weights(alone), 0.01)
