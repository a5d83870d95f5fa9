"""Candidates for Megatron-style layer pairs, from a trace of the loss: column-parallel modules and a row-parallel one.

Examples are {query, key, value} -> out and {gate, up} -> down. `tensor.proof` tests the candidates.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

from torch import nn

from shoal.parallel.model.tensor_slice import Runs
from shoal.parallel.tensor.layers import kind, num_features
from shoal.parallel.tensor.trace import OPAQUE, TensorTrace

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
    num_inputs = num_features(model.get_submodule(candidate.row))[0]
    first: list[SectionCut] = []
    # A view as three dims may be cut inside sections, [3, heads, width], or across them, [heads, 3, width].
    ways = [(by_sections, heads), (plain, heads)] + ([(plain, groups)] if groups else [])
    for sections, counted in ways:
        parts = [size for sizes_of_module in sections.values() for size in sizes_of_module]
        units = math.gcd(*counted) if counted else math.gcd(*parts, num_inputs)
        cut = SectionCut(sections, units, degree)
        if units >= degree and not any(size % units for size in (*parts, num_inputs)) and cut not in first:
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
