"""Compilation: what belongs to grains stays out of it, whatever compiles the rest."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import PlanError, SettingWarning
from shoal.numerics.grain_randomness import GrainScope, belongs_to_grains
from shoal.numerics.precision import Precision
from shoal.parallel.base import run_backward
from shoal.parallel.blocks.compiled import Regions, compile_blocks
from shoal.parallel.blocks.recompute import Recomputed, SavedResults, recompute
from shoal.plans.grains import Grain

# As `compile_blocks` sets for a process that compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiler_as_before() -> Iterator[None]:
    """Nothing compiled, and torch's settings, for whatever test comes next in this process."""
    import torch._dynamo
    import torch._inductor.config

    threads = torch._inductor.config.compile_threads
    with torch._dynamo.config.patch(), warnings.catch_warnings():
        limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
        yield
        torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = limits
    torch._inductor.config.compile_threads = threads
    torch._dynamo.reset()


class Graphs:
    """A compiler that counts the graphs that it is given, and calls them as they are."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.seen.append([str(getattr(n.target, "__name__", n.target)) for n in graph.graph.nodes if "call" in n.op])
        return graph.forward


class Block(nn.Module):
    """A perceptron with dropout and BatchNorm: [N, 8] -> [N, 8]."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


def stack(kind: Callable[[], nn.Module] = Block) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *(kind() for _ in range(3)))


def grains(*sizes: int) -> list[Grain]:
    return [Grain(i, 0, size) for i, size in enumerate(sizes)]


