"""Tensor parallelism: layers of one model divided over the ranks of the tensor axis, in place.

Each rank has slices of the weights as plain parameters under the user's own names. Parameters that are not cut are
whole on every rank, with equal gradients. See docs/decisions/0011-tensor-parallel.md.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.errors import PlanError, ShoalError, from_json
from shoal.numerics.float8 import BLOCK, Float8Linear
from shoal.numerics.float8 import cut as cut_float8
from shoal.parallel.axis_collectives import TensorAxis, enter, leave
from shoal.parallel.model.sharded_model import Runs, TensorSlice
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.tensor.heads import sizes, with_sliced
from shoal.parallel.tensor.layers import (
    Column,
    DividedLayer,
    Entry,
    Foreign,
    GatheredLayer,
    Row,
    SlicedDropout,
    SlicedOutputLayer,
    Vocabulary,
    foreign,
    give_role,
    input_runs,
    kind,
    num_outputs,
    output_dim,
    output_dims,
)
from shoal.parallel.tensor.plan import Slice, TensorPlan, decide, follow, set_count
from shoal.plans.accounting.collectives import cuts

# A module's number among its siblings.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class TensorParallel:
    """Divided model: `parts` of this rank's parameters, including whole ones, under their names in the whole model.

    `partial`: whole parameters with a gradient that is a term of a sum over the axis. `slices`: modules that return
    slices of their output in the whole model; None if the slice cannot be described.
    """

    parts: dict[str, TensorSlice]
    partial: tuple[str, ...]
    slices: dict[str, Slice | None]
    notes: dict[str, str]

    def describe(self) -> list[str]:
        """Return a line on each module with the reason, one for modules that differ only by their numbers."""
        notes = ((_NUMBER.sub("*", name or "(model)"), _NUMBER.sub("*", note)) for name, note in self.notes.items())
        counts = Counter(notes)
        return [
            f"{name}: {note}" + (f" ({count} times)" if count > 1 else "") for (name, note), count in counts.items()
        ]


def plan_model(subject: ModelTrial, axis: TensorAxis, experts: tuple[str, ...] = ()) -> TensorPlan:
    """Plan the division of a model on the axis's first rank, by tracing the loss without computing anything.

    `experts`: prefixes of the modules of experts that another axis divides.
    Collective: the axis, two broadcasts.
    Raises: on every rank, PlanError if the loss cannot be traced or nothing can be cut.
    """
    document: dict[str, Any] = {}
    error: ShoalError | None = None
    if axis.place == 0:
        try:
            trace = follow(subject.model, subject.loss, subject.batch, subject.values, axis.degree)
            plan = decide(subject.model, trace, subject.values, axis.degree, experts)
            document = {"plan": with_sliced(plan, subject, trace, axis.degree).to_json()}
        except Exception as caught:
            error = as_shoal_error(caught)
            document = {"error": to_json(error, 0, "")}
    if axis.degree > 1:
        text = bytearray(json.dumps(document).encode()) if axis.place == 0 else bytearray()
        length = torch.tensor([len(text)])
        dist.broadcast(length, group=axis.group, group_src=0)
        data = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, group=axis.group, group_src=0)
        document = json.loads(bytes(data.numpy().tobytes()))
    if error is not None:
        raise error
    if "error" in document:
        raise from_json(document["error"])
    return TensorPlan.from_json(document["plan"])


def apply(model: nn.Module, plan: TensorPlan, axis: TensorAxis) -> TensorParallel:
    """Divide `model` according to a plan."""
    names = {id(p): name for name, p in model.named_parameters()}
    parts = {name: TensorSlice.whole(p.shape) for name, p in model.named_parameters()}

    def cut(module: nn.Module, parameter: str, dim: int, runs: Runs) -> None:
        whole = module._parameters.get(parameter)
        if isinstance(module, Float8Linear) and module.float8.blocks and any(e % BLOCK for run in runs for e in run):
            raise PlanError(
                given=f'precision.products = "float8_blocks" with layout.tensor = {axis.degree}',
                conflict=f"a rank would have a part of a block of {BLOCK} x {BLOCK} of a weight, which has one scale",
                remedy=f'precision.products = "float8_rows", or a layout.tensor that cuts at multiples of {BLOCK}',
            )
        if whole is not None:
            name = names[id(whole)]
            parts[name] = TensorSlice.whole(whole.shape).select(dim, runs)

    slices: dict[str, Slice | None] = {}
    partial: list[str] = []
    for pair in plan.pairs:
        for name in (*pair.candidate.columns, pair.candidate.row):
            module, runs = model.get_submodule(name), pair.runs[name][axis.place]
            if name == pair.candidate.row:
                for parameter, columns in input_runs(module, runs).items():
                    cut(module, parameter, 1 - output_dim(module), columns)
            else:
                for parameter, dim in output_dims(module).items():
                    cut(module, parameter, dim, runs)
        partial += [names[id(model.get_parameter(name))] for name in pair.partial]
        slices |= pair.slices
    for name in (*plan.gathered, *plan.rows):
        module = model.get_submodule(name)
        start, stop = cuts(num_outputs(module), axis.degree)[axis.place :][:2]
        for parameter, dim in output_dims(module).items():
            cut(module, parameter, dim, ((start, stop),))
    _give_roles(model, plan, axis)
    pieces: dict[int, nn.Parameter] = {}  # a shared parameter stays shared
    for module in model.modules():
        for attribute, whole in list(module._parameters.items()):
            if whole is None or parts[names[id(whole)]].is_whole:
                continue
            if id(whole) not in pieces:
                own = parts[names[id(whole)]].take(whole.detach()).clone()
                pieces[id(whole)] = nn.Parameter(own, requires_grad=whole.requires_grad)
            module._parameters[attribute] = pieces[id(whole)]
    return TensorParallel(parts, tuple(dict.fromkeys(partial)), slices, dict(plan.notes))


def _give_roles(model: nn.Module, plan: TensorPlan, axis: TensorAxis) -> None:
    largest = functools.partial(axis.all_reduce, op=dist.ReduceOp.MAX)
    for pair in plan.pairs:
        entry = Entry(functools.partial(enter, axis=axis), len(pair.candidate.columns))
        for name in pair.candidate.columns:
            cut_float8(model.get_submodule(name), outputs=largest)
            give_role(model.get_submodule(name), Column(entry))
        cut_float8(model.get_submodule(pair.candidate.row), inputs=largest)
        give_role(model.get_submodule(pair.candidate.row), Row(functools.partial(leave, axis=axis)))
        for name, part in pair.slices.items():
            module = model.get_submodule(name)
            if kind(module) == "dropout" and part is not None:
                give_role(module, SlicedDropout(part.dim, part.runs[axis.place], part.size))
        for name, attribute, value in pair.attributes[axis.place] if pair.attributes else ():
            set_count(model.get_submodule(name), attribute, value)
    for name in plan.gathered:
        module = model.get_submodule(name)
        own_sizes, outputs = sizes(num_outputs(module), axis.degree), foreign(module)
        cut_float8(module, outputs=largest)
        if outputs is None:
            give_role(module, (SlicedOutputLayer if name in plan.sliced else GatheredLayer)(axis, own_sizes))
        else:
            give_role(module, Foreign(axis, own_sizes, type(module).forward, outputs.feature_dim))
            module.keep_outputs(own_sizes[axis.place])  # type: ignore[operator]
    for name in plan.rows:
        module = model.get_submodule(name)
        size = num_outputs(module)
        start, stop = cuts(size, axis.degree)[axis.place :][:2]
        give_role(module, Vocabulary(axis, start, stop, size))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(m, DividedLayer) for m in module.modules()
        ):
            # In evaluation it passes its layers' weights to one kernel and skips their forwards, unless there are
            # hooks.
            module.register_forward_pre_hook(lambda module, args: None)


def wholes(division: TensorParallel, axis: TensorAxis) -> dict[str, Callable[[Tensor], Tensor] | None]:
    """Return, for each module that returns slices, the conversion of a slice to the whole, or None."""
    return {
        name: None if part is None else functools.partial(whole_slice, part=part, axis=axis)
        for name, part in division.slices.items()
    }


def whole_slice(tensor: Tensor, part: Slice, axis: TensorAxis) -> Tensor:
    """Return a module's output in the whole model, from its slice. Collective: the axis, an all-gather."""
    sizes = [sum(stop - start for start, stop in runs) for runs in part.runs]
    dim = tensor.ndim + part.dim
    gathered = axis.all_gather(tensor, dim, sizes)
    order = [index for runs in part.runs for start, stop in runs for index in range(start, stop)]
    return gathered.index_select(dim, torch.tensor(order, device=tensor.device).argsort())
