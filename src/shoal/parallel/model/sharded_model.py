"""Sharded model: this rank's shard of the parameters and buffers, under the names of the undivided module."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.mesh import Mesh
from shoal.errors import JobError
from shoal.numerics.flat import raw_bytes
from shoal.parallel.model.parameter_hooks import ParameterHooks
from shoal.parallel.model.tensor_slice import TensorSlice
from shoal.plans.accounting.collectives import SizedCollective
from shoal.plans.accounting.model_parallel import SlicedBlock, Staged

# Tensors under paths, each with the part that it is of a logical one.
TensorSlices = dict[str, tuple[TensorSlice, Tensor]]


def local(tensor: Tensor) -> Tensor:
    """This rank's own memory of a tensor: of a DTensor its local tensor, without a gradient's history."""
    to_local = getattr(tensor, "to_local", None)
    own = tensor if to_local is None else to_local()
    return own.detach() if own.requires_grad else own


def laid_out(own: Tensor, like: Any) -> Tensor:
    """This rank's memory of a tensor as the DTensor that `like` is; itself where that is none."""
    if not hasattr(like, "to_local"):
        return own
    from torch.distributed.tensor import DTensor

    layout = like.device_mesh, like.placements
    return DTensor.from_local(own, *layout, run_check=False, shape=like.shape, stride=like.stride())


def cut_of(tensor: Tensor, part: TensorSlice) -> TensorSlice:
    """The slice of `part` on this rank where `tensor`, which stands for it, is a DTensor that is cut further."""
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout: Any = tensor  # a DTensor
    shape, offset = compute_local_shape_and_global_offset(layout.shape, layout.device_mesh, layout.placements)
    return part.narrow(0, offset[0], offset[0] + shape[0])


# Makes of this rank's output of a module the whole model's; None where nothing can.
Output = Callable[[Tensor], Tensor]


@dataclass
class ModelDivision:
    """Division of a model over the axes, one after the other; names are of the undivided model.

    `parts` of what is cut, `absent` what other ranks hold. `partial`: parameters whose gradient, after the backward, is
    a partial sum over axes of the mesh, and these axes. `outputs`: modules that give other tensors than in the whole
    model, and what makes these of them, collectively over the ranks that compute the same grains. `is_elsewhere`:
    whether a forward is in modules that another rank computes. `sends`: what forwards and backwards of microbatches of
    so many samples send over a tensor axis, if there is a formula. `staged`: the stages of a pipeline, `sliced`: the
    blocks of a context axis. `cut`: what a rank would have of a parameter of that shape, if it held any. `notes` say
    how and why, a line each. `hooks`: those of the undivided model's parameters. `writing`: modules whose forward may
    write their parameters.
    """

    parts: dict[str, TensorSlice] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    partial: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: dict[str, Output | None] = field(default_factory=dict)
    is_elsewhere: Callable[[], bool] = lambda: False
    staged: Staged | None = None
    sliced: tuple[SlicedBlock, ...] = ()
    cut: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape
    sends: Callable[[Sequence[int]], Sequence[SizedCollective] | None] | None = None
    notes: list[str] = field(default_factory=list)
    hooks: ParameterHooks = field(default_factory=ParameterHooks)
    writing: set[nn.Module] = field(default_factory=set)

    def add_partial(self, names: Iterable[str], axis: str) -> None:
        """Notes that gradients are also partial over `axis`."""
        for name in names:
            self.partial[name] = (*self.partial.get(name, ()), axis)


def replaced(name: str) -> JobError:
    """The error of a parameter in whose place the job's code has put something else."""
    return JobError(
        given=f"a model, loss or callback that puts another tensor in the place of the parameter {name}",
        conflict="the optimizer and the checkpoints have the parameter that model() made; nothing trains another",
        remedy="make every parameter in model(); change its values in the optimizer's step (an optimizer hook), or by "
        "torch.nn.utils.parametrize in the model",
    )


