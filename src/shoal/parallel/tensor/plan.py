"""Tensor-parallel plan of a model, module by module: decided and proven on one rank, sent as JSON.

Candidates are Megatron-style pairs of layers: column-parallel modules and a row-parallel one, such as {query, key,
value} -> out and {gate, up} -> down. A trace of the loss shows them. The proof runs the module around a pair, whole
against divided, in float64 and on random numbers.

There is no communication: this code computes each rank's share in turn. A rank's row module returns the whole's output,
so that everything after it is as in the whole. Each rank can then be checked alone:

- The input of its row module is its slice of the whole's.
- Its gradients of the weights are its slices of the whole's; those of the column modules' inputs add up.
- Every other parameter gets the whole gradient on each rank, or terms that add up (`ProvenPair.partial`).
- The module returns the same as the whole module.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from shoal.errors import JobError, PlanError, first_line
from shoal.parallel.model.adapters.quantized import QuantizedLinear
from shoal.parallel.model.sharded_model import Runs
from shoal.parallel.model.trial import SEED, Values, WithoutDropout, floor_of, gradients, is_same, materialised
from shoal.parallel.tensor.layers import kind, num_features, num_outputs, output_dim, output_dims, product
from shoal.parallel.tensor.trace import OPAQUE, LayerShapes, TensorTrace, observe

# Integer attributes with these names count layers and are never widths.
_PLACES = re.compile(r"idx|index|layer_id|layer_number|^training$")
# Attributes with these names count heads: num_heads, n_head, num_key_value_heads.
_HEADS = re.compile(r"heads?$")


@dataclass(frozen=True)
class PairCandidate:
    """Candidate pair by names: `columns` may be cut along outputs, `row` along inputs; `owner` contains all of them."""

    columns: tuple[str, ...]
    row: str
    owner: str


@dataclass(frozen=True)
class SectionCut:
    """Partition of a candidate: each section of each output is cut into `units`, assigned to the ranks in order.

    `attributes` of modules count heads or features and are set to the slice's: (module, attribute, whole value).
    """

    sections: Mapping[str, tuple[int, ...]]
    units: int
    degree: int
    attributes: tuple[tuple[str, str, int], ...] = ()

    def bounds(self, size: int, place: int) -> tuple[int, int]:
        """Return one rank's slice [start, stop) of `size` features that form `units` consecutive units."""
        step = size // self.units
        return step * (self.units * place // self.degree), step * (self.units * (place + 1) // self.degree)

    def runs(self, name: str, place: int) -> Runs:
        """Return the outputs of a column module on one rank."""
        sizes = self.sections[name]
        bounds = (self.bounds(size, place) for size in sizes)
        return tuple(
            (start + low, start + high) for start, (low, high) in zip(accumulate((0, *sizes)), bounds, strict=False)
        )

    def values(self, place: int) -> Iterator[tuple[str, str, int]]:
        """Yield the attributes with their values on one rank."""
        for module, attribute, value in self.attributes:
            low, high = self.bounds(value, place)
            yield module, attribute, high - low


@dataclass(frozen=True)
class Slice:
    """Slices of a module's output by rank: `runs` of the whole `size` along `dim`, which is counted from the end."""

    dim: int
    size: int
    runs: tuple[Runs, ...]


@dataclass(frozen=True)
class ProvenPair:
    """Proven pair as plain values. `runs`, by module and rank: outputs, or inputs of the row module.

    `slices`: modules that return slices, None if the slice cannot be described. `partial`: parameters that are whole on
    every rank, each with a part of the gradient. `attributes` by rank: (module, attribute, value).
    """

    candidate: PairCandidate
    runs: Mapping[str, tuple[Runs, ...]]
    slices: Mapping[str, Slice | None] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    attributes: tuple[tuple[tuple[str, str, int], ...], ...] = ()

    def renamed(self, name: Callable[[str], str]) -> ProvenPair:
        """Return the same pair with each module's name replaced by `name` of it."""
        chosen = self.candidate
        return ProvenPair(
            PairCandidate(tuple(map(name, chosen.columns)), name(chosen.row), name(chosen.owner)),
            {name(n): runs for n, runs in self.runs.items()},
            {name(n): part for n, part in self.slices.items()},
            tuple(map(name, self.partial)),
            tuple(tuple((name(n), a, v) for n, a, v in place) for place in self.attributes),
        )


def candidates(model: nn.Module, trace: TensorTrace, usable: Iterable[str]) -> list[PairCandidate]:
    """Return candidates from a trace and the model's own `tp_plan`, each module once, in the order of the calls."""
    free = set(usable)
    pairs = []
    for row, calls in trace.inputs.items():
        columns = calls[0]
        if row not in free or not columns or OPAQUE in columns or any(sources != columns for sources in calls):
            continue
        outputs = [trace.outputs[name] for name in columns]
        if not columns <= free or any(output.feeds != {row} or output.leaks for output in outputs):
            continue
        pairs.append(_candidate([name for name in trace.inputs if name in columns], row, trace))
        free -= {row, *columns}
    # A tp_plan pairs a "rowwise" module with the "colwise" modules nearest to it.
    said = {name: style for name, style in styles(model).items() if name in free}
    colwise = [name for name, style in said.items() if style == "colwise"]
    for row in [name for name, style in said.items() if style == "rowwise"]:
        owner = row
        near: list[str] = []
        while owner and not near:
            owner = owner.rpartition(".")[0]
            near = [name for name in colwise if name.startswith(f"{owner}.")]
        if near:
            colwise = [name for name in colwise if name not in near]
            pairs.append(_candidate(near, row, trace))
    return pairs


def obstacle(name: str, trace: TensorTrace) -> str | None:
    """Return why a linear module's output cannot stay a slice, if a dropout is the reason."""
    output = trace.outputs.get(name)
    return next((why for why in output.leaks if "mask" in why), None) if output is not None else None


def _candidate(columns: list[str], row: str, trace: TensorTrace) -> PairCandidate:
    split = zip(*(name.split(".") for name in (*columns, row)), strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, split)]
    while common and ".".join(common) not in trace.calls:
        common.pop()
    return PairCandidate(tuple(columns), row, ".".join(common))


