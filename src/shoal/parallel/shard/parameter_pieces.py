"""Pieces of single parameters that ranks with one copy of a model update, if whole parameters divide the work badly.

While one rank updates a parameter that is larger than its fair share, the others wait. SGD, Adam and AdamW compute each
element from its own gradient and state alone, so other ranks can step a run of its elements. Values, gradients and
state are in memory that all ranks map. The parameter's owner has its whole state in the same memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
from shoal.distributed.collectives.shared_memory.region import SharedRegion, exchanged, open_region
from shoal.distributed.collectives.shared_memory.staging import LINE_BYTES
from shoal.distributed.mesh import Mesh
from shoal.plans.accounting.collectives import PIECE_ROW, level

# dtype of each state tensor that has its parameter's shape, by index of the parameter and key of the tensor.
Kinds = dict[str, dict[str, str]]


def is_divisible(parameter: Tensor) -> bool:
    """Return True if runs of a parameter's elements are whole rows in order, as kernels and the gradient norm need."""
    return (
        parameter.dtype == torch.float32
        and parameter.is_contiguous()
        and parameter.numel() % PIECE_ROW == 0
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize
    )


@dataclass(eq=False)
class _Divided:
    """Parameter whose elements several ranks update, each a contiguous range; `part` is this rank's range, or None."""

    whole: nn.Parameter
    bounds: tuple[int, int]
    part: nn.Parameter | None
    is_owner: bool
    state: dict[str, Any] = field(default_factory=dict)  # of the part
    entry: dict[str, Any] | None = None  # the owner's entry for the whole parameter, as given to the optimizer
    shared: dict[str, Tensor] = field(default_factory=dict)  # by key, the memory that all ranks map, as one row
    others: dict[str, Any] = field(default_factory=dict)  # entries of the owner's state that no step of a part reads
    versions: list[int] = field(default_factory=list)  # of the owner's counters; each rank has its own counters

    def settle(self) -> None:
        """Record the versions of the owner's counters after a step."""
        self.versions = _versions(self.entry) if self.is_owner else []