def computed(model: nn.Module, sizes: tuple[int, ...]) -> list[Tensor]:
    """The total, the gradients and the buffers of a microbatch."""
    inputs = torch.randn(sum(sizes), 8, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    names = {module: name for name, module in model.named_modules()}
    with GrainScope(1, 2, grains(*sizes), names) as scope:
        total = model(inputs).square().sum()
        run_backward(total)
        assert not scope.leaked()
    return [total.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def put(model: nn.Module, exact: bool = False) -> Graphs:
    """Compiles the blocks of a model with a compiler that only counts."""
    found = Graphs()
    regions = Regions(lambda: found, exact=exact)
    for name, module in model.named_children():
        if isinstance(module.__dict__.get("forward"), Recomputed):
            module.forward.forward = regions.around(name, module.forward.forward)
        elif list(module.children()):
            module.forward = regions.around(name, module.forward)
    return found


SIZES = [(4, 4), (4, 4), (4, 3), (2,)]


@pytest.mark.parametrize("kind", ["none", "full"])
def test_masks_and_means_are_those_without_it(kind: str) -> None:
    torch.manual_seed(0)
    plain = stack()
    other = copy.deepcopy(plain)
    recompute(other, kind)
    graphs = put(other)
    for sizes in SIZES:
        for a, b in zip(computed(other, sizes), computed(plain, sizes), strict=True):
            torch.testing.assert_close(a, b)
    assert graphs.seen
    everything = {name for graph in graphs.seen for name in graph}
    assert {"linear", "gelu", "add"} <= everything
    assert "dropout" not in everything
    assert {"drawn", "normalised_at_once"} <= everything


def test_without_randomness_a_block_is_one_graph() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.dropout = nn.Linear(8, 8), nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.dropout(torch.tanh(self.up(x)))

    model = stack(Plain)
    graphs = put(model)
    computed(model, (4, 4))
    assert len(graphs.seen) == 1  # the blocks are alike
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert len(graphs.seen) == 1


DIFFERENT = [(4, 4), (4, 3), (4, 2), (5, 5), (6, 6), (7, 7), (4, 4)]


def test_a_graph_a_shape_in_exact_mode() -> None:
    model = stack(lambda: Block(0.0))
    graphs = put(model, exact=True)
    for sizes in DIFFERENT:
        computed(model, sizes)
    exact = len(graphs.seen)
    assert exact == len(set(map(sum, DIFFERENT)))
    torch._dynamo.reset()
    model = stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    graphs = put(model)
    for sizes in DIFFERENT:
        model(torch.randn(sum(sizes), 8)).sum().backward()
    assert len(graphs.seen) < exact


class Torn(nn.Module):
    """What it does next depends on what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * 2.0 if float(x.detach().sum()) > 0.0 else F.dropout(x, 0.5)


def test_what_is_not_one_graph_is_not_compiled_and_says_so() -> None:
    torch.manual_seed(0)
    plain = stack(Torn)
    other = copy.deepcopy(plain)
    put(other)
    with pytest.warns(SettingWarning, match="is not compiled"):
        found = computed(other, (4, 4))
    assert all(torch.equal(a, b) for a, b in zip(found, computed(plain, (4, 4)), strict=True))
    put(exact := stack(Torn), exact=True)
    with pytest.raises(PlanError, match="exact mode, and 1"):
        computed(exact, (4, 4))


def test_a_compiler_that_fails_is_named() -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    model = stack()
    model[1].forward = Regions(lambda: failing).around("1", model[1].forward)
    with pytest.raises(PlanError, match="no such instruction"):
        computed(model, (4, 4))


def test_a_copy_compiles_its_own() -> None:
    model = stack()
    put(model)
    computed(model, (4, 4))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert computed(twin, (4, 4))[0] > 0.0


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "wanted"),
    [
        (F.dropout, (1, 0.5, True), {}, True),
        (F.dropout, (1, 0.5), {"training": False}, False),
        (F.dropout, (1, 0.0, True), {}, False),
        (torch.dropout, (1, 0.5), {"train": True}, True),
        (F.batch_norm, (1, None, None, None, None, True), {}, True),
        (F.batch_norm, (1, None, None), {"training": False}, False),
        (F.scaled_dot_product_attention, (1, 2, 3), {}, False),
        (F.scaled_dot_product_attention, (1, 2, 3, None, 0.1), {}, True),
        (Tensor.bernoulli_, (1,), {}, True),
        (torch.rand_like, (1,), {}, True),
        (F.gelu, (1,), {}, False),
        ("no function", (), {}, False),
    ],
)
def test_what_belongs_to_grains(func: Any, args: Any, kwargs: Any, wanted: bool) -> None:
    assert belongs_to_grains(func, args, kwargs) is wanted


# ----------------------------------------------------------------------------------------------------------- settings


def plan(**execution: Any) -> shoal.Plan:
    return shoal.Plan().with_sections(execution=execution)


def put_by_plan(model: nn.Module, of: shoal.Plan) -> list[str]:
    return compile_blocks(model, of, Precision.of(of.precision, CPU)).names


def test_blocks_or_else_the_whole() -> None:
    assert put_by_plan(stack(), plan(compile="none")) == []
    assert put_by_plan(stack(), plan(compile="default")) == ["Sequential"]
    sharded = plan(compile="default").with_sections(layout={"shard": 2})
    assert put_by_plan(stack(), sharded) == ["1", "2", "3"]
    assert put_by_plan(nn.Linear(2, 2), sharded) == ["Linear"]
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    recompute(model, "full")
    assert put_by_plan(model, plan(compile="default")) == ["[0:2]"]


@pytest.mark.parametrize("kind", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_have_no_effect_on_cpu(kind: str) -> None:
    with pytest.warns(SettingWarning, match="has no effect on cpu beyond 'default'"):
        put_by_plan(stack(), plan(compile=kind))


def test_no_effect_where_each_product_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Precision, "products", lambda self: SavedResults())
    with pytest.warns(SettingWarning, match="has no effect: on this processor"):
        assert put_by_plan(stack(), plan(compile="default")) == []


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("No working C++ compiler found\nwith details")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(PlanError, match=r"no C\+\+ compiler.*apt install g\+\+"):
        put_by_plan(stack(), plan(compile="default"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import metrics

    torch.manual_seed(0)
    plain = stack()
    other = copy.deepcopy(plain)
    recompute(other, "full")
    assert put_by_plan(other, plan(compile="default")) == ["1", "2", "3"]
    metrics.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing of an earlier run
    for sizes in [(4, 4), (4, 3)]:
        for a, b in zip(computed(other, sizes), computed(plain, sizes), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert metrics.generated_kernel_count > 0
