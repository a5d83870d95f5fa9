"""Sharded model: this rank's shard of the parameters and buffers, under the names of the undivided module.

A tensor slice is the index ranges of a rank's part of a tensor. Copies between slices need no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.mesh import Mesh
from shoal.errors import JobError
from shoal.numerics.operators import raw_bytes
from shoal.parallel.experts.blocks import ExpertLoads
from shoal.parallel.model.parameter_hooks import ParameterHooks
from shoal.plans.accounting.collectives import SizedCollective
from shoal.plans.accounting.model_parallel import SlicedBlock, Staged

if TYPE_CHECKING:
    from shoal.parallel.experts.gathered import GatheredBlock

# Half-open runs of indices along one dim, in the order of the local tensor.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorSlice:
    """Slice of a tensor of `shape`: along each dim the indices in `ranges`, one after the other."""

    shape: tuple[int, ...]
    ranges: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> TensorSlice:
        """Return the slice of all indices."""
        sizes = tuple(shape)
        return cls(sizes, tuple(((0, size),) for size in sizes))

    @property
    def is_whole(self) -> bool:
        """True if the slice has all elements."""
        return self == TensorSlice.whole(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""
        return math.prod(self.local_shape)

    def narrow(self, dim: int, start: int, stop: int) -> TensorSlice:
        """Return the part of this slice at its own indices [start, stop) along `dim`."""
        inside, place = [], 0
        for first, last in self.ranges[dim]:
            size = last - first
            low, high = max(start - place, 0), min(stop - place, size)
            if low < high:
                inside.append((first + low, first + high))
            place += size
        return TensorSlice(self.shape, (*self.ranges[:dim], tuple(inside), *self.ranges[dim + 1 :]))

    def select(self, dim: int, runs: Runs) -> TensorSlice:
        """Return the part with the indices in `runs` along a dim that is whole in this slice."""
        assert self.ranges[dim] == ((0, self.shape[dim]),), "a dim is cut once"
        return TensorSlice(self.shape, (*self.ranges[:dim], tuple(runs), *self.ranges[dim + 1 :]))

    def take(self, whole: Tensor) -> Tensor:
        """Return this slice of `whole`, a tensor of `shape`; a view if each dim has one run."""
        for dim, runs in enumerate(self.ranges):
            if runs == ((0, self.shape[dim]),):
                continue
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
        return whole

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Write the slice's values, of `local_shape`, into `whole`, a tensor of `shape`."""
        TensorSlice.whole(self.shape).copy(whole, self, local)

    def copy(self, target: Tensor, other: TensorSlice, source: Tensor) -> int:
        """Copy the elements in common from `source` (slice `other`) to `target` (this slice); return their number.

        Raises: ValueError if the slices are of tensors of different shapes.
        """
        if self.shape != other.shape:
            raise ValueError(f"a part of {self.shape} and one of {other.shape}")
        if self == other:
            target.copy_(source)
            return target.numel()
        pairs = zip(map(_indices, self.ranges), map(_indices, other.ranges), strict=True)
        common = [np.intersect1d(own, given, return_indices=True)[1:] for own, given in pairs]
        mine, theirs = [here for here, _ in common], [there for _, there in common]
        if not all(map(len, mine)):
            return 0
        values = _block(source, theirs)
        if _are_runs(mine):
            _block(target, mine).copy_(values)
        else:
            target[_mesh(mine)] = values.to(target)
        return math.prod(map(len, mine))

    def to_json(self) -> list[list[list[int]]] | None:
        """Return the ranges as JSON; None for the whole."""
        return None if self.is_whole else [[list(run) for run in runs] for runs in self.ranges]

    @classmethod
    def from_json(cls, shape: Iterable[int], ranges: list[list[list[int]]] | None) -> TensorSlice:
        """Return the slice of a `to_json` result."""
        if ranges is None:
            return cls.whole(shape)
        return cls(tuple(shape), tuple(tuple((start, stop) for start, stop in runs) for runs in ranges))


_Places = npt.NDArray[np.int64]


def _indices(runs: Runs) -> _Places:
    return np.concatenate([np.arange(start, stop) for start, stop in runs] or [np.empty(0, np.int64)])


def _are_runs(places: list[_Places]) -> bool:
    """Return True if each dim's indices are consecutive, so that they form a view."""
    return all(int(p[-1]) - int(p[0]) == len(p) - 1 for p in places)


def _block(tensor: Tensor, places: list[_Places]) -> Tensor:
    if not _are_runs(places):
        return tensor[_mesh(places)]
    for dim, indices in enumerate(places):
        tensor = tensor.narrow(dim, int(indices[0]), len(indices))
    return tensor


def _mesh(places: list[_Places]) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, np.ix_(*places)))