class ShardedModel:
    """One rank's shard of a model, with the other ranks' tensors on the meta device.

    `divided`: whether any rank lacks something of the model; `divides_state`: of the optimizer's state.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module,
        division: ModelDivision | None = None,
        *,
        by_rank: Sequence[Mapping[str, Any]] = (),
        divides_state: bool = False,
        hooks: ParameterHooks | None = None,
    ) -> None:
        """Of a model without a division every rank holds everything; else `by_rank` has each rank's parts, as JSON.

        `hooks`: those taken off the parameters, where there is no division that has them.
        """
        self.mesh, self.model = mesh, model
        self.divided = division is not None
        self.division = division or ModelDivision()
        self.hooks = hooks or self.division.hooks
        self.divides_state = divides_state or self.divided
        self.dtypes = {p.dtype for p in model.parameters()}
        self._by_rank = by_rank

    @classmethod
    def gathered(cls, mesh: Mesh, model: nn.Module, division: ModelDivision) -> ShardedModel:
        """Of a divided model that has its memory. Collective: all ranks, a JSON gather."""
        own = cls(mesh, model, division)
        parts = {name: part.to_json() for name, (part, _) in own.tensors().items()}
        return cls(mesh, model, division, by_rank=mesh.gather_json(parts))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of each on this rank, once however many names a parameter has."""
        return ((name, p) for name, p in self.model.named_parameters() if not p.is_meta)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and buffer of each on this rank."""
        return ((name, b) for name, b in self.model.named_buffers() if not b.is_meta)

    def part(self, name: str, tensor: Tensor) -> TensorSlice:
        """The part of the logical tensor `name` that this rank's `tensor` is."""
        return cut_of(tensor, self.division.parts.get(name) or TensorSlice.whole(tensor.shape))

    def tensors(self) -> TensorSlices:
        """Parameters and buffers on this rank, in this rank's own memory."""
        named = [*self.parameters(), *self.buffers()]
        return {name: (self.part(name, tensor), local(tensor)) for name, tensor in named}

    def state_dict(self) -> TensorSlices:
        """The model's state dict: what `tensors` has under every name that it has, without what it does not persist."""
        found = self.model.state_dict(keep_vars=True)
        names = {id(t): name for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        return {
            key: (self.part(names[id(t)], t), local(t))
            for key, t in found.items()
            if isinstance(t, Tensor) and not t.is_meta
        }

    def key_names(self) -> dict[str, str]:
        """Each key of the model's state dict, held by this rank or not, and the name that `tensors` has for it."""
        names = {id(t): name for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        found = self.model.state_dict(keep_vars=True)
        return {key: names[id(t)] for key, t in found.items() if isinstance(t, Tensor) and id(t) in names}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape of every parameter of the model, on this rank or not."""
        parts = self.division.parts
        return {n: parts[n].shape if n in parts else tuple(p.shape) for n, p in self.model.named_parameters()}

    def state(self, tensors: Mapping[str, Tensor]) -> TensorSlices:
        """The optimizer's tensors by path, which begins with the parameter's name.

        Raises: JobError for state of a divided parameter that is not divided as the parameter is.
        """
        parts = {name: self.part(name, p) for name, p in self.parameters()}
        found: TensorSlices = {}
        for path, tensor in tensors.items():
            part = parts.get(path.partition("/")[0])
            if part is not None and tuple(tensor.shape) == part.local_shape:
                found[path] = part, tensor
            elif part is None or part.is_whole or tensor.numel() == 1:
                found[path] = TensorSlice.whole(tensor.shape), tensor
            else:
                raise JobError(
                    given=f"an optimizer whose state {path} has shape {list(tensor.shape)}",
                    conflict=f"this rank holds a part of shape {list(part.local_shape)} of that parameter",
                    remedy="use an optimizer whose state has the shape of the parameter, or the data axis, or "
                    'shard.level = "optimizer", which divide no parameter',
                )
        return found

    def room(self, known: Mapping[str, Any], names: Container[str]) -> TensorSlices:
        """Memory for the optimizer's tensors of these parameters, and of its groups, of those that a checkpoint has."""
        parts, absent = {name: self.part(name, p) for name, p in self.parameters()}, self.absent()
        found: TensorSlices = {}
        for path, entry in known.items():
            owner = path.partition("/")[0]
            part, shape = parts.get(owner), tuple(entry["shape"])
            if part is not None and owner not in names:
                continue
            if part is None and owner in absent:
                continue
            mine = part if part is not None and part.shape == shape else TensorSlice.whole(shape)
            found[path] = mine, torch.empty(mine.local_shape, dtype=getattr(torch, entry["dtype"]))
        return found

    def absent(self) -> set[str]:
        """The names of parameters and buffers that other ranks hold."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name for name, tensor in named if tensor.is_meta}

    def counts(self, name: str) -> bool:
        """Whether this rank is the first of all that holds what it holds of it; True where nothing is divided."""
        return self._is_first(name, range(self.mesh.rank))

    def counts_buffer(self, name: str) -> bool:
        """Whether it is the first of those that compute the same grains."""
        place = self.mesh.layout.coordinate
        here = place(self.mesh.rank)
        same = [r for r in range(self.mesh.rank) if place(r)[1:3] == (here.data, here.shard)]
        return self._is_first(name, same)

    def _is_first(self, name: str, others: Iterable[int]) -> bool:
        if not self._by_rank:
            return True
        mine, nothing = self._by_rank[self.mesh.rank], object()
        return name in mine and all(self._by_rank[r].get(name, nothing) != mine[name] for r in others)


def entries(held: TensorSlices) -> dict[str, list[Any]]:
    """Shard as JSON: dtype, shape of the whole, ranges; by path."""
    return {
        path: [str(t.dtype).removeprefix("torch."), list(part.shape), part.to_json()]
        for path, (part, t) in held.items()
    }


def first_holders(told: list[dict[str, Any]], path: str) -> list[int]:
    """The first rank of each different part of a tensor, from every rank's `entries`."""
    found: list[int] = []
    for rank, own in enumerate(told):
        if path in own and not any(told[other][path][:3] == own[path][:3] for other in found):
            found.append(rank)
    return found


# The whole initial value of a parameter or buffer, by its name.
Whole = Callable[[str], Tensor]


def materialise(
    model: nn.Module, whole: Whole, division: ModelDivision, parameters: torch.device, buffers: torch.device
) -> None:
    """Gives every tensor on the meta device memory and this rank's part of its initial value.

    `parameters` and `buffers` are their devices. What is absent stays on the meta device. A parameter under several
    names stays one. No more than one whole value is in memory at a time.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    made: dict[int, Tensor] = {}
    for name, tensor in named:
        if tensor.is_meta and name not in division.absent:
            part = cut_of(tensor, division.parts.get(name) or TensorSlice.whole(tensor.shape))
            device = parameters if isinstance(tensor, nn.Parameter) else buffers
            value = part.take(whole(name)).to(device=device, dtype=tensor.dtype, copy=True).contiguous()
            value = laid_out(value, tensor)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for key, old in home.items():
                if old is not None and id(old) in made:
                    home[key] = made[id(old)]  # type: ignore[assignment]


def whole_tensors(model: ShardedModel, held: TensorSlices) -> Iterator[tuple[str, Tensor | None]]:
    """Each path of any rank in order, with the whole tensor on rank 0's CPU and None on the others; one at a time.

    Collective: all ranks, a JSON gather and a message for each part that rank 0 lacks, where anything is divided.
    """
    mesh = model.mesh
    if not model.divides_state or mesh.world_size == 1:
        for path in sorted(held):
            yield path, held[path][1].cpu() if mesh.rank == 0 else None
        return
    told = mesh.gather_json(entries(held))
    for path in sorted(set().union(*told)):
        holders = first_holders(told, path)
        dtype, shape, _ = told[next(iter(holders))][path]
        whole = torch.empty(shape, dtype=getattr(torch, dtype)) if mesh.rank == 0 else None
        for rank in holders:
            part = TensorSlice.from_json(shape, told[rank][path][2])
            if mesh.rank == rank != 0:
                dist.send(raw_bytes(held[path][1].cpu()), 0)
            elif whole is not None and rank == 0:
                part.put(whole, held[path][1].cpu())
            elif whole is not None:
                received = torch.empty(part.local_shape, dtype=whole.dtype)
                dist.recv(raw_bytes(received), rank)
                part.put(whole, received)
        yield path, whole
