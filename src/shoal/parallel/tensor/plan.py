"""Tensor-parallel plan of a model, module by module: decided and proven on one rank, sent as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.errors import JobError, PlanError, first_line
from shoal.parallel.model.trial import Values
from shoal.parallel.tensor.layers import kind, num_outputs, output_dims
from shoal.parallel.tensor.pairs import (
    PairCandidate,
    ProvenPair,
    candidates,
    cuts,
    obstacle,
    styles,
)
from shoal.parallel.tensor.proof import Bench, NotProvenError, OutputDiffersError
from shoal.parallel.tensor.trace import LayerShapes, TensorTrace, observe

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


def decide(model: nn.Module, trace: TensorTrace, values: Values | None, degree: int) -> TensorPlan:
    """Return the plan of a model with proven pairs. Without `values` the proofs use random numbers.

    Raises: PlanError if nothing can be cut into `degree` parts.
    """
    prover = _Prover(model, trace, values, degree)
    notes, holders = _whole(model, trace, degree), _holders(model)
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
        why: NotProvenError = NotProvenError(f"no heads or features for {self._degree} ranks")
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
