"""Parameter server: pushes of workers, and a server's shard of the parameters.

A push is the sum of the gradients of some grains of one step, once for each node: a worker's whole part, or in exact
mode the nodes of the fixed tree that its grains fill. It is named by (step, part), so that it counts once however often
and in whatever order it arrives, and by a ticket, which grows each time that the part is given out anew.
Source of the idea: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.data.loader import Microbatch
from shoal.distributed.collectives.fixed_tree import evaluate
from shoal.job import Progress
from shoal.numerics.flat import raw_bytes, views_of
from shoal.numerics.gradient_norm import global_norm
from shoal.parallel.base import NUM_SUMS, Flags, StepSums
from shoal.parallel.data.replicated import DataParallel, ExactDataParallel
from shoal.plans.accounting.partition import Range, divide

T = TypeVar("T")


class FastPart(DataParallel):
    """One worker's part of a step: one sum over its grains; after `finish` in the parameters' `.grad`."""

    def begin(self, step: int = 0, factor: float = 1.0) -> None:
        super().begin(step, factor)
        self._grains: list[int] = []

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        self._grains += [grain.index for grain in microbatch.grains]
        super().backward(microbatch, total, sums, last)

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """This worker's sums; nothing is sent here."""
        found = super()._sum(flags, num_sums, row)
        self._row = torch.from_numpy(found.sums).clone()
        return found

    @property
    def sums(self) -> dict[Range, Tensor]:
        """The step's sums over this part, by its node."""
        return {self._node: self._row}

    def gradients(self, parameters: Sequence[Tensor], reduce: torch.dtype) -> dict[Range, Tensor]:
        """The flat gradient of these parameters in the reduce dtype, zero where there is none, by its node."""
        return {self._node: torch.cat([_flat(p, self._buckets.gradient(p), reduce) for p in parameters])}

    def used(self, parameters: Sequence[Tensor]) -> list[int]:
        """The places of those parameters that have a gradient."""
        return [place for place, p in enumerate(parameters) if p.grad is not None]

    @property
    def _node(self) -> Range:
        return min(self._grains), max(self._grains) + 1


def _flat(parameter: Tensor, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1).to(dtype)


class ExactPart(ExactDataParallel):
    """One worker's part of a step in exact mode: the sums over the nodes of the fixed tree that its grains fill."""

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """This worker's sums; nothing is sent here."""
        rows = {node: row.cpu() for node, row in self.sums.items()}
        total = evaluate(rows, self._num_grains, torch.Tensor.add)
        sums = torch.zeros(max(num_sums, NUM_SUMS), dtype=torch.float64) if total is None else total
        return StepSums(sums.numpy(), flags)

    @property
    def sums(self) -> dict[Range, Tensor]:
        """The step's sums of each grain, by its node."""
        return {(grain, grain + 1): row for grain, row in self._rows.items()}

    def gradients(self, parameters: Sequence[Tensor], reduce: torch.dtype) -> dict[Range, Tensor]:
        """The flat gradient of these parameters, by its node of the tree."""
        places = {id(p): place for place, p in enumerate(self._parameters)}
        sizes = [p.numel() for p in self._parameters]
        wanted = [places[id(p)] for p in parameters]
        return {
            node: torch.cat([flat.split(sizes)[place] for place in wanted]) for node, flat in self._tree.nodes.items()
        }

    def used(self, parameters: Sequence[Tensor]) -> list[int]:
        """The places of those parameters that some grain had a gradient of."""
        places = {id(p): place for place, p in enumerate(self._parameters)}
        return [place for place, p in enumerate(parameters) if self._used[places[id(p)]]]


def combine(values: Mapping[Range, T], num_grains: int, add: Callable[[T, T], T], *, exact: bool) -> T | None:
    """The sum over all nodes: by the fixed tree, or else in the order of the grains; whoever sent them, and when."""
    if exact:
        return evaluate(values, num_grains, add)
    return reduce(add, (values[node] for node in sorted(values))) if values else None


def divide_parameters(sizes: Mapping[str, int], num_servers: int) -> list[list[str]]:
    """The parameters of each server by name, from their sizes in bytes: the largest first, to the one with least.

    A parameter is never cut, so that any optimizer may be asked for. Each server's are in the order of the model.
    """
    owners = divide([max(1, size) for size in sizes.values()], num_servers)
    return [
        [name for name, owner in zip(sizes, owners, strict=True) if owner == server] for server in range(num_servers)
    ]


