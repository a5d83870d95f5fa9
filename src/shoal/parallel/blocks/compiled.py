"""Compilation of a model's blocks by torch.compile, except for operations by grain.

torch captures the blocks as graphs without the active GrainScope. Operations that the scope divides by grains (random
numbers, batch statistics) are cut out of each graph. They run unchanged, under the scope, between compiled parts. A
mask or a mean is therefore the same with and without compilation. See docs/decisions/0013-recompute-and-compile.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import PlanError, SettingWarning
from shoal.numerics.grain_randomness import belongs_to_grains
from shoal.numerics.precision import Precision
from shoal.parallel.blocks.recompute import Recomputed, recomputed
from shoal.parallel.model.structure import repeated_blocks
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline

_CUDA_GRAPHS = "triton.cudagraphs"
# Blocks that differ in a number (such as the layer's index) compile separately, and count against one limit.
_MOST_GRAPHS = 128


def compile_blocks(model: nn.Module, plan: Plan, precision: Precision, pipeline: Pipeline | None = None) -> list[str]:
    """Compile a model's blocks, or the whole model if it repeats none, at their first forward with gradients.

    The function changes `forward` of module instances. Forwards without gradients, as in an evaluation, are not
    compiled.
    Returns: the names of what is compiled. Raises: PlanError if there is no compiler.
    """
    kind = plan.execution.compile
    if kind == "none":
        return []
    if not isinstance(precision.products(), contextlib.nullcontext):
        given = f"execution.compile = {kind!r} has no effect: on this processor each product of {precision.compute}"
        warnings.warn(f"{given} is computed in float32", SettingWarning, stacklevel=2)
        return []
    _require_compiler(precision.device)
    backend = Backend(_options(kind, precision.device, plan.execution.exact), plan.execution.exact)
    if pipeline is not None:  # what a stage receives and sends stays outside of the graphs
        return pipeline.stages.compile(lambda name, forward: Compiled(name, forward, backend))
    blocks: list[Recomputed] = recomputed(model)
    for block in blocks:  # the backward calls the compiled forward again
        block.forward = Compiled(block.name, block.forward, backend)
    if blocks:
        return [block.name for block in blocks]
    modules = {b.name: b.module for b in repeated_blocks(model)} or {type(model).__name__: model}
    for name, module in modules.items():
        module.forward = Compiled(name, module.forward, backend)
    return list(modules)


def _require_compiler(device: torch.device) -> None:
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


def _options(kind: str, device: torch.device, exact: bool) -> dict[str, Any]:
    """Return Inductor's options for a mode of torch.compile, and prepare this process for compilation."""
    # Loaded only here: the imports take more than a second.
    dynamo, inductor = importlib.import_module("torch._dynamo"), importlib.import_module("torch._inductor")
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MOST_GRAPHS)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, 4 * _MOST_GRAPHS)
    # torch causes the warning itself: to capture a graph, it reads `.grad` of every tensor.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    options = dict(inductor.list_mode_options(kind)) if kind != "default" else {}
    if device.type == "cpu":
        # Otherwise a pool of processes stays with each rank; one process compiles C++ for all the blocks in seconds.
        inductor.config.compile_threads = 1
        if options.pop(_CUDA_GRAPHS, False):
            rest = "" if kind == "reduce-overhead" else "; products are tuned"
            message = f"execution.compile = {kind!r} has no effect on cpu beyond 'default': no CUDA graphs{rest}"
            warnings.warn(message, SettingWarning, stacklevel=3)
    # Draws that the cuts miss come from torch's own generators, where Computer notices them.
    options["fallback_random"] = True
    if exact and hasattr(inductor.config, "deterministic"):
        options["deterministic"] = True
    return options


