"""Experts in exact mode: a rank stores some experts of a block, and gathers the others where it computes them.

The bits of a product depend on how many rows are multiplied together, so no expert computes the tokens of several
ranks. The module's own forward computes a rank's grain with all experts, and has the bits of one process. After the
backward the gradients of each grain travel to the ranks that store the experts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shoal.distributed.collectives.fixed_tree import TreeSum
from shoal.distributed.mesh import EXPERT_COPIES
from shoal.errors import JobError
from shoal.numerics.gradient_norm import global_norm
from shoal.numerics.operators import as_real, in_dtype, real_numel, tensors_in, views_of
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.experts.blocks import ExpertBlock
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.tensor.layers import with_base

# Elements that the widest CPU kernels of torch 2.13 compute at once; 16-bit SGD rounds the remaining ones differently.
_EVEN = 64


class _ParameterHome(NamedTuple):
    """Place of a parameter in the model: its module's parameters, the key there, and its full name."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    name: str

    @property
    def own(self) -> nn.Parameter:
        """The parameter of this rank; on the meta device if another rank stores it."""
        parameter = self.parameters[self.key]
        assert parameter is not None, "a block's parameters exist"
        return parameter


@dataclass(eq=False)
class GatheredBlock:
    """Experts of a block that the ranks of an axis gather for each forward and each backward.

    homes: the places of each stacked parameter, or of one parameter of all experts in a ModuleList.
    wholes: leaves of the experts' gradients in the same order, with memory while they are gathered.
    """

    block: ExpertBlock
    axis: TensorAxis
    homes: list[list[_ParameterHome]]
    blocks: list[GatheredBlock]  # all of the model, in its order
    wholes: list[list[nn.Parameter]] = field(default_factory=list)
    _stored: list[Tensor] = field(default_factory=list)  # this rank's part of each whole, since the last forward

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all experts for a forward, and free them after it. Collective: the axis, as `gather`."""
        own = [(home, home.own) for homes in self.homes for home in homes]
        if not self.wholes:
            for homes in self.homes:
                one = self._stored_of(homes)[0]
                shape = one.shape if self.block.listed else (self.block.count, *one.shape[1:])
                self.wholes.append([nn.Parameter(one.new_empty(shape), home.own.requires_grad) for home in homes])
        is_recomputed = torch._C._current_graph_task_id() != -1  # and its backward follows
        if not is_recomputed:
            self.free()
        self._stored = [
            torch.stack(parts) if self.block.listed else parts[0] for parts in map(self._stored_of, self.homes)
        ]
        self.gather()
        for home, whole in zip((h for h, _ in own), (w for of in self.wholes for w in of), strict=True):
            home.parameters[home.key] = whole
        try:
            yield
        finally:
            for home, parameter in own:
                home.parameters[home.key] = parameter
            if not is_recomputed:
                self.free()

    def _stored_of(self, homes: Sequence[_ParameterHome]) -> list[Tensor]:
        return [home.own.detach() for home in homes if not home.own.is_meta]

    def gather(self) -> None:
        """Give the wholes memory and values. Collective: the axis, an all-gather of each parameter of the experts."""
        if self.wholes[0][0].untyped_storage().size():
            return
        for stored, wholes in zip(self._stored, self.wholes, strict=True):
            every = self.axis.all_gather(stored, 0)
            for whole, values in zip(wholes, every if self.block.listed else [every], strict=True):
                whole.untyped_storage().resize_(whole.nbytes)  # kernels see the alignment of memory of its own
                # Views that autograd has saved stay valid.
                with torch.no_grad(), _unsafe_preserve_version_counter(whole):
                    whole.copy_(values)

    def before_backward(self, gradient: Tensor) -> None:
        """Gather the experts, and free those of other blocks. Collective: as `gather`. Raises: JobError."""
        if torch.is_grad_enabled():
            raise JobError(
                given=f"a gradient of a gradient (create_graph=True) through the experts {self.block.name}",
                conflict="with layout.expert > 1 in exact mode they are in memory for one backward at a time",
                remedy="use layout.expert = 1 or execution.exact = false, or leave the experts out of that gradient",
            )
        for other in self.blocks:
            if other is not self:
                other.free()
        self.gather()

    def free(self) -> None:
        """Release the memory of the wholes."""
        for whole in (whole for wholes in self.wholes for whole in wholes):
            whole.untyped_storage().resize_(0)

    def send_gradients(self, counts: bool) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name, gradients of all ranks [degree, ...], and whether there is one, of each trained parameter here.

        Collective: the axis, an all-gather of flags, and an all-to-all of each parameter of the experts.
        """
        flags = [float(whole.grad is not None and counts) for wholes in self.wholes for whole in wholes]
        own_flags = torch.tensor([flags], dtype=torch.float64, device=self._stored[0].device)
        given = self.axis.all_gather(own_flags, 0).any(0).tolist()
        each, place = self.block.count // self.axis.degree, 0
        for homes, wholes in zip(self.homes, self.wholes, strict=True):
            place += len(homes)
            if not any(whole.requires_grad for whole in wholes):
                continue
            gradients = [torch.zeros_like(w) if w.grad is None else w.grad.to_dense() for w in wholes]
            for whole in wholes:
                whole.grad = None
            sent = torch.stack(gradients) if self.block.listed else gradients[0]
            del gradients
            sizes = (each,) * self.axis.degree
            arrived = self.axis.all_to_all(sent, sizes, sizes).unflatten(0, (self.axis.degree, each))
            for number, home in enumerate(homes):
                if home.own.requires_grad and not home.own.is_meta:
                    own = arrived[:, number - each * self.axis.place] if self.block.listed else arrived
                    yield home.name, own, given[place - len(homes) + number]


