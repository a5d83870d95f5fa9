"""Counts of a compiled step: regions and generated kernels are those of the model and its loss compiled by hand."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT, LeNet, ResNet18
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import SettingWarning
from shoal.numerics.grain_randomness import GrainScope
from shoal.numerics.precision import Precision
from shoal.parallel.base import run_backward
from shoal.parallel.blocks.compiled import Regions, _collective, compile_blocks
from shoal.plans.grains import Grain

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.timeout(300),
]
CPU, ROWS = torch.device("cpu"), 8


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Inductor writes its kernels, and nothing compiles them: they return at once."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, *args, **kwargs: lambda *tensors: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        torch._dynamo.config.patch(recompile_limit=64),
        torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


@dataclass(frozen=True)
class Counts:
    """Regions of the forward, those with a backward, generated kernels, and breaks of a graph."""

    regions: int
    backwards: int
    kernels: int
    breaks: int


def counted(function: Callable[..., Any], model: nn.Module, batch: Any) -> Counts:
    """Compute a step's forward and backward, and count what torch compiles for it."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    counters.clear()
    total, _ = function(model, batch)
    run_backward(total)
    regions, backwards = counters["stats"]["unique_graphs"], counters["aot_autograd"]["ok"]
    return Counts(regions, backwards, metrics.generated_kernel_count, sum(counters["graph_break"].values()))


def compiled(model: nn.Module, loss: Callable[..., Any], **sections: Any) -> Regions:
    plan = shoal.Plan().with_sections(execution={"compile": "default"}, **sections)
    return compile_blocks(model, plan, Precision.of(plan.precision, CPU), None, loss)


