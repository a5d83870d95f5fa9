"""Comparison of two jobs field by field: values by value, functions by their code and the objects it refers to."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from shoal.jobs.job import Job
from shoal.numerics.operators import raw_bytes

# Attributes of classes and functions that do not affect their results.
_UNCOMPUTED = ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__annotations__", "_abc_impl")
_CODE = ("co_code", "co_consts", "co_names", "co_freevars", "co_varnames", "co_argcount", "co_kwonlyargcount")
_PLAIN = (bool, int, str, bytes, complex, type(None), type(Ellipsis), range, torch.dtype, torch.device)


def differing_fields(one: Job, other: Job) -> tuple[str, ...]:
    """Return the names of the fields with values that differ or cannot be compared.

    Neither job may have been opened or trained. Two objects of a user's class are the same if their `__reduce_ex__`
    values are the same; the comparison calls nothing in these values.
    """
    return tuple(f.name for f in fields(Job) if not _Walk().field(getattr(one, f.name), getattr(other, f.name)))


class _Walk:
    """One comparison, which treats pairs under comparison as equal so that cycles end."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], tuple[Any, Any]] = {}  # store the objects too, or their ids could be reused

    def field(self, one: Any, other: Any) -> bool:
        """Return True if two values are the same, False if they differ or cannot be compared."""
        try:
            return self.same(one, other)
        except Exception:  # from a user's __reduce_ex__, or a recursion that is too deep
            return False

    def same(self, one: Any, other: Any) -> bool:
        if one is other or (id(one), id(other)) in self._begun:
            return True
        if type(one) is not type(other) and type(one).__qualname__ != type(other).__qualname__:
            return False
        self._begun[id(one), id(other)] = one, other
        if isinstance(one, _PLAIN):
            return bool(one == other)
        if isinstance(one, float):
            return one == other or (math.isnan(one) and math.isnan(other))
        result = self._values(one, other)
        if result is None:  # compare objects of any other class by the values that a copy would be made from
            return self.same(type(one), type(other)) and self.same(_reduced(one), _reduced(other))
        return result

    def _values(self, one: Any, other: Any) -> bool | None:
        """Compare values of known types; return None for other types."""
        if type(one) in (list, tuple):
            return len(one) == len(other) and all(map(self.same, one, other))
        if type(one) in (set, frozenset):
            return bool(one == other)
        if type(one) is dict:
            return list(one) == list(other) and all(self.same(one[key], other[key]) for key in one)
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
                return False
            return torch.equal(raw_bytes(one), raw_bytes(other))
        if isinstance(one, torch.Generator):
            return bool(torch.equal(one.get_state(), other.get_state()))
        if type(one) is np.ndarray and one.dtype != object:
            same = one.dtype == other.dtype and one.shape == other.shape
            return bool(same and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        if isinstance(one, types.FunctionType):
            # Compare code, defaults, closures, attributes, and the globals that the code names.
            return (
                self.same(one.__code__, other.__code__)
                and self.same((one.__defaults__, one.__kwdefaults__), (other.__defaults__, other.__kwdefaults__))
                and self.same(_closure(one), _closure(other))
                and self.same(vars(one), vars(other))
                and all(self.same(one.__globals__.get(n), other.__globals__.get(n)) for n in _globals(one.__code__))
            )
        if isinstance(one, types.MethodType):
            return self.same(one.__func__, other.__func__) and self.same(one.__self__, other.__self__)
        if isinstance(one, staticmethod | classmethod):
            return self.same(one.__func__, other.__func__)
        if isinstance(one, property):
            return self.same((one.fget, one.fset, one.fdel), (other.fget, other.fset, other.fdel))
        if isinstance(one, types.CodeType):
            return all(self.same(getattr(one, name), getattr(other, name)) for name in _CODE)
        if isinstance(one, type):
            named = (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
            return named and self.same(one.__bases__, other.__bases__) and self.same(_body(one), _body(other))
        if isinstance(one, types.ModuleType):
            return bool(one.__name__ == other.__name__)
        return None


def _reduced(value: Any) -> Any:
    """Return the value of `__reduce_ex__`, with iterators as lists."""
    parts = value.__reduce_ex__(4)
    return parts if isinstance(parts, str) else [list(p) if hasattr(p, "__next__") else p for p in parts]


def _body(kind: type) -> Mapping[str, Any]:
    return {name: value for name, value in sorted(vars(kind).items()) if name not in _UNCOMPUTED}


def _closure(function: Any) -> list[Any]:
    empty = types.CellType()  # the cell of a variable that is not set yet
    return [cell.cell_contents if cell != empty else None for cell in function.__closure__ or ()]


def _globals(code: types.CodeType) -> set[str]:
    """Return the names that the code, or a function within it, may read as globals."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_globals, inner))
