"""Tensors and torch's operators: views of one vector, raw bytes, tensors in trees, and what an operator touches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Arguments that an operator writes although its schema does not mark them.
_UNMARKED = {"native_batch_norm": {"running_mean", "running_var"}}


class OperatorMode(TorchDispatchMode):
    """Context that sees each operator, without torch's compiler, whose import takes over a second."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def storage_key(tensor: Tensor) -> int:
    """Return a key that all tensors on one storage share, and no others while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor covers its whole storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def replace_leaves(tree: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return the tree with each leaf of type `kind` replaced by `by(leaf)`."""
    return tree_map(lambda leaf: by(leaf) if isinstance(leaf, kind) else leaf, tree)


def operation_name(func: Any) -> str:
    """Return an operation's name without its namespace and overload."""
    return str(func._schema.name).removeprefix("aten::")


def is_random(func: Any) -> bool:
    """Return True if an operation may draw from a random generator."""
    return torch.Tag.nondeterministic_seeded in func.tags or any(a.name == "generator" for a in func._schema.arguments)


def roles(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation writes, and the tensors that it reads."""
    unmarked = _UNMARKED.get(operation_name(func), ())
    written: list[Tensor] = []
    read: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        writes = (alias is not None and alias.is_write) or argument.name in unmarked
        (written if writes else read).extend(tensors_in(value))
    return written, read


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into consecutive views with the shapes of the tensors in `like`, which together fill the vector.

    A real vector stores both parts of each complex element. A complex tensor's view then has the shape of `as_real`.
    """
    if flat.is_complex() or not any(map(Tensor.is_complex, like)):
        pieces = flat.split([tensor.numel() for tensor in like])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
    pieces = flat.split([real_numel(tensor) for tensor in like])
    shapes = [(*tensor.shape, 2) if tensor.is_complex() else tensor.shape for tensor in like]
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def real_numel(tensor: Tensor) -> int:
    """Return the number of real numbers in a tensor: two for each complex element."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real numbers with one more dim of size 2; return any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_dtype(real: Tensor, like: Tensor) -> Tensor:
    """Convert real numbers from `as_real` to the dtype of `like`; return `real` itself if the dtypes match."""
    if like.is_complex():  # not a view: the memory may not be aligned for pairs
        return torch.view_as_complex(real.clone()).to(like.dtype)
    return real if real.dtype == like.dtype else real.to(like.dtype)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [nbytes]: a view if the tensor is contiguous, else a copy."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def is_strided(tensor: Tensor) -> bool:
    """Return True if a tensor is one block of numbers: not sparse, nested or quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that make up a tensor: itself, or such as indices and values of a sparse one."""
    if is_strided(tensor):
        return [tensor]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]  # the dequantized values show scales and zero points
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def row_runs(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the numbers in consecutive runs of `counts` rows of a tensor of any layout, one flat tensor for each run.

    For a sparse tensor, each run also contains the indices of its values, relative to the run's first row.
    """
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        rows = iter(tensor.unbind())
        return [torch.cat([next(rows).reshape(-1) for _ in range(count)]) for count in counts]
    if tensor.layout == torch.strided:
        return [run.reshape(-1) for run in tensor.split(list(counts))]
    sparse = tensor.to_sparse_coo().coalesce()
    places, values = sparse.indices(), sparse.values()
    values = values.to(torch.complex128 if values.is_complex() else torch.float64)
    ends = torch.tensor([0, *counts], device=places.device).cumsum(0)
    cuts = torch.searchsorted(places[0].contiguous(), ends).tolist()
    runs = []
    for first, (begin, end) in zip(ends.tolist(), itertools.pairwise(cuts), strict=False):
        within = places[:, begin:end] + 1  # plus one, so that index zero counts too
        within[0] -= first
        runs.append(torch.cat([values[begin:end].reshape(-1), within.reshape(-1).to(values.dtype)]))
    return runs
