"""Loss over the global batch of a step: outputs of all grains, the loss of all of them, and its gradients by grain.

A first pass computes the outputs of each microbatch without a graph. All ranks gather the outputs, compute the same
loss of the whole batch, and differentiate it by the outputs. The second pass computes the outputs again and runs each
microbatch's backward with the gradients by its own outputs. If a rank has one microbatch, its graph stays and the
outputs are computed once. The scheme is that of GradCache (Gao et al., arXiv 2101.06983).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shoal.data.loader import Loader, Microbatch
from shoal.data.source import NoSamples
from shoal.distributed.collectives.fixed_tree import TreeSum
from shoal.errors import JobError, PeerError
from shoal.numerics.generators import DrawWatch, generators_kept, seed_everything
from shoal.numerics.isolation import without_modes
from shoal.numerics.operators import as_real, in_dtype, raw_bytes, real_numel, views_of
from shoal.numerics.outputs import (
    BY_SAMPLE,
    PARAMETER,
    SUM,
    GivenGradients,
    GrainOutputs,
    OutputsRequest,
    has_no_tensor,
    widened_leaf,
)
from shoal.parallel.base import run_engine
from shoal.plans.grains import random_key
from shoal.training.microbatch.loss_pair import LossPair

if TYPE_CHECKING:
    from shoal.training.microbatch.step import ForwardBackward, LoadedMicrobatch, StepParts

# Relative distance between outputs and the same outputs computed again: kernels of a GPU in 16 bits stay below it, and
# dropout with another mask is far above it.
_SAME_OUTPUTS = 2e-2
_OTHER_NAMES = "outputs or batches with other names or numbers of tensors in another grain"
# Reads of a tensor that need no values.
_OF_SHAPE: frozenset[Any] = frozenset(
    {Tensor.__len__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
    | {Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.dtype.__get__, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
)


class PeerFailedError(PeerError):
    """Another rank has failed in a first pass, so that the step has no loss. `Strategy.finish` reports the error."""


@dataclass
class _Part:
    """Outputs and batch leaves of one microbatch of this rank."""

    grain: int
    size: int
    outputs: GrainOutputs
    batch: list[Any]


@dataclass
class _Solution:
    """Loss of the global batch.

    `gradients`: by each output of the global batch. `starts`: the first row of each microbatch, by its first grain.
    `pairs`: total and weight that a microbatch adds, by its first grain; those that are absent add nothing.
    """

    gradients: list[Tensor | None]
    starts: dict[int, int]
    pairs: dict[int, tuple[Tensor, Tensor | float]]


@dataclass
class _Step:
    """This rank's part of one step: its microbatches, and the loss once all ranks have met."""

    step: int
    parts: dict[int, _Part] = field(default_factory=dict)
    batch: TreeSpec | None = None
    template: _Part | None = None
    solution: _Solution | None = None
    has_met: bool = False