def styles(model: nn.Module) -> dict[str, str]:
    """Return each module's style in a `tp_plan` of the model or of a module in it, as transformers defines them."""
    style_of: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    for prefix, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None) or getattr(module, "tp_plan", None)
        plan = plan or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        for pattern, style in plan.items():
            whole = re.escape(f"{prefix}.{pattern}" if prefix else pattern).replace(r"\*", r"[^.]+")
            style_of |= {name: str(style) for name in names if re.fullmatch(whole, name)}
    return style_of


def cuts(model: nn.Module, trace: TensorTrace, candidate: PairCandidate, degree: int) -> Iterator[SectionCut]:
    """Yield ways to cut a candidate, the likeliest first; none if there are fewer heads than ranks."""
    outputs = {name: trace.outputs[name] for name in candidate.columns if name in trace.outputs}
    sizes = {name: num_features(model.get_submodule(name))[1] for name in candidate.columns}
    by_sections = {name: _sections(size, outputs.get(name)) for name, size in sizes.items()}
    plain: dict[str, tuple[int, ...]] = {name: (size,) for name, size in sizes.items()}
    heads = {h for output in outputs.values() for h in output.heads}
    groups = {g for output in outputs.values() for g in output.groups}
    row = model.get_submodule(candidate.row)
    num_inputs = num_features(row)[0]
    first: list[SectionCut] = []
    # A view as three dims may be cut inside sections, [3, heads, width], or across them, [heads, 3, width].
    ways = [(by_sections, heads), (plain, heads)] + ([(plain, groups)] if groups else [])
    for sections, counted in ways:
        parts = [size for sizes_of_module in sections.values() for size in sizes_of_module]
        units = math.gcd(*counted) if counted else math.gcd(*parts, num_inputs)
        cut = SectionCut(sections, units, degree)
        if units < degree or any(size % units for size in (*parts, num_inputs)) or cut in first:
            continue
        bounds = tuple(cut.bounds(num_inputs, place) for place in range(degree))
        if not isinstance(row, QuantizedLinear) or row.keeps_blocks(bounds):
            first.append(cut)
    yield from first
    for cut in first:
        for attributes in _attributes(model.get_submodule(candidate.owner), cut, heads | groups):
            yield SectionCut(cut.sections, cut.units, degree, attributes)