class ParameterPieces:
    """Division of the largest parameters of overloaded ranks in one optimizer's update."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        collective: SharedMemory,
        mesh: Mesh,
        *,
        memory: Callable[[Tensor], Tensor],
        owners: Callable[[Tensor], int],
    ) -> None:
        """Divide the parameters. `memory` returns a parameter's shared memory, `owners` the rank that owns it."""
        self._optimizer, self._collective, self._mesh = optimizer, collective, mesh
        self._owners = owners
        sizes = [p.numel() * p.itemsize for p in parameters]
        owner_ranks = [owners(p) for p in parameters]
        runs_by_index = level(sizes, owner_ranks, mesh.world_size, [is_divisible(p) for p in parameters])
        self._divided: list[_Divided] = []
        for index, runs in runs_by_index.items():
            parameter, flat = parameters[index], memory(parameters[index]).view(-1)
            begin, end = (edge // parameter.itemsize for edge in runs.get(mesh.rank, (0, 0)))
            part = nn.Parameter(flat[begin:end]) if begin < end else None
            if part is not None:
                vars(part).update(vars(parameter))
            self._divided.append(_Divided(parameter, (begin, end), part, owner_ranks[index] == mesh.rank))
        self._lists: dict[int, tuple[list[Any], int, list[Any]]] = {}
        self._region: SharedRegion | None = None

    @property
    def parts(self) -> dict[nn.Parameter, nn.Parameter | None]:
        """This rank's part of each divided parameter, as one row of elements, or None."""
        return {one.whole: one.part for one in self._divided}

    def take_gradients(self) -> None:
        """Give each part its elements of the whole parameter's gradient."""
        for one in self._divided:
            if one.part is not None:
                gradient = one.whole.grad
                one.part.grad = None if gradient is None else gradient.detach().view(-1)[slice(*one.bounds)]

    # -------------------------------------------------------------------------------------------------------- step

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which this rank's parts replace the divided parameters in the optimizer's groups."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        before = [group["params"] for group in groups]
        for group in groups:
            whole = group["params"]
            known = self._lists.get(id(whole))
            if known is None or known[0] is not whole or known[1] != len(whole):
                by_whole, rank = self.parts, self._mesh.rank
                stand = [by_whole[p] if p in by_whole else p if self._owners(p) == rank else None for p in whole]
                known = self._lists[id(whole)] = whole, len(whole), [p for p in stand if p is not None]
            group["params"] = known[2]  # always the same list, which a fused step expects
        parts = [(one, one.part) for one in self._divided if one.part is not None]
        for one, part in parts:
            if one.state:
                state[part] = one.state
        try:
            yield
        finally:
            for group, whole in zip(groups, before, strict=True):
                group["params"] = whole
            for one, part in parts:
                part.grad = None
                one.state = state.pop(part, {})
                one.settle()

    # ------------------------------------------------------------------------------------------------------- state

    def is_new(self) -> bool:
        """Return True if the step has created state of a part that other ranks do not see."""
        return any(
            _is_like(value, one.part)
            and not (
                key in one.shared and value.untyped_storage().data_ptr() == one.shared[key].untyped_storage().data_ptr()
            )
            for one in self._divided
            for key, value in one.state.items()
        )

    def is_replaced(self) -> bool:
        """Return True if the state of a parameter that this rank owns was replaced, for example from a checkpoint.

        The optimizer then has state that it did not receive here, or a changed counter.
        """
        state = self._optimizer.state
        return any(
            not _is_same(state.get(one.whole), one.entry) or one.versions != _versions(one.entry)
            for one in self._divided
            if one.is_owner
        )

    def share(self) -> None:
        """Move the parts' state to memory that all ranks map.

        Collective: all ranks, as `open_region`, and two barriers.
        """
        own = {str(i): _kinds(one.state, one.part) for i, one in enumerate(self._divided)}
        self._open(_merged(self._mesh.gather_json(own)))
        for one in self._divided:
            for key, memory in one.shared.items():
                mine = memory[slice(*one.bounds)]
                if key in one.state:
                    mine.copy_(one.state[key])
                    one.state[key] = mine
        self._collective.barrier()
        self._give_owners()

    def adopt(self) -> None:
        """Copy the current state of the owners' optimizers to the parts. Collective: as `share`."""
        state = self._optimizer.state
        entries = {i: state.get(one.whole) or {} for i, one in enumerate(self._divided) if one.is_owner}
        own = {str(i): _kinds(entry, self._divided[i].whole) for i, entry in entries.items()}
        by_rank = self._mesh.gather_json([own, {str(i): _rest(entry) for i, entry in entries.items()}])
        self._open(_merged([layout for layout, _ in by_rank]))
        rest = {i: values for _, values_by_index in by_rank for i, values in values_by_index.items()}
        for i, one in enumerate(self._divided):
            if one.is_owner:
                for key, memory in one.shared.items():
                    memory.copy_(entries[i][key].reshape(-1))
                known = {*one.shared, *rest[str(i)]}
                one.others = {key: value for key, value in entries[i].items() if key not in known}
            one.state = {
                key: torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
                for key, (dtype, value) in rest[str(i)].items()
            }
            if one.part is not None:
                one.state |= {key: memory[slice(*one.bounds)] for key, memory in one.shared.items()}
        self._collective.barrier()
        self._give_owners()

    def _give_owners(self) -> None:
        for one in self._divided:
            if one.is_owner and (one.state or one.shared):
                whole = {key: memory.view(one.whole.shape) for key, memory in one.shared.items()}
                one.entry = {**one.state, **whole, **one.others}
                self._optimizer.state[one.whole] = dict(one.entry)
            else:
                one.entry = None
            one.settle()

    def _open(self, layout: Kinds) -> None:
        """Give each state tensor of the layout its place in new memory, which all ranks map."""
        places, end = {}, 0
        for i, kinds in layout.items():
            for key, dtype in sorted(kinds.items()):
                numel, kind = self._divided[int(i)].whole.numel(), getattr(torch, dtype)
                places[i, key] = end, numel, kind
                end += -(-numel * kind.itemsize // LINE_BYTES) * LINE_BYTES
        for one in self._divided:
            one.shared = {}
        if not end:
            self._region = None
            return
        exchange = functools.partial(exchanged, group=self._collective.group)
        num_ranks = self._mesh.world_size
        region = open_region(exchange, self._mesh.rank, num_ranks, -(-end // num_ranks))
        self._collective.barrier()  # each rank has zeroed a part, to which other ranks write
        for (i, key), (start, numel, kind) in places.items():  # each a storage of its own size, for the memory count
            tensor = torch.frombuffer(region.memory, dtype=kind, count=numel, offset=start)
            self._divided[int(i)].shared[key] = tensor
        self._region = region


def _is_like(value: Any, parameter: Tensor | None) -> bool:
    return isinstance(value, Tensor) and parameter is not None and value.ndim > 0 and value.shape == parameter.shape


def _is_same(state: dict[str, Any] | None, given: dict[str, Any] | None) -> bool:
    """Return True if the optimizer has the state that it received: the same tensors and values."""
    if state is None or given is None or state.keys() != given.keys():
        return not state and not given
    return all(state[key] is value for key, value in given.items())


def _versions(entry: dict[str, Any] | None) -> list[int]:
    values = () if entry is None else entry.values()
    return [value._version for value in values if isinstance(value, Tensor) and value.ndim == 0]


def _kinds(state: dict[str, Any], parameter: Tensor | None) -> dict[str, str]:
    return {key: str(value.dtype).removeprefix("torch.") for key, value in state.items() if _is_like(value, parameter)}


def _merged(layouts: Sequence[Kinds]) -> Kinds:
    """Merge the layouts of all ranks in one order. Each rank reports the parameters that it has, whole or in part."""
    merged: Kinds = {}
    for layout in layouts:
        for i, kinds in layout.items():
            merged.setdefault(i, {}).update(kinds)
    return dict(sorted(merged.items(), key=lambda item: int(item[0])))


def _rest(entry: dict[str, Any]) -> dict[str, Any]:
    """Return, for JSON, the state without the parameter's shape: step counters, plain values and None."""
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.ndim == 0:
            values[key] = [str(value.dtype).removeprefix("torch."), value.item()]
        elif value is None or isinstance(value, bool | int | float | str):
            values[key] = ["", value]
    return values
