"""ZeRO stages 2 and 3: gradients, or parameters too, divided over the shard axis.

The module builds on torch's fully_shard (Zhao et al., arXiv 2304.11277), which cuts each unit's parameters along their
first dim. A unit's forward gathers them. Its backward leaves the sum of the gradients over the ranks, cut the same way.
With a data axis as well, the cut gradients are also summed over that axis (hybrid sharding).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shoal.data.loader import Microbatch
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, PlanError
from shoal.numerics import device_reads
from shoal.numerics.operators import replace_leaves
from shoal.numerics.precision import Precision
from shoal.parallel.base import NO_FAILURES, AccumulatingStrategy, Flags, LateTerms, Mark, QueuedSums, StepSums
from shoal.parallel.data.replicated import GradientBuckets, all_sums, queued_sums
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlice, cut_of, local, replaced
from shoal.parallel.model.structure import repeated_blocks
from shoal.parallel.shard import torch_release
from shoal.parallel.shard.torch_release import param_groups
from shoal.plans.plan import Plan

# If a model repeats no block, a module with this many parameter bytes is a unit; smaller modules share a unit.
UNIT_BYTES = 1 << 20
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def shard(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    precision: Precision,
    absent: Container[str] = (),
    *,
    experts: Container[str] = (),
    writing: set[nn.Module] | None = None,
) -> list[nn.Module]:
    """Cut the parameters of a model (on the meta device, or real) in place; return the units, each gathered as one.

    Args:
        model: model to cut; its names do not change.
        plan: plan with the level, offload and layout.
        mesh: mesh with the shard axis.
        precision: dtypes of parameters and reductions.
        absent: names of other ranks' parameters, which are not cut.
        experts: names of divided experts' parameters, which are not cut.
        writing: receives modules with hooks that may write parameters, and later modules with a forward that does.

    Raises: PlanError; JobError for what fully_shard does not cut.
    Collective: none here; each unit's forward and backward communicate.
    """
    lacking = torch_release.missing()
    if lacking:
        raise PlanError(
            given=f"shard.level = {plan.shard.level!r} with torch {torch.__version__}",
            conflict=lacking,
            remedy=f'use torch {torch_release.OLDEST_TEXT} or newer, or shard.level = "optimizer"',
        )
    keep = plan.shard.level == "gradients"
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if plan.shard.offload else OffloadPolicy()
    wide = None if precision.reduce == precision.parameters else precision.reduce
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise JobError(
                given=f"{name or 'the model'}: {type(module).__name__}(sparse=True), with sharded gradients",
                conflict="torch's fully_shard cuts and sums dense gradients only",
                remedy='build it with sparse=False, or use shard.level = "optimizer" or the data axis',
            )
    whole = {p for name, p in model.named_parameters() if not _is_cut(p.shape) or name in absent or name in experts}
    every_unit = [*(unit for unit in units(model) if not whole.issuperset(unit.parameters())), model]
    seen = set(whole)
    for unit in every_unit:  # inner units come before outer ones
        own = [p for p in unit.parameters() if p.requires_grad and p not in seen]
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in own})
        if len(kinds) > 1:
            raise JobError(
                given=f"shard.level = {plan.shard.level!r} for a model with parameters in {' and '.join(kinds)}",
                conflict="torch's fully_shard cuts parameters of one dtype together",
                remedy='use shard.level = "optimizer", or one dtype for all parameters',
            )
        seen.update(own)
    others = set(every_unit)
    # The axes for fully_shard: data, if it has more than one rank, and shard.
    axes = [axis for axis in ("data", "shard") if mesh.layout.degree(axis) > 1 or axis == "shard"]
    groups, kind = [mesh.groups[axis] for axis in axes], mesh.device.type
    if len(axes) == 1:
        device_mesh = DeviceMesh.from_group(groups[0], kind, mesh_dim_names=("shard",))
    else:
        ranks = torch.tensor(next(r for r in mesh.layout.groups("data", "shard") if mesh.rank in r))
        shaped = ranks.view([mesh.layout.degree(axis) for axis in axes])
        device_mesh = DeviceMesh.from_group(groups, kind, mesh=shaped, mesh_dim_names=tuple(axes))
    writing = set() if writing is None else writing
    writing.update(module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks)
    for unit in every_unit:
        unit.register_forward_hook(_no_views)
        if plan.layout.pipeline == 1:  # a pipeline gathers by itself, and first runs without values
            unit.register_forward_hook(_KeptTensors(unit, others))
            unit.register_forward_hook(_WrittenParameters(writing, model))
        fully_shard(
            unit,
            mesh=device_mesh,
            reshard_after_forward=not keep,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False),
            offload_policy=offload,
            ignored_params=whole,
        )
    for unit in every_unit:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # sums over grains, not means over ranks
        unit.set_reduce_scatter_unused_params(True)  # another rank's grains may use what this rank's do not
        if mesh.device.type == "cpu" or mesh.through_host:  # Gloo scales no sum
            unit.set_force_sum_reduction_for_comms(True)
        homes: dict[nn.Module, _Home] = {}  # torch finds Keras variables there, by their parameters' names
        for group in param_groups(unit):
            for parameter in group.fsdp_params:
                place = parameter._module_info
                if getattr(place.module, place.param_name) is not parameter.sharded_param:
                    place.module = cast(nn.Module, homes.setdefault(place.module, _Home(place.module)))
    return every_unit


def _no_views(unit: nn.Module, args: Any, output: Any) -> Any:
    """Copy outputs that are views, such as those of a linear layer with a bias over sequences.

    A change of a view in place would drop the hook that gathers the unit's parameters for its backward.
    """
    if not torch.is_grad_enabled():
        return None
    return replace_leaves(output, Tensor, lambda t: t.clone() if t.requires_grad and t._base is not None else t)


# Attributes of every module: none contains a forward's tensors.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_MOST_ITEMS, _MOST_DEPTH = 256, 4


class _KeptTensors:
    """Forward hook that gathers a unit's parameters also for gradients of tensors stored as attributes of its modules.

    An auxiliary loss is an example. fully_shard gathers parameters for gradients of the unit's outputs alone.
    """

    def __init__(self, unit: nn.Module, units: set[nn.Module]) -> None:
        """Find the unit's own modules. `units`: all units; an inner unit's modules belong to that unit."""
        inner = [
            other for module in unit.modules() if module is not unit and module in units for other in module.modules()
        ]
        elsewhere = set(inner)
        self._modules = [module for module in unit.modules() if module not in elsewhere]

    def __call__(self, unit: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        given = set(map(id, tree_leaves(args)))
        for module in self._modules:
            for name, value in module.__dict__.items():
                if name in _OF_EVERY_MODULE:
                    continue
                for tensor in _tensors_in(value):
                    if tensor.grad_fn is not None and id(tensor) not in given:
                        tensor.register_hook(cast(FSDPModule, unit)._get_fsdp_state()._pre_backward)


# Number of training forwards in which all parameters of a unit are compared. Every forward without gradients compares.
_COMPARED_FORWARDS = 3


class _WrittenParameters:
    """Forward hook that stores what a forward, or a hook on it, has written to the unit's gathered parameters.

    An example is a mask on `weight.data`. Without this hook the write is lost: torch frees the gathered values, and the
    optimizer steps the ranks' parts.
    """

    def __init__(self, hooked: Container[nn.Module], root: nn.Module) -> None:
        """Set `hooked`, modules with hooks of the job that may write in each forward, and `root`, the model."""
        self._hooked, self._root, self._num_forwards = hooked, root, 0
        self._written: set[int] = set()  # by index in the unit

    def __call__(self, unit: nn.Module, args: Any, output: Any) -> None:
        _refuse_replaced(unit, self._root)
        self._num_forwards += torch.is_grad_enabled()
        compares = self._num_forwards <= _COMPARED_FORWARDS or not torch.is_grad_enabled()
        parameters = [parameter for group in param_groups(unit) for parameter in group.fsdp_params]
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                is_written = number in self._written or parameter._module_info.module in self._hooked
                if not (is_written or compares):
                    continue
                own = local(parameter.sharded_param)
                part = cut_of(parameter.sharded_param, TensorSlice.whole(parameter.sharded_param.shape))
                now = part.take(parameter._unsharded_param)
                if is_written or not torch.equal(own, now.to(own.device)):
                    self._written.add(number)
                    own.copy_(now)


def _refuse_replaced(unit: nn.Module, root: nn.Module) -> None:
    """Raise JobError if another tensor has replaced a parameter of the unit."""
    for group in param_groups(unit):
        for one in group.fsdp_params:
            place = one._module_info
            now = getattr(place.module, place.param_name, None)
            if isinstance(now, FakeTensor):  # a run without data, of a pipeline's stage
                continue
            if now is not one.sharded_param and now is not getattr(one, "_unsharded_param", None):
                home = next((name for name, module in root.named_modules() if module is place.module), "")
                raise replaced(f"{home}.{place.param_name}".lstrip("."))


def _tensors_in(value: Any, depth: int = _MOST_DEPTH) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, list | tuple | set | deque | Mapping) and len(value) <= _MOST_ITEMS:
        items = value.values() if isinstance(value, Mapping) else value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # it may have slots
        items = [getattr(value, part.name, None) for part in dataclasses.fields(value)]
    for item in items if depth else ():  # it may refer to itself
        yield from _tensors_in(item, depth - 1)


class _Home:
    """Module for fully_shard, which reads parameters as attributes, if the attributes are Keras variables."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        parameters = self._module._parameters
        return parameters[name] if name in parameters else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def scalars(model: nn.Module) -> list[str]:
    """Return the names of parameters without dims or elements, which fully_shard does not cut.

    These parameters stay whole, and their gradients partial.
    """
    return [name for name, parameter in model.named_parameters() if not _is_cut(parameter.shape)]