def _sections(size: int, output: Any) -> tuple[int, ...]:
    if output is None:
        return (size,)
    for sizes in sorted(output.sections):
        if sum(sizes) == size:
            return tuple(sizes)
    slices = sorted(output.slices)
    ends = [0, *(start + length for start, length in slices)]
    if len(slices) > 1 and ends[-1] == size and [start for start, _ in slices] == ends[:-1]:
        return tuple(length for _, length in slices)
    return (size,)


def _attributes(owner: nn.Module, cut: SectionCut, heads: set[int]) -> Iterator[tuple[tuple[str, str, int], ...]]:
    """Yield attributes that may count cut features: one by one, then all that count heads, or sections, or either.

    The last groups are all attributes named as heads, and those with the config's attributes that a forward may read.
    """
    sections = {size for sizes in cut.sections.values() if len(sizes) > 1 for size in sizes}
    counts: list[tuple[str, str, int]] = []
    named: list[tuple[str, str, int]] = []
    configured: list[tuple[str, str, int]] = []
    for name, module in owner.named_modules():
        if kind(module) is None:
            for attribute, value in _integers(module, cut.units):
                if value in heads | sections and not _PLACES.search(attribute):
                    counts.append((name, attribute, value))
                if _HEADS.search(attribute):
                    named.append((name, attribute, value))
            config = getattr(module, "config", None)
            numbers = _integers(config, cut.units) if hasattr(config, "__dict__") else ()
            configured += [(name, f"config.{a}", v) for a, v in numbers if _HEADS.search(a)]
    groups: list[tuple[tuple[str, str, int], ...]] = [(entry,) for entry in counts]
    groups += [tuple(e for e in counts if e[2] in kinds) for kinds in (heads, sections, heads | sections)]
    groups += [tuple(named), (*named, *configured)]
    yield from (group for i, group in enumerate(groups) if group and group not in groups[:i])


def _integers(holder: Any, units: int) -> list[tuple[str, int]]:
    return [(name, value) for name, value in vars(holder).items() if type(value) is int and value % units == 0]


def set_count(module: nn.Module, attribute: str, value: int) -> None:
    """Set an attribute of a module. If it belongs to a shared object, the module gets its own copy of the object."""
    holder, _, name = attribute.rpartition(".")
    if holder:
        setattr(module, holder, copy.copy(getattr(module, holder)))
    setattr(getattr(module, holder) if holder else module, name, value)


_WHOLE = Slice(0, 0, ())
# Rank of the matrices in a proof: with a higher rank, slices are less likely to agree by chance.
_RANK = 8
# Largest number of other parameters of a module: 1 GiB.
_MOST = 1 << 27


class NotProvenError(Exception):
    """The divided module differs from the whole one."""


class OutputDiffersError(NotProvenError):
    """The divided module returns a different output, which its caller may not use."""


