"""Interface of parallelism strategies: backward passes of microbatches, and sums of gradients and losses over ranks.

The module also sums gradients that are partial over a mesh axis.

Backward passes go through the entry point of autograd's engine, whole or split. torch dispatches
torch.autograd.backward and grad to an active TorchFunctionMode, which is off while it handles a call. Recomputation in
the backward needs the mode (see numerics/grain_randomness.py) in force.

A split backward, for zero-bubble schedules, computes the gradients of the inputs first and those of the weights later.
The second part starts where the weights' paths join the inputs' path, with the gradients stored in the first part. No
gradient of an activation is computed twice. The method follows Qi et al., arXiv 2401.10241. torch's own split
(torch.distributed.pipelining) does not run under a TorchFunctionMode.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shoal.data.loader import Microbatch
from shoal.data.order import DIGEST_WORDS
from shoal.errors import LossError
from shoal.numerics import device_reads
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.parallel.shard.update_division import UpdateDivision

if TYPE_CHECKING:
    from shoal.distributed.collectives.compression.compressed_sum import Comparison, Compression
    from shoal.parallel.data.replicated import GradientBuckets
    from shoal.parallel.experts.gathered import ExpertGrains


def run_engine(
    roots: Sequence[Any],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
    *,
    keep: bool = False,
    accumulate: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run autograd's engine and return the gradients of `inputs`, unless they are added to `.grad`.

    Args:
        roots: tensors or gradient edges from which the backward starts.
        gradients: the gradient of each root.
        inputs: tensors to differentiate by; by default all leaves.
        keep: do not free the graph.
        accumulate: add the gradients to `.grad` and return nothing.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    results = engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return () if accumulate else tuple(results)


def run_backward(total: Tensor, factor: float | Tensor = 1.0) -> None:
    """Run the backward of a total with `factor` as its initial gradient: no extra operation or graph node."""
    run_engine((total,), (factor.to(total.dtype) if isinstance(factor, Tensor) else torch.full_like(total, factor),))


@dataclass
class _Group:
    """Weights with shared joints (nodes at which their paths join the inputs' path) and the joints' gradients."""

    weights: list[Tensor]
    joints: list[Node]
    gradients: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class Weights:
    """Second part of a split backward: the gradients of the weights."""

    groups: list[_Group]
    roots: list[tuple[GradientEdge, Tensor]]  # outputs that depend on weights alone
    weights: list[Tensor]

    @property
    def in_turn(self) -> list[list[Tensor]]:
        """The groups of weights for which `backward_weight` adds gradients together, in its order."""
        return [group.weights for group in self.groups] + ([self.weights] if self.roots else [])


def backward_input(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Weights]:
    """Return the gradients of the inputs, None for an input without dependents, and the state for `backward_weight`."""
    # For each node that the roots depend on, the nodes that depend on it directly.
    children: dict[Node, list[Node]] = {edge.node: [] for edge in roots}
    queue = list(children)
    while queue:
        node = queue.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in children:
                children[below] = []
                queue.append(below)
            children[below].append(node)
    leaves = {get_gradient_edge(weight).node: weight for weight in weights}
    path = _upwards([get_gradient_edge(tensor).node for tensor in inputs], children)
    groups = _groups({node: w for node, w in leaves.items() if node in children}, path, children)
    # A hook stores what arrives at a joint in the gradients of its group.
    keep = [(joint, partial(group.gradients.__setitem__, joint)) for group in groups for joint in group.joints]
    handles = [joint.register_prehook(hook) for joint, hook in keep]
    on_path = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node in path]
    off_path = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node not in path]
    results: tuple[Tensor | None, ...] = (None,) * len(inputs)
    try:
        if on_path:
            results = run_engine([e for e, _ in on_path], [g for _, g in on_path], inputs, keep=True, accumulate=False)
    finally:
        for handle in handles:
            handle.remove()
    return results, Weights(groups, off_path, list(leaves.values()))


def backward_weight(rest: Weights, turns: Iterator[None]) -> None:
    """Add the gradients of the weights to their `.grad`, as a whole backward does, hooks included.

    The function advances `turns` before each group of `in_turn`, and once at the end.
    """
    for group in rest.groups:
        next(turns)
        edges, gradients, handles = [], [], []
        for joint, stored in group.gradients.items():
            for number, gradient in enumerate(stored):
                if gradient is not None:
                    edges.append(GradientEdge(joint, number))
                    gradients.append(gradient)
            if len(group.joints) > 1:
                # One joint may be behind another: what it would receive from there is in its stored gradient already.
                handles.append(joint.register_prehook(lambda _, stored=stored: stored))
        try:
            if edges:
                run_engine(edges, gradients, group.weights)
        finally:
            for handle in handles:
                handle.remove()
    if rest.roots:
        next(turns)
        run_engine([edge for edge, _ in rest.roots], [gradient for _, gradient in rest.roots], rest.weights)
    next(turns)


def _upwards(starts: Sequence[Node], children: dict[Node, list[Node]], stop: set[Node] | None = None) -> set[Node]:
    """Return the starts and all nodes that depend on them, up to and including the nodes of `stop`."""
    above: set[Node] = set()
    queue = [node for node in starts if node in children]
    while queue:
        node = queue.pop()
        if node in above:
            continue
        above.add(node)
        if stop is None or node not in stop:
            queue += children[node]
    return above


def _groups(leaves: dict[Node, Tensor], path: set[Node], children: dict[Node, list[Node]]) -> list[_Group]:
    """Return the weights grouped by the joints that they share."""
    groups: dict[int, _Group] = {}
    of_joint: dict[Node, int] = {}
    members: dict[int, list[Node]] = defaultdict(list)
    for number, (leaf, weight) in enumerate(leaves.items()):
        joints = [node for node in _upwards([leaf], children, path) if node in path]
        merged = {of_joint[joint] for joint in joints if joint in of_joint}
        group = _Group([weight], [])
        members[number] = list(joints)
        for other in merged:
            group.weights += groups.pop(other).weights
            members[number] += [joint for joint in members.pop(other) if joint not in members[number]]
        for joint in members[number]:
            of_joint[joint] = number
        group.joints = members[number]
        groups[number] = group
    return [group for group in groups.values() if group.joints]


# Indices of a step's sums: loss total, weight, samples, number of microbatches with a gradient, and the words of the
# sample digest. Weighted buffers follow (see numerics/batch_statistics.py).
TOTAL, WEIGHT, SAMPLES, LEARNT, DIGEST = 0, 1, 2, 3, 4
NUM_SUMS = DIGEST + DIGEST_WORDS


@dataclass(frozen=True)
class Flags:
    """Failures of this rank in this step. After a sum over ranks: the number of ranks with each failure."""

    errors: int = 0
    redo: int = 0  # out of memory, or the model needs another way of computing


NO_FAILURES = Flags()


class StepSums:
    """Sums of a step over all ranks, identical on each rank.

    `sums`: float64, with the indices above. `loss`: mean over the global batch, NaN if the batch has no weight.
    """

    def __init__(
        self,
        sums: npt.NDArray[np.float64],
        flags: Flags,
        rows: npt.NDArray[np.float64] | None = None,
        compared: Comparison | None = None,
        norm: float | None = None,
    ) -> None:
        """Set the sums and the values derived from them.

        Args:
            sums: float64, with the indices above.
            flags: number of ranks with each failure.
            rows: [world_size, n], each rank's row, if the rows travelled with the sums.
            compared: compressed against exact gradients, in a sampled step.
            norm: norm of the summed gradients, as an input of `settled`, if it was read with the sums.
        """
        self.sums, self.flags, self.rows, self.compared, self.norm = sums, flags, rows, compared, norm
        total, self.weight, samples, self.learnt = sums[:DIGEST].tolist()
        self.loss = total / self.weight if self.weight else math.nan
        self.num_samples = round(samples)
        self.is_constant = bool(self.weight) and not self.learnt  # a batch with a weight, and nowhere a gradient
        self.digest = sums[DIGEST:NUM_SUMS]  # the sum of the grains' digests
        self.buffers = sums[NUM_SUMS:]  # the buffers' values, each multiplied by its number of samples


_OF_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


@dataclass  # made in every step
class LateTerms:
    """Terms of the sums of a step of one microbatch on one rank, of which only the loss is on the device.

    `known`: float64, the other numbers, on the host. The places of `total` and `weight` are unused.
    """

    known: Tensor
    total: Tensor
    weight: Tensor

    def sums(self) -> Tensor:
        """Return all terms on the device."""
        sums = device_reads.sent(self.known, self.total.device)
        sums[TOTAL], sums[WEIGHT] = self.total, self.weight
        return sums


@dataclass(frozen=True)
class QueuedSums:
    """Sums of a step over all ranks, as in StepSums, that are still on the device and unread.

    `sums`: float64. `failures` [3]: the two flags, and the number of parameters for which the presence of a gradient
    differs from the last step that was read at once. `rows`: float32 [world_size, n], or None if they did not travel
    with the sums. `fails`: False if the host knows that there is no failure. `loss`: total and weight if the other sums
    are on the host.
    """

    sums: Tensor
    failures: Tensor
    rows: Tensor | None
    fails: bool = True
    loss: tuple[Tensor, Tensor] | None = None

    def packed(self, bad: Tensor, norms: Sequence[Tensor]) -> Tensor:
        """Return the bytes of all unread numbers for a single read. `norms`: float64."""
        return device_reads.packed([bad, *self._unread, *norms])

    def unpacked(self, read: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], ...]:
        """Return `bad`, failures, sums, rows (or an empty array) and norms from the bytes of `packed`."""
        unread = self._unread
        bad, *parts, norms = np.split(read, np.cumsum([4, *(part.nbytes for part in unread)]))
        failures, *loss, rows = [
            np.frombuffer(part.tobytes(), _OF_NUMPY[own.dtype]) for part, own in zip(parts, unread, strict=True)
        ]
        sums = loss[0]
        if self.loss is not None:
            sums = self.sums.numpy()
            sums[[TOTAL, WEIGHT]] = np.concatenate(loss)
        return np.frombuffer(bad.tobytes(), np.float32), failures, sums, rows, np.frombuffer(norms.tobytes())

    @property
    def _unread(self) -> list[Tensor]:
        rows = self.failures[:0] if self.rows is None else self.rows
        return [self.failures, *(self.loss or [self.sums]), rows]


def refuse_weight(weight: float) -> float:
    """Return the weight of a loss. Raises: LossError if the weight is negative or infinite."""
    if weight < 0.0 or weight == math.inf:
        raise LossError(
            given=f"a loss whose weight is {weight}",
            conflict="the gradient is divided by the sum of the weights, each a number of samples or tokens",
            remedy="return how many the total sums over, 0 for none",
        )
    return weight


def microbatch_sums(
    microbatch: Microbatch, total: Tensor, weight: Tensor | float, buffers: Tensor, *, is_alone: bool = False
) -> Tensor | LateTerms:
    """Return one microbatch's terms of the step's sums: float64, on the device, without waiting for the device.

    `is_alone`: the step has no other microbatch, on any rank. A later forward may write over the memory of `total`.
    """
    # A read on the host waits for nothing, and one array made of numbers costs a fraction of writes into its elements.
    here = not device_reads.waits(total.device)
    known = [total.item(), refuse_weight(float(weight))] if here else [0.0, 0.0]
    sums = torch.from_numpy(np.array([*known, microbatch.num_samples, total.requires_grad, *microbatch.words]))
    if not here:
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        if is_alone and not len(buffers):
            if not (isinstance(weight, Tensor) and weight.device == total.device):  # the host knows it
                weight = torch.full_like(total, float(weight), dtype=sums.dtype)
            loss = total.detach(), weight
            return LateTerms(sums, *(part if part.dtype in _OF_NUMPY else part.double() for part in loss))
        sums = device_reads.sent(sums, buffers.device)
        sums[TOTAL], sums[WEIGHT] = total.detach(), weight
    elif not buffers.is_cpu:
        sums = device_reads.sent(sums, buffers.device)
    return torch.cat([sums, buffers]) if len(buffers) else sums


def buffer_sums(buffers: Tensor) -> Tensor:
    """Return a microbatch's terms if another rank counts its loss and samples: the buffers alone."""
    return torch.cat([buffers.new_zeros(NUM_SUMS), buffers])


# For each axis: its group, and the parameters with gradients to sum over the axis.
PartialSums = list[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]


def add_partial(model: ShardedModel) -> PartialSums:
    """Sum the gradients that are partial over axes. Return the axes' groups and the parameters summed over each.

    A parameter without a gradient on any rank has none afterwards either. Collective: for each axis, in its group, an
    all-reduce of flags, then one all-reduce per gradient.
    """
    mesh, partial = model.mesh, dict(sorted(model.division.partial.items()))
    added: PartialSums = []
    for axis in sorted({axis for axes in partial.values() for axis in axes}):
        parameters = [model.model.get_parameter(name) for name, axes in partial.items() if axis in axes]
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not parameters:
            continue
        group = mesh.group(axis)
        there = torch.tensor([float(p.grad is not None) for p in parameters], device=mesh.device)
        dist.all_reduce(there, group=group)
        added.append((group, [p for p, count in zip(parameters, there.tolist(), strict=True) if count]))
        _add_each(added[-1:], model)
    return added


def _add_each(added: PartialSums, model: ShardedModel) -> None:
    """Sum gradients over groups, in float32 at least: 16 bits would lose what autograd accumulated."""
    for group, parameter in ((group, parameter) for group, parameters in added for parameter in parameters):
        dtype = torch.float32 if parameter.itemsize < 4 else parameter.dtype
        if parameter.is_meta:  # another rank computes the parameter's stages: this rank adds zeros
            shape = model.division.cut(tuple(parameter.shape))
            dist.all_reduce(torch.zeros(shape, dtype=dtype, device=model.mesh.device), group=group)
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = local(parameter.grad)
        wide = own.to(dtype)
        dist.all_reduce(wide, group=group)
        own.copy_(wide)


# A callable that takes the name of the span that begins.
Mark = Callable[[str], None]


class Strategy(ABC):
    """Interface of a step on every rank, also on a rank without samples: begin, a backward per microbatch, finish.

    After `finish`, each parameter's `.grad` is the sum over all grains of all ranks, not divided by the weight. It is
    None if no rank's loss depends on the parameter. The update then works through `update_division`.
    """

    compression: Compression | None = None  # compresses the gradients before they are sent
    # Whether ranks with different grains communicate within each microbatch, and so need equal numbers of microbatches.
    syncs_every_microbatch = False
    # Whether `backward` takes the unscaled total and starts its gradient with the factor that `begin` received.
    begins_with_factor = False
    is_alone = False  # whether this rank computes all grains, of which a forward may take several
    sparse: Sequence[Tensor] = ()  # the parameters with sparse gradients
    expert_sums: GradientBuckets | None = None  # the gradients of this rank's experts, if ranks divide them
    expert_grains: ExpertGrains | None = None  # the same in exact mode

    def __init__(self, model: ShardedModel, mark: Mark, update_division: UpdateDivision | None = None) -> None:
        """Set the model, the `mark` to call before communication waits, and the division of the update, if any."""
        self._model, self._mesh, self._mark = model, model.mesh, mark
        self.update_division = update_division or UpdateDivision(model)
        # From the last good step that was read at once: what `add_partial` summed, and which parameters had a gradient
        # before.
        self._added: PartialSums = []
        partial = (model.model.get_parameter(name) for name in model.division.partial)
        self._watched = [p for p in partial if p.requires_grad and not p.is_meta]
        self._had: list[bool] = []

    @abstractmethod
    def begin(self, step: int = 0, factor: float | Tensor = 1.0) -> None:
        """Start a step, or start it again, without gradients or sums. Loss totals are multiplied by `factor`.

        Collective: as `UpdateDivision.begin`.
        """

    @abstractmethod
    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        """Add a microbatch's gradient and sums.

        Args:
            microbatch: the microbatch of `total`; a filler has no grains.
            total: scalar, multiplied by a factor common to all microbatches unless the strategy `begins_with_factor`.
                Its graph is freed.
            sums: float64, the microbatch's terms of the step's sums.
            last: whether all other microbatches of this rank are done.
        """

    @abstractmethod
    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        """Add a microbatch's terms of the buffers after its backward, which received zeros in their place."""

    def finish(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Return the sums over all ranks, with every rank's `row` if the rows cost no extra message.

        Args:
            flags: failures of this rank.
            num_sums: length of the sums.
            row: the same number of values on every rank, rounded to float32.

        Collective: all ranks; in a good step also as `add_partial`.
        """
        self._mark("exposed_communication")
        sums = self._sum(flags, num_sums, row)
        if self._model.division.partial and sums.weight and sums.flags == NO_FAILURES:
            self._had = [parameter.grad is not None for parameter in self._watched]
            self._added = add_partial(self._model)
        return sums

    @abstractmethod
    def _sum(self, flags: Flags, num_sums: int, row: list[float]) -> StepSums:
        """Sum gradients and step sums over the ranks with different grains, as `finish`."""

    @property
    def queues(self) -> bool:
        """True if `queue` is available: the sums need no value that the host must read first. The same on all ranks."""
        return False

    def queue(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        """Do the same as `finish`, without a wait, for parameters with a gradient in the last good `finish`.

        Collective: as `finish`, without the all-reduce of flags.
        """
        self._mark("exposed_communication")
        sums = self._queued_sum(flags, num_sums, row)
        _add_each(self._added, self._model)
        return sums

    def _queued_sum(self, flags: Flags, num_sums: int, row: list[float]) -> QueuedSums:
        """Do the same as `_sum`, if the strategy `queues`."""
        raise NotImplementedError(type(self).__name__)

    def _num_odd(self) -> int:
        """Return how many `_watched` gradients are unusually present or missing, and restore the usual state."""
        odd = 0
        for parameter, had in zip(self._watched, self._had, strict=True):
            if had != (parameter.grad is not None):
                odd += 1
                parameter.grad = torch.zeros_like(parameter) if had else None
        return odd

    def rest(self) -> None:
        """Free what forwards without a backward, for example in an evaluation, have gathered."""
        return

    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradient memory outside the parameters' own `.grad`, and memory that counts elsewhere."""
        return self.expert_sums.memory() if self.expert_sums is not None else ([], [])

    @abstractmethod
    def close(self) -> None:
        """Remove the strategy's hooks from the parameters."""


class AccumulatingStrategy(Strategy):
    """Strategy that accumulates gradients in the backward, its own or a pipeline's."""

    _sums: Any = None  # Tensor, or LateTerms of a step of one microbatch on one rank
    _root: float | Tensor = 1.0  # the initial gradient of a total

    def backward(self, microbatch: Microbatch, total: Tensor, sums: Tensor, last: bool) -> None:
        self.add(sums)
        if last:
            self.arm()
        if total.requires_grad:  # else the microbatch has no weight
            run_backward(total, self._root)

    def add(self, sums: Tensor | LateTerms) -> None:
        """Add a microbatch's sums, after its forward."""
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    def add_buffers(self, microbatch: Microbatch, values: Tensor) -> None:
        if len(values) and self._sums is not None:
            self._sums[NUM_SUMS:].add_(values)

    @abstractmethod
    def arm(self) -> None:
        """Announce that the next backward is this rank's last in the step."""
