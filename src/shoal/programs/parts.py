"""Parts of parameters that a rank has, of every way of sharding: where they lie, their weights and gradients.

Within a script this needs torch alone, as the observer does. Nothing here makes a collective call.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

# Parts of names that wrappers put before those of the wrapped module.
WRAPPED = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of a tensor, detached, which may be a view."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.detach()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of this rank's values on the host."""
    copy = local(tensor).to("cpu", copy=True)
    return copy.to_dense() if copy.is_sparse else copy


@functools.cache
def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return ".".join(one for one in name.split(".") if one and one not in WRAPPED)


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def place_of(tensor: Any) -> dict[str, Any] | None:
    """Return where a rank's part lies in the whole tensor, and with which ranks' it is to be summed. None if whole."""
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    partial = [axis for axis, one in enumerate(tensor.placements) if one.is_partial()]
    summed = ranks_along(tensor.device_mesh, partial) if partial else []
    return {"shape": tuple(tensor.shape), "offset": tuple(offset), "size": tuple(shape), "summed": summed}


def ranks_along(mesh: Any, axes: list[int]) -> list[int]:
    """Return the ranks of a mesh that differ from this one along some axes only."""
    own = mesh.get_coordinate()
    ranks = mesh.mesh[tuple(slice(None) if axis in axes else place for axis, place in enumerate(own))]
    return sorted(int(rank) for rank in ranks.flatten())


def tensor_ranks(module: nn.Module) -> list[int]:
    """Return the ranks that compute parts of this rank's forward: those of DTensors, but not those of `fully_shard`."""
    own, data = {own_rank()}, set[int]()
    modules: Any = module.modules()
    for part in modules:
        group = part._get_fsdp_state()._fsdp_param_group if hasattr(part, "_get_fsdp_state") else None
        data |= {int(rank) for rank in group.mesh_info.mesh.mesh.flatten()} if group is not None else set()
    parameters: Any = module.parameters()
    for mesh in {p.device_mesh for p in parameters if is_sharded(p)}:
        groups = [set(ranks_along(mesh, [axis])) for axis in range(mesh.ndim)]
        own = own.union(*(group for group in groups if not group <= data))
    return sorted(own)


class ParameterPart(NamedTuple):
    """A parameter, or this rank's part of one: where it lies in the whole, its weights and its gradient."""

    key: str  # "MODULE:NAME"
    place: dict[str, Any] | None
    shape: tuple[int, ...]
    owner: torch.Tensor  # what an optimizer has; a flat tensor has several parts
    weights: Callable[[], torch.Tensor]
    gradient: Callable[[], torch.Tensor | None]
    dtype: torch.dtype  # in which the forward computes

    @property
    def is_frozen(self) -> bool:
        """True if it gets no gradient: a whole one that a forward may change, such as a moving average of others."""
        return self.place is None and not self.owner.requires_grad


def parts_of(module: nn.Module, number: int) -> Iterator[ParameterPart]:
    """Yield this rank's parts of the parameters of a module, or of the wrapper around it."""
    dtypes: dict[int, torch.dtype] = {}
    flat = set[str]()
    sharded: dict[int, Any] = {}  # what the optimizer has, by the whole parameters between two forwards
    for prefix, one in module.named_modules():
        state: Any = one._get_fsdp_state() if hasattr(one, "_get_fsdp_state") else None
        for own in getattr(state._fsdp_param_group, "fsdp_params", ()) if state is not None else ():
            sharded[id(getattr(own, "_unsharded_param", None))] = own.sharded_param
            if state._mp_policy.param_dtype is not None:
                dtypes[id(own.sharded_param)] = state._mp_policy.param_dtype
        handle = getattr(one, "_handle", None) if type(one).__name__ == "FullyShardedDataParallel" else None
        if handle is None:
            continue
        whole = handle.flat_param
        owners = whole._params or [whole] * len(whole._fqns)
        for name, shape, own, owner in zip(whole._fqns, whole._shapes, whole._shard_param_infos, owners, strict=True):
            begin, size = (own.offset_in_shard, own.numel_in_shard) if own.in_shard else (0, 0)
            key = f"{number}:{plain_name(f'{prefix}.{name}')}"
            flat.add(key)

            def weights(whole: Any = whole, begin: int = begin, size: int = size) -> Any:
                return whole._local_shard[begin : begin + size]

            def gradient(owner: Any = owner, whole: Any = whole, begin: int = begin, size: int = size) -> Any:
                flat = None if owner.grad is None else owner.grad.flatten()
                return flat if owner is not whole or flat is None else flat[begin : begin + size]

            start = own.intra_param_start_idx if own.in_shard else 0
            place = {"shape": tuple(shape), "offset": (start,), "size": (size,), "summed": []}
            yield ParameterPart(key, place, tuple(shape), owner, weights, gradient, handle._fwd_bwd_param_dtype)
    flats = flat_parts(module, number)
    for name, own in module.named_parameters():
        if id(own) in flats:
            yield flats[id(own)]
            continue
        key, p = f"{number}:{plain_name(name)}", sharded.get(id(own), own)
        if key not in flat and not hasattr(p, "_fqns"):
            of = (p.detach, functools.partial(getattr, p, "grad"))
            yield ParameterPart(key, place_of(p), tuple(p.shape), p, *of, dtypes.get(id(p), p.dtype))


