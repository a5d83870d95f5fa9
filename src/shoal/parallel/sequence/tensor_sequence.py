"""Sequence parallelism: between the layer pairs of a block each rank of the tensor axis has some positions.

The method follows Korthikanti et al. (arXiv 2205.05198). A pair begins with an all-gather of positions instead of a
copy, and ends with a reduce-scatter instead of an all-reduce. Norms, dropout and residual sums compute 1/N of the
positions. All ranks prove the blocks together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError, ShoalError, first_line
from shoal.parallel.axis_collectives import TensorAxis, divide, join
from shoal.parallel.model.sharded_model import TensorSlice
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.sequence.plan import edges_of
from shoal.parallel.sequence.positions import (
    SEQUENCE,
    BlockEnds,
    BlockRole,
    PartDropout,
    Path,
    Span,
    Stream,
    surround,
    tensors_by_path,
    with_tensors,
)
from shoal.parallel.sequence.trace import BlockTrace, observe
from shoal.parallel.sequence.trial import OF_PARAMETER, BlockTrial, computed
from shoal.parallel.tensor.heads import sizes
from shoal.parallel.tensor.layers import Column, Entry, Row
from shoal.parallel.tensor.plan import TensorPlan
from shoal.parallel.tensor.tensor_parallel import apply
from shoal.plans.accounting.collectives import SizedCollective
from shoal.plans.accounting.model_parallel import LayerPair, Positions, sharded_loss, stream, tensor_parallel


class FeatureStream(Stream):
    """Sequence with pairs that divide features: their modules compute all positions of slices."""

    def refusal(self, block: str, conflict: str, remedy: str) -> ShoalError:
        """Return the error for a block with another use than in the first batch."""
        return JobError(
            given=f"tensor.sequence with the block {block}",
            conflict=conflict,
            remedy="call the blocks in evaluation and with all batches as in the first, or write "
            "tensor.sequence = false",
        )

    def is_part(self, tensor: Any) -> bool:
        """Return True if a tensor has this rank's positions only."""
        assert self.span is not None
        return isinstance(tensor, Tensor) and tensor.ndim > SEQUENCE and tensor.shape[SEQUENCE] == self.span.size

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's positions of a whole tensor. Collective in the backward: the axis, an all-gather."""
        assert self.span is not None
        return self.span.scatter(whole, SEQUENCE, self.axis)

    def join(self, part: Tensor) -> Tensor:
        """Return all positions for use in slices.

        Collective: the axis, an all-gather; in the backward a reduce-scatter.
        """
        assert self.span is not None
        return join(part, self.axis, SEQUENCE).narrow(SEQUENCE, 0, self.span.length)

    def divide(self, term: Tensor) -> Tensor:
        """Return this rank's positions of the sum of the ranks' terms. Collective: the axis, a reduce-scatter."""
        assert self.span is not None
        missing = self.span.size * self.axis.degree - self.span.length
        return divide(F.pad(term, (0, 0) * (term.ndim - 2) + (0, missing)) if missing else term, self.axis, SEQUENCE)


@dataclass(frozen=True)
class PairByPositions:
    """Modules of a pair by name; positions are gathered at the columns, or at the module `around` the columns."""

    columns: tuple[str, ...]
    row: str
    around: str = ""

    def give(self, model: nn.Module, stream: FeatureStream) -> None:
        """Make the divided pair take and return parts of the positions."""
        entry = Entry(stream.join, len(self.columns), always=True)  # gathering is expensive
        if self.around:
            entry = Entry(lambda tensor: tensor)
            surround(model.get_submodule(self.around), functools.partial(_joined, stream))
        for name in self.columns:
            model.get_submodule(name).tensor_role = Column(entry)  # type: ignore[assignment]
        model.get_submodule(self.row).tensor_role = Row(stream.divide)  # type: ignore[assignment]


@dataclass
class FeatureBlockRole(BlockRole):
    """Role of a block that divides positions between its pairs, while each pair divides features."""

    stream: FeatureStream

    def dropouts(self, span: Span, ndim: int) -> AbstractContextManager[Any]:
        """Return the context in which dropout of tensors shaped like the hidden state is that of a part."""
        return PartDropout(span, lambda t: SEQUENCE if t.ndim == ndim and self.stream.is_part(t) else None)


