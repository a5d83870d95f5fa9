"""One hash of all that a look must leave as it was: batch, modules with every attribute, optimizer, generators."""

from __future__ import annotations

import hashlib
import random
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def fingerprint(*things: Any) -> str:
    """The hash of these things' whole state and of the global generators of torch, numpy and Python.

    Modules, optimizers and other objects are walked through their `__dict__`, tensors by dtype, shape, bits and
    gradient, functions by their attributes and closures.
    """
    digest, seen = hashlib.sha256(), {}
    for thing in (*things, torch.get_rng_state(), np.random.get_state(), random.getstate()):
        _walk(thing, digest.update, seen)
    return digest.hexdigest()


def _walk(thing: Any, put: Callable[[bytes], None], seen: dict[int, Any]) -> None:
    if id(thing) in seen:
        put(b"again")
        return
    put(type(thing).__qualname__.encode())
    if isinstance(thing, str | bytes | int | float | complex | bool | type(None) | type):
        put(repr(thing).encode())
        return
    seen[id(thing)] = thing  # kept, so that no other object takes its id
    if torch.is_tensor(thing):
        _tensor(thing, put)
        _walk(thing.grad if thing.is_leaf else None, put, seen)
    elif isinstance(thing, np.ndarray | np.generic):
        put(str(thing.dtype).encode() + np.ascontiguousarray(thing).tobytes())
    elif isinstance(thing, torch.Generator):
        _walk(thing.get_state(), put, seen)
    elif isinstance(thing, np.random.Generator):
        put(repr(thing.bit_generator.state).encode())
    elif isinstance(thing, random.Random):
        put(repr(thing.getstate()).encode())
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            _walk(key, put, seen)
            _walk(value, put, seen)
    elif isinstance(thing, list | tuple | set | frozenset):
        put(str(len(thing)).encode())
        for value in sorted(thing, key=repr) if isinstance(thing, set | frozenset) else thing:
            _walk(value, put, seen)
    elif isinstance(thing, types.FunctionType | types.MethodType):
        function = getattr(thing, "__func__", thing)
        _walk(vars(function), put, seen)
        for cell in function.__closure__ or ():
            try:
                _walk(cell.cell_contents, put, seen)
            except ValueError:  # a cell that is not filled yet
                put(b"empty")
    elif not isinstance(thing, types.ModuleType) and hasattr(thing, "__dict__"):
        _walk(dict(vars(thing)), put, seen)
        if isinstance(thing, nn.Module):
            put(str(thing.training).encode())


def _tensor(thing: torch.Tensor, put: Callable[[bytes], None]) -> None:
    put(f"{thing.dtype} {thing.layout} {thing.requires_grad}".encode())
    if nn.parameter.is_lazy(thing):
        return
    value = thing.detach()
    if value.is_nested:
        parts = list(value.unbind())
    elif value.layout == torch.sparse_coo:
        parts = [value._indices(), value._values()]
    elif value.layout == torch.sparse_csr:
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    else:
        parts = [value]
    for part in parts:
        put(str(tuple(part.shape)).encode())
        part = torch.view_as_real(part) if part.is_complex() else part
        put(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
