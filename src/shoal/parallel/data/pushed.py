"""Parameter server: pushes of workers, and a server's shard of the parameters.

A push contains gradients of some grains of one step, one sum per node: a worker's whole part, or in exact mode the
nodes of the fixed tree that its grains fill. Its name (step, part) makes a server count it once, also if it arrives
late or twice. Its ticket grows each time the part is handed out again. Source of the idea: Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.data.loader import Microbatch
from shoal.distributed.collectives.fixed_tree import evaluate
from shoal.jobs.job import Progress
from shoal.numerics.gradient_norm import global_norm
from shoal.numerics.operators import raw_bytes, views_of
from shoal.parallel.base import NUM_SUMS, Flags, StepSums
from shoal.parallel.data.replicated import DataParallel, ExactDataParallel
from shoal.plans.accounting.collectives import Range, divide

T = TypeVar("T")


class FastPart(DataParallel):
    """One worker's part of a step: one sum over its grains; after `finish` in the parameters' `.grad`."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.is_alone = False  # the mesh has one rank, but other workers compute the other grains

    def begin(self, step: int = 0, factor: float | Tensor = 1.0) -> None:
        super().begin(step, factor)
        self._grains: list[int] = []

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        self._grains += [grain.index for grain in microbatch.grains]
        super().backward(microbatch, total, sums, last)

    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Return this worker's sums without sending them."""
        step_sums = super()._sum(flags, num_sums, row)
        self._row = torch.from_numpy(step_sums.sums).clone()
        return step_sums

    @property
    def sums(self) -> dict[Range, Tensor]:
        """The step's sums over this part, by its node."""
        return {self._node: self._row}

    def gradients(self, parameters: Sequence[Tensor], reduce: torch.dtype) -> dict[Range, Tensor]:
        """Return the parameters' flat gradient in the reduce dtype, by its node; zeros replace missing gradients."""
        return {self._node: torch.cat([_flat(p, self._buckets.gradient(p), reduce) for p in parameters])}

    def used(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return the indices of the `parameters` that have a gradient."""
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
        """Return this worker's sums without sending them."""
        rows = {node: row.cpu() for node, row in self.sums.items()}
        total = evaluate(rows, self._num_grains, torch.Tensor.add)
        sums = torch.zeros(max(num_sums, NUM_SUMS), dtype=torch.float64) if total is None else total
        return StepSums(sums.numpy(), flags)

    @property
    def sums(self) -> dict[Range, Tensor]:
        """The step's sums of each grain, by its node."""
        return {(grain, grain + 1): row for grain, row in self._rows.items()}

    def gradients(self, parameters: Sequence[Tensor], reduce: torch.dtype) -> dict[Range, Tensor]:
        """Return the flat gradient of the `parameters` for each node of the tree."""
        places = {id(p): place for place, p in enumerate(self._parameters)}
        sizes = [p.numel() for p in self._parameters]
        wanted = [places[id(p)] for p in parameters]
        return {
            node: torch.cat([flat.split(sizes)[place] for place in wanted]) for node, flat in self._tree.nodes.items()
        }

    def used(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return the indices of the `parameters` for which some grain had a gradient."""
        places = {id(p): place for place, p in enumerate(self._parameters)}
        return [place for place, p in enumerate(parameters) if self._used[places[id(p)]]]


def combine(values: Mapping[Range, T], num_grains: int, add: Callable[[T, T], T], *, exact: bool) -> T | None:
    """Sum over all nodes, by the fixed tree if `exact`, else in the order of the grains. The senders do not matter."""
    if exact:
        return evaluate(values, num_grains, add)
    return reduce(add, (values[node] for node in sorted(values))) if values else None


def divide_parameters(sizes: Mapping[str, int], num_servers: int) -> list[list[str]]:
    """Assign parameters to servers by size in bytes: the largest first, to the server with the fewest bytes.

    A parameter is never cut, so any optimizer works. Each server's names are in the order of the model.
    """
    owners = divide([max(1, size) for size in sizes.values()], num_servers)
    return [
        [name for name, owner in zip(sizes, owners, strict=True) if owner == server] for server in range(num_servers)
    ]


class Ledger:
    """Set of the applied steps: all below a number, and those above it that were applied early."""

    def __init__(self, first: int = 0) -> None:
        self._below, self._above = first, set[int]()

    def __contains__(self, step: int) -> bool:
        return step < self._below or step in self._above

    def add(self, step: int) -> None:
        """Add a step. Raises: ValueError if the set has it already, because the step would count twice."""
        if step in self:
            raise ValueError(f"step {step} is already applied")
        self._above.add(step)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1


@dataclass(frozen=True)
class Push:
    """A worker's push: `flats` contains, for each of `nodes`, a flat gradient of all the server's parameters.

    `used`: indices of the parameters that have a gradient.
    """

    step: int
    part: int
    ticket: int
    nodes: tuple[Range, ...]
    used: tuple[int, ...]
    flats: tuple[Tensor, ...]


class ServerShard:
    """State of one server: parameters and their pushes. `version` counts decisions: updates and skipped steps."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], step: Callable[[Progress], None], num_grains: int, *, exact: bool
    ) -> None:
        """Set the parameters. `step` updates them from `.grad`, given the progress of the gradient's step."""
        self._parameters, self._step = list(parameters), step
        self._num_grains, self._exact = num_grains, exact
        self.version = 0
        self._sizes = [p.numel() for p in self._parameters]
        self._staged: dict[int, dict[int, Push]] = {}
        self._ledger = Ledger()
        self._snapshot: tuple[int, Tensor] | None = None
        self.repeated = 0

    def push(self, push: Push) -> bool:
        """Store a push. Return False if it is a duplicate, has an old ticket, or its step was applied."""
        if any(flat.numel() != sum(self._sizes) for flat in push.flats) or len(push.flats) != len(push.nodes):
            raise ValueError(f"a push of {[f.numel() for f in push.flats]} elements, for {sum(self._sizes)}")
        earlier = self._staged.get(push.step, {}).get(push.part)
        if push.step in self._ledger or (earlier is not None and earlier.ticket >= push.ticket):
            self.repeated += 1
            return False
        self._staged.setdefault(push.step, {})[push.part] = push
        return True

    def combine(self, step: int, tickets: Mapping[int, int]) -> list[float | None]:
        """Sum a step's parts into the gradients. Return each gradient's Euclidean norm, None for a missing gradient.

        `tickets`: the expected push of each part. Raises: ValueError if the stored pushes differ.
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
        """Update the parameters with the combined gradients times `scale`; None skips the update.

        Returns: False, without any effect, if the step was applied before.
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
        """Resume from `version` with the parameters' current values."""
        self.version, self._staged, self._ledger, self._snapshot = version, {}, Ledger(version), None

    def pull(self) -> tuple[int, Tensor]:
        """Return the version and a copy of the parameters' bytes, concatenated, that no later update changes."""
        if self._snapshot is None or self._snapshot[0] != self.version:
            self._snapshot = self.version, pack(self._parameters)
        return self._snapshot

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the last `combine`."""
        return [p.grad for p in self._parameters]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors' bytes as uint8."""
    return torch.cat([raw_bytes(t).cpu() for t in tensors])


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the output of `pack` into tensors of the same shapes and dtypes."""
    parts = packed.split([t.nbytes for t in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
