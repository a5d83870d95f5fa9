"""Traces of repeated blocks in runs of the loss: their arguments, and the dims of sequence length.

The runs are on the meta device if the model allows it, with shapes and no numbers. Two runs with sequences of two
lengths show which dims belong to the sequence.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import PlanError, first_line
from shoal.numerics.grain_randomness import draws
from shoal.numerics.operators import tensors_in
from shoal.parallel.model.structure import repeated_blocks
from shoal.parallel.model.trial import DROPOUTS, FunctionCall, FunctionTrace, Values, dropout_arguments, on_copies
from shoal.parallel.sequence.positions import Path, tensors_by_path, with_tensors
from shoal.plans.accounting.model_parallel import Attention, SlicedBlock

# A model up to this size runs with values if it does not run without them.
_REAL_BYTES = 8 << 30
# Functions that read a tensor's properties without using the tensor.
_METADATA = frozenset("__get__ size dim stride numel __len__ is_floating_point is_contiguous".split())  # noqa: SIM905

Loss = Callable[[nn.Module, Any], Any]


@dataclass
class BlockTrace:
    """Observations of one block over all its calls; arguments and operations of the first call."""

    arguments: Any = None  # [args, kwargs]
    hidden: Path = ()
    results: list[Path] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)  # by call: the block that returned the hidden state
    used_elsewhere: bool = False  # whether anything but the next block uses its output
    masks: set[Path] = field(default_factory=set)
    operations: list[str] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    attention_dropout: float = 0.0
    softmaxes: list[torch.Size] = field(default_factory=list)
    dropouts: list[torch.Size] = field(default_factory=list)
    random: list[tuple[str, torch.Size]] = field(default_factory=list)
    outputs: dict[str, list[torch.Size]] = field(default_factory=dict)  # by inner module

    @property
    def shapes(self) -> dict[Path, torch.Size]:
        """Shapes of the tensors among the arguments."""
        return {path: tensor.shape for path, tensor in tensors_by_path(self.arguments)}

    @property
    def length(self) -> int:
        """Number of positions of the hidden state."""
        return self.shapes[self.hidden][1]


@dataclass
class ContextTrace:
    """Trace of a run. `inside` and `outside`: the parameters used in blocks, and used outside of blocks."""

    blocks: dict[str, BlockTrace] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)


def observe(model: nn.Module, loss: Loss, batch: Any, degree: int, values: Values) -> list[ContextTrace]:
    """Return traces of one or two runs on copies. If possible, `degree` does not divide the first run's length.

    Raises: PlanError if the loss does not run.
    """
    small = sum(p.numel() * p.itemsize for p in model.parameters()) <= _REAL_BYTES
    error: Exception | None = None
    both = [batch]  # with sequences of two lengths, if it has sequences
    if length_of(batch) >= 3:
        first = shortened_to(batch, degree)
        both = [
            tree_map(lambda v, n=n: v[:, :n] if isinstance(v, Tensor) and v.ndim > 1 else v, batch)
            for n in (first, first + 1)
        ]
    for given in (None, values) if small else (None,):
        for batches in (both, [batch]):
            try:
                traces = []
                for each in batches:
                    with on_copies(model, loss, each, given) as (copied_model, shown):
                        watcher = _Watcher(copied_model.train())
                        with watcher:
                            loss(copied_model, shown)
                        traces.append(watcher.trace)
                return traces
            except Exception as caught:
                error = caught
    assert error is not None
    text = first_line(error, 300)
    raise PlanError(
        given=f"context = {degree}",
        conflict=f"how this model computes its loss cannot be followed: {type(error).__name__}: {text}",
        remedy="use context = 1, or a model and a loss that run on the CPU",
    ) from error


def sliced(
    trace: ContextTrace, length: int, opens: Collection[str], closes: Collection[str]
) -> tuple[SlicedBlock, ...]:
    """Return a trace's blocks for the planner's formulas, one per call, for sequences of `length`."""
    blocks: list[SlicedBlock] = []
    for name, block in trace.blocks.items():
        hidden = dict(tensors_by_path(block.arguments))[block.hidden]
        width, ends = prod(hidden.shape[2:]), (name in opens, name in closes)
        one = SlicedBlock(name, length, width, *ends, tuple(block.attentions), hidden.requires_grad)
        blocks += [one] * len(block.sources)
    return tuple(blocks)


def length_of(batch: Any) -> int:
    """Return the length of a batch's sequences; 0 if it has none."""
    lengths = {tensor.shape[1] for tensor in tensors_in(batch) if tensor.ndim > 1}
    return lengths.pop() if len(lengths) == 1 else 0


