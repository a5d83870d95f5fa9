"""State of modules as a value, as far as Python sees it: with equal states and arguments, code takes the same path.

The state covers everything reachable from a module's attributes, including closures, but no globals.
"""

from __future__ import annotations

import enum
import functools
import operator
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Attributes with these names usually number equal modules, and rarely affect what a module computes.
PLACES = re.compile(r"idx|index|layer_id|layer_number")
_VALUES: set[type] = {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range}
_VALUES |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_ITSELF = (type, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_HOLDERS = (object, dict, OrderedDict, list, tuple, set, frozenset)
_MOST_OBJECTS = 20_000
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: objects of other types may have state that Python does not see


class UnknownStateError(Exception):
    """Object with a state that cannot be determined."""


class PlaceNumber:
    """Integer attribute of a module that contains its index among equal modules.

    `is_read` becomes True when code uses the number.
    """

    def __init__(self, value: int) -> None:
        self.value = value
        self.is_read = False

    @property  # type: ignore[misc]
    def __class__(self) -> type[int]:  # type: ignore[override]
        return int


def _reading(operation: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        self.is_read = True
        others = tuple(o.value if type(o) is PlaceNumber else o for o in others)
        return operation(*others, self.value) if reflected else operation(self.value, *others)

    return method


_BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
for _name in ("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert", "index", *_BINARY):
    setattr(PlaceNumber, f"__{_name}__", _reading(getattr(operator, f"__{_name}__")))
for _name in _BINARY:
    setattr(PlaceNumber, f"__r{_name}__", _reading(getattr(operator, f"__{_name}__"), reflected=True))
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "bool": bool, "hash": hash, "str": str, "repr": repr, "format": format,
    "divmod": divmod, "rdivmod": lambda other, own: divmod(own, other), "round": round, "getattr": getattr,
}  # fmt: skip
for _name, _function in _FUNCTIONS.items():
    setattr(PlaceNumber, f"__{_name}__", _reading(_function))


def place_numbers(module: nn.Module) -> list[tuple[dict[str, Any], str, int]]:
    """Return the place numbers of a user's modules in this one, as (attributes, name, value)."""
    return [
        (vars(inner), name, value)
        for inner in module.modules()
        if not type(inner).__module__.startswith("torch.")
        for name, value in vars(inner).items()
        if type(value) is int and PLACES.search(name)
    ]


def state_of(value: Any, name: Callable[[Any], str | None], instead: Mapping[int, Any]) -> Hashable:
    """Return the state of a module or another object.

    `name`: returns the name in the model of a tensor or module, or None. `instead`: by id, the object to examine in an
    object's place. Raises: UnknownStateError.
    """
    return _StateWalk(name, instead).of(value)


class _StateWalk:
    def __init__(self, name: Callable[[Any], str | None], instead: Mapping[int, Any]) -> None:
        self._name, self._instead = name, instead
        self._seen: dict[int, tuple[int, Any]] = {}  # also the objects, so that their ids stay unique

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if kind is PlaceNumber:
            return "a place"
        if isinstance(value, _ITSELF):
            return value
        if kind in _HOLDERS and not value:
            return kind.__name__, 0  # most attributes of a module: tables of hooks
        known = self._seen.get(id(value))
        if known is not None:
            return "again", known[0]
        if len(self._seen) == _MOST_OBJECTS:
            raise UnknownStateError
        self._seen[id(value)] = len(self._seen), value
        if id(value) in self._instead:
            return self.of(self._instead[id(value)])
        return kind, *self._inside(value)

    def _inside(self, value: Any) -> tuple[Hashable, ...]:
        if isinstance(value, Tensor):
            return self._name(value), tuple(value.shape), value.dtype, value.requires_grad, value.device
        if isinstance(value, nn.Module):
            return self._name(value), self._items(vars(value))
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            more = (value.__defaults__, value.__kwdefaults__, cells, vars(value))
            return value.__code__, *map(self.of, more)
        if isinstance(value, types.MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        for c in type(value).__mro__:  # Python may not see the whole state of the class's objects
            if c not in _HOLDERS and not (c.__flags__ & _HEAP_TYPE and not vars(c).get("__slots__")):
                raise UnknownStateError
        content: tuple[Hashable, ...] = ()
        if isinstance(value, Mapping):
            content = (self._items(value),)
        elif isinstance(value, set | frozenset):
            content = (frozenset(map(self.of, value)),)
        elif isinstance(value, list | tuple):
            content = tuple(map(self.of, value))
        return *content, self._items(getattr(value, "__dict__", {}))

    def _items(self, items: Mapping[Any, Any]) -> tuple[Hashable, ...]:
        return tuple((self.of(key), self.of(value)) for key, value in items.items())
