"""Compilation of a training step by torch.compile: the regions of a model, and the switch to eager steps.

A region is one captured graph. Where nothing needs the borders of blocks, model and loss are one region. Batch
statistics by grain are part of it, because torch captures once for each division into grains. Random operations are
part of it too: they draw by keys that the graph receives. Those without a form by hash are cut out of the graph. They
run unchanged, under the GrainScope, between compiled parts.

A backward is never part of a region: torch would skip the hooks on parameters without an error.
See docs/decisions/0013-recompute-and-compile.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.errors import PlanError, SettingWarning
from shoal.hardware.detect import cache_folder
from shoal.numerics.batch_statistics import BATCH_NORM, normalised_at_once
from shoal.numerics.grain_randomness import NotFusibleError, Sites, active_scope, belongs_to_grains
from shoal.numerics.precision import Precision
from shoal.numerics.traced_draws import calls_by_keys, drawn_by_keys
from shoal.parallel.blocks.recompute import recomputed
from shoal.parallel.model.structure import is_composite, repeated_blocks
from shoal.parallel.tensor.layers import cut_at_collectives
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline

_PLACE = "place"  # entry of a node: the place of the module that calls it, as in `Sites.places`
# Blocks that differ in a number (such as the layer's index) compile separately, and count against one limit.
_MOST_GRAPHS = 128
Function = Callable[..., Any]


class Regions:
    """Compiled regions of a model, which share its modules with eager steps.

    `enabled` switches between compiled and eager steps at any time between two steps. A disabled region calls the
    function that it replaces; its graphs stay for the next switch. A region compiles at its first call with gradients
    and at a call with another division into grains. Afterwards it launches its kernels on the current stream and reads
    nothing from the device, so a CUDA graph may capture it.

    `names`: what is compiled. `cuts`: operations that run uncompiled between parts of a region, with their modules.
    `blocks`: modules with a backward of their own, because their gradients are sent while others are computed.
    """

    def __init__(self, compiler: Callable[[], Function] | None = None, *, exact: bool = False) -> None:
        """Create the regions of a model. `compiler`: returns the compiler of graphs, at the first compilation."""
        self.enabled = True
        self.notice: Function = lambda: None  # called before each compilation, which takes longer than a step
        self.names: list[str] = []
        self.cuts: set[str] = set()
        self.blocks: Sequence[str] = ()
        self.whole: Region | None = None  # the loss with the model, as a function of (model, batch)
        self.sites: Sites | None = None  # of the last call of a region; while torch compiles, no scope is active
        self.exact, self._prepare = exact, compiler
        self._compiler: Function | None = None
        self._backends: dict[tuple[int, ...] | None, Backend] = {}

    @property
    def seconds(self) -> float:
        """Time that this process has spent in torch's compiler."""
        if not self._backends:
            return 0.0
        return float(importlib.import_module("torch._dynamo.utils").calculate_time_spent().get("total_wall_time", 0.0))

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute eagerly within the context."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def around(
        self, name: str, forward: Function, instead: Function | None = None, *, apart: _Apart | None = None
    ) -> Region:
        """Return a forward as a region.

        `instead`: called if torch cannot capture it. `apart`: what it calls outside of its graphs; without one it is
        one graph.
        """
        self.names.append(name)
        return Region(name, forward, self, instead, apart)

    def backend(self, sizes: tuple[int, ...] | None) -> Backend:
        """Return the backend for a microbatch of grains of these sizes, or without a GrainScope if None.

        One object serves all regions, so that equal blocks share their graphs.
        """
        if self._compiler is None:
            assert self._prepare is not None
            self._compiler = self._prepare()
        if sizes not in self._backends:
            self._backends[sizes] = Backend(self, self._compiler, sizes)
        return self._backends[sizes]

    def __deepcopy__(self, memo: Any) -> Regions:
        return self