class GlobalLoss:
    """Loss over the global batch of each step, for the microbatches of one rank."""

    def __init__(self, parts: StepParts, loader: Loader) -> None:
        self._parts, self._loader, self._mesh = parts, loader, parts.mesh
        precision, self._job = parts.precision, parts.computer.job
        # Without autocast: scores of 16 bits are coarser than the differences that such a loss is about.
        self._pair = LossPair(self._job.loss, replace(precision, compute=precision.parameters))
        self._read: set[int] = set()  # places of the batch's leaves whose values the loss has read
        self._step = _Step(-1)

    def begin(self, step: int, passes: ForwardBackward) -> None:
        """Start a step, or start it again. The passes compute their losses through this object from now on."""
        template, batch = self._step.template, self._step.batch
        self._step = _Step(step, template=template, batch=batch)
        passes.request = self._request

    def microbatches(
        self, passes: ForwardBackward, loaded: Iterator[LoadedMicrobatch], own: int, fillers: list[LoadedMicrobatch]
    ) -> Iterator[LoadedMicrobatch]:
        """Return the microbatches for the passes with a backward, after a first pass over them if it is needed.

        `own`: number of microbatches of this rank. `fillers`: of weight zero, which keep the rank in step with others.
        Raises: as `ForwardBackward.compute`; PeerFailedError.
        Collective: the data ranks, unless each has one microbatch, whose pass is then the collective.
        """
        step = self._step
        if own + len(fillers) == 1:
            return loaded
        stored = list(loaded)
        for number, one in enumerate([*stored, *fillers]):
            passes.forward(one, functools.partial(self._collect, one.microbatch, number < own))
        if not own and step.template is None:
            from shoal.training.microbatch.step import LoadedMicrobatch

            first = self._loader.first_grains(step.step, 1)
            if first is None:
                raise JobError(
                    given="a first step with fewer grains than ranks, of a stream",
                    conflict="a rank without samples does not know which outputs the others gather",
                    remedy="use fewer devices, or a first step of a whole global batch",
                )
            with generators_kept():
                batch = functools.partial(self._parts.precision.inputs, first.batch)
                passes.forward(LoadedMicrobatch(first, batch), functools.partial(self._collect, first, False))
        self._parts.strategy.rest()
        self._meet()
        return iter(stored)

    def fail(self) -> None:
        """Report to the other ranks that this rank has no outputs, unless they have met. Collective: the data ranks."""
        if not self._step.has_met:
            self._step.has_met = True
            self._mesh.gather_json({"failed": True})

    def _request(self, microbatch: Microbatch, batch: Any, counts: bool) -> OutputsRequest:
        if isinstance(batch, NoSamples):
            raise JobError(
                given="a collate function that drops all samples of a grain, with Job(outputs=...)",
                conflict="the loss over the global batch compares the samples that the step's account counts",
                remedy="drop samples from the dataset instead",
            )
        return OutputsRequest(batch, functools.partial(self._settle, microbatch, batch, counts))

    def _collect(self, microbatch: Microbatch, counts: bool, batch: Any) -> OutputsRequest:
        """Return the request of a first pass, which stores the outputs without their graph."""

        def settle(outputs: Any) -> tuple[Tensor, float]:
            self._add(microbatch, counts, batch, GrainOutputs.of(outputs, microbatch.num_samples))
            return torch.zeros(()), 0.0

        return replace(self._request(microbatch, batch, counts), settle=settle)

    def _add(self, microbatch: Microbatch, counts: bool, batch: Any, outputs: GrainOutputs) -> None:
        """Store the outputs and the batch of a microbatch that `counts`. Raises: JobError if they do not fit others."""
        step = self._step
        leaves, spec = tree_flatten(batch, is_leaf=has_no_tensor)
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs.leaves]
        for place, kind in enumerate(outputs.kinds):
            if kind == PARAMETER:  # ranks that gather it free it after the forward
                detached[place] = detached[place].clone()
        part = _Part(microbatch.grains[0].index, microbatch.num_samples, replace(outputs, leaves=detached), leaves)
        first = next(iter(step.parts.values()), None)
        if first is None:
            step.template, step.batch = part, spec
        elif (first.outputs.spec, first.outputs.kinds) != (outputs.spec, outputs.kinds) or step.batch != spec:
            raise _unlike(_OTHER_NAMES)
        if counts:
            step.parts[part.grain] = part

    def _settle(self, microbatch: Microbatch, batch: Any, counts: bool, outputs: Any) -> tuple[Tensor, Tensor | float]:
        """Return the part of the loss of a microbatch, with the gradients by its outputs."""
        step, grain = self._step, microbatch.grains[0].index
        flat = GrainOutputs.of(outputs, microbatch.num_samples)
        if step.solution is None:  # the only microbatch of this rank, and no first pass
            self._add(microbatch, counts, batch, flat)
            self._meet()
        elif counts:
            _refuse_other(step.parts[grain].outputs, flat)
        assert step.solution is not None
        start, leaves, gradients = step.solution.starts.get(grain, 0), [], []
        nothing = torch.zeros((), device=self._mesh.device), 0.0
        total, weight = step.solution.pairs.get(grain, nothing) if counts else nothing
        is_first = counts and start == 0
        for leaf, kind, gradient in zip(flat.leaves, flat.kinds, step.solution.gradients, strict=True):
            if gradient is None or not leaf.requires_grad or (kind == PARAMETER and not is_first):
                continue
            leaves.append(leaf)
            if not counts:  # the backward of a filler passes through the same modules, in which ranks may meet
                gradients.append(torch.zeros_like(leaf))
            else:
                gradients.append(gradient[start : start + microbatch.num_samples] if kind == BY_SAMPLE else gradient)
        if leaves:
            total = GivenGradients.apply(total, gradients, *leaves)  # type: ignore[no-untyped-call]
        return total, weight

    def _meet(self) -> None:
        """Compute the loss of the global batch and its gradients. Collective: the data ranks."""
        step, mark = self._step, self._parts.clock.mark
        device = self._mesh.device
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        with (
            without_modes(),
            generators_kept(),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            self._parts.precision.products(),
        ):
            try:
                mark("exposed_communication")
                gathering = _Gathering(self._mesh, step)
                step.has_met = True
                gathering.exchange_layouts()
                leaves = self._leaves(gathering)
                mark("forward")
                pairs = self._losses(gathering, leaves)
                for total, _ in pairs.values():
                    self._refuse_past_outputs(total, leaves)
                num_grains = self._job.num_grains if self._job.loss_by_rows else None
                gradients = gathering.gradients(leaves, pairs, num_grains)
                step.solution = _Solution(gradients, gathering.starts, {})
                for grain, (total, weight) in pairs.items():
                    weight = weight.detach() if isinstance(weight, Tensor) else weight
                    step.solution.pairs[grain] = total.detach(), weight
            finally:
                if on_device is not None:
                    torch.cuda.set_rng_state(on_device, device)

    def _refuse_past_outputs(self, total: Tensor, leaves: list[Any]) -> None:
        """Refuse a loss that uses the model's parameters in another way than by outputs. Raises: JobError."""
        nodes, seen, known = [total.grad_fn], set[Any](), {id(leaf) for leaf in leaves}
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            if variable is None or id(variable) in known:
                continue
            for name, parameter in self._parts.computer.model.named_parameters():
                if parameter is variable:
                    raise JobError(
                        given=f"a loss over the global batch that uses {name!r} of the model by itself",
                        conflict="it is differentiated by the outputs alone, so that this use would have no gradient",
                        remedy="return the parameter from Job(outputs=...), or what the loss computes with it",
                    )

    def _leaves(self, gathering: _Gathering) -> list[Any]:
        """Return the outputs of the global batch, each a leaf of the loss's graph."""
        assert self._step.template is not None
        outputs = self._step.template.outputs
        whole = list(outputs.leaves)
        places = [place for place, kind in enumerate(outputs.kinds) if kind == BY_SAMPLE]
        for place, tensor in zip(places, gathering.rows(places), strict=True):
            whole[place] = tensor
        sums = [place for place, kind in enumerate(outputs.kinds) if kind == SUM]
        for place, tensor in zip(sums, gathering.sums(sums, self._job.num_grains), strict=True):
            whole[place] = tensor
        leaves = []
        for leaf in whole:
            if isinstance(leaf, Tensor):
                leaf = widened_leaf(leaf.detach())
                leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
            leaves.append(leaf)
        return leaves

    def _losses(self, gathering: _Gathering, leaves: list[Any]) -> dict[int, tuple[Tensor, Tensor | float]]:
        """Return (total, weight) of the global batch, which all ranks compute, at the first grain.

        If the job's loss is by rows, return (total, weight) of the rows of each own microbatch, by its first grain.
        Only leaves of the batch whose values the loss reads are gathered. The others have their shape and no values; a
        first read of a value gathers it, and the loss is computed again, from the same outputs and generators.
        """
        assert self._step.template is not None
        assert self._step.batch is not None
        outputs, batch = self._step.template.outputs, gathering.shapes_of_batch()
        known: set[int] = set()
        pairs = {next(iter(gathering.starts)): self._pair}
        if self._job.loss_by_rows:
            pairs = {
                part.grain: replace(self._pair, function=functools.partial(self._job.loss, rows=rows))
                for part, rows in gathering.own_rows()
            }
        while True:
            seed_everything(random_key(self._job.seed, "loss", self._step.step))
            missing = sorted(self._read - known)
            for place, tensor in zip(missing, gathering.batch(missing), strict=True):
                batch[place] = tensor
            known = {*self._read}
            unread = [place for place, leaf in enumerate(batch) if place not in known and isinstance(leaf, Tensor)]
            reads = _Reads({id(batch[place]): place for place in unread})
            tree = tree_unflatten(batch, self._step.batch)
            error: Exception | None = None
            draws = DrawWatch()
            draws.begin()
            try:
                with reads if reads.places else contextlib.nullcontext():
                    losses = {grain: pair(outputs.tree(leaves), tree) for grain, pair in pairs.items()}
                if self._job.loss_by_rows and draws.end():
                    raise JobError(
                        given="a loss with loss_by_rows=True that draws random numbers",
                        conflict="each rank would draw others for its rows, so that the result depends on the layout",
                        remedy="draw in Job(outputs=...), by sample, or leave loss_by_rows out",
                    )
            except Exception as caught:
                error = None if reads.read else caught
            if self._job.loss_by_rows:  # ranks compute other rows, and may read other parts of the batch
                rows = self._mesh.gather_json({"failed": True} if error is not None else sorted(reads.read))
                if error is None and {"failed": True} in rows:
                    raise peer_failed()
                reads.read = {place for row in rows if isinstance(row, list) for place in row}
            if error is not None:
                raise error
            if not reads.read:
                return losses
            self._read |= reads.read
            leaves[:] = self._leaves(gathering)  # the loss may have written into them