def scope(model: nn.Module, *sizes: int) -> GrainScope:
    grains = [Grain(i, sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    return GrainScope(1, 2, grains, {module: name for name, module in model.named_modules()})


class ViT(nn.Module):
    """Patches of 4 x 4 pixels through encoder layers: [N, 1, 8, 8] -> [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(1, 16, 4, 4), nn.Parameter(torch.zeros(4, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, F.gelu, batch_first=True, norm_first=True)
        layer.self_attn.dropout = 0.0
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.encoder(tokens).mean(1))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    layer.self_attn.dropout = 0.0  # torch compiles no kernel of attention with dropout
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(4 * 16, 5))


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(first, nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 36, 5))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 5))


def of_tokens(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers: Any = pytest.importorskip("transformers")
        sizes = {"vocab_size": 65, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 32, "attn_implementation": "eager"}
        if name == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
        else:
            model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
        return Logits(model)

    return make


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


SLOW = pytest.mark.slow
TOKENS = torch.randint(65, (ROWS, 16))
SMALL, LABELS = torch.randn(ROWS, 1, 8, 8), torch.randint(5, (ROWS,))
NETS = [
    pytest.param(perceptron, (torch.randn(ROWS, 8), LABELS), id="mlp"),
    pytest.param(lambda: GPT(2, 32, 2, 16, 0.1), (TOKENS, TOKENS), id="gpt", marks=SLOW),
    pytest.param(convolutions, (SMALL, LABELS), id="convolutions", marks=SLOW),
    pytest.param(LeNet, (torch.randn(ROWS, 1, 28, 28), LABELS), id="lenet", marks=SLOW),
    pytest.param(ResNet18, (SMALL, LABELS), id="resnet18", marks=SLOW),
    pytest.param(ViT, (SMALL, LABELS), id="vit", marks=SLOW),
    pytest.param(encoder, (torch.randn(ROWS, 4, 16), LABELS), id="encoder", marks=SLOW),
    pytest.param(of_tokens("llama"), (TOKENS, TOKENS), id="llama", marks=SLOW),
    pytest.param(of_tokens("bert"), (TOKENS, TOKENS), id="bert", marks=SLOW),
]


@pytest.mark.parametrize(("make", "batch"), NETS)
def test_regions_and_kernels_as_by_hand(make: Callable[[], nn.Module], batch: Any) -> None:
    model = make()
    by_hand = counted(torch.compile(loss, fullgraph=True, dynamic=False), model, batch)
    assert (by_hand.regions, by_hand.backwards, by_hand.breaks) == (1, 1, 0)
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    regions = compiled(model, loss)
    for sizes in ((ROWS,), (ROWS // 2, ROWS // 2)):
        with scope(model, *sizes):
            counts = counted(regions.whole, model, batch)
        assert (counts.regions, counts.backwards, counts.breaks) == (1, 1, 0)
        # Running statistics of several grains are a mean over them. Of the ViT one sum with a dropout, which has longer
        # expressions than torch's own, is stored before its norm.
        more = (norms if len(sizes) > 1 else 0) + isinstance(model, ViT)
        assert counts.kernels <= by_hand.kernels + more
    assert not regions.cuts
    assert regions.names == [f"{type(model).__name__} and its loss"]


def test_with_borders_each_block_has_a_backward_of_its_own() -> None:
    model = GPT(2, 8, 2, 16, 0.0)
    with scope(model, ROWS):
        counts = counted(compiled(model, loss, layout={"data": 2}).whole, model, (TOKENS, TOKENS))
    assert counts.backwards == 4  # before the blocks, two blocks, after the blocks with the loss


def test_hooks_around_a_sharded_model_are_called_outside_of_the_compiled_loss() -> None:
    """Hooks gather parameters. What the model returns elsewhere, as in an evaluation, is not kept."""
    model, seen, batch = perceptron(), list[bool](), (torch.randn(ROWS, 8), LABELS)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    regions = compiled(model, loss, layout={"shard": 2}, shard={"level": "gradients"})
    with scope(model, ROWS):
        counts = counted(regions.whole, model, batch)
    assert (counts.backwards, seen) == (2, [False])
    assert regions.names[-1] == "the loss"
    output = weakref.ref(model(batch[0]))
    assert output() is None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_what_cannot_be_compiled_says_why() -> None:
    model = Recurrent()
    regions = compiled(model, loss)
    batch = torch.randn(ROWS, 3, 8), LABELS
    own: Any = regions.whole
    with pytest.warns(SettingWarning) as said:
        own(model, batch)
    assert ["LSTM" in str(warning.message) or "RNN" in str(warning.message) for warning in said] == [True, True]
    assert [str(warning.message).partition(" is not compiled")[0] for warning in said] == [
        "Recurrent and its loss",
        "Recurrent",
    ]
    assert regions.names == ["the loss"]


# ------------------------------------------------------------------------------------------------- results and hooks


def eagerly(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile a graph with autograd's part of the compiler, and run it by torch's own kernels."""
    from torch._dynamo.backends.debugging import aot_eager

    call: Callable[..., Any] = aot_eager(graph, list(inputs))
    return call


def computed(model: nn.Module, function: Any, batch: Any, sizes: tuple[int, ...]) -> list[Tensor]:
    model.zero_grad()
    with scope(model, *sizes) as own:
        total, _ = function(model, batch)
        run_backward(total)
        assert not own.leaked()
    return [total.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("sizes", [(5, 3), *(pytest.param(sizes, marks=SLOW) for sizes in [(8,), (4, 4), (3, 3, 2)])])
@pytest.mark.parametrize("make", [perceptron, convolutions, encoder])
def test_masks_gradients_and_buffers_are_the_eager_ones(make: Callable[[], nn.Module], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = make()
    model, regions = copy.deepcopy(plain), Regions(lambda: eagerly)
    batch = {perceptron: torch.randn(ROWS, 8), convolutions: SMALL, encoder: torch.randn(ROWS, 4, 16)}[make], LABELS
    expected = computed(plain, loss, batch, sizes)
    whole = regions.around("the whole", loss)
    torch.testing.assert_close(computed(model, whole, batch, sizes), expected, rtol=1e-4, atol=1e-5)
    assert not regions.cuts


@pytest.mark.parametrize(("between", "calls"), [(F.relu, 1), (lambda x: F.relu(x, True), 2), (lambda x: x.mul_(2), 2)])
def test_layers_with_one_input_share_its_collective_unless_it_is_written(between: Any, calls: int) -> None:
    seen: list[Tensor] = []

    def doubled(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            seen.append(tensor)
        return tensor * 2

    def forward(tensor: Tensor) -> Tensor:
        value = tensor + 1
        first = cut(value)
        other = between(value)
        return first + cut(value) + other

    cut = _collective(doubled)
    inputs, regions = torch.randn(4, 3, requires_grad=True), Regions(lambda: eagerly)
    expected = forward(inputs)
    seen.clear()
    torch.testing.assert_close(regions.around("forward", forward)(inputs), expected)
    assert len(seen) == calls


class Listed(nn.Module):
    """Dropouts in a plain list have no name of their own: [N, 8] -> [N, 8]."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear, self.shared, self.dropouts = nn.Linear(8, 8), shared, [nn.Dropout(0.3), nn.Dropout(0.5)]

    def forward(self, x: Tensor) -> Tensor:
        for dropout in self.dropouts:
            x = dropout(self.shared(self.linear(x)))
        return x


@pytest.mark.parametrize("by_block", [False, True])
def test_draws_belong_to_the_first_name_of_a_module_or_to_a_module_around_it(by_block: bool) -> None:
    """Two blocks share a dropout, whose first name is of the block that is called last."""
    shared, sizes = nn.Dropout(0.25), (5, 3)
    model = nn.ModuleDict({"head": Listed(shared), "body": nn.Sequential(Listed(shared), Listed(shared))})

    def backwards(model: Any, batch: Tensor) -> Any:
        return model["head"](model["body"](batch)).square().sum(), 1

    sites = []
    for function in (backwards, Regions(lambda: eagerly).around("the whole", backwards)):
        if by_block and function is not backwards:
            function, regions = backwards, Regions(lambda: eagerly)
            for block in (model["head"], *model["body"]):
                block.forward = regions.around("a block", block.forward)
        with scope(model, *sizes) as own:
            total, _ = function(model, torch.ones(ROWS, 8))
        sites.append((float(total.detach()), [site for drawn in own.sites.in_order for site in drawn]))
    eager, regional = sites
    assert sorted(regional[1]) == sorted(eager[1])
    assert {name for name, _ in eager[1]} == {"head", "head.shared", "body.0", "body.1"}
    assert regional[0] == pytest.approx(eager[0])


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.drop = nn.LSTM(8, 5), nn.BatchNorm1d(5), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.lstm(x)[0]))


@pytest.mark.filterwarnings("ignore:.* is not compiled")
def test_a_model_runs_once_if_the_loss_fails_after_it() -> None:
    def hidden(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return checkpoint(lambda output: F.dropout(output).sum(), model(batch[0]), use_reentrant=False), ROWS

    model, batch = Recurring(), (torch.randn(ROWS, 8), LABELS)
    plain = copy.deepcopy(model)
    expected = computed(plain, hidden, batch, (5, 3))
    regions = compiled(model, hidden)
    found = computed(model, regions.whole, batch, (5, 3))
    assert all(map(torch.equal, found, expected))
    assert regions.names == []


def test_hooks_on_parameters_are_called_and_the_switch_leaves_no_graph() -> None:
    """A backward within a region would skip the hooks silently, and with them the sums over ranks."""
    model, regions = perceptron(), Regions(lambda: eagerly)
    whole, called = regions.around("the whole", loss), list[str]()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: called.append("before"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: called.append("after"))
    batch, count = (torch.randn(ROWS, 8), LABELS), len(list(model.parameters()))
    computed(model, whole, batch, (4, 4))
    assert sorted(called) == ["after"] * count + ["before"] * count
    from torch._dynamo.utils import counters

    regions.enabled = False
    before = counters["stats"]["unique_graphs"]
    plain = copy.deepcopy(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(computed(model, whole, batch, (3, 5)), computed(plain, loss, batch, (3, 5)), strict=True)
    )
    assert counters["stats"]["unique_graphs"] == before


def test_a_region_runs_under_a_dispatch_mode() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, regions = perceptron(), Regions(lambda: eagerly)
    plain, whole = copy.deepcopy(model), regions.around("the whole", loss)
    batch = torch.randn(ROWS, 8), LABELS
    with Seen():
        first = computed(model, whole, batch, (4, 4))
    torch.testing.assert_close(first, computed(plain, loss, batch, (4, 4)), rtol=1e-4, atol=1e-5)