class _GatheringForward(nn.Module):
    """First base of the class of a module that computes gathered experts."""

    gathered_experts: GatheredBlock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's own forward with all experts. Collective: as `GatheredBlock.gathered`."""
        with self.gathered_experts.gathered():
            result = super().forward(*args, **kwargs)
        for tensor in tensors_in(result) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(self.gathered_experts.before_backward)
        return result


def gather_block(model: nn.Module, block: ExpertBlock, axis: TensorAxis, blocks: list[GatheredBlock]) -> None:
    """Make a block gather its experts from the ranks of an axis. Mutates the model, and adds the block to `blocks`.

    Afterwards each parameter must have the rank's experts alone. The block's forwards and backwards communicate.
    """
    homes: dict[str, list[_ParameterHome]] = {}  # by the name within an expert
    for name in block.parameters:
        home, _, key = name.rpartition(".")
        within = name.removeprefix(f"{block.name}.").partition(".")[2] if block.listed else key
        homes.setdefault(within, []).append(_ParameterHome(model.get_submodule(home)._parameters, key, name))
    blocks.append(GatheredBlock(block, axis, list(homes.values()), blocks))
    module: Any = model.get_submodule(block.name.rpartition(".")[0] if block.listed else block.name)
    module.gathered_experts = blocks[-1]
    with_base(module, _GatheringForward)