@dataclass
class _ProofRun:
    """Results of a run of the module, by module name and call."""

    entries: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    seen: dict[str, list[list[Tensor]]] = field(default_factory=dict)  # outputs of each inner module, by call
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Bench:
    """Module of one candidate, ready to run whole and cut; random if the model has no `values`.

    Linear layers multiply by random matrices of low rank: how they divide is known, and memory is only needed for
    activations. `_fixed` contains each layer's factor that is no parameter. It follows the weight in the row module,
    and precedes the weight in all others.
    """

    def __init__(self, model: nn.Module, trace: TensorTrace, candidate: PairCandidate, values: Values | None) -> None:
        self._candidate = candidate
        self._prefix = f"{candidate.owner}." if candidate.owner else ""
        self._columns = [name.removeprefix(self._prefix) for name in candidate.columns]
        self._row = candidate.row.removeprefix(self._prefix)
        generator = torch.Generator().manual_seed(SEED)
        self._fixed: dict[str, Tensor] = {}
        module = model.get_submodule(candidate.owner)
        holders = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
        thin: dict[int, nn.Parameter] = {}  # low-rank weights by id of the model's, if nothing else uses these
        for name, layer in module.named_modules():
            weight = layer._parameters.get("weight") if kind(layer) in ("linear", "transposed") else None
            if weight is None or id(weight) in trace.foreign_uses or holders[id(weight)] > 1:
                continue
            is_row, is_transposed = name == self._row, kind(layer) == "transposed"
            shape = (_RANK, num_features(layer)[is_transposed]), (weight.shape[0], _RANK)
            own, fixed = shape if is_row != is_transposed else shape[::-1]
            thin[id(weight)] = nn.Parameter(torch.randn(own, dtype=torch.float64, generator=generator))
            self._fixed[name] = torch.randn(fixed, dtype=torch.float64, generator=generator) / math.sqrt(max(fixed))
            if not is_transposed:
                self._fixed[name] = self._fixed[name].T
        others = sum(p.numel() for p in module.parameters() if id(p) not in thin)
        if others > _MOST:
            raise NotProvenError(f"{others:,} parameters beside its linear layers are too many")
        self._module = materialised(model, candidate.owner, values, generator, thin)
        real = functools.partial(_argument, real=trace.real if values is not None else {}, generator=generator)
        self._args, self._kwargs = tree_map(real, trace.calls[candidate.owner])
        self._whole = self._run(None, 0)

    def prove(self, cut: SectionCut) -> ProvenPair:
        """Return the pair for this cut. Raises: NotProvenError, or what the user's module raises on slices."""
        runs = [self._run(cut, place) for place in range(cut.degree)]
        partial = self._compare(cut, runs)
        names = {name: tuple(cut.runs(name, place) for place in range(cut.degree)) for name in self._candidate.columns}
        num_inputs = num_features(self._module.get_submodule(self._row))[0]
        names[self._candidate.row] = tuple((cut.bounds(num_inputs, place),) for place in range(cut.degree))
        attributes = tuple(
            tuple((f"{self._candidate.owner}.{name}".strip("."), a, v) for name, a, v in cut.values(place))
            for place in range(cut.degree)
        )
        slices: dict[str, Slice | None] = {}  # of inner modules; None if a slice cannot be described
        for name, wholes in self._whole.seen.items():
            others = [run.seen[name] for run in runs]
            if any([len(call) for call in seen] != [len(call) for call in wholes] for seen in others):
                slices[name] = None
                continue
            kinds = {
                self._slice(cut, name, whole, [seen[i][j] for seen in others])
                for i, call in enumerate(wholes)
                for j, whole in enumerate(call)
            }
            if kinds - {_WHOLE}:
                slices[name] = next(iter(kinds)) if len(kinds) == 1 else None
        for name, part in slices.items():
            if part is None and kind(self._module.get_submodule(name)) == "dropout":
                raise NotProvenError(f"what {name} sees")
        return ProvenPair(
            self._candidate,
            names,
            {self._prefix + name: part for name, part in slices.items()},
            tuple(self._prefix + name for name in partial),
            attributes,
        )

    def _run(self, cut: SectionCut | None, place: int) -> _ProofRun:
        """Run the module once, whole without a cut; the module and its arguments do not change."""
        module = copy.deepcopy(self._module)
        run = _ProofRun()
        for name, layer in module.named_modules():
            if name in self._columns:
                layer.forward = functools.partial(self._column_forward, run, (name, layer), cut, place)
            elif name == self._row:
                layer.forward = functools.partial(self._row_forward, run, layer, cut, place)
            elif kind(layer) == "dropout":
                layer.forward = nn.Identity().forward
            elif name in self._fixed:
                layer.forward = functools.partial(_thin_product, layer, self._fixed[name])
            if name:
                layer.register_forward_hook(functools.partial(_watch, run.seen.setdefault(name, [])))
        for name, attribute, value in cut.values(place) if cut is not None else ():
            set_count(module.get_submodule(name), attribute, value)
        args, kwargs = tree_map(fresh, (self._args, self._kwargs))
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), WithoutDropout(inside_attention=True):
            torch.manual_seed(SEED)
            output = module(*args, **kwargs)
        run.outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        outputs = [output for output in run.outputs if output.requires_grad]
        if not outputs:
            raise NotProvenError("what it returns has no gradient")
        leaves: dict[str, Tensor] = {f"parameter {name}": p for name, p in module.named_parameters()}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        leaves |= {f"argument {i}": leaf for i, leaf in enumerate(inputs)}
        leaves |= {f"input {name} {i}": leaf for name, calls in run.entries.items() for i, leaf in enumerate(calls)}
        run.gradients = gradients(outputs, leaves)
        return run

    def _column_forward(
        self, run: _ProofRun, named: tuple[str, nn.Module], cut: SectionCut | None, place: int, /, input: Tensor
    ) -> Tensor:
        name, layer = named
        leaf = input.detach().requires_grad_()
        run.entries.setdefault(name, []).append(leaf)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        if cut is not None:
            runs = cut.runs(self._prefix + name, place)
            weight = _cut(weight, output_dim(layer), runs)
            bias = None if bias is None else _cut(bias, 0, runs)  # type: ignore[arg-type]
        return product(layer, self._before(name, leaf), weight, bias)  # type: ignore[arg-type]

    def _before(self, name: str, input: Tensor) -> Tensor:
        return input @ self._fixed[name] if name in self._fixed else input

    def _row_forward(
        self, run: _ProofRun, layer: nn.Module, cut: SectionCut | None, place: int, input: Tensor
    ) -> Tensor:
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        run.inputs.append(input.detach())
        if cut is not None:
            bounds = cut.bounds(num_features(layer)[0], place)
            weight = _cut(weight, 1 - output_dim(layer), (bounds,))
        output = self._before(self._row, product(layer, input, weight, None))
        if cut is None:
            run.results.append(output.detach())
        elif len(run.inputs) > len(self._whole.results):
            raise NotProvenError("the slice is computed with more calls than the whole")
        else:
            output = self._whole.results[len(run.inputs) - 1] + (output - output.detach())
        return output if bias is None else output + bias  # type: ignore[operator]

    def _compare(self, cut: SectionCut, runs: list[_ProofRun]) -> list[str]:
        """Return the parameters with partial gradients. Raises: NotProvenError."""
        whole = self._whole
        num_inputs = num_features(self._module.get_submodule(self._row))[0]
        floor = floor_of(whole.gradients.values())
        for place, run in enumerate(runs):
            if len(run.inputs) != len(whole.inputs) or len(run.outputs) != len(whole.outputs):
                raise NotProvenError("the slice is computed with other calls than the whole")
            bounds = (cut.bounds(num_inputs, place),)
            for a, b in zip(run.inputs, whole.inputs, strict=True):
                _same(a, _cut(b, b.ndim - 1, bounds), 0.0, f"the input of {self._row}")
            for a, b in zip(run.outputs, whole.outputs, strict=True):
                _same(a.detach(), b.detach(), 0.0, "what it returns", OutputDiffersError)
        partial = []
        of_cut = {f"parameter {name}.{which}" for name in self._columns for which in ("weight", "bias")}
        of_cut.add(f"parameter {self._row}.weight")
        for name, wanted in whole.gradients.items():
            own = [run.gradients.get(name) for run in runs]
            if any(g is None or g.shape != wanted.shape for g in own):
                raise NotProvenError(f"the gradient of {name}")
            terms = [g for g in own if g is not None]
            if name in of_cut:
                # Outside a rank's own slice the gradient is zero.
                _same(_sum(terms), wanted, floor, f"the gradient of {name}")
                if not float(wanted.norm()) and name.endswith("weight"):
                    raise NotProvenError(f"the gradient of {name} is zero")
            elif name.startswith("input "):
                _same(_sum(terms), wanted, floor, f"the gradient of the {name}")
            elif not all(is_same(g, wanted, floor) for g in terms):
                _same(_sum(terms), wanted, floor, f"the gradient of {name}")
                if name.startswith("argument "):
                    raise NotProvenError("an argument gets a part of its gradient")
                partial.append(name.removeprefix("parameter "))
        return partial

    def _slice(self, cut: SectionCut, name: str, whole: Tensor, slices: list[Tensor]) -> Slice | None:
        differ = [d for d in range(whole.ndim) if any(own.shape[d : d + 1] != whole.shape[d : d + 1] for own in slices)]
        if not differ and all(is_same(own, whole, 0.0) for own in slices):
            return _WHOLE
        if len(differ) != 1 or whole.shape[differ[0]] % cut.units:
            return None
        dim, size = differ[0], whole.shape[differ[0]]
        if name in self._columns:
            places = tuple(cut.runs(self._prefix + name, place) for place in range(cut.degree))
        else:
            places = tuple((cut.bounds(size, place),) for place in range(cut.degree))
        if all(is_same(own, _cut(whole, dim, at), 0.0) for own, at in zip(slices, places, strict=True)):
            return Slice(dim - whole.ndim, size, places)
        return None


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _argument(leaf: Any, real: Mapping[int, Tensor], generator: torch.Generator) -> Any:
    """Return numbers for an argument of the trace: those in `real` for a tensor of the batch, else random ones."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not (isinstance(leaf, FakeTensor) or leaf.is_floating_point() or leaf.is_complex()):
        return leaf.detach().clone()
    if id(leaf) in real:
        value = real[id(leaf)].detach().cpu()
        return value.double() if value.is_floating_point() else value
    if leaf.is_complex():
        return torch.randn(leaf.shape, dtype=torch.complex128, generator=generator)
    if not leaf.is_floating_point():
        return torch.ones(leaf.shape, dtype=leaf.dtype)
    value = torch.randn(leaf.shape, dtype=torch.float64, generator=generator)
    return value.requires_grad_(leaf.requires_grad)


def fresh(leaf: Any) -> Any:
    """Return a copy without history."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)