class _Gathering:
    """Gathering of one step's outputs and batches over the data ranks, each in the order of samples."""

    def __init__(self, mesh: Any, step: _Step) -> None:
        self._mesh, self._step = mesh, step
        self._own = [step.parts[grain] for grain in sorted(step.parts)]

    def exchange_layouts(self) -> None:
        """Exchange the grains and the shapes of all ranks. Raises: PeerFailedError; JobError for unlike shapes."""
        own = self._own
        layouts = [
            [_layout(part.outputs.leaves[place], part.size) for part in own] for place in self._places(BY_SAMPLE)
        ]
        num_leaves = len(own[0].batch) if own else 0
        batch = [[_layout(part.batch[place], part.size) for part in own] for place in range(num_leaves)]
        rows = self._mesh.gather_json(
            {
                "grains": [[part.grain, part.size] for part in own],
                "names": [[part.outputs.names, part.outputs.kinds, len(part.batch)] for part in own[:1]],
                "outputs": [_common(of_parts) for of_parts in layouts],
                "batch": [_common(of_parts) for of_parts in batch],
            }
        )
        if any("failed" in row for row in rows):
            raise peer_failed()
        self.holders = [[grain for grain, _ in row["grains"]] for row in rows]
        self._sizes = [sum(size for _, size in row["grains"]) for row in rows]
        sizes = dict(sorted(pair for row in rows for pair in row["grains"]))
        self.num_rows = sum(sizes.values())
        self.starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        in_turn = [grain for holder in self.holders for grain in holder]
        self._order = None
        if in_turn != sorted(in_turn):
            places = dict(zip(in_turn, torch.arange(self.num_rows).split([sizes[g] for g in in_turn]), strict=True))
            self._order = torch.cat([places[grain] for grain in sorted(places)])
        holding = [row for row in rows if row["grains"]]
        if any(row["names"] != holding[0]["names"] for row in holding):
            raise _unlike(_OTHER_NAMES)
        self._outputs = [_common(list(column)) for column in zip(*(row["outputs"] for row in holding), strict=True)]
        self._batch = [_common(list(column)) for column in zip(*(row["batch"] for row in holding), strict=True)]
        for place, layout in zip(self._places(BY_SAMPLE), self._outputs, strict=True):
            if layout is None:
                assert self._step.template is not None
                raise _unlike(
                    f"{self._step.template.outputs.names[place]} with another shape or dtype in another grain"
                )

    def _places(self, kind: str) -> list[int]:
        assert self._step.template is not None
        return [place for place, own in enumerate(self._step.template.outputs.kinds) if own == kind]

    def rows(self, places: Sequence[int]) -> list[Tensor]:
        """Return outputs by sample of the global batch. Collective: the data ranks, one all-gather."""
        own = [[part.outputs.leaves[place] for part in self._own] for place in places]
        return self._gathered(own, [layout for layout in self._outputs if layout is not None])

    def batch(self, places: Sequence[int]) -> list[Tensor]:
        """Return leaves of the global batch. Collective: the data ranks, one all-gather unless `places` is empty."""
        layouts = [self._batch[place] for place in places]
        own = [[part.batch[place] for part in self._own] for place in places]
        return self._gathered(own, [layout for layout in layouts if layout is not None])

    def own_rows(self) -> list[tuple[_Part, slice]]:
        """Return this rank's microbatches with their rows."""
        return [(part, slice(self.starts[part.grain], self.starts[part.grain] + part.size)) for part in self._own]

    def shapes_of_batch(self) -> list[Any]:
        """Return the leaves of the global batch: tensors without values, and constants that all grains have."""
        return [
            NotGathered()
            if layout is None
            else torch.empty((self.num_rows, *layout[1]), dtype=getattr(torch, layout[0]), device="meta")
            if layout[0]
            else layout[1]
            for layout in self._batch
        ]

    def _gathered(self, own: list[list[Tensor]], layouts: list[tuple[str, list[int]]]) -> list[Tensor]:
        if not layouts:
            return []
        mesh, device = self._mesh, self._mesh.device
        if mesh.world_size == 1:
            return [torch.cat(parts) for parts in own]
        widths = [math.prod(shape) * getattr(torch, kind).itemsize for kind, shape in layouts]
        sent = torch.zeros(max(self._sizes) * sum(widths), dtype=torch.uint8, device=device)
        if self._own:
            mine = torch.cat([raw_bytes(part.contiguous()) for parts in own for part in parts])
            sent[: len(mine)] = mine
        through = sent.cpu() if mesh.through_host else sent
        blocks = [torch.empty_like(through) for _ in range(mesh.world_size)]
        dist.all_gather(blocks, through)  # all ranks have different grains
        whole, before = [], 0
        for (kind, shape), width in zip(layouts, widths, strict=True):
            pieces = [
                block[before * size : (before + width) * size] for block, size in zip(blocks, self._sizes, strict=True)
            ]
            before += width
            rows = torch.cat(pieces).to(device).view(getattr(torch, kind)).reshape(self.num_rows, *shape)
            whole.append(rows if self._order is None else rows[self._order.to(device)])
        return whole

    def gradients(
        self, leaves: list[Any], pairs: dict[int, tuple[Tensor, Tensor | float]], num_grains: int | None
    ) -> list[Tensor | None]:
        """Return the gradients of the global loss by each leaf, or None.

        `num_grains`: None if all ranks have the whole loss. Otherwise the losses are those of each rank's own rows, and
        the ranks add their gradients in the tree. Collective: all ranks in that case.
        """
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        by_input: list[Tensor | None] = [None] * len(inputs)
        tree = None
        if num_grains is not None and inputs:
            kind = torch.float64 if any(as_real(leaf).dtype == torch.float64 for leaf in inputs) else torch.float32
            length = sum(map(real_numel, inputs))
            tree = TreeSum(num_grains, torch.empty(length, dtype=kind, device=self._mesh.device))
        for grain, (total, _) in pairs.items():
            if total.requires_grad:
                by_input = list(run_engine((total,), (torch.ones_like(total),), inputs, accumulate=False))
            else:
                by_input = [None] * len(inputs)
            if tree is not None:
                flat = tree.empty().zero_()
                for view, gradient in zip(views_of(flat, inputs), by_input, strict=True):
                    if gradient is not None:
                        view.copy_(as_real(gradient))
                tree.add(grain, flat)
        if tree is not None:
            views = views_of(tree.total(self.holders, self._mesh.rank).clone(), inputs)
            by_input = [in_dtype(view, leaf) for view, leaf in zip(views, inputs, strict=True)]
        each = iter(by_input)
        return [next(each) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]

    def sums(self, places: Sequence[int], num_grains: int) -> list[Tensor]:
        """Return sums over the samples of the global batch, added in the tree of the gradients. Collective: all ranks.

        A microbatch of several grains takes the place of its first grain.
        """
        assert self._step.template is not None
        like = [widened_leaf(self._step.template.outputs.leaves[place]) for place in places]
        whole: dict[int, Tensor] = {}
        for kind in sorted({leaf.dtype for leaf in like}, key=str):
            numbers = [number for number, leaf in enumerate(like) if leaf.dtype == kind]
            lengths = [like[number].numel() for number in numbers]
            tree = TreeSum(num_grains, torch.empty(sum(lengths), dtype=kind, device=self._mesh.device))
            for part in self._own:
                own = [widened_leaf(part.outputs.leaves[places[number]]).reshape(-1) for number in numbers]
                tree.add(part.grain, torch.cat(own))
            flat = tree.total(self.holders, self._mesh.rank)
            for number, values in zip(numbers, flat.split(lengths), strict=True):
                whole[number] = values.clone().reshape(like[number].shape)
        return [whole[number] for number in range(len(places))]