class ExpertGrains:
    """Sums of the gradients of this rank's experts in the fixed tree, over the grains of all ranks."""

    def __init__(self, model: ShardedModel, num_grains: int, reduce: torch.dtype) -> None:
        """Set the model, whose experts are gathered. Raises: JobError for a cut that would change the updates' bits."""
        mesh = model.mesh
        self._blocks, self._axis = model.division.gathered, model.division.gathered[0].axis
        self._mesh, self._num_grains = mesh, num_grains
        names = {name for name, p in model.parameters() if name in model.division.experts and p.requires_grad}
        self.parameters = {name: p for name, p in model.parameters() if name in names}
        self._cut = [p for name, p in self.parameters.items() if name in model.division.parts]
        for name, parameter in self.parameters.items() if mesh.device.type == "cpu" else ():
            if parameter.itemsize < 4 and parameter.numel() % _EVEN and name in model.division.parts:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise JobError(
                    given=f"{name} in {dtype}, of which a rank stores {parameter.numel()} elements, in exact mode",
                    conflict=f"CPU kernels round the last elements of a {dtype} tensor in another way unless it has a "
                    f"multiple of {_EVEN}, so the optimizer's bits would depend on layout.expert",
                    remedy='use precision.parameters = "float32", other sizes, or layout.expert = 1',
                )
        length = sum(map(real_numel, self.parameters.values()))
        self._copies = next(ranks for ranks in mesh.layout.expert_copies() if mesh.rank in ranks)
        self._group = mesh.group(EXPERT_COPIES) if len(self._copies) > 1 else None
        self.tree = TreeSum(num_grains, torch.empty(length, dtype=reduce, device=mesh.device), self._group)

    def begin(self) -> None:
        """Clear the gradients, those of a metric included, and start a step."""
        self.tree.clear()
        for whole in (one for block in self._blocks for wholes in block.wholes for one in wholes):
            whole.grad = None
        self._used = dict.fromkeys(self.parameters, False)
        for parameter in self.parameters.values():
            parameter.grad = None

    def take(self, grain: int | None) -> None:
        """Take the gradients of a grain of each rank of the axis; None if this rank's microbatch does not count.

        Collective: the axis, an all-gather of a number, and as `GatheredBlock.send_gradients`.
        """
        own = torch.tensor([-1.0 if grain is None else grain], dtype=torch.float64, device=self._mesh.device)
        grains = [int(number) for number in self._axis.all_gather(own, 0).tolist()]
        like = list(self.parameters.values())
        flats = {source: self.tree.empty() for source, number in enumerate(grains) if number >= 0}
        views = {s: dict(zip(self.parameters, views_of(flat, like), strict=True)) for s, flat in flats.items()}
        for block in self._blocks:
            block.free()
            for name, gradients, given in block.send_gradients(grain is not None):
                self._used[name] |= given
                for source, of_source in views.items():
                    of_source[name].copy_(as_real(gradients[source]))
        for source, flat in flats.items():
            self.tree.add(grains[source], flat)

    def give(self, holders: list[list[int]]) -> None:
        """Give each parameter the sum over all grains, or None if no grain has a gradient. `holders`: of all ranks.

        Collective: the ranks with the same experts, an all-reduce of flags, and as `TreeSum.total`.
        """
        degree = self._axis.degree
        firsts = [rank - rank % degree for rank in self._copies]  # of the groups with a copy each
        of_copies = [sorted(itertools.chain(*holders[first : first + degree])) for first in firsts]
        used = torch.tensor([float(f) for f in self._used.values()], dtype=torch.float64, device=self._mesh.device)
        if self._group is not None:
            dist.all_reduce(used, group=self._group)
        total = self.tree.total(of_copies, self._copies.index(self._mesh.rank))
        pairs = zip(self.parameters.values(), views_of(total, list(self.parameters.values())), strict=True)
        for (parameter, view), is_used in zip(pairs, used.tolist(), strict=True):
            parameter.grad = in_dtype(view, parameter) if is_used else None

    def norm(self, rest: float) -> float:
        """Return the norm over `rest` and, on rank 0, over the stacked parameters of all ranks' experts.

        The norm of a tensor is that of rows, which a cut would change. Collective: the axis, an all-gather of each one.
        """
        for parameter in self._cut:
            if parameter.grad is not None:
                of_all = global_norm([self._axis.all_gather(parameter.grad.detach(), 0)])
                rest = math.hypot(rest, of_all) if self._mesh.rank == 0 else rest
        return rest

    def is_apart(self, parameter: Tensor) -> bool:
        """Return True if `norm` counts a parameter."""
        return any(parameter is one for one in self._cut)