def _thin_product(layer: nn.Module, fixed: Tensor, input: Tensor) -> Tensor:
    return product(layer, input @ fixed, layer.weight, layer.bias)  # type: ignore[arg-type]


def _watch(seen: list[list[Tensor]], module: nn.Module, args: Any, output: Any) -> None:
    seen.append([leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])


def _cut(tensor: Tensor, dim: int, runs: Any) -> Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in runs], dim)


def _same(value: Tensor, wanted: Tensor, floor: float, what: str, error: type[Exception] = NotProvenError) -> None:
    if not is_same(value, wanted, floor):
        raise error(f"{what} differs")


# A model up to this size is traced with values if it does not run without them.
_REAL_BYTES = 8 << 30
_FEW_TOKENS = 64


@dataclass(frozen=True)
class TensorPlan:
    """Cuts by module: `gathered` along outputs, `rows` (embeddings) along the vocabulary; `notes` for people.

    `sliced`: modules of `gathered` with only cross entropies as consumers, which take slices. `losses`: number of
    targets and use of label smoothing of each. `shapes`: the calls of the modules that communicate.
    """

    pairs: tuple[ProvenPair, ...] = ()
    gathered: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    sliced: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    losses: tuple[tuple[int, bool], ...] = ()
    shapes: Mapping[str, tuple[LayerShapes, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TensorPlan:
        """Return the plan of a `to_json` result."""
        return TypeAdapter(cls).validate_python(document)


def follow(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    values: Values,
    degree: int,
    *,
    most_bytes: int = _REAL_BYTES,
) -> TensorTrace:
    """Return the trace of one run of the loss on copies; with `values` only if it needs them and the model is small.

    Raises: PlanError if the loss does not run; a JobError of the loss.
    """
    errors: list[Exception] = []
    small = sum(p.numel() * p.itemsize for p in model.parameters()) <= most_bytes
    for given in (None, values) if small else (None,):
        try:
            trace = observe(model, loss, batch, given)
        except JobError:  # such as for a collective of the job's own
            raise
        except Exception as error:
            errors.append(error)
            continue
        # The proofs need only the first tokens of a batch of longer sequences.
        wide = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 1]
        lengths = {leaf.shape[1] for leaf in wide}
        is_long = len(lengths) == 1 and lengths.pop() > _FEW_TOKENS
        if is_long and not any(leaf.is_floating_point() for leaf in wide):
            short = tree_map(lambda v: v[:, :_FEW_TOKENS] if isinstance(v, Tensor) and v.ndim > 1 else v, batch)
            with contextlib.suppress(Exception):
                other = observe(model, loss, short, given)
                if other.inputs == trace.inputs:
                    trace.calls, trace.real = other.calls, other.real
        return trace
    raise PlanError(
        given=f"tensor = {degree}",
        conflict=f"how this model computes its loss cannot be followed: {type(errors[0]).__name__}: "
        + _first_line(errors[0]),
        remedy="use tensor = 1, or a model and a loss that run on the CPU",
    ) from errors[-1]


def decide(
    model: nn.Module, trace: TensorTrace, values: Values | None, degree: int, experts: tuple[str, ...] = ()
) -> TensorPlan:
    """Return the plan of a model with proven pairs. Without `values` the proofs use random numbers.

    `experts`: prefixes of the modules of experts that another axis divides, which stay whole.
    Raises: PlanError if nothing can be cut into `degree` parts.
    """
    prover = _Prover(model, trace, values, degree)
    notes, holders = _whole(model, trace, degree), _holders(model)
    of_experts = [name for name, module in model.named_modules() if name.startswith(experts) and _own(module)]
    notes |= dict.fromkeys(of_experts, "whole: layout.expert divides the experts")
    linear = {name: m for name, m in model.named_modules() if kind(m) in ("linear", "transposed") and name not in notes}
    usable = [name for name, m in linear.items() if all(len(holders[id(p)]) == 1 for p in _own(m))]
    pairs, failures = [], dict[str, str]()
    for candidate in candidates(model, trace, usable):
        reader = trace.reader_within(candidate.owner)
        result = f"what {reader} computes depends on values" if reader is not None else prover.prove(candidate)
        if isinstance(result, ProvenPair):
            pairs.append(result)
        else:
            failures |= dict.fromkeys((*candidate.columns, candidate.row), result)
    for pair in pairs:
        row = pair.candidate.row
        notes |= dict.fromkeys(pair.candidate.columns, f"cut along its outputs, which {row} takes")
        notes[row] = "cut along its inputs"
    rest = [n for n, m in model.named_modules() if n not in notes and kind(m) not in (None, "dropout")]
    rows = tuple(name for name in rest if kind(model.get_submodule(name)) == "embedding")
    gathered = tuple(name for name in rest if name not in rows)
    for name in gathered:
        why = failures.get(name) or obstacle(name, trace)
        notes[name] = "cut along its outputs, gathered" + (f" ({why})" if why else "")
    if not (pairs or gathered or rows):
        widest = max((num_outputs(m) for m in model.modules() if kind(m) not in (None, "dropout")), default=1)
        raise PlanError(
            given=f"tensor = {degree}",
            conflict=f"no module of this model can be cut into {degree} parts"
            + (f": the widest has {widest} outputs" if 1 < widest < degree else ""),
            remedy=f"use tensor = {widest} at most" if 1 < widest < degree else "use tensor = 1 and more data ranks",
        )
    notes |= dict.fromkeys(rows, "cut along its rows")
    order = [name for name, _ in model.named_modules() if name in notes]
    sending = {name for p in pairs for name in (*p.candidate.columns, p.candidate.row)}.union(gathered, rows)
    shapes = {name: tuple(calls) for name, calls in trace.shapes.items() if name in sending}
    return TensorPlan(tuple(pairs), gathered, rows, notes={name: notes[name] for name in order}, shapes=shapes)


def _whole(model: nn.Module, trace: TensorTrace, degree: int) -> dict[str, str]:
    """Return the modules with their own parameters that stay whole, each with the reason."""
    said, holders = styles(model), _holders(model)
    reasons = {}
    for name, module in model.named_modules():
        # A second name for a parameter of a layer that can be cut has no influence.
        of_layers = all(any(kind(m) is not None for m in holders[id(p)]) for p in _own(module))
        if not _own(module) or (kind(module) is None and of_layers):
            continue
        why = "as its tp_plan says" if said.get(name) == "replicated" else _obstacle(name, module, trace, degree)
        if why is not None:
            reasons[name] = f"whole: {why}"
    changed = True
    while changed:  # a module that shares a parameter with a whole module stays whole
        shared_names = {id(p): name for name in reasons for p in _own(model.get_submodule(name))}
        changed = False
        for name, module in model.named_modules():
            shared = [shared_names[id(p)] for p in _own(module) if id(p) in shared_names]
            if kind(module) is not None and shared and name not in reasons:
                reasons[name] = f"whole: it shares a parameter with {shared[0]}"
                changed = True
    return reasons


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _obstacle(name: str, module: nn.Module, trace: TensorTrace, degree: int) -> str | None:
    what = kind(module)
    if what is None:
        return f"no rule to cut a {type(module).__name__}"
    tensors = _own(module)
    if not isinstance(module._parameters.get(next(iter(output_dims(module)))), Tensor):
        return "its weight is computed from others"
    if name not in trace.inputs:
        return "the loss does not call it"
    used = [trace.foreign_uses[id(p)] for p in tensors if id(p) in trace.foreign_uses]
    if used:
        return f"its parameter is used by {used[0]}"
    if what == "convolution" and module.groups != 1:
        return "its channels are in groups"
    if isinstance(module, nn.Embedding):
        odd = {"max_norm": module.max_norm, "sparse": module.sparse, "scale_grad_by_freq": module.scale_grad_by_freq}
        given = [option for option, value in odd.items() if value]
        if given:
            return f"{given[0]} needs the whole table"
        return None if module.num_embeddings >= degree else f"{module.num_embeddings} rows are too few"
    num = num_outputs(module)
    return None if num >= degree else f"{num} outputs are too few"


def _holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the modules that contain each parameter, by its id."""
    modules_of: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in _own(module):
            modules_of.setdefault(id(parameter), []).append(module)
    return modules_of


_SIMPLE = (int, float, bool, str, type(None))


class _Prover:
    """Prover of candidates. A result applies to all modules of the same structure."""

    def __init__(self, model: nn.Module, trace: TensorTrace, values: Values | None, degree: int) -> None:
        self._model, self._trace, self._values, self._degree = model, trace, values, degree
        self._known: dict[Any, tuple[str, ProvenPair | Exception]] = {}

    def prove(self, candidate: PairCandidate) -> ProvenPair | str:
        """Return the pair, or why it fails. If a module returns slices, the enclosing module may absorb them."""
        result = self._proven(candidate)
        around = candidate.owner.rpartition(".")[0]
        while around and around not in self._trace.calls:
            around = around.rpartition(".")[0]
        if isinstance(result, OutputDiffersError) and around and self._trace.reader_within(around) is None:
            wider = self._proven(replace(candidate, owner=around))
            result = wider if isinstance(wider, ProvenPair) else result
        return result if isinstance(result, ProvenPair) else str(result)

    def _proven(self, candidate: PairCandidate) -> ProvenPair | Exception:
        # Equal for modules that compute the same, judging by classes, shapes and plain attributes.
        module, prefix = self._model.get_submodule(candidate.owner), f"{candidate.owner}."
        inside = [
            (name, type(m), tuple((k, v) for k, v in vars(m).items() if isinstance(v, _SIMPLE) and "idx" not in k))
            for name, m in module.named_modules()
        ]
        shapes = tuple((name, p.shape) for name, p in module.named_parameters())
        args, kwargs = self._trace.calls[candidate.owner]
        arguments = str([tuple(a.shape) if isinstance(a, Tensor) else type(a) for a in (*args, *kwargs.values())])
        names = tuple(name.removeprefix(prefix) for name in (*candidate.columns, candidate.row))
        key = str(inside), shapes, arguments, names
        if key not in self._known:
            self._known[key] = candidate.owner, self._try(candidate)
        owner, result = self._known[key]
        if isinstance(result, Exception):
            return result
        return result.renamed(lambda name: candidate.owner + name.removeprefix(owner))

    def _try(self, candidate: PairCandidate) -> ProvenPair | Exception:
        row = self._model.get_submodule(candidate.row)
        blocks = f" in blocks of {row.quantization.block}" if isinstance(row, QuantizedLinear) else ""
        why: NotProvenError = NotProvenError(f"no heads or features{blocks} for {self._degree} ranks")
        bench = None
        for cut in cuts(self._model, self._trace, candidate, self._degree):
            try:
                bench = bench or Bench(self._model, self._trace, candidate, self._values)
            except Exception as error:
                return NotProvenError(f"cannot be tried by itself: {_first_line(error)}")
            try:
                return bench.prove(cut)
            except Exception as error:
                if not (cut.attributes or isinstance(why, OutputDiffersError)):
                    what = "differs" if isinstance(error, NotProvenError) else "raises"
                    cause = type(error) if isinstance(error, NotProvenError) else NotProvenError
                    why = cause(f"{what} as a slice: {_first_line(error)}")
        return why


def _first_line(error: Exception) -> str:
    return first_line(error) or type(error).__name__