def compile_blocks(
    model: nn.Module, plan: Plan, precision: Precision, pipeline: Pipeline | None = None, loss: Function | None = None
) -> Regions:
    """Compile a model with its loss, or else its blocks, at their first call with gradients.

    The function changes `forward` of module instances. Forwards without gradients, as in an evaluation, are not
    compiled.

    Args:
        model: the model.
        plan: the plan; with `execution.compile = "none"` nothing is compiled.
        precision: the precision of the run.
        pipeline: the pipeline, if the model has stages.
        loss: the loss of (model, batch), whose region is `Regions.whole`; None to compile the model's forward alone.

    Raises: PlanError if there is no compiler.
    """
    kind = plan.execution.compile
    if kind == "none":
        return Regions()
    if not isinstance(precision.products(), contextlib.nullcontext):
        given = f"execution.compile = {kind!r} has no effect: on this processor each product of {precision.compute}"
        warnings.warn(f"{given} is computed in float32", SettingWarning, stacklevel=2)
        return Regions()
    require_compiler(precision.device)
    exact = plan.execution.exact
    if precision.device.type == "cpu" and kind != "default":
        rest = "" if kind == "reduce-overhead" else "; products are tuned"
        message = f"execution.compile = {kind!r} has no effect on cpu beyond 'default': no CUDA graphs{rest}"
        warnings.warn(message, SettingWarning, stacklevel=2)
    regions = Regions(partial(_inductor, kind, precision.device, exact), exact=exact)
    blocks = [block.name for block in repeated_blocks(model)]

    def by_block() -> None:
        regions.blocks = ()
        again = {block.name: block for block in recomputed(model)}  # the backward calls the compiled forward again
        modules = {name: model.get_submodule(name) for name in (again or blocks) if "[" not in name}
        rest = [m for m in model.named_modules() if modules and is_composite(m[1]) and _is_apart(m[0], modules)]
        for name, owner in [*(again or modules or {type(model).__name__: model}).items(), *rest]:
            if any(name.startswith(f"{other}.") for other, _ in rest):
                continue
            if cut_at_collectives([owner] if isinstance(owner, nn.Module) else owner.modules, _collective):
                owner.forward = regions.around(name, owner.forward)
        if loss is not None and plan.layout.tensor == 1:  # torch would trace the hooks that gather the parameters
            model._compiled_call_impl = apart = _Apart(model._call_impl)
            own = regions.around("the loss", loss, apart=apart)
            if regions.whole is None:
                regions.whole = own
            else:
                regions.whole.forward = own

    if pipeline is not None:  # what a stage receives and sends stays outside of the graphs
        pipeline.stages.compile(regions.around)
    elif plan.shards_model or plan.layout.tensor > 1 or recomputed(model):
        by_block()
    else:  # in exact mode the same regions on every number of ranks
        regions.blocks = blocks if plan.layout.divides_grains > 1 and not exact else ()
        if loss is None:
            model.forward = regions.around(type(model).__name__, model.forward)
        else:
            regions.whole = regions.around(f"{type(model).__name__} and its loss", loss, by_block)
    return regions