@dataclass(frozen=True)
class Outputs:
    """Output slicing of a layer that is not torch's own: `dims` of its parameters, the weight first.

    `size`: number of outputs along `feature_dim` of the layer's output, counted from the end. The layer has methods
    `tensor_outputs()`, which returns an Outputs or None, and `keep_outputs(size)`, called after its parameters are cut.
    """

    dims: dict[str, int]
    size: int
    feature_dim: int


# Tensors by path, each with its slice of the logical tensor.
TensorSlices = dict[str, tuple[TensorSlice, Tensor]]


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's memory on this rank, detached; for a DTensor, its local tensor."""
    to_local = getattr(tensor, "to_local", None)
    own = tensor if to_local is None else to_local()
    return own.detach() if own.requires_grad else own


def laid_out(own: Tensor, like: Any) -> Tensor:
    """Return this rank's memory as a DTensor laid out as `like`; the tensor itself if `like` is none."""
    if not hasattr(like, "to_local"):
        return own
    from torch.distributed.tensor import DTensor

    layout = like.device_mesh, like.placements
    return DTensor.from_local(own, *layout, run_check=False, shape=like.shape, stride=like.stride())


def cut_of(tensor: Tensor, part: TensorSlice) -> TensorSlice:
    """Return this rank's slice of `part` if `tensor`, which represents `part`, is a DTensor and cut further."""
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout: Any = tensor  # a DTensor
    shape, offset = compute_local_shape_and_global_offset(layout.shape, layout.device_mesh, layout.placements)
    return part.narrow(0, offset[0], offset[0] + shape[0])


# Converts this rank's output of a module to the whole model's output; None if that is impossible.
Output = Callable[[Tensor], Tensor]


@dataclass
class ModelDivision:
    """Division of a model over the axes, one after the other; names are those of the undivided model.

    - `parts`: slices of the tensors that are cut. `absent`: names that only other ranks have.
    - `partial`: for each parameter, the axes over which its gradient is a partial sum after the backward.
    - `outputs`: modules with outputs other than in the whole model, and the conversion to the whole model's outputs. It
      is collective over the ranks that compute the same grains.
    - `is_elsewhere`: whether a forward is currently in modules that another rank computes.
    - `sends`: messages over a tensor axis for microbatches of given numbers of samples, if there is a formula.
    - `staged`: the pipeline's stages. `sliced`: the blocks of a context axis.
    - `cut`: shape of this rank's part of a parameter with a given shape. `notes`: one line per reason.
    - `experts`: names of the parameters of experts that ranks divide. Their gradients are sums over an expert group.
      `expert_loads`: rows that this rank sends to them.
    - `gathered`: blocks with such experts in exact mode.
    - `by_position`: names of buffers that count a rank's positions of the sequences.
    - `owners`: the rank that updates a cut parameter whole, for some names of this rank's parameters.
    - `hooks`: hooks of the undivided model's parameters. `writing`: modules with a forward that may write parameters.
    - `marks`: attributes that the job gave to parameters, such as `_no_weight_decay`.
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
    marks: dict[str, dict[str, Any]] = field(default_factory=dict)
    writing: set[nn.Module] = field(default_factory=set)
    owners: dict[str, int] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    expert_loads: ExpertLoads = field(default_factory=ExpertLoads)
    gathered: list[GatheredBlock] = field(default_factory=list)
    by_position: set[str] = field(default_factory=set)

    def add_partial(self, names: Iterable[str], axis: str) -> None:
        """Record that the gradients of `names` are also partial over `axis`.

        Those of experts are not: they contain the tokens of their whole group. Equal stages have copies of them.
        """
        for name in names:
            if axis == "pipeline" or name not in self.experts:
                self.partial[name] = (*self.partial.get(name, ()), axis)


def replaced(name: str) -> JobError:
    """Return the error for a parameter that the job's code has replaced."""
    return JobError(
        given=f"a model, loss or callback that puts another tensor in the place of the parameter {name}",
        conflict="the optimizer and the checkpoints have the parameter that model() made; nothing trains another",
        remedy="make every parameter in model(); change its values in the optimizer's step (an optimizer hook), or by "
        "torch.nn.utils.parametrize in the model",
    )