def _is_cut(shape: tuple[int, ...]) -> bool:
    return len(shape) > 0 and math.prod(shape) > 0


def rows(mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of this rank's part of a parameter that fully_shard cuts by rows, as torch.chunk does."""
    if not _is_cut(shape):
        return shape
    each = -(-shape[0] // mesh.layout.shard)
    start = mesh.layout.coordinate(mesh.rank).shard * each
    return (max(0, min(each, shape[0] - start)), *shape[1:])


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that are gathered together, inner ones first.

    The rest is the model's own unit. These are the blocks that the model repeats, or else modules that are large
    enough. None shares a parameter with a module outside.
    """
    blocks = [_outermost(model, block.name) for block in repeated_blocks(model) if block.children is None]
    candidates = list(dict.fromkeys(blocks)) or list(_large(model))
    candidates = list(dict.fromkeys(part for candidate in candidates for part in _called(candidate)))
    # It calls only the clusters with classes in the batch, so calls differ between ranks.
    adaptive = [m for m in model.modules() if isinstance(m, nn.AdaptiveLogSoftmaxWithLoss)]
    clusters = {inner for module in adaptive for inner in module.modules()}
    candidates = [unit for unit in candidates if unit not in clusters]
    homes: dict[int, set[int]] = {}
    for number, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(number)
    places = {module: number for number, module in enumerate(model.modules())}
    closed = []
    for unit in candidates:
        inside = {places[m] for m in unit.modules()}
        if all(homes[id(p)] <= inside for p in unit.parameters()):
            closed.append(unit)
    return closed


def _outermost(model: nn.Module, name: str) -> nn.Module:
    """Return the outermost repeated module around a block. Not every rank calls an expert, but all call its parent."""
    keys = name.split(".")
    for end in range(1, len(keys)):
        parent, child = model.get_submodule(".".join(keys[: end - 1])), model.get_submodule(".".join(keys[:end]))
        siblings = sum(type(other) is type(child) for other in parent.children())
        if isinstance(parent, _CONTAINERS) and not isinstance(child, _CONTAINERS) and siblings > 1:
            return child
    return model.get_submodule(name)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or in the place of one without a forward, such as a ModuleList, those inside that have one."""
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _large(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        inner = list(_large(child))
        size = sum(p.numel() * p.itemsize for p in child.parameters())
        if len(inner) > 1 or size < UNIT_BYTES or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from inner
        else:
            yield child


def _refuse_call(model: nn.Module, args: Any) -> None:
    """Raise JobError if torch.func transforms the model's call, or a parameter of the model was replaced."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise JobError(
            given="a loss that transforms the model by torch.func, with parameters that are cut over the shard axis",
            conflict="a rank gathers and frees each unit's parameters in hooks, which torch.func cannot transform",
            remedy='write shard.level = "optimizer"',
        )
    for unit in model.modules():
        # Before the first forward, torch still has the parameters from the meta device.
        if isinstance(unit, FSDPModule) and unit._get_fsdp_state()._is_root is not None:
            _refuse_replaced(unit, model)


_POLL_SECONDS = 0.0005
# Sums over 1024 ranks of smaller numbers and of their squares, and products of the sums, are exact in float64.
_NUM_ORDERS = 1 << 13


class UnitCalls:
    """Calls that gather a unit, within a microbatch's forward or an evaluation, on this rank and its peers.

    A rank that calls a unit once more than another rank waits in its gather, while the other waits in another
    collective. Ranks therefore post their counts in the store of the process group, outside of collectives, so that
    unequal counts raise an error at once. A post does not wait. Ranks read each other's posts only if a count differs
    from the last microbatch's.

    `order`: a hash below 2^13 of the sequence of units called in a step.
    """

    def __init__(self, model: nn.Module, units: Sequence[FSDPModule], mesh: Mesh) -> None:
        """Register the hooks. All ranks of a mesh create equal numbers of these objects, in the same order."""
        assert mesh.store is not None, "several ranks have one"
        self._model, self._rank = model, mesh.rank
        self._peers = next(list(ranks) for ranks in mesh.layout.groups("data", "shard") if mesh.rank in ranks)
        self._serial = self._count = self._usual = self.order = 0
        self._trains = self._met = False
        opened = mesh.store.add(f"unit calls/{mesh.rank}", 1)
        self._store = PrefixStore(f"unit calls {opened}", mesh.store)
        self._post("at")
        # runs before fully_shard's own hook, which gathers
        self._handles = [
            unit.register_forward_pre_hook(functools.partial(self._called, number), prepend=True)  # type: ignore[attr-defined]
            for number, unit in enumerate(units, 1)
        ]

    def _called(self, number: int, unit: Any, args: Any) -> None:
        state = unit._get_fsdp_state()
        is_recomputed = state._training_state == TrainingState.PRE_BACKWARD
        if is_recomputed or all(group.is_unsharded for group in param_groups(unit)):
            return
        self._count += 1
        self._trains = self._model.training
        self.order = (self.order * 31 + number) % _NUM_ORDERS
        self._post("at")
        if self._trains and self._count > self._usual:
            self._meet("at")

    def end(self) -> None:
        """End a microbatch's forward, or an evaluation. Raises: JobError if a peer's calls differ."""
        if not self._count:
            return
        self._post("end")
        if not self._trains or self._count != self._usual:
            self._meet("end")
        if self._trains:
            self._usual = self._count
        self._serial, self._count = self._serial + 1, 0

    def _post(self, where: str) -> None:
        self._store.set(str(self._rank), f"{self._serial} {self._count} {where}")

    def _meet(self, where: str) -> None:
        """Wait until each peer has made the same number of calls. Raises: JobError if a peer no longer can."""
        waited = [str(rank) for rank in self._peers if rank != self._rank]
        while not self._met and not self._store.check(waited):
            time.sleep(_POLL_SECONDS)
        self._met = True
        while waited:
            behind = []
            for rank, post in zip(waited, self._store.multi_get(waited), strict=True):
                serial, count, there = post.decode().split()
                if int(serial) < self._serial or (int(serial) == self._serial and int(count) < self._count):
                    if int(serial) == self._serial and there == "end":
                        raise unequal(
                            f"parts of the model {self._count} times or more, and on rank {rank} {count} times"
                        )
                    behind.append(rank)
                elif int(serial) == self._serial and where == "end":
                    if int(count) > self._count:
                        raise unequal(f"parts of the model {self._count} times, and on rank {rank} more often")
                    behind += [rank] if there == "at" else []
                elif int(serial) > self._serial and where == "at":
                    raise unequal(f"parts of the model {self._count} times or more, and on rank {rank} less often")
            waited = behind
            if waited:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def unequal(what: str) -> JobError:
    """Return the error of ranks that call units unequally."""
    return JobError(
        given=f"a model or loss that calls {what} in one microbatch",
        conflict="where gradients or parameters are cut over the shard axis, the ranks gather a part of the model "
        "together each time that it is called",
        remedy="call as much on every rank, whatever its samples (generate a fixed number of tokens, compute every "
        'block and mask its result), or use shard.level = "optimizer"',
    )


class FullySharded(AccumulatingStrategy):
    """Strategy of ZeRO stages 2 and 3: units sum gradients in the backward, the strategy sums the rest."""

    syncs_every_microbatch = True  # each unit gathers its parameters from all ranks

    def __init__(
        self, model: ShardedModel, mark: Mark, *, late: bool = False, expert_sums: GradientBuckets | None = None
    ) -> None:
        """Register the hooks. `late`: only the last microbatch scatters gradients; before, they accumulate whole.

        `expert_sums`: sums of divided experts' gradients.
        """
        super().__init__(model, mark)
        self.expert_sums = expert_sums
        model.model.register_forward_pre_hook(_refuse_call, prepend=True)
        self._late = late
        self._units = [m for m in model.model.modules() if isinstance(m, FSDPModule)]
        experts = model.division.experts
        every = [p for name, p in model.model.named_parameters() if p.requires_grad and name not in experts]
        self._parameters = [p for p in every if not p.is_meta]
        # Numbers common to all ranks: they include parameters of other stages, and exclude scalars.
        self._cut = dict(enumerate(p for p in every if _is_cut(p.shape)))
        self._used = torch.zeros(len(self._cut), dtype=torch.float64)
        self._cut = {number: p for number, p in self._cut.items() if not p.is_meta}
        # For each number, whether any rank had a gradient in the last step that was read at once.
        self._usual, self._is_usual = torch.zeros(0), list[bool]()
        self._watched = [p for p in self._parameters if not _is_cut(p.shape)]
        self._handles: dict[int, RemovableHandle] = {}
        # A pipeline calls stages by its schedule.
        counts = self._mesh.num_data_ranks > 1 and self._mesh.layout.pipeline == 1
        self._calls = UnitCalls(model.model, self._units, self._mesh) if counts else None

    def begin(self, step: int = 0, factor: float | Tensor = 1.0) -> None:
        self.rest()
        for parameter in self._parameters:
            parameter.grad = None
        if self.expert_sums is not None:
            self.expert_sums.begin()
        self._used.zero_()
        self._sums = None
        if self._calls is not None:
            self._calls.order = 0
        self._scatter(False)

    def rest(self) -> None:
        """Free what a forward without a backward has gathered, which would become stale."""
        if self._calls is not None:
            self._calls.end()
        for unit in self._units:
            unit.reshard()

    def add(self, sums: Tensor | LateTerms) -> None:
        super().add(sums)
        if self._calls is not None:
            self._calls.end()
        if len(self._handles) == len(self._cut):
            return
        # Record which parameters get a gradient here: for the others the units sum zeros.
        numbers = {id(p): i for i, p in self._cut.items()}
        for parameter in (p for unit in self._units for group in param_groups(unit) for p in group.fsdp_params):
            number = numbers.get(id(parameter.sharded_param))
            gathered = getattr(parameter, "_unsharded_param", None)
            if number is not None and gathered is not None and number not in self._handles:

                def note(gathered: Tensor, number: int = number) -> None:
                    self._used[number] = 1.0

                self._handles[number] = gathered.register_post_accumulate_grad_hook(note)

    def arm(self) -> None:
        if self.expert_sums is not None:
            self.expert_sums.arm()
        self._scatter(True)

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        try:
            super().backward(microbatch, total, sums, last)
        except RuntimeError as error:
            if "storage of size 0" not in str(error):
                raise
            raise JobError(
                given="a loss that uses a tensor from within a block, which is not an output of the block",
                conflict='with shard.level = "parameters" a block\'s parameters are freed after its forward, and '
                "gathered again for gradients of its outputs and of tensors that its modules have as attributes",
                remedy="return the tensor from the block, or keep it as an attribute of the block (self.aux = ...); or "
                'use shard.level = "gradients"',
            ) from error

    def _scatter(self, now: bool) -> None:
        """Set whether backwards scatter gradients. Collective if they do: the data and shard axes, one per unit."""
        for unit in self._units if self._late else ():
            unit.set_requires_gradient_sync(now, recurse=False)

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Return the step's sums; gradients of units are summed already. Collective: all ranks, one all-reduce."""
        if self.expert_sums is not None:
            self.expert_sums.finish(NO_FAILURES, torch.empty(0, device=self._mesh.device))
        step_sums = all_sums(self._sums_and_used(num_sums), flags, self._mesh.device)
        used = step_sums.sums[num_sums:-2] > 0
        order, squares = step_sums.sums[-2:].tolist()
        if step_sums.flags == NO_FAILURES and order * order != squares * self._mesh.world_size:
            raise unequal("other parts of the model than on another rank, or in another order,")
        self._usual, self._is_usual = device_reads.sent(torch.from_numpy(used), self._mesh.device), used.tolist()
        self._drop()
        return StepSums(step_sums.sums[:num_sums], step_sums.flags)

    def _sums_and_used(self, num_sums: int) -> Tensor:
        device = self._mesh.device
        order = float(self._calls.order) if self._calls is not None else 0.0
        orders = torch.tensor([order, order * order], dtype=torch.float64)  # if ranks differ, the sums show it
        own = torch.zeros(num_sums, dtype=torch.float64) if self._sums is None else self._sums, self._used, orders
        return torch.cat([device_reads.sent(numbers, device) for numbers in own])

    def _drop(self) -> None:
        """Keep gradients of the usual parameters only."""
        for number, parameter in self._cut.items():
            if not self._is_usual[number]:
                parameter.grad = None

    @property
    def queues(self) -> bool:
        return all(p.device.type == self._mesh.device.type for p in self._parameters)  # nothing is offloaded

    def _queued_sum(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        failures = torch.tensor([flags.errors, flags.redo, self._num_odd()], dtype=torch.float64)
        own = self._sums_and_used(num_sums), device_reads.sent(failures, self._mesh.device)
        if self.expert_sums is not None:
            own[1][-1] += self.expert_sums.queue(NO_FAILURES, torch.empty(0, device=self._mesh.device))[0][-1]
        numbers, failures = queued_sums(*own)
        failures[-1] += ((numbers[num_sums:-2] > 0) != self._usual).sum()
        failures[-1] += numbers[-2].square() != numbers[-1] * self._mesh.world_size
        self._drop()
        return QueuedSums(numbers[:num_sums], failures, None)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        if self.expert_sums is not None:
            self.expert_sums.close()
        if self._calls is not None:
            self._calls.close()