def flat_parts(module: nn.Module, number: int) -> dict[int, ParameterPart]:
    """Return parts, which may be empty, by the ids of parameters, in flat tensors of a DeepSpeed engine's optimizer."""
    by_id: dict[int, ParameterPart] = {}
    if type(module).__name__ != "DeepSpeedEngine":
        return by_id
    zero: Any = getattr(module, "optimizer", None)
    names = {id(p): plain_name(name) for name, p in module.named_parameters()}

    def note(p: Any, shape: Any, flat: torch.Tensor, start: int, own: slice) -> None:
        place = {"shape": tuple(shape), "offset": (start,), "size": (own.stop - own.start,), "summed": []}
        gradient = lambda: None if flat.grad is None else flat.grad[own]  # noqa: E731
        of = (tuple(shape), flat, lambda: flat.detach()[own], gradient, p.dtype)
        by_id[id(p)] = ParameterPart(f"{number}:{names[id(p)]}", place, *of)

    flats = getattr(zero, "single_partition_of_fp32_groups", ())
    for flat, group in zip(flats, zero.bit16_groups if flats else (), strict=True):
        for p in group:
            start = begin = size = 0
            if (own := p._hp_mapping) is not None:
                start, begin = own.lp_fragment_address.start, own.hp_fragment_address.start
                size = own.hp_fragment_address.numel
            note(p, p.shape, flat, start, slice(begin, begin + size))
    positions, parameters = getattr(zero, "grad_position", {}), cast(Iterable[Any], module.parameters())
    for p in parameters if positions else ():  # ZeRO-3, whose parts have one size
        if getattr(p, "ds_id", None) in positions:
            group, begin, size = positions[p.ds_id]
            start = min(p.ds_numel, torch.distributed.get_rank(p.ds_process_group) * size)
            flat = zero.fp32_partitioned_groups_flat[group]
            note(p, p.ds_shape, flat, start, slice(begin, begin + min(size, p.ds_numel - start)))
    return by_id


def note_engine(recorder: Any, module: nn.Module) -> None:
    """Look for DeepSpeed's engine of a module. Its optimizer updates each group of parameters by another one."""
    kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    for engine in [one for one in gc.get_objects() if issubclass(type(one), kind) and one.module is module]:
        recorder.known.wrappers[id(module)] = engine
        zero = engine.optimizer
        flats = getattr(zero, "single_partition_of_fp32_groups", getattr(zero, "fp32_partitioned_groups_flat", []))
        is_cut = (
            engine.has_moe_layers or type(engine) is not kind or len(flats) not in (0, len(zero.optimizer.param_groups))
        )
        offloads = getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False)
        if is_cut or engine.fp16_enabled() or offloads:
            recorder.unread.add("DeepSpeedEngine")
        if not flats:
            continue
        groups, run = len(flats), zero._optimizer_step

        def step(number: int, run: Any = run, groups: int = groups) -> None:
            recorder.turn = number, groups
            run(number)

        zero._optimizer_step = step


def casts_of(module: nn.Module) -> dict[str, tuple[str | None, str | None]]:
    """Return the types to which `fully_shard` casts the inputs and outputs of modules, by their names."""
    casts = {}
    for name, one in module.named_modules():
        policy = one._get_fsdp_state()._mp_policy if hasattr(one, "_get_fsdp_state") else None
        if policy is not None and (policy.param_dtype or policy.output_dtype):
            inside = policy.param_dtype if policy.cast_forward_inputs else None
            outside = policy.output_dtype
            casts[plain_name(name)] = (inside and str(inside), outside and str(outside))
    return casts


def own_rank() -> int:
    """Return this process's rank, which a script that starts its processes itself may set late."""
    return torch.distributed.get_rank() if is_joined() else int(os.environ.get("RANK", "0"))


def is_joined() -> bool:
    """Return True if this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
