"""Metrics over all predictions: `over_all`, and the rows of all samples in their order, in memory or on disk."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoal.errors import JobError
from shoal.numerics.operators import as_real, raw_bytes
from shoal.numerics.outputs import widened_leaf

# Bytes of a file that stay in memory.
IN_MEMORY = 64 << 20
# Names of the first parameter of a function that takes the targets first, as those of sklearn do.
_TARGETS = ("y_true", "labels_true", "labels", "target", "targets")


@dataclass(frozen=True)
class OverAll:
    """Metric of the outputs and targets of all samples. `over_all` makes it.

    `outputs` and `targets` are functions, or the rows of one batch. A call with (model, batch) returns the rows.
    """

    metric: Any
    outputs: Any = None
    targets: Any = None

    def __call__(self, model: Any, batch: Any) -> OverAll:
        """Return the metric with the rows of a batch. Raises: errors of the functions."""
        return self.of(self.outputs(model, batch), batch)

    def of(self, outputs: Any, batch: Any) -> OverAll:
        """Return the metric with these outputs, and the targets of the batch. Raises: JobError if they are unknown."""
        if self.targets is None and not (isinstance(batch, tuple | list) and len(batch) > 1):
            raise JobError(
                given=f"shoal.over_all without targets, and a batch of type {type(batch).__name__}",
                conflict="the targets are the second part of a tuple (inputs, targets), and other batches have none",
                remedy="write shoal.over_all(metric, targets=lambda batch: batch['labels']), say",
            )
        return replace(self, outputs=outputs, targets=batch[1] if self.targets is None else self.targets(batch))

    def rows(self) -> tuple[Any, Any]:
        """Return copies of the outputs and targets on the CPU. Raises: JobError for what cannot be sent to rank 0."""
        if self.outputs is None or self.targets is None:
            raise JobError(
                given="shoal.over_all without outputs or without targets, in a metric of your own",
                conflict="there it takes the outputs and the targets of the batch",
                remedy="write shoal.over_all(metric, outputs, targets)",
            )
        return _plain("outputs", self.outputs), _plain("targets", self.targets)


def over_all(metric: Any, outputs: Any = None, targets: Any = None) -> OverAll:
    """Return a metric of the outputs and targets of all samples of an evaluation, such as an AUROC or a BLEU score.

    Rank 0 receives the rows of all ranks in the order of the samples, each sample once, and computes the value. So the
    value is the same for any number of devices.

    Args:
        metric: A function of (outputs, targets) that returns one number. It gets (targets, outputs) if its first
            parameter is called y_true, labels_true, labels, target or targets, as in sklearn. Or an object or class
            with `update(outputs, targets)`, `compute()` and `reset()`, such as a metric of torchmetrics, which is
            updated batch by batch on rank 0. A metric under a tuple of names returns a dict that has these names.
        outputs: (model, batch) -> a tensor with samples (or tokens) as first dim, a list with an entry per sample, or a
            tuple or dict of these. Default: `Job.predict`, else the job's outputs by sample, else the model's output
            for the batch or its first part. Metrics with the same function share one forward. In a metric of your own,
            which may return `shoal.over_all(...)`, the outputs themselves.
        targets: batch -> the same kinds. Default: the second part of the batch. In a metric of your own, the targets.

    Returns:
        A metric for `Job(metrics=...)` and `session.evaluate`. The function gets tensors on the CPU, 16-bit floats as
        float32; beyond 64 MiB each is a mapped temporary file.

    Raises:
        JobError: If `metric` is neither a function nor has `update`, `compute` and `reset`, or is a class with
            arguments.

    Example:
        metrics={"auroc": shoal.over_all(roc_auc_score, outputs=lambda model, batch: model(batch[0])[:, 1])}
    """
    if not callable(metric) and not is_metric_object(metric):
        raise JobError(
            given=f"shoal.over_all({metric!r:.60})",
            conflict="it takes a function of all outputs and targets, or an object with update and compute",
            remedy="write shoal.over_all(sklearn.metrics.roc_auc_score), say",
        )
    if is_metric_object(metric):
        try:
            metric = metric() if isinstance(metric, type) else metric
        except TypeError as error:
            raise JobError(
                given=f"shoal.over_all({metric.__name__})",
                conflict=f"a class is called without arguments, and it raised {error}",
                remedy=f"give an object: shoal.over_all({metric.__name__}(...))",
            ) from error
        if not callable(getattr(metric, "reset", None)):
            raise JobError(
                given=f"shoal.over_all of a {type(metric).__name__} without reset()",
                conflict="each evaluation begins with an object without samples",
                remedy="define reset(self), which removes the samples",
            )
    return OverAll(metric, outputs, targets)


def is_metric_object(metric: Any) -> bool:
    """Return True for an object or class that is updated by batches, such as a metric of torchmetrics."""
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


def begun(metric: Any, files: ExitStack) -> Any:
    """Return an object with `update(outputs, targets)` and `compute()` without samples. `files` closes its files."""
    if not is_metric_object(metric):
        return AllRows(metric, files)
    own = copy.deepcopy(metric)
    own.reset()
    parts: Any = own.cpu().modules() if isinstance(own, nn.Module) else ()
    for part in parts:
        if hasattr(part, "distributed_available_fn"):  # else it waits for the other ranks
            part.distributed_available_fn = bool  # () -> False
    return own


def sum_of_rows(rows: Any) -> Tensor:
    """Return the sum of all tensors in rows, float64 [], which differs if the rows do."""
    sums = (as_real(leaf).double().sum() for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))
    return sum(sums, torch.zeros((), dtype=torch.float64))


def _plain(what: str, value: Any) -> Any:
    """Return a copy of rows that consists of tensors on the CPU, texts, numbers, lists, tuples and dicts."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return widened_leaf(value.detach()).to("cpu").clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(what, own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(what, own) for own in value]
        return parts if isinstance(value, list) else tuple(parts)
    if value is None or isinstance(value, str | int | float):
        return value
    raise JobError(
        given=f"shoal.over_all with {what} of type {type(value).__name__}",
        conflict="rank 0 receives tensors, lists with an entry per sample, and tuples and dicts of these",
        remedy=f"return a tensor, or a list of texts, as {what}",
    )


