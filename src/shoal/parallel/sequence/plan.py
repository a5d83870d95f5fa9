"""Context-parallel plan: the arguments of each block to cut, from traces.

Models that cannot be divided are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import JobError, PlanError
from shoal.parallel.sequence.attention import dropout_refusal, refuse_degree
from shoal.parallel.sequence.positions import SEQUENCE, BlockEnds, Path, refusal
from shoal.parallel.sequence.trace import BlockTrace, ContextTrace
from shoal.plans.accounting.model_parallel import SlicedBlock
from shoal.plans.legal import HOLD_BLOCKS, NO_BLOCKS


@dataclass(frozen=True)
class BlockPlan(BlockEnds):
    """Division of one block.

    `cuts`: the arguments cut along a dim; `whole`: the arguments that stay whole. `dropouts`: by number of dims, the
    sequence's dim of a dropout's input. `outputs`: the sequence's dim of each inner module's output. None: there is
    none; -1: it cannot be determined.
    """

    cuts: Mapping[Path, int]
    whole: frozenset[Path]
    dropouts: Mapping[int, int | None]
    outputs: Mapping[str, int | None]


@dataclass(frozen=True)
class ContextPlan:
    """Divisions of the blocks by name, parameters with partial gradients, and lines for people.

    `sliced`: the blocks for the planner's formulas, for sequences as long as those of the small batch.
    """

    blocks: Mapping[str, BlockPlan]
    partial: tuple[str, ...]
    notes: tuple[str, ...]
    sliced: tuple[SlicedBlock, ...] = ()


def decide(
    traces: Sequence[ContextTrace], names: Mapping[str, Sequence[str]], degree: int, num_cuts: int = 1
) -> ContextPlan:
    """Return the plan. `names`: each block's parameters. `num_cuts`: number of parts of the heads on another axis.

    Raises: PlanError, JobError for a model that cannot be divided so.
    """
    first, other = traces[0], traces[-1] if len(traces) > 1 else None
    if not first.blocks:
        raise PlanError(given=f"context = {degree}", conflict=NO_BLOCKS, remedy=HOLD_BLOCKS)
    edges = edges_of(first)
    blocks = {}
    for name, block in first.blocks.items():
        _refuse(name, block, degree, num_cuts)
        twin = other.blocks.get(name) if other is not None else None
        cuts = {}
        shapes, others = block.shapes, twin.shapes if twin is not None else {}
        for path, shape in shapes.items():
            if path != block.hidden and path not in block.masks:
                dims = _sequence_dims(shape, others.get(path), block.length)
                if dims and (twin is None or len(dims) == 1):
                    cuts[path] = dims[0]
                elif dims:
                    what = f"it takes a tensor of shape {list(shape)} that is no attention mask"
                    remedy = "use F.scaled_dot_product_attention with that tensor as attn_mask, or context = 1"
                    raise refusal(name, what, remedy)
        outputs: dict[str, int | None] = {}
        for inner, inner_shapes in block.outputs.items():
            pairs = zip(inner_shapes, twin.outputs[inner] if twin is not None else inner_shapes, strict=True)
            dim = _one(_sequence_dims(a, b if twin else None, block.length) for a, b in pairs)
            # Another length is not that of the positions, such as the number of tokens that a router gives an expert.
            # It differs between ranks, which would not all take part in a gather of it.
            is_positions = dim is None or (dim > 0 and all(shape[dim] == block.length for shape in inner_shapes))
            outputs[inner] = dim if is_positions else -1
        dropouts: dict[int, int | None] = {}
        for i, shape in enumerate(block.dropouts):
            dim = _one([_sequence_dims(shape, twin.dropouts[i] if twin is not None else None, block.length)])
            if (
                dropouts.setdefault(len(shape), dim) != dim
                or dim == -1
                or (dim is not None and shape[dim] != block.length)
            ):
                what = (
                    f"it drops elements of a tensor of shape {list(shape)}, whose positions are not a dim of their own"
                )
                raise refusal(name, what, "use dropout on [batch, positions, features], or p = 0")
        blocks[name] = BlockPlan(
            opens=name not in edges,
            closes=name not in edges.values(),
            hidden=block.hidden,
            result=block.results[0],
            cuts=cuts,
            whole=frozenset(shapes) - cuts.keys() - {block.hidden},
            dropouts=dropouts,
            outputs=outputs,
        )
    partial = first.inside | {p for name in first.blocks for p in names[name]}
    both = sorted(partial & first.outside)
    if both:
        raise JobError(
            given=f"a context axis with a model that uses {both[0]} inside of its blocks and past them",
            conflict="one use computes with a part of the sequence and the other with all of it",
            remedy="use context = 1, or a parameter of its own for each",
        )
    stacks = [name for name, block in blocks.items() if block.opens]
    note = f"{len(blocks)} blocks compute with 1/{degree} of the positions each, from {', '.join(stacks)} on"
    return ContextPlan(blocks, tuple(sorted(partial)), (note,))


def edges_of(trace: ContextTrace) -> dict[str, str]:
    """Map a block to its predecessor, if it takes only the predecessor's output and nothing else uses that output."""
    followers: dict[str, set[str]] = {}
    for name, block in trace.blocks.items():
        for source in block.sources:
            followers.setdefault(source or "", set()).add(name)
    edges = {}
    for name, block in trace.blocks.items():
        sources = set(block.sources)
        source = next(iter(sources)) or ""
        follows = len(sources) == 1 and source not in ("", name)
        if follows and followers[source] == {name} and not trace.blocks[source].used_elsewhere:
            edges[name] = source
    return edges


def _sequence_dims(shape: torch.Size, other: torch.Size | None, length: int) -> list[int]:
    """Return the dims of sequence length: those that differ between two lengths, else those of its size."""
    if other is not None:
        return [d for d, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]
    dims = [d for d, size in enumerate(shape) if size == length]
    return [SEQUENCE] if len(shape) == 3 and SEQUENCE in dims else dims


def _one(dims_of_each: object) -> int | None:
    dims = {tuple(each) for each in dims_of_each}  # type: ignore[attr-defined]
    each = dims.pop() if len(dims) == 1 else (-1, -1)
    return None if not each else each[0] if len(each) == 1 else -1


def _refuse(name: str, block: BlockTrace, degree: int, num_cuts: int) -> None:
    length = block.length
    if any(len(shape) > 2 and tuple(shape[-2:]) == (length, length) for shape in block.softmaxes):
        what = "it computes attention by a softmax of its own, which a rank with some of the positions cannot"
        raise refusal(name, what, 'use F.scaled_dot_product_attention (in Transformers attn_implementation="sdpa")')
    if block.attention_dropout:
        raise dropout_refusal(name, block.attention_dropout)
    if "multi_head_attention_forward" in block.operations:
        what = "it uses nn.MultiheadAttention, whose attention is out of reach"
        raise refusal(name, what, "use F.scaled_dot_product_attention on [batch, heads, positions, width]")
    for function, shape in block.random:
        if function == "batch_norm" or length in shape[1:]:
            what = f"{function}() of a tensor of shape {list(shape)} would draw or average over a part of the positions"
            raise refusal(name, what, "use dropout or layer norm, or context = 1")
    if len(block.results) != 1:
        what = f"it returns {len(block.results)} tensors"
        raise refusal(name, what, "return the hidden state alone, or use context = 1")
    for heads in block.heads:
        refuse_degree(heads // num_cuts, degree, name)