def shortened_to(batch: Any, degree: int) -> int:
    """Return the shorter of the two lengths to run, if possible no multiple of `degree`."""
    return min(4 * degree + 1, length_of(batch) - 1)


class _Watcher(FunctionTrace):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = ContextTrace()
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._block: str | None = None
        self._first = False  # whether this is the block's first call
        self._came_out: dict[int, str] = {}
        for block in repeated_blocks(model):
            if block.children is not None:
                continue
            self.hook(block.module, partial(self._after, block.name), partial(self._before, block.name))
            for name, module in block.module.named_modules():
                if name:
                    self.hook(module, partial(self._inner, block.name, name))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            arguments = [args, kwargs]
            tensors = list(tensors_by_path(arguments))
            hidden = next((p for p, t in tensors if t.is_floating_point() and t.ndim >= 3), None)
            if hidden is None:
                return
            self._first = name not in self.trace.blocks
            block = self.trace.blocks.setdefault(name, BlockTrace())
            if self._first:  # a snapshot, with copies of tensors that a block may change
                copies = {path: t.detach().clone().requires_grad_(t.requires_grad) for path, t in tensors}
                block.hidden, block.arguments = hidden, copied(with_tensors(arguments, copies))
        source = None
        for path, tensor in tensors:
            origin = self._came_out.get(id(tensor))
            if path == hidden:
                source = origin
            elif origin is not None:
                self.trace.blocks[origin].used_elsewhere = True
            self.mark(tensor, frozenset((path,)))
        block.sources.append(source)
        self._block = name

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._block != name:
            return
        self._block = None
        tensors = list(tensors_by_path(output))
        self.trace.blocks[name].results = [path for path, _ in tensors]
        self._sources.clear()
        for _, tensor in tensors:
            self._came_out[id(tensor)] = name
            self._alive.append(tensor)

    def _inner(self, block: str, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._block == block and self._first:
            shapes = [tensor.shape for tensor in tensors_in(output)]
            self.trace.blocks[block].outputs.setdefault(name, []).extend(shapes)

    def seen(self, call: FunctionCall) -> None:
        """Record uses of parameters and of the blocks' outputs, and the operations in blocks."""
        if call.name in _METADATA:
            return
        used = {self._names[id(t)] for t in call.given if id(t) in self._names}
        (self.trace.outside if self._block is None else self.trace.inside).update(used)
        if self._block is None:
            for tensor in call.given:
                if id(tensor) in self._came_out:
                    self.trace.blocks[self._came_out[id(tensor)]].used_elsewhere = True
            return
        sources = frozenset[Path]().union(*(self._sources.get(id(t), ()) for t in call.given))
        for tensor in call.results:
            self.mark(tensor, sources)
        if not self._first:
            return
        block, func, given = self.trace.blocks[self._block], call.func, call.given
        block.operations.append(call.name)
        if func is F.scaled_dot_product_attention:
            block.masks |= self._sources.get(id(call.argument(3, "attn_mask")), frozenset())
            query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
            block.heads.append(query.shape[1] if query.ndim == 4 else 0)
            if query.ndim == 4:
                needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
                widths = query.shape[-1], value.shape[-1]
                block.attentions.append(Attention(query.shape[1], key.shape[1], *widths, needs_gradient))
            block.attention_dropout = call.argument(4, "dropout_p", 0.0)
        elif func in DROPOUTS:
            if dropout_arguments(*call.args, **call.kwargs)[2]:
                block.dropouts.append(given[0].shape)
        elif draws(func):
            sizes = torch.Size(s for s in call.args if isinstance(s, int)) if not given else given[0].shape
            block.random.append((call.name, sizes))
        elif call.name == "softmax":
            block.softmaxes.append(given[0].shape)


def copied(value: Any) -> Any:
    """Return the same tensors in copies of their containers; None replaces objects that cannot be copied."""
    if isinstance(value, Tensor):
        return value
    if type(value) in (tuple, list):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    return None
