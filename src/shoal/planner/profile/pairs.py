"""Pairs: which parameters tensor parallelism cuts, found in the trace of a model: {q, k, v} -> out, {gate, up} -> down.

As Megatron-LM (arXiv 1909.08053) has it: between the two layers of a pair features, or heads, are divided, and only the
second's output is summed; the vocabulary is divided in the embedding and in the head, whose logits stay divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.planner.profile.division import CutParameters
from shoal.planner.profile.events import OperatorEvent, OperatorTrace, StorageRef

_PRODUCTS = {"aten.mm": (0, 1, None), "aten.addmm": (1, 2, 0)}
# They mix features, or heads: what comes of them is no slice.
_MIXING = frozenset(
    (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "rms_norm",
        "convolution",
        "embedding",
        "sum",
        "mean",
    )
)
# Among sources: something that is not the output of a layer that could be cut.
_OPAQUE = "*"


@dataclass
class _Layer:
    """A matrix by its parameter's name: which dim of it gives outputs, its bias, and what became of its output."""

    name: str
    outer: int
    size: int
    sources: frozenset[str]
    bias: str | None = None
    feeds: set[str] = field(default_factory=set)
    leaks: bool = False
    along: set[str] = field(default_factory=set)  # vectors that act on its outputs, one by one


def in_pairs(trace: OperatorTrace) -> CutParameters:
    """What is cut; nothing where there are no pairs."""
    finder = _Finder(trace)
    dims: dict[str, int] = {}
    for columns, row in finder.pairs():
        for layer in columns:
            dims[layer.name] = layer.outer
            dims |= dict.fromkeys(layer.along, 0)
            if layer.bias is not None:
                dims[layer.bias] = 0
        dims[row.name] = 1 - row.outer
    if dims:
        dims |= finder.vocabulary()
    return CutParameters(_everywhere(trace, dims))


def _everywhere(trace: OperatorTrace, dims: dict[str, int]) -> dict[str, int]:
    """The same for the blocks in whose place another one was traced."""
    found = dict(dims)
    for region in trace.regions:
        if region.like is None:
            continue
        other = trace.regions[region.like].block
        own = {k: v for k, v in dims.items() if k.startswith(f"{other}.")}
        found |= {f"{region.block}.{key.removeprefix(f'{other}.')}": dim for key, dim in own.items()}
    return {key: dim for key, dim in found.items() if key in trace.weights}


class _Finder:
    def __init__(self, trace: OperatorTrace) -> None:
        self._trace = trace
        self._layers: dict[str, _Layer] = {}
        self._tables: dict[str, int] = {}  # embeddings of what is in the batch: rows
        self._weights: dict[int, tuple[str, StorageRef]] = {ref.key: (name, ref) for name, ref in trace.weights.items()}
        self._sources: dict[int, frozenset[str]] = {key: frozenset() for key in trace.constants}
        self._made: dict[int, int] = {}
        for event in trace.events:
            if event.is_backward:
                break
            self._event(event)

    def pairs(self) -> Iterator[tuple[list[_Layer], _Layer]]:
        """({columns}, row), each layer once."""
        taken: set[str] = set()
        for row in self._layers.values():
            names = row.sources
            if not names or _OPAQUE in names or names & taken or row.name in names or row.name in self._tables:
                continue
            columns = [self._layers[name] for name in names]
            if any(c.leaks or c.feeds != {row.name} or c.name in self._tables for c in columns):
                continue
            taken |= {*names, row.name}
            yield columns, row

    def vocabulary(self) -> dict[str, int]:
        """Rows of the largest embedding, and the layers outside of blocks that give as many outputs."""
        table = max(self._tables, key=lambda name: self._tables[name], default=None)
        if table is None:
            return {}
        found = {table: 0}
        for layer in self._layers.values():
            if layer.size == self._tables[table]:
                found[layer.name] = layer.outer
                if layer.bias is not None:
                    found[layer.bias] = 0
                found |= dict.fromkeys(layer.along, 0)
        return found

    def _event(self, event: OperatorEvent) -> None:
        if event.is_view:
            return
        if event.name == "aten._to_copy" and event.inputs[0].key in self._weights:
            name, _ = self._weights[event.inputs[0].key]
            self._weights[event.outputs[0].key] = name, event.outputs[0]
            self._sources[event.outputs[0].key] = frozenset()
            return
        if event.name == "aten.embedding" and event.inputs[1].key in self._trace.batch:
            name, ref = self._weights.get(event.inputs[0].key, ("", None))
            if ref is not None:
                self._tables[name] = ref.shape[0]
        layer = self._layer(event)
        sources = frozenset((layer.name,)) if layer is not None else self._outcome(event)
        for ref in (*event.outputs, *(event.inputs[i] for i in event.written)):
            self._sources[ref.key] = sources
            self._made[ref.key] = event.region

    def _layer(self, event: OperatorEvent) -> _Layer | None:
        """The layer that a product is of."""
        if event.name not in _PRODUCTS:
            return None
        a, b, c = _PRODUCTS[event.name]
        known = self._weights.get(event.inputs[b].key)
        if known is None or event.inputs[a].key in self._weights:
            return None
        name, ref = known
        given, matrix = event.inputs[a], event.inputs[b]
        outer = next((d for d in range(len(ref.shape)) if ref.stride[d] == matrix.stride[-1]), 0)
        sources = self._of(event, given)
        if name in self._layers:  # called again: it is no longer plain who feeds whom
            self._layers[name].leaks = True
            sources = frozenset((_OPAQUE,))
        for source in sources - {_OPAQUE}:
            self._layers[source].feeds.add(name)
        bias = self._weights.get(event.inputs[c].key, (None,))[0] if c is not None else None
        layer = self._layers.get(name) or _Layer(name, outer, matrix.shape[-1], sources, bias)
        layer.sources = sources
        self._layers[name] = layer
        return layer

    def _of(self, event: OperatorEvent, ref: StorageRef) -> frozenset[str]:
        if self._made.get(ref.key, event.region) != event.region:
            self._leak(self._sources.get(ref.key, frozenset()))
            return frozenset((_OPAQUE,))
        return self._sources.get(ref.key, frozenset((_OPAQUE,)))

    def _outcome(self, event: OperatorEvent) -> frozenset[str]:
        sources = frozenset[str]().union(*(self._of(event, ref) for ref in event.inputs))
        short = event.name.partition(".")[2]
        by_head = short not in ("convolution", "embedding") and all(
            event.inputs[0].shape[-1:] < (self._layers[source].size,) for source in sources - {_OPAQUE}
        )
        if _OPAQUE in sources or (short in _MIXING and not by_head) or event.name == "stand_in":
            self._leak(sources)
            return frozenset((_OPAQUE,))
        for ref in event.inputs:
            known = self._weights.get(ref.key)
            if known is not None and len(ref.shape) == 1:
                for source in sources:
                    if self._layers[source].size == ref.shape[0]:
                        self._layers[source].along.add(known[0])
        return sources

    def _leak(self, sources: frozenset[str]) -> None:
        for source in sources - {_OPAQUE}:
            self._layers[source].leaks = True