class Frames:
    """Byte strings in order: in memory, and beyond 64 MiB in a temporary file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  (`close`)
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, content: bytes) -> None:
        """Append a byte string. Raises: OSError if the disk is full."""
        self._file.write(content)
        self._lengths.append(len(content))

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        yield from map(self._file.read, self._lengths)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class AllRows:
    """Rows of all samples for a `function` of all outputs and targets. `files` closes their files."""

    def __init__(self, function: Callable[[Any, Any], Any], files: ExitStack) -> None:
        self._function, self._files = function, files
        self._columns: list[_Column] = []
        self._spec: Any = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Add the rows of the next batch. Raises: JobError if they differ from those before in kind or shape."""
        leaves, spec = tree_flatten((outputs, targets), is_leaf=lambda part: isinstance(part, list))
        if self._spec is None:
            self._spec, self._columns = spec, [_Column(self._files) for _ in leaves]
        if self._spec != spec:
            raise _apart(
                f"{spec} for some samples, and {self._spec} for others", "return the same names for each batch"
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf)

    def compute(self) -> Any:
        """Return the function's result for all rows."""
        outputs, targets = tree_unflatten([column.whole() for column in self._columns], self._spec)
        try:
            first = next(iter(inspect.signature(self._function).parameters), "")
        except ValueError:  # a function in C without a signature
            first = ""
        return self._function(targets, outputs) if first in _TARGETS else self._function(outputs, targets)


class _Column:
    """Rows of one tensor, or of one list."""

    def __init__(self, files: ExitStack) -> None:
        self._entries: list[Any] = []
        self._file = files.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY))  # noqa: SIM115  (closed by `files`)
        self._kind: Any = None
        self._count = 0

    def add(self, part: Any) -> None:
        if isinstance(part, Tensor) and part.ndim:
            kind: Any = part.dtype, tuple(part.shape[1:])
        elif isinstance(part, list):
            kind = list, ()
        else:
            raise _apart(f"{part!r:.40}, which has no rows", "return tensors with the samples as first dim, or lists")
        self._kind = self._kind or kind
        if kind != self._kind:
            said = " and ".join(f"{of} {list(shape)}" for of, shape in (kind, self._kind))
            raise _apart(f"rows of {said}", "pad them to one shape, or return a list with an entry per sample")
        self._count += len(part)
        if isinstance(part, list):
            self._entries += part
        else:
            self._file.write(raw_bytes(part).numpy().data)

    def whole(self) -> Any:
        dtype, shape = self._kind
        if dtype is list:
            return self._entries
        size = self._file.tell()
        self._file.seek(0)
        if size > IN_MEMORY:
            flat = torch.from_numpy(np.memmap(self._file, np.uint8, "r+"))
        else:
            flat = torch.from_numpy(np.frombuffer(bytearray(self._file.read()), np.uint8))
        return flat.view(dtype).reshape(self._count, *shape)


def _apart(given: str, remedy: str) -> JobError:
    conflict = "the function gets the rows of all samples at once"
    return JobError(given=f"outputs or targets of a metric over all samples: {given}", conflict=conflict, remedy=remedy)