def _joined(stream: FeatureStream, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a module around a pair's columns that reads the number of positions from its input.

    Collective: the axis, an all-gather; in the backward a reduce-scatter.
    """
    args, kwargs = _with_wholes(stream, stream.join, args, kwargs)
    return forward(*args, **kwargs)


def _on_wholes(stream: FeatureStream, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a module within a block that needs all positions, on each rank.

    Collective: the axis, an all-gather in the forward and one in the backward.
    """
    args, kwargs = _with_wholes(stream, stream.whole, args, kwargs)
    result = forward(*args, **kwargs)
    assert stream.span is not None
    length = stream.span.length
    outputs = {p: t for p, t in tensors_by_path(result) if t.ndim > 2 and t.shape[SEQUENCE] == length}
    return with_tensors(result, {path: stream.part(tensor) for path, tensor in outputs.items()})


def _with_wholes(stream: FeatureStream, make: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> Any:
    """Replace parts among the arguments by tensors with all positions."""
    wholes: dict[int, Tensor] = {}  # the same tensor may be query, key and value
    replacements: dict[Path, Tensor] = {}
    for path, tensor in tensors_by_path([args, kwargs]):
        if stream.is_part(tensor) and tensor.is_floating_point() and tensor.ndim > 2:
            if id(tensor) not in wholes:
                wholes[id(tensor)] = make(tensor)
            replacements[path] = wholes[id(tensor)]
    return with_tensors([args, kwargs], replacements)


@dataclass(frozen=True)
class SequenceBlock(BlockEnds):
    """Block for sequence parallelism. `wholes`: inner modules that compute all positions on each rank.

    `partial`: parameters with a gradient of this rank's positions only. `parts`: modules that return these positions.
    """

    pairs: tuple[PairByPositions, ...]
    wholes: tuple[str, ...]
    partial: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def give(self, block: nn.Module, name: str, stream: FeatureStream) -> None:
        """Apply the division to a block that is already divided along its features."""
        for pair in self.pairs:
            pair.give(block, stream)
        for inner in self.wholes:
            surround(block.get_submodule(inner), functools.partial(_on_wholes, stream))
        surround(block, FeatureBlockRole(name, self, stream))


@dataclass(frozen=True)
class SequencePlan:
    """Blocks by name, lines for people, and the parameters with gradients that become sums over the axis."""

    blocks: Mapping[str, SequenceBlock]
    notes: tuple[str, ...]
    partial: tuple[str, ...] = ()

    def apply(self, model: nn.Module, axis: TensorAxis) -> dict[str, Callable[[Tensor], Tensor]]:
        """Change blocks of a divided model in place; return the conversions of modules' outputs to wholes, by name."""
        outputs: dict[str, Callable[[Tensor], Tensor]] = {}
        stream = FeatureStream(axis)
        for name, block in self.blocks.items():
            if block.opens:
                stream = FeatureStream(axis)
            block.give(model.get_submodule(name), name, stream)
            outputs |= {f"{name}.{inner}": stream.whole_output for inner in block.parts}
            if not block.closes:
                outputs[name] = stream.whole_output
        return outputs


def plan_sequence(subject: ModelTrial, plan: TensorPlan, axis: TensorAxis, device: torch.device) -> SequencePlan:
    """Plan sequence parallelism for the blocks of a whole model that `plan` will divide. Collective: the axis."""
    try:
        trace = observe(subject.model, subject.loss, subject.batch, axis.degree, subject.values)[0]
    except ShoalError as error:
        return SequencePlan({}, (f"no block computes parts of a sequence: {error.conflict}",))
    bench = _Bench(subject, plan, axis, device)
    blocks, failures = {}, dict[str, list[str]]()
    for name, block in trace.blocks.items():
        result = bench.prove(name, block)
        if isinstance(result, str):
            failures.setdefault(result, []).append(name)
        else:
            blocks[name] = result
    notes = [f"whole sequences in {', '.join(failed)}: {why}" for why, failed in failures.items()]
    names = {id(p): name for name, p in subject.model.named_parameters()}
    partial = {
        names[id(subject.model.get_submodule(name).get_parameter(inner))]
        for name, block in blocks.items()
        for inner in block.partial
    }
    used_outside = set(trace.outside)  # parameters that code or modules outside these blocks use
    for name, module in subject.model.named_modules():
        if not any(name == block or name.startswith(f"{block}.") for block in blocks):
            used_outside |= {names[id(p)] for p in module._parameters.values() if p is not None}
    shared = sorted(partial & used_outside)
    if shared:
        return SequencePlan({}, (f"no block computes parts of a sequence: {shared[0]} is used past its block too",))
    if blocks:
        notes.insert(0, f"{len(blocks)} blocks compute 1/{axis.degree} of the positions between their pairs")
    elif not notes:
        notes.append("no block computes parts of a sequence: the model repeats none that take [batch, positions, ...]")
    # A block that alone uses another block's output follows that block directly.
    follows = {name: source for name, source in edges_of(trace).items() if name in blocks and source in blocks}
    linked = {
        name: replace(block, opens=name not in follows, closes=name not in follows.values())
        for name, block in blocks.items()
    }
    return SequencePlan(linked, tuple(notes), tuple(sorted(partial)))


def _obstacle(block: BlockTrace, own: TensorPlan) -> str | None:
    """Return why a block is not tested, or None."""
    if not own.pairs:
        return "it has no pair of layers"
    if len(block.results) != 1:
        return f"it returns {len(block.results)} tensors"
    shape = block.shapes[block.hidden]
    for dropped in block.dropouts:
        if len(dropped) < 4 and tuple(dropped[:2]) != tuple(shape[:2]):
            return f"it drops elements of a tensor of shape {list(dropped)}"
    for function, drawn in block.random:
        if function == "batch_norm" or block.length in drawn[1:]:
            return f"{function}() of a tensor of shape {list(drawn)} would see a part of the positions"
    return None


class _Bench:
    """Prover of blocks. A result applies to all blocks of the same structure."""

    def __init__(self, subject: ModelTrial, plan: TensorPlan, axis: TensorAxis, device: torch.device) -> None:
        self._subject, self._plan, self._axis, self._device = subject, plan, axis, device
        self._known: dict[Any, SequenceBlock | str] = {}

    def prove(self, name: str, block: BlockTrace) -> SequenceBlock | str:
        """Return the block, or why it computes whole sequences. Collective: the axis."""
        own = _within(self._plan, name)
        why = _obstacle(block, own)
        if why is not None:
            return why
        module = self._subject.model.get_submodule(name)
        key = repr(module), tuple(block.operations), tuple(block.shapes.items()), str(own.to_json())
        if key not in self._known:
            for pairs, wholes in itertools.product(_ways(own), _regions(module, own)):
                divided = SequenceBlock(True, True, block.hidden, block.results[0], pairs, wholes)
                self._known[key] = self._try(name, block, own, divided)
                if not isinstance(self._known[key], str):
                    break
        return self._known[key]

    def _try(self, name: str, block: BlockTrace, own: TensorPlan, divided: SequenceBlock) -> SequenceBlock | str:
        trial = BlockTrial.of(self._subject.model, name, self._subject.values, block, self._device)
        parts = apply(trial.divided, own, self._axis).parts
        divided.give(trial.divided, name, FeatureStream(self._axis))
        try:
            split = computed(trial.divided, trial.arguments)
        except Exception as error:
            return f"it raises {type(error).__name__} on a part of the positions: {first_line(error)}"
        partial = []
        for key, wanted in trial.whole.values.items():
            name = key.removeprefix(OF_PARAMETER).strip()
            part = parts[name] if key.startswith(OF_PARAMETER) else TensorSlice.whole(wanted.shape)
            if self._all(trial.is_same(key, split.values[key], part.take(wanted))):
                continue
            total = split.values[key].clone()
            dist.all_reduce(total, group=self._axis.group)
            is_sum = key.startswith(OF_PARAMETER) and part.is_whole
            if not is_sum or not self._all(trial.is_same(key, total, wanted)):
                return f"{key} is another where each rank has a part of the positions"
            partial.append(name)
        is_part: dict[str, bool] = {}  # modules with outputs that are shorter along the sequence, and only there
        for inner, wholes in trial.whole.shapes.items():
            pairs = list(zip(wholes, split.shapes.get(inner, []), strict=False))
            is_part[inner] = bool(pairs) and len(pairs) == len(wholes)
            for whole, shape in pairs:
                differ = [d for d in range(len(shape)) if len(whole) != len(shape) or shape[d] != whole[d]]
                is_part[inner] &= len(whole) == len(shape) and differ == [SEQUENCE]
        return replace(divided, partial=tuple(partial), parts=tuple(inner for inner in is_part if is_part[inner]))

    def _all(self, right: bool) -> bool:
        """Return True if `right` is True on all ranks. Collective: the axis, an all-reduce of a number."""
        on_all = torch.tensor([float(right)], device=self._device)
        dist.all_reduce(on_all, dist.ReduceOp.MIN, group=self._axis.group)
        return bool(on_all)


def _within(plan: TensorPlan, block: str) -> TensorPlan:
    """Return the plan for the modules of a block, by their names in the block."""
    prefix = f"{block}."

    def inside(names: Any) -> tuple[str, ...]:
        return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def local(name: str) -> str:
        return f"{name}.".removeprefix(prefix).removesuffix(".")

    pairs = tuple(p.renamed(local) for p in plan.pairs if f"{p.candidate.owner}.".startswith(prefix))
    return TensorPlan(pairs, inside(plan.gathered), inside(plan.rows))


def _ways(own: TensorPlan) -> list[tuple[PairByPositions, ...]]:
    """Return two ways to gather: at the columns, and at the modules around them, in case their code reads the shape."""
    candidates = [p.candidate for p in own.pairs]
    plain = tuple(PairByPositions(c.columns, c.row) for c in candidates)
    around = []
    for candidate in candidates:
        parents = {name.rpartition(".")[0] for name in candidate.columns}
        shared = parents.pop() if len(candidate.columns) > 1 and len(parents) == 1 else ""
        around.append(PairByPositions(candidate.columns, candidate.row, shared))
    return [plain] if plain == tuple(around) else [plain, tuple(around)]


def _regions(block: nn.Module, own: TensorPlan) -> list[tuple[str, ...]]:
    """Return inner modules to compute whole: around cut layers without a pair, or around all layers without a pair."""
    paired = [name for p in own.pairs for name in (*p.candidate.columns, p.candidate.row)]
    cut = [*own.gathered, *own.rows]
    wide = [
        name for name, m in block.named_modules() if any(p is not None and p.ndim > 1 for p in m._parameters.values())
    ]
    first = _tops(block, cut, paired)
    second = _tops(block, [name for name in wide if name and name not in paired], paired)
    return [first] if first == second else [first, second]


def _tops(block: nn.Module, names: list[str], paired: list[str]) -> tuple[str, ...]:
    """Return the largest modules that contain these, but no module of a pair."""
    modules: list[str] = []
    for name in names:
        steps = name.split(".")
        tops = (".".join(steps[: n + 1]) for n in range(len(steps)))
        top = next(t for t in tops if not any(f"{p}.".startswith(f"{t}.") for p in paired))
        if isinstance(block.get_submodule(top), nn.ModuleList | nn.ModuleDict):
            top = name
        if top not in modules:
            modules.append(top)
    return tuple(modules)


# -------------------------------------------------------------------------------------------------------------- traffic


# Of the traffic: everything is float32.
_ITEMSIZE = 4


def tensor_traffic(
    plan: TensorPlan, sequences: SequencePlan, rows: int, degree: int, microbatches: Sequence[int]
) -> list[SizedCollective] | None:
    """Return the collectives that the tensor axis sends for microbatches of these sample counts.

    The model is divided by `plan` and was traced with a batch of `rows` samples; sequences are taken to be as long as
    in that batch. None if a block has modules that compute all positions on every rank (`wholes`).
    """
    if any(block.wholes for block in sequences.blocks.values()):
        return None
    sent: list[SizedCollective] = []
    names = list(sequences.blocks)
    for samples in microbatches:

        def num_bytes(shape: tuple[int, ...], samples: int = samples) -> int:
            """Return a tensor's bytes for `samples`, if its first dim counts samples, else as traced."""
            scales = shape[0] % rows == 0 if len(shape) != 2 else shape[0] == rows
            return prod(shape) * _ITEMSIZE * (samples if scales else rows) // rows

        opened = 0
        for pair in plan.pairs:
            block = next((b for b in names if pair.candidate.row.startswith(f"{b}.")), None)
            columns, row = plan.shapes[pair.candidate.columns[0]], plan.shapes[pair.candidate.row]
            for into, out in zip(columns, row, strict=True):
                layers = LayerPair(num_bytes(into.input), num_bytes(out.output), into.needs_gradient)
                where = Positions(into.input[1], degree) if block is not None else None
                sent += tensor_parallel([layers], [], 1, positions=where)
                if where is not None and block is not None:
                    begun = sum(sequences.blocks[name].opens for name in names[: names.index(block) + 1])
                    if opened < begun:
                        opened += 1
                        sent.append(stream(layers.output_bytes, where, 1))
        for name in plan.rows:
            for call in plan.shapes[name]:
                sent += tensor_parallel([LayerPair(0, num_bytes(call.output), False)], [], 1)
        for name in plan.gathered:
            for call in plan.shapes[name]:
                entry = LayerPair(num_bytes(call.input), 0, call.needs_gradient)
                size = call.output[call.feature_dim]
                largest = num_bytes(call.output) // size * max(sizes(size, degree))
                gathered = [] if name in plan.sliced else [largest * degree]
                sent += tensor_parallel([entry], gathered, 1)
        for targets, smoothed in plan.losses:
            sent += sharded_loss(targets * samples // rows, 1, smoothed, _ITEMSIZE)
    return sent