class ShardedModel:
    """One rank's shard of a model, with the other ranks' tensors on the meta device.

    `divided`: whether any rank lacks a part of the model. `divides_state`: the same for the optimizer's state.
    `by_rank`: the ranges of each rank's parts, by name, as JSON.
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
        """Set the model.

        Args:
            mesh: mesh of all ranks.
            model: module with this rank's tensors.
            division: division of the model; by default every rank has everything.
            by_rank: each rank's parts as JSON.
            divides_state: whether ranks divide the optimizer's state.
            hooks: hooks taken off the parameters, if there is no division.
        """
        self.mesh, self.model = mesh, model
        self.divided = division is not None
        self.division = division or ModelDivision()
        self.hooks = hooks or self.division.hooks
        self.divides_state = divides_state or self.divided
        self.dtypes = {p.dtype for p in model.parameters()}
        self.by_rank = by_rank

    @classmethod
    def gathered(cls, mesh: Mesh, model: nn.Module, division: ModelDivision) -> ShardedModel:
        """Return the sharded model of a division with memory allocated. Collective: all ranks, a JSON gather."""
        own = cls(mesh, model, division)
        parts = {name: part.to_json() for name, (part, _) in own.tensors().items()}
        return cls(mesh, model, division, by_rank=mesh.gather_json(parts))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return name and parameter of each parameter on this rank, once even with several names."""
        return ((name, p) for name, p in self.model.named_parameters() if not p.is_meta)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of this rank's experts, if ranks divide the experts."""
        return [p for name, p in self.parameters() if name in self.division.experts and p.requires_grad]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return name and buffer of each buffer on this rank."""
        return ((name, b) for name, b in self.model.named_buffers() if not b.is_meta)

    def part(self, name: str, tensor: Tensor) -> TensorSlice:
        """Return the slice of the logical tensor `name` that this rank's `tensor` is."""
        return cut_of(tensor, self.division.parts.get(name) or TensorSlice.whole(tensor.shape))

    def tensors(self) -> TensorSlices:
        """Return this rank's parameters and buffers, in this rank's own memory."""
        named = [*self.parameters(), *self.buffers()]
        return {name: (self.part(name, tensor), local(tensor)) for name, tensor in named}

    def state_dict(self) -> TensorSlices:
        """Return the model's state dict: entries of `tensors` under all their names, if they are persistent."""
        tensors = self.model.state_dict(keep_vars=True)
        names = {id(t): name for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        return {
            key: (self.part(names[id(t)], t), local(t))
            for key, t in tensors.items()
            if isinstance(t, Tensor) and not t.is_meta
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the logical shape of every parameter of the model, including those of other ranks."""
        parts = self.division.parts
        return {n: parts[n].shape if n in parts else tuple(p.shape) for n, p in self.model.named_parameters()}

    def absent(self) -> set[str]:
        """Return the names of parameters and buffers that only other ranks have."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name for name, tensor in named if tensor.is_meta}

    def counts(self, name: str) -> bool:
        """Return True if this rank is the first of those with the same part of `name`; True if nothing is divided."""
        return self._is_first(name, range(self.mesh.rank))

    def counts_buffer(self, name: str) -> bool:
        """Return True if this rank is the first with its part of `name` among the ranks of the same grains.

        Of a buffer `by_position` it is among those of the same positions too.
        """
        place, last = self.mesh.layout.coordinate, 4 if name in self.division.by_position else 3
        here = place(self.mesh.rank)[1:last]
        same = [r for r in range(self.mesh.rank) if place(r)[1:last] == here]
        return self._is_first(name, same)

    def _is_first(self, name: str, others: Iterable[int]) -> bool:
        if not self.by_rank:
            return True
        mine, nothing = self.by_rank[self.mesh.rank], object()
        return name in mine and all(self.by_rank[r].get(name, nothing) != mine[name] for r in others)


def slices_by_rank(model: ShardedModel, name: str, shape: tuple[int, ...]) -> dict[int, TensorSlice]:
    """Return the slice of the parameter `name`, of the logical `shape`, on each rank that has one."""
    ranges = ((rank, own[name]) for rank, own in enumerate(model.by_rank) if name in own)
    return {rank: TensorSlice.from_json(shape, of_rank) for rank, of_rank in ranges}


def state_parts(model: ShardedModel) -> dict[str, TensorSlice]:
    """Return the slice of each parameter that its optimizer state has: the whole if one rank owns it."""
    named = ((name, model.part(name, p)) for name, p in model.parameters())
    return {name: TensorSlice.whole(part.shape) if name in model.division.owners else part for name, part in named}


def key_names(model: ShardedModel) -> dict[str, str]:
    """Return the name in `tensors` for each key of the model's state dict, including tensors of other ranks."""
    names = {id(t): name for name, t in [*model.model.named_parameters(), *model.model.named_buffers()]}
    tensors = model.model.state_dict(keep_vars=True)
    return {key: names[id(t)] for key, t in tensors.items() if isinstance(t, Tensor) and id(t) in names}


def state_slices(model: ShardedModel, tensors: Mapping[str, Tensor]) -> TensorSlices:
    """Return an optimizer's tensors with their slices by path, which begins with the parameter's name.

    Raises: JobError for state of a divided parameter that is not divided as the parameter is.
    """
    parts = state_parts(model)
    slices: TensorSlices = {}
    for path, tensor in tensors.items():
        part = parts.get(path.partition("/")[0])
        if part is not None and tuple(tensor.shape) == part.local_shape:
            slices[path] = part, tensor
        elif part is None or part.is_whole or tensor.numel() == 1:
            slices[path] = TensorSlice.whole(tensor.shape), tensor
        else:
            raise JobError(
                given=f"an optimizer whose state {path} has shape {list(tensor.shape)}",
                conflict=f"this rank holds a part of shape {list(part.local_shape)} of that parameter",
                remedy="use an optimizer whose state has the shape of the parameter, or the data axis, or "
                'shard.level = "optimizer", which divide no parameter',
            )
    return slices


def allocate_state(model: ShardedModel, known: Mapping[str, Any], names: Container[str]) -> TensorSlices:
    """Allocate memory for a checkpoint's optimizer tensors that belong to the parameters `names` or to groups."""
    parts, absent = state_parts(model), model.absent()
    slices: TensorSlices = {}
    for path, entry in known.items():
        owner = path.partition("/")[0]
        part, shape = parts.get(owner), tuple(entry["shape"])
        if part is not None and owner not in names:
            continue
        if part is None and owner in absent:
            continue
        mine = part if part is not None and part.shape == shape else TensorSlice.whole(shape)
        slices[path] = mine, torch.empty(mine.local_shape, dtype=getattr(torch, entry["dtype"]))
    return slices


def entries(slices: TensorSlices) -> dict[str, list[Any]]:
    """Return a shard as JSON by path: dtype, shape of the whole, ranges."""
    return {
        path: [str(t.dtype).removeprefix("torch."), list(part.shape), part.to_json()]
        for path, (part, t) in slices.items()
    }


def first_holders(by_rank: list[dict[str, Any]], path: str) -> list[int]:
    """Return the first rank of each distinct part of a tensor, from every rank's `entries`."""
    ranks: list[int] = []
    for rank, own in enumerate(by_rank):
        if path in own and not any(by_rank[other][path][:3] == own[path][:3] for other in ranks):
            ranks.append(rank)
    return ranks


# Returns the whole initial value of a parameter or buffer, by name.
Whole = Callable[[str], Tensor]


def materialise(
    model: nn.Module, whole: Whole, division: ModelDivision, parameters: torch.device, buffers: torch.device
) -> None:
    """Give every tensor on the meta device memory and this rank's part of its initial value.

    Args:
        model: model with absent tensors, which stay on the meta device. A parameter with several names stays one.
        whole: returns a whole initial value by name. At most one is in memory at a time.
        division: this rank's parts.
        parameters: device of the parameters.
        buffers: device of the buffers.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    values: dict[int, Tensor] = {}
    for name, tensor in named:
        if tensor.is_meta and name not in division.absent:
            part = cut_of(tensor, division.parts.get(name) or TensorSlice.whole(tensor.shape))
            device = parameters if isinstance(tensor, nn.Parameter) else buffers
            value = part.take(whole(name)).to(device=device, dtype=tensor.dtype, copy=True).contiguous()
            value = laid_out(value, tensor)
            values[id(tensor)] = (
                nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for key, old in home.items():
                if old is not None and id(old) in values:
                    home[key] = values[id(old)]  # type: ignore[assignment]


def whole_tensors(model: ShardedModel, slices: TensorSlices) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each path of any rank in order, with the whole tensor on rank 0's CPU and None elsewhere; one at a time.

    Collective: all ranks, a JSON gather and a message for each part that rank 0 lacks, if anything is divided.
    """
    mesh = model.mesh
    if not model.divides_state or mesh.world_size == 1:
        for path in sorted(slices):
            yield path, slices[path][1].cpu() if mesh.rank == 0 else None
        return
    by_rank = mesh.gather_json(entries(slices))
    for path in sorted(set().union(*by_rank)):
        holders = first_holders(by_rank, path)
        dtype, shape, _ = by_rank[next(iter(holders))][path]
        whole = torch.empty(shape, dtype=getattr(torch, dtype)) if mesh.rank == 0 else None
        for rank in holders:
            part = TensorSlice.from_json(shape, by_rank[rank][path][2])
            if mesh.rank == rank != 0:
                dist.send(raw_bytes(slices[path][1].cpu()), 0)
            elif whole is not None and rank == 0:
                part.put(whole, slices[path][1].cpu())
            elif whole is not None:
                received = torch.empty(part.local_shape, dtype=whole.dtype)
                dist.recv(raw_bytes(received), rank)
                part.put(whole, received)
        yield path, whole
