"""Outputs of a job whose loss sees the whole global batch, and the functions of (model, batch) that stand for its loss.

An output is a tensor by sample, a sum over samples, or a parameter of the model that the loss uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from shoal.errors import JobError
from shoal.numerics.grain_randomness import active_scope
from shoal.numerics.operators import as_real

BY_SAMPLE, SUM, PARAMETER, NOTHING = "by sample", "sum", "parameter", "nothing"


class Summed:
    """Tensor that is a sum over the samples of a batch. `summed` makes it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def summed(tensor: Tensor) -> Summed:
    """Mark a tensor in the outputs of a job as a sum over samples, such as a covariance or the counts of experts.

    Args:
        tensor: A sum over the samples of the batch that `Job(outputs=...)` receives, of any shape. The loss receives
            the sum over the global batch. Floats of fewer than 32 bits are added in float32, integers in int64.

    Returns:
        The marked tensor, as a leaf of the outputs.

    Raises:
        JobError: If the argument is no tensor.

    Example:
        outputs=lambda model, batch: {"gram": shoal.summed((z := model(batch[0])).T @ z)}
    """
    if not isinstance(tensor, Tensor):
        raise JobError(
            given=f"shoal.summed({tensor!r:.60})",
            conflict="it marks a tensor that is a sum over samples",
            remedy="write shoal.summed(z.T @ z), say",
        )
    return Summed(tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.long())


@dataclass(frozen=True)
class GrainOutputs:
    """Outputs of one microbatch as a list of leaves, with the kind of each and the tree's structure."""

    leaves: list[Any]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, outputs: Any, num_samples: int | None) -> GrainOutputs:
        """Flatten the outputs of `num_samples` samples, or of an unknown number. Raises: JobError for a wrong leaf."""
        paths, spec = tree_flatten_with_path(outputs)
        names = tuple(f"outputs{keystr(path)}" for path, _ in paths)
        kinds = tuple(_kind(name, leaf, num_samples) for name, (_, leaf) in zip(names, paths, strict=True))
        if not {*kinds} - {NOTHING}:
            raise JobError(
                given="Job(outputs=...) that returned no tensor",
                conflict="the loss over the global batch is computed from the outputs alone",
                remedy="return a tensor, or a tuple or dict of tensors, with the samples as first dim",
            )
        return cls([leaf.tensor if isinstance(leaf, Summed) else leaf for _, leaf in paths], kinds, names, spec)

    @property
    def by_sample(self) -> list[Tensor]:
        """The tensors by sample."""
        return [leaf for leaf, kind in zip(self.leaves, self.kinds, strict=True) if kind == BY_SAMPLE]

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Return other leaves in the structure of the outputs."""
        return tree_unflatten(leaves, self.spec)


def _kind(name: str, leaf: Any, num_samples: int | None) -> str:
    if leaf is None:
        return NOTHING
    if isinstance(leaf, Summed):
        return SUM
    is_cut = hasattr(leaf, "placements")
    if isinstance(leaf, nn.Parameter) and not is_cut:
        return PARAMETER
    rows = isinstance(leaf, Tensor) and leaf.ndim > 0 and num_samples in (None, leaf.size(0))
    if rows and not is_cut:
        return BY_SAMPLE
    if is_cut:
        given, remedy = f"{name}, a parameter that is cut over ranks", "return it by sample from the model's forward: "
        remedy += "scale.expand(len(x))"
    elif isinstance(leaf, Tensor):
        given = f"{name} of shape {list(leaf.shape)}" + (f" for {num_samples} samples" if num_samples else "")
        remedy = (
            "return a tensor whose first dim is that of the batch, shoal.summed(tensor) for a sum over samples, or a "
            "parameter of the model as it is (model.scale, and scale.exp() in the loss)"
        )
    else:
        given, remedy = f"{name} of type {type(leaf).__name__}", "return tensors alone, or None in its place"
    raise JobError(
        given=given,
        conflict="each output has one row per sample, is marked as a sum over samples, or is a parameter of the model: "
        "nothing else is known to be the same, or to add up, over the grains of a batch",
        remedy=remedy,
    )


def has_no_tensor(part: Any) -> bool:
    """Return True if no leaf of a part of a batch is a tensor, such as None or a list of names."""
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(part))


def widened_leaf(leaf: Any) -> Any:
    """Return a leaf in float32 if it has fewer bits: a loss that compares many samples loses too much in them."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.itemsize < 4 else leaf