class Ledger:
    """Set of the steps that were applied, in whatever order: all below a number, and some above it."""

    def __init__(self, first: int = 0) -> None:
        self._below, self._above = first, set[int]()

    def __contains__(self, step: int) -> bool:
        return step < self._below or step in self._above

    def add(self, step: int) -> None:
        """Notes a step. Raises: ValueError where it was noted before: it would count twice."""
        if step in self:
            raise ValueError(f"step {step} was applied before")
        self._above.add(step)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1


@dataclass(frozen=True)
class Push:
    """Push of a worker: `flats` holds a flat gradient of all the server's parameters for each of `nodes`.

    `used`: the places of those parameters that have a gradient at all.
    """

    step: int
    part: int
    ticket: int
    nodes: tuple[Range, ...]
    used: tuple[int, ...]
    flats: tuple[Tensor, ...]


class ServerShard:
    """State of one server: parameters, and their pushes. A version counts decisions: updates, and steps left out."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], step: Callable[[Progress], None], num_grains: int, *, exact: bool
    ) -> None:
        """`step` updates them, given the progress of the step whose gradient their `.grad` are."""
        self._parameters, self._step = list(parameters), step
        self._num_grains, self._exact = num_grains, exact
        self.version = 0
        self._sizes = [p.numel() for p in self._parameters]
        self._staged: dict[int, dict[int, Push]] = {}
        self._ledger = Ledger()
        self._snapshot: tuple[int, Tensor] | None = None
        self.repeated = 0

    def push(self, push: Push) -> bool:
        """Takes a push aside; False where it was there already, is older than what is there, or was applied."""
        if any(flat.numel() != sum(self._sizes) for flat in push.flats) or len(push.flats) != len(push.nodes):
            raise ValueError(f"a push of {[f.numel() for f in push.flats]} elements, for {sum(self._sizes)}")
        held = self._staged.get(push.step, {}).get(push.part)
        if push.step in self._ledger or (held is not None and held.ticket >= push.ticket):
            self.repeated += 1
            return False
        self._staged.setdefault(push.step, {})[push.part] = push
        return True

    def combine(self, step: int, tickets: Mapping[int, int]) -> list[float | None]:
        """Adds up a step's parts into the gradients; the Euclidean norm of each, None where it has no gradient.

        `tickets` says of each part which push is meant. Raises: ValueError where it is not there.
        """
        staged = self._staged.get(step, {})
        if {part: push.ticket for part, push in staged.items()} != dict(tickets):
            raise ValueError(f"step {step}: of the pushes {dict(tickets)} there are {sorted(staged)}")
        nodes = {node: flat for push in staged.values() for node, flat in zip(push.nodes, push.flats, strict=True)}
        total = combine(nodes, self._num_grains, torch.add, exact=self._exact)
        used = {place for push in staged.values() for place in push.used}
        assert total is not None, "a step has a part"
        pairs = zip(self._parameters, views_of(total, self._parameters), strict=True)
        for place, (parameter, view) in enumerate(pairs):
            parameter.grad = view.to(parameter.dtype) if place in used else None
        return [None if p.grad is None else global_norm([p.grad]) for p in self._parameters]

    def apply(self, step: int, version: int, scale: float | None, progress: Progress) -> bool:
        """Updates the parameters by what was combined, times `scale`; None leaves the step out.

        False where the step was applied before; then nothing happens.
        """
        if step in self._ledger:
            return False
        if version != self.version + 1:
            raise ValueError(f"version {version} after {self.version}")
        self._ledger.add(step)
        if scale is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if gradients and scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            self._step(progress)
        self._staged.pop(step, None)
        for parameter in self._parameters:
            parameter.grad = None
        self.version = version
        return True

    def reset(self, version: int) -> None:
        """Goes on from that version, with the values that the parameters have now."""
        self.version, self._staged, self._ledger, self._snapshot = version, {}, Ledger(version), None

    def pull(self) -> tuple[int, Tensor]:
        """The version and the parameters' bytes, one after the other; a copy that later updates leave alone."""
        if self._snapshot is None or self._snapshot[0] != self.version:
            self._snapshot = self.version, pack(self._parameters)
        return self._snapshot

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the last `combine`."""
        return [p.grad for p in self._parameters]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' bytes, one after the other: uint8."""
    return torch.cat([raw_bytes(t).cpu() for t in tensors])


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies what `pack` made into tensors of the same shapes and dtypes."""
    parts = packed.split([t.nbytes for t in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
