"""Schemas of torch operators: tensors read and written, and use of random generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Arguments that an operator writes although its schema does not mark them.
_UNMARKED = {"native_batch_norm": {"running_mean", "running_var"}}


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