class _Reads(TorchFunctionMode):
    """Context that records the leaves, given by id, whose values a function of torch reads."""

    def __init__(self, places: Mapping[int, int]) -> None:
        super().__init__()
        self.places, self.read = places, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _OF_SHAPE:
            self.read.update(self.places[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.places)
        return func(*args, **kwargs)


class NotGathered:
    """Part of a batch that is neither by sample nor a constant, so that a loss over the global batch cannot read it."""

    def __getattr__(self, name: str) -> Any:
        raise JobError(
            given=f"a loss over the global batch that reads {name} of a part of the batch which is no tensor by sample",
            conflict="the batches of the grains are joined along the samples; this part has no such dim, or another "
            "value or shape in each grain",
            remedy="return what the loss needs of it from Job(outputs=...), as a tensor by sample",
        )

    def _read(self, *others: Any) -> Any:
        return self.__getattr__("values")

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __int__ = __float__ = __index__ = _read
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls().values


def _layout(leaf: Any, num_samples: int) -> tuple[str, Any] | None:
    """Return dtype and shape of a row, an empty name and the value of a constant, or None for what is neither."""
    if isinstance(leaf, Tensor):
        is_row = leaf.ndim > 0 and leaf.size(0) == num_samples
        return (str(leaf.dtype).removeprefix("torch."), list(leaf.shape[1:])) if is_row else None
    return ("", leaf) if leaf is None or type(leaf) in (bool, int, float, str) else None


def _common(layouts: Sequence[Any]) -> Any:
    """Return the layout that all have, or None."""
    return layouts[0] if layouts and all(list(one or ()) == list(layouts[0] or ()) for one in layouts) else None


def peer_failed() -> PeerFailedError:
    """Return the error of a rank that cannot finish a step because another rank has failed."""
    return PeerFailedError(given="another rank", conflict="it has failed in this step", remedy="read its message")


def _unlike(given: str) -> JobError:
    return JobError(
        given=given,
        conflict="the outputs of all grains are joined along the samples to those of the global batch",
        remedy="return the same tensors for every batch, with rows of one shape: pad them to a fixed length, or reduce "
        "them to what the loss compares",
    )


def _refuse_other(first: GrainOutputs, again: GrainOutputs) -> None:
    """Refuse outputs that differ from those of the first pass, from which the gradients are. Raises: JobError."""
    for name, one, two in zip(first.names, first.leaves, again.leaves, strict=True):
        if not isinstance(one, Tensor):
            continue
        two = two.detach()
        if one.shape == two.shape and bool(
            torch.linalg.vector_norm((one - two).float()) <= _SAME_OUTPUTS * torch.linalg.vector_norm(one.float())
        ):
            continue
        if one.shape == two.shape and not bool(torch.isfinite(one).all()):
            continue  # the step reports it
        raise JobError(
            given=f"{name}, which has other values when the same microbatch is computed again",
            conflict="the gradients of a loss over the global batch belong to the outputs of the first computation",
            remedy="draw with torch's functions alone, write into no tensor of the batch, and keep no state between "
            "forwards; or use one microbatch a rank, whose outputs are computed once",
        )