def require_compiler(device: torch.device) -> None:
    """Check that this machine can compile for a device. Raises: PlanError."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
        missing = ""
    except Exception as error:
        missing = f"no C++ compiler: {str(error).strip().splitlines()[0]:.100}"
    if device.type == "cuda" and not missing:
        from torch.utils._triton import has_triton

        if not has_triton():
            missing = "no Triton that knows this GPU"
        elif not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
            missing = "no C compiler, which Triton needs"
    if missing:
        raise PlanError(
            given="a plan with execution.compile",
            conflict=f"this machine has {missing}",
            remedy="install g++ (Debian: apt install g++) or set CXX, or write execution.compile = 'none'",
        )


def _inductor(kind: str, device: torch.device, exact: bool) -> Function:
    """Return Inductor as the compiler of graphs for a mode of torch.compile, and prepare this process for it."""
    # torch's own place is emptied when the host starts. Without the right to write there, torch chooses one.
    with contextlib.suppress(OSError):
        folder = cache_folder() / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # Loaded only here: the imports take more than a second.
    dynamo, inductor = importlib.import_module("torch._dynamo"), importlib.import_module("torch._inductor")
    compile_fx = importlib.import_module("torch._inductor.compile_fx").compile_fx
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MOST_GRAPHS)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, 4 * _MOST_GRAPHS)
    # torch causes the warning itself: to capture a graph, it reads `.grad` of every tensor.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    options = dict(inductor.list_mode_options(kind)) if kind != "default" else {}
    if device.type == "cpu":
        # Otherwise a pool of processes stays with each rank; one process compiles C++ for all the blocks in seconds.
        inductor.config.compile_threads = 1
        options.pop("triton.cudagraphs", None)
    # Draws that the cuts miss come from torch's own generators, where the loss's computer notices them.
    options["fallback_random"] = True
    if exact and hasattr(inductor.config, "deterministic"):
        options["deterministic"] = True

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
        compiled: Function = compile_fx(graph, list(inputs), config_patches=options)
        return compiled

    return compiler


def _collective(function: Function) -> Function:
    """Return a collective of one tensor as one operation of the graphs, at which they are cut."""

    def collective(tensor: Tensor) -> Tensor:
        result: Tensor = function(tensor)
        return result

    collective.cuts_graphs = True  # type: ignore[attr-defined]
    operation: Function = torch._dynamo.allow_in_graph(collective)
    return operation


def _is_apart(name: str, modules: Collection[str]) -> bool:
    """Return True if a module is in none of some modules, and has none of them."""
    return bool(name) and not any(f"{a}.".startswith(f"{b}.") for own in modules for a, b in ((own, name), (name, own)))


class _Apart:
    """Call of a module, with its hooks, that a region makes and that is no part of it.

    `is_open`: whether the region runs. `results`: of the calls from it. `draws`: their number of draws. `again`:
    results that the next calls return, because the region has failed after them and runs once more.
    """

    def __init__(self, forward: Function) -> None:
        self.forward, self.draws, self.is_open = forward, 0, False
        self.results, self.again = list[Any](), list[Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.compiler.disable(self._called)(*args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if self.again:
            return self.again.pop(0)
        scope = active_scope()
        before = scope.calls if scope is not None else 0
        result = _under_scope(self.forward)(*args, **kwargs)
        if self.is_open:
            self.results.append(result)
        self.draws += scope.calls - before if scope is not None else 0
        return result


class Region:
    """Function that is compiled if gradients are enabled, once for each set of shapes and each division into grains.

    If torch cannot capture the function as one graph, it runs uncompiled, with a warning. In exact mode that is an
    error, since another rank might have captured it.
    """

    def __init__(
        self,
        name: str,
        forward: Function,
        regions: Regions,
        instead: Function | None = None,
        apart: _Apart | None = None,
    ) -> None:
        self.name, self.forward, self._regions, self._instead = name, forward, regions, instead
        self._apart = apart
        self._compiled: dict[tuple[int, ...] | None, Function] = {}
        self._given_up = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the compiled function: a copy of the model compiles its own."""
        return {**self.__dict__, "_compiled": {}, "_instead": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result."""
        regions = self._regions
        is_eager = self._given_up or not regions.enabled or not torch.is_grad_enabled()
        if is_eager or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        scope = active_scope()
        sizes, regions.sites = (scope.sizes, scope.sites) if scope is not None else (None, None)
        call = self._compiled.get(sizes)
        if call is None:
            regions.notice()
            # With a graph per shape, the kernels of exact mode do not depend on the shapes seen before.
            dynamic = False if regions.exact else None
            backend, is_whole = regions.backend(sizes), self._apart is None
            call = torch.compile(self.forward, backend=backend, fullgraph=is_whole, dynamic=dynamic)
            self._compiled[sizes] = call
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

        apart, drawn = self._apart or _Apart(self.forward), scope.calls if scope is not None else 0
        apart.draws, apart.is_open = 0, True
        # torch compiles nothing under a dispatch mode; no mode has to see inside a region.
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()
        try:
            with torch._C.DisableTorchFunction(), modes:
                return call(*args, **kwargs)
        except TorchDynamoException as error:  # raised before a graph was computed
            if isinstance(error, BackendCompilerFailed) and not isinstance(error.inner_exception, _HiddenError):
                raise _failed(error) from error
            why = f"{type(error).__name__}: {_first_lines(error)}"
            if regions.exact and (self._instead is None or len(self._compiled) > 1):
                raise PlanError(
                    given=f"a plan with execution.compile in exact mode, and {self.name}",
                    conflict=f"it cannot be compiled, or not for one more shape: {why}",
                    remedy="write execution.compile = 'none', or give it batches of fewer different shapes",
                ) from error
            if scope is not None and scope.calls - drawn > apart.draws:
                raise PlanError(
                    given=f"a plan with execution.compile, and {self.name}",
                    conflict=f"a part of it cannot be compiled, after another has drawn random numbers: {why}",
                    remedy="write execution.compile = 'none'",
                ) from error
            apart.again = apart.results.copy()
            self._given_up = True
            regions.names = [name for name in regions.names if name != self.name]
            warnings.warn(f"{self.name} is not compiled: {why}", SettingWarning, stacklevel=2)
            if self._instead is not None:
                self._instead()
        finally:
            apart.is_open = False
            apart.results.clear()
        return self.forward(*args, **kwargs)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3])[:300] or type(error).__name__


def _failed(error: Exception) -> PlanError:
    return PlanError(
        given="a plan with execution.compile",
        conflict=f"torch's compiler failed: {type(error).__name__}: {_first_lines(error)}",
        remedy="write execution.compile = 'none'",
    )


class _HiddenError(Exception):
    """Error for an operation that a scope divides, within a function that is one operation of the graph."""


@dataclass(frozen=True, eq=False)
class Backend:
    """torch.compile backend for the captured graphs of microbatches whose grains have certain `sizes`."""

    regions: Regions
    compiler: Function
    sizes: tuple[int, ...] | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """Return the graph as a callable: compiled, or its parts compiled or called under the scope."""
        self.regions.notice()
        for own in graph.modules():
            for node in own.graph.nodes if isinstance(own, torch.fx.GraphModule) else ():
                if node.target is F.batch_norm and self.sizes is not None and _needs_scope(node):
                    given = dict(zip(BATCH_NORM, node.args, strict=False)) | node.kwargs
                    value = given["input"].meta.get("example_value")
                    if value is not None and value.shape[0] == sum(self.sizes):
                        node.target, node.args, node.kwargs = normalised_at_once, (self.sizes, given), {}
                if own is not graph and node.op.startswith("call_") and _needs_scope(node):
                    raise _HiddenError(f"{node.target} within a function that is one operation of the graph")
        own_graph, copies = torch.fx.Graph(), dict[torch.fx.Node, Any]()  # Dynamo reads the inputs of its graph again
        own_graph.output(own_graph.graph_copy(graph.graph, copies))
        places = self.regions.sites.places() if self.regions.sites is not None else {}
        for before, after in copies.items():
            if before.op == "placeholder":
                after._dynamo_source = before._dynamo_source  # type: ignore[attr-defined]
            # Eager draws belong to the innermost module that has a name, too.
            calls = [key.partition("@")[0] for key in before.meta.get("nn_module_stack", {})]
            after.meta[_PLACE] = next((places[call] for call in reversed(calls) if call in places), "")
        equal: dict[Any, torch.fx.Node] = {}  # layers with one input share its collective
        for node in own_graph.nodes:
            if getattr(node.target, "cuts_graphs", False):
                first = equal.setdefault((node.target, node.args), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    own_graph.erase_node(node)
            elif node.op.startswith("call_") and _writes(node):
                equal.clear()
        graph = torch.fx.GraphModule(graph, own_graph)
        sites = self._draw_by_keys(graph)
        if not sites:
            return self._in_parts(graph, inputs)
        # torch 2.10 compiles with another fake mode than it traces with.
        tracing = TracingContext.try_get()
        with (tracing and tracing.fake_mode) or contextlib.nullcontext():
            values = [node.meta["example_value"] for node in sites]
            keys = [torch.empty(tuple(key.shape), dtype=key.dtype, device=key.device) for key in values]
        names, drawing, call = dict[str, list[str]](), list(sites.values()), self._in_parts(graph, [*inputs, *keys])

        def run(*args: Any) -> Any:
            scope = active_scope()
            assert scope is not None
            with torch._C._EnableTorchFunction():
                own_keys = scope.keys_at(drawing, keys[0].device, names).unbind()
            return call(*args, *own_keys)

        return run

    def _draw_by_keys(self, graph: torch.fx.GraphModule) -> dict[torch.fx.Node, str]:
        """Replace random operations by functions of keys. Return the inputs for the keys with the drawing places."""
        from torch._dynamo.source import SyntheticLocalSource

        sites: dict[torch.fx.Node, str] = {}
        if self.sizes is None:
            return sites
        last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
        draws: list[tuple[torch.fx.Node, Function, int, Tensor | None]] = []
        for node in [node for node in graph.graph.nodes if node.op.startswith("call_") and _needs_scope(node)]:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda given: given.meta.get("example_value"))
            function = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
            fake: Any = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            key, count = None, 0
            if fake is not None:
                with fake.fake_mode, torch.no_grad(), contextlib.suppress(NotFusibleError, RuntimeError, TypeError):
                    key = torch.empty(2, sum(self.sizes), dtype=torch.int32, device=fake.device)
                    count = calls_by_keys(function, self.sizes, key, args, kwargs)
            draws.append((node, function, count, key))
        # Draws of one module count up in their order, so all of them have keys or none.
        without = {node.meta[_PLACE] for node, _, count, _ in draws if not count}
        for node, function, count, key in draws:
            place, keys = node.meta[_PLACE], []
            for _ in range(count if place not in without else 0):
                with graph.graph.inserting_after(last):
                    last = graph.graph.placeholder(f"keys_{len(sites)}")
                last.meta["example_value"] = key
                last._dynamo_source = SyntheticLocalSource(last.name)
                sites[last] = place
                keys.append(last)
            if keys:
                drawn = torch._dynamo.allow_in_graph(drawn_by_keys(function, self.sizes))
                node.op, node.target, node.args = "call_function", drawn, (keys, *node.args)
        graph.recompile()
        return sites

    def _in_parts(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """Return a graph as a callable: compiled, or its parts compiled or called under the scope."""
        parts: dict[torch.fx.Node, int] = {}
        kinds: list[tuple[bool, str]] = []  # of each part: whether it runs under the scope, and the place or block
        for node in graph.graph.nodes:
            if not node.op.startswith("call_"):
                continue
            stack, place = list(node.meta.get("nn_module_stack", {}).values()), node.meta[_PLACE]
            path = stack[-1][0] if stack else ""
            block = next((b for b in self.regions.blocks if f".{b}." in f".{path}."), "")
            kind = (True, place) if _needs_scope(node) else (False, block)
            if kind[0]:
                name = place.lstrip("/") or "the forward"
                self.regions.cuts.add(f"{getattr(node.target, '__name__', node.target)} in {name}")
            if not kinds or kinds[-1] != kind:
                kinds.append(kind)
            parts[node] = len(kinds) - 1
        if len(kinds) < 2 and not any(is_cut for is_cut, _ in kinds):
            compiled: Function = self.compiler(graph, inputs)
            return compiled
        if any(getattr(node.target, "__name__", "") in _STATES for node in parts):
            for node in filter(_needs_scope, parts):
                function: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
                node.op, node.target = "call_function", _under_scope(function, node.meta[_PLACE])
            graph.recompile()
            return _source(graph)
        from torch.fx.passes.split_module import split_module

        whole: torch.fx.GraphModule = split_module(graph, nn.Module(), lambda node: parts[node])
        for name, child in list(whole.named_children()):
            assert isinstance(child, torch.fx.GraphModule)
            is_cut, place = kinds[int(name.rpartition("_")[2])]
            child.forward = _under_scope(_source(child), place) if is_cut else self._compile(child)
        return _source(whole)

    def _compile(self, graph: torch.fx.GraphModule) -> Function:
        forward = _source(graph)

        def part(*args: Any) -> Any:
            return forward(*args)

        # A function: torch silently skips code that is in no file. It has its own code object, since torch keeps
        # compiled graphs by code. Otherwise torch would try all parts of all blocks in turn.
        wrapper = FunctionType(part.__code__.replace(), part.__globals__, part.__name__, None, part.__closure__)
        dynamic = False if self.regions.exact else None
        call = torch.compile(wrapper, fullgraph=True, dynamic=dynamic, backend=self.compiler)

        def run(*args: Any) -> Any:
            from torch._dynamo.exc import TorchDynamoException

            try:
                return call(*args)
            except TorchDynamoException as error:
                raise _failed(error) from error

        return run


# Begin and end of a context in a graph: no cut is possible in between.
_STATES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_saved_tensors_hooks_disable"})


def _writes(node: torch.fx.Node) -> bool:
    """Return True if an operation of a graph may write to one of its inputs. Names with i are of operator.iadd, say."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.startswith("i") or name.endswith(("_", "setitem"))
    return by_name or any(given is True for given in node.args) or bool({"inplace", "out"} & node.kwargs.keys())


def _needs_scope(node: torch.fx.Node) -> bool:
    target = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return getattr(target, "cuts_graphs", False) or belongs_to_grains(target, node.args, node.kwargs)


def _source(graph: torch.fx.GraphModule) -> Function:
    """Return the graph's forward. Reading `code` makes torch write it: until then forward is a placeholder."""
    assert graph.code
    return graph.forward


def _under_scope(call: Function, place: str = "") -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        scope = active_scope()
        with torch._C._EnableTorchFunction(), scope.sites.inside(place) if scope else contextlib.nullcontext():
            return call(*args, **kwargs)

    return run
