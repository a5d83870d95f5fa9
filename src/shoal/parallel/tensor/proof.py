"""Proof of a layer pair: the module around it, whole against divided, in float64 and on random numbers.

There is no communication: this code computes each rank's share in turn. A rank's row module returns the whole's output,
so that everything after it is as in the whole. Each rank can then be checked alone:

- The input of its row module is its slice of the whole's.
- Its gradients of the weights are its slices of the whole's; those of the column modules' inputs add up.
- Every other parameter gets the whole gradient on each rank, or terms that add up (`ProvenPair.partial`).
- The module returns the same as the whole module.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from shoal.parallel.model.trial import SEED, Values, WithoutDropout, floor_of, gradients, is_same, materialised
from shoal.parallel.tensor.layers import kind, num_features, output_dim, product
from shoal.parallel.tensor.pairs import PairCandidate, ProvenPair, SectionCut, Slice, set_count
from shoal.parallel.tensor.trace import TensorTrace

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
            shape = (_RANK, weight.shape[1]), (weight.shape[0], _RANK)
            is_row, is_transposed = name == self._row, kind(layer) == "transposed"
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