@dataclass(frozen=True)
class OutputsRequest:
    """Batch on the device whose outputs are passed to `settle`, which returns their part of the global loss."""

    batch: Any
    settle: Callable[[Any], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class SurrogateLoss:
    """Loss of (model, batch) that stands for a loss over the global batch, of which a microbatch is only a part.

    For an `OutputsRequest` it is the part of the real loss. For any other batch it is a sum over samples of a function
    of the outputs, so that looks see whether the outputs themselves mix samples.
    """

    outputs: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> tuple[Tensor, Tensor | float]:
        """Return (total, weight). Raises: JobError for wrong outputs."""
        if isinstance(batch, OutputsRequest):
            return batch.settle(self.outputs(model, batch.batch))
        scope = active_scope()
        outputs = GrainOutputs.of(self.outputs(model, batch), None if scope is None else sum(scope.sizes))
        totals = []
        for leaf, kind in zip(outputs.leaves, outputs.kinds, strict=True):
            if kind in (BY_SAMPLE, SUM):
                values = as_real(widened_leaf(leaf if leaf.is_floating_point() or leaf.is_complex() else leaf.double()))
                rows = values.reshape(leaf.size(0), -1) if kind == BY_SAMPLE else values.reshape(1, -1)
                # The square shows what subtracts the mean of a batch, which changes no sum over its samples.
                weights = torch.arange(1.0, rows.size(1) + 1.0, dtype=rows.dtype, device=rows.device).cos_()
                totals.append(((rows + rows.square() if kind == BY_SAMPLE else rows) * weights).sum())
        rows_of = [len(leaf) for leaf in outputs.by_sample]
        rows_of += [leaf.size(0) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        if not totals:
            return torch.zeros(()), float(next(iter(rows_of), 1))
        return torch.stack([total.to(totals[0].dtype) for total in totals]).sum(), float(next(iter(rows_of), 1))


@dataclass(frozen=True)
class BatchLoss:
    """Loss of (model, batch) of a job with outputs, where the batch is a whole one, as in an evaluation."""

    outputs: Callable[[Any, Any], Any]
    loss: Callable[..., Any]
    by_rows: bool = False

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return what the job's loss returns for the outputs of this batch."""
        pieces = pieces_of(batch)
        parts = [GrainOutputs.of(self.outputs(model, piece), None) for piece in pieces]
        device = next(leaf.device.type for leaf in parts[0].leaves if isinstance(leaf, Tensor))
        with torch.autocast(device, enabled=False):
            leaves = []
            for place, kind in enumerate(parts[0].kinds):
                own = [widened_leaf(part.leaves[place]) for part in parts]
                leaves.append(torch.cat(own) if kind == BY_SAMPLE else sum(own[1:], own[0]) if kind == SUM else own[0])
            if self.by_rows:
                rows = next(len(leaf) for leaf, kind in zip(leaves, parts[0].kinds, strict=True) if kind == BY_SAMPLE)
                return self.loss(parts[0].tree(leaves), batch, rows=slice(0, rows))
            return self.loss(parts[0].tree(leaves), batch)


# Maximum number of rows in one forward of an evaluation, which computes larger batches in pieces.
_PIECE = 256


def num_rows(batch: Any) -> int | None:
    """Return the number of rows of a batch, or None if it has parts that are no tensors by sample."""
    sizes = {leaf.size(0) if isinstance(leaf, Tensor) and leaf.ndim else -1 for leaf in tree_flatten(batch)[0]}
    return max(sizes) if len(sizes) == 1 and max(sizes) >= 0 else None


def pieces_of(batch: Any) -> list[Any]:
    """Return a batch in pieces of some rows, or whole if it has no rows."""
    leaves, spec = tree_flatten(batch)
    rows = num_rows(batch)
    if rows is None or rows <= _PIECE:
        return [batch]
    starts = range(0, rows, _PIECE)
    return [tree_unflatten([leaf[start : start + _PIECE] for leaf in leaves], spec) for start in starts]


def most_pieces(most_rows: int) -> int:
    """Return the largest number of pieces of a batch with up to `most_rows` rows."""
    return -(-most_rows // _PIECE)


@dataclass(frozen=True)
class InPieces:
    """Metric of (model, batch) that is computed in pieces of the batch, as a sum over samples allows."""

    metric: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the sums of the metric's totals and weights."""
        return tuple(map(sum, zip(*(self.metric(model, piece) for piece in pieces_of(batch)), strict=True)))


def microbatch_loss(job: Any) -> Callable[[Any, Any], Any]:
    """Return the loss of (model, batch) that a microbatch of a job computes; with outputs a stand-in for its part."""
    loss: Callable[[Any, Any], Any] = job.loss
    return loss if job.outputs is None else SurrogateLoss(job.outputs)


def evaluated_functions(job: Any) -> dict[Any, Any]:
    """Return the functions of (model, whole batch) for a job's loss and metrics, by one name or several."""
    loss = job.loss if job.outputs is None else BatchLoss(job.outputs, job.loss, job.loss_by_rows)
    own = {} if any("loss" in key for key in job.metrics if isinstance(key, tuple)) else {"loss": loss}
    return {**own, **job.metrics}


@dataclass(frozen=True)
class RowsOfOutputs:
    """Function of (model, batch) that returns a job's outputs by sample, for predictions."""

    outputs: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the tensors by sample: the tensor itself if the outputs are one, otherwise a dict by name."""
        outputs = GrainOutputs.of(self.outputs(model, batch), None)
        named = zip(outputs.names, outputs.leaves, outputs.kinds, strict=True)
        rows = {
            name[len("outputs") :].strip("[]'").replace("']['", "."): leaf
            for name, leaf, kind in named
            if kind == BY_SAMPLE
        }
        return rows[""] if list(rows) == [""] else rows


class GivenGradients(torch.autograd.Function):
    """A total with the given gradients by some tensors, each multiplied by the gradient of the total.

    `apply(total, gradients, *tensors)` returns a copy of the total.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        """Return a copy of the total."""
        ctx.gradients, ctx.kinds = gradients, [tensor.dtype for tensor in tensors]
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:
        """Return the given gradients times `factor`, in the dtypes of the tensors."""
        return None, None, *((g * factor).to(kind) for g, kind in zip(ctx.gradients, ctx.kinds, strict=True))