class Compiled:
    """Forward of a block, compiled if gradients are enabled, once for each set of shapes.

    If torch cannot capture the block as one graph, it runs uncompiled, with a warning. In exact mode that is an error,
    since another rank might have captured it.
    """

    def __init__(self, name: str, forward: Callable[..., Any], backend: Backend) -> None:
        self.name, self.forward, self._backend = name, forward, backend
        self._compiled: Callable[..., Any] | None = None
        self._given_up = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the compiled forward: a copy of the model compiles its own."""
        return {**self.__dict__, "_compiled": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output."""
        if self._given_up or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        if self._compiled is None:
            # With a graph per shape, the kernels of exact mode do not depend on the shapes seen before.
            dynamic = False if self._backend.exact else None
            self._compiled = torch.compile(self.forward, backend=self._backend, fullgraph=True, dynamic=dynamic)
        from torch._dynamo.exc import TorchDynamoException

        try:
            with torch._C.DisableTorchFunction():
                return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:  # raised before anything was computed
            why = f"{type(error).__name__}: {_first_lines(error)}"
            if self._backend.exact:
                raise PlanError(
                    given=f"a plan with execution.compile in exact mode, and {self.name}",
                    conflict=f"it cannot be compiled, or not for one more shape: {why}",
                    remedy="write execution.compile = 'none', or give it batches of fewer different shapes",
                ) from error
            self._given_up = True
            warnings.warn(f"{self.name} is not compiled: {why}", SettingWarning, stacklevel=2)
        return self.forward(*args, **kwargs)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3])[:300] or type(error).__name__


@dataclass(frozen=True, eq=False)
class Backend:
    """torch.compile backend for captured graphs.

    One object serves all blocks, so that equal blocks share their graphs.
    """

    options: dict[str, Any]
    exact: bool
    compiler: str | Callable[..., Any] = "inductor"

    def __deepcopy__(self, memo: Any) -> Backend:
        return self

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the graph as a callable: its parts compiled, or called under the scope."""
        nodes = list(graph.graph.nodes)
        own = {node: _needs_scope(node) for node in nodes if node.op.startswith("call_")}
        for child in graph.modules():
            if child is not graph and isinstance(child, torch.fx.GraphModule):
                hidden = [n for n in child.graph.nodes if n.op.startswith("call_") and _needs_scope(n)]
                if hidden:
                    raise RuntimeError(f"{hidden[0].target} within a function that is one operation of the graph")
        if not any(own.values()):
            return self._compile(graph)
        if any(getattr(n.target, "__name__", "") in _STATES for n in own):
            return _under_scope(graph.forward)
        from torch.fx.passes.split_module import split_module

        parts: dict[torch.fx.Node, int] = {}
        kinds: list[bool] = []
        for node in nodes:
            if node in own:
                if not kinds or kinds[-1] != own[node]:
                    kinds.append(own[node])
                parts[node] = len(kinds) - 1
        whole: torch.fx.GraphModule = split_module(graph, nn.Module(), lambda node: parts[node])
        for name, child in list(whole.named_children()):
            assert isinstance(child, torch.fx.GraphModule)
            scoped = kinds[int(name.rpartition("_")[2])]
            child.forward = _under_scope(_source(child)) if scoped else self._compile(child)
        return _source(whole)

    def _compile(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        forward = _source(graph)

        def part(*args: Any) -> Any:
            return forward(*args)

        # A function: torch silently skips code that is in no file. It has its own code object, since torch keeps
        # compiled graphs by code. Otherwise torch would try all parts of all blocks in turn.
        wrapper = FunctionType(part.__code__.replace(), part.__globals__, part.__name__, None, part.__closure__)
        call = torch.compile(
            wrapper,
            fullgraph=True,
            dynamic=False if self.exact else None,
            backend=self.compiler,
            options=dict(self.options) or None,
        )

        def run(*args: Any) -> Any:
            from torch._dynamo.exc import TorchDynamoException
            from torch._inductor.exc import InductorError

            try:
                return call(*args)
            except (TorchDynamoException, InductorError) as error:
                raise PlanError(
                    given="a plan with execution.compile",
                    conflict=f"torch's compiler failed: {type(error).__name__}: {_first_lines(error)}",
                    remedy="write execution.compile = 'none'",
                ) from error

        return run


# Begin and end of a context in a graph: no cut is possible in between.
_STATES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_saved_tensors_hooks_disable"})


def _needs_scope(node: torch.fx.Node) -> bool:
    target = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return belongs_to_grains(target, node.args, node.kwargs)


def _source(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return the graph's forward. Reading `code` makes torch write it: until then forward is a placeholder."""
    assert graph.code
    return graph.forward


def _under_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return call(*args)

    return run
