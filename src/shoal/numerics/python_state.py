"""Python state: the content of attributes, variables and containers that a program's code can reach.

`reachable` finds the namespaces that a job's functions can write. A `ValueKeeper` copies their content, as far as it is
small. A `KeptDict` reports what has changed since, and restores it.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import copy
import dis
import functools
import itertools
import operator
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.installed import is_installed

# Containers of more items are compared by length. Arrays of more bytes are data and are not compared. Tensors of more
# bytes are copied only when an operator is about to write them. All references of an attribute share one item limit.
_MOST_ITEMS, _MOST_BYTES = 10_000, 1 << 20
# Total bytes of small tensors and arrays that a look copies, and depth of references that it follows.
_MOST_BYTES_IN_ALL, _MOST_DEPTH = 64 << 20, 32
# Attributes of a module that belong to torch; recurrent layers also list their parameters.
OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_flat_weights", "_flat_weight_refs"}
ATOMS: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type,
    torch.dtype,
    torch.device,
    torch.Size,
)
ATOMS += (types.ModuleType, types.BuiltinFunctionType)
# Objects of these modules belong to the process: a logger refers to all loggers and their files.
OF_PROCESS = ("logging", "threading", "multiprocessing", "concurrent", "asyncio", "io")
# Iterators with a position that can be read and set.
_ITERATORS: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor has memory of its own on this rank, in one block."""
    is_block = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    is_transformed = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # by vmap, say
    return is_block and not tensor.is_meta and not tensor.is_nested and not is_transformed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    with torch._C.DisableTorchFunction():
        one, other = one.detach(), other.detach()
        if torch.equal(one, other) or not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        return bool(((one == other) | ((one != one) & (other != other))).all())


class KeptDict:
    """Content of a namespace or dict at one time, including the content of its values."""

    def __init__(
        self, home: MutableMapping[Any, Any], skip: Iterable[Any], keeper: ValueKeeper, *, each: bool = False
    ) -> None:
        """Copy the content of `home`. `each`: the keeper's limit of items applies to each entry separately."""
        self._home, self._skip = home, frozenset(skip)
        self._before: dict[Any, _Kept] = {}
        for key, value in home.items():
            if key not in self._skip:
                keeper.items_left = _MOST_ITEMS if each else keeper.items_left
                self._before[key] = keeper.keep(value)

    def keys(self) -> set[Any]:
        """Return the original keys and the current keys."""
        return {key for key in self._home if key not in self._skip} | self._before.keys()

    def differences(self) -> Iterator[tuple[str, str]]:
        """Yield key and kind of each entry that was replaced or has other content."""
        for key in self.keys():
            before = self._before.get(key)
            if key not in self._home:
                yield str(key), "container"
            elif before is None or not before.same(self._home[key], set()):
                value = self._home[key]
                if isinstance(value, Tensor):
                    kind = "tensor"
                elif _is_one_way(value) and before is not None and before.value is value:
                    kind = "generator"  # an iterator that the forward has made is a container's content
                else:
                    kind = "number" if isinstance(value, bool | int | float | complex) else "container"
                yield str(key), kind

    def same(self, begun: set[int]) -> bool:
        """Return True if keys and values equal the original ones; objects in `begun` are not compared again."""
        now = {key for key in self._home if key not in self._skip}
        return now == self._before.keys() and all(k.same(self._home[key], begun) for key, k in self._before.items())

    def restore(self, begun: set[int] | None = None, stays: Collection[Any] = ()) -> None:
        """Restore the entries, except for the keys in `stays`."""
        begun = set() if begun is None else begun
        for key, before in self._before.items():
            if key not in stays:
                value = before.restore(begun)
                if key not in self._home or self._home[key] is not value:
                    self._home[key] = value
        for key in self.keys() - self._before.keys():
            if key not in stays:
                del self._home[key]

    def numbers(self, of: str) -> Iterator[Number]:
        """Yield the numbers that have changed: entries, tensors of one element and counts, also within entries."""
        begun: set[int] = set()
        for key in list(self._home):
            if key not in self._skip:
                before = self._before.get(key) or _Kept(None)
                yield from before.numbers(self._home, key, f"{of}.{key}".lstrip("."), begun)


@dataclass(frozen=True)
class Number:
    """Number that changes: the `name` of the attribute that refers to it, its `path` from there, and its access."""

    name: str
    path: str
    read: Callable[[], float]
    write: Callable[[float], None]


@dataclass(slots=True)
class _Kept:
    """Value as it was at one time. `content` depends on the kind of the value: see `ValueKeeper.keep`."""

    value: Any
    content: Any = None

    def same(self, now: Any, begun: set[int]) -> bool:
        value = self.value
        if isinstance(value, ATOMS):
            same_kind = type(now) is type(value)
            return same_kind and (now is value or bool(now == value) or (now != now and value != value))
        if now is not value:
            return isinstance(value, Tensor) and isinstance(now, Tensor) and self._same_tensor(now)
        if id(value) in begun:
            return True
        begun.add(id(value))
        if isinstance(value, Tensor):
            return self._same_tensor(value)
        if isinstance(value, np.ndarray):
            return self.content is None or (value.dtype == self.content.dtype and _same_array(value, self.content))
        if self.content is None:
            return True
        state = _state_of(value)
        if state is not None:
            return repr(state[0]()) == repr(self.content)
        if isinstance(self.content, KeptDict):
            return self.content.same(begun)
        if isinstance(self.content, list):
            items = list(value)
            return len(items) == len(self.content) and all(
                before.same(item, begun) for before, item in zip(self.content, items, strict=True)
            )
        return not isinstance(self.content, int) or len(value) == self.content

    def numbers(self, home: Any, key: Any, name: str, begun: set[int], path: str = "") -> Iterator[Number]:
        """Yield the numbers that have changed in `home[key]`, which had this value; skip objects in `begun`."""
        now, path = home[key], path or name
        kind: Any = type(now)
        if isinstance(now, int | float) and not isinstance(now, bool):
            if not self.same(now, set()):
                yield Number(name, path, lambda: home[key], lambda value: operator.setitem(home, key, kind(value)))
            return
        if isinstance(now, ATOMS) or id(now) in begun:
            return
        begun.add(id(now))
        if isinstance(now, Tensor):
            if is_plain(now) and now.numel() == 1 and not now.is_complex() and now.dtype != torch.bool:
                write = torch.no_grad()(lambda value: home[key].data.fill_(value))
                yield Number(name, path, lambda: home[key].item(), write)
        elif isinstance(now, itertools.count):
            ahead = copy_of_count(now)
            step = -next(ahead) + next(ahead)
            put = lambda value: operator.setitem(home, key, itertools.count(value, step))  # noqa: E731
            yield Number(name, path, lambda: next(copy_of_count(home[key])), put)
        elif (
            isinstance(now, list | collections.deque)
            and now
            and now is self.value
            and isinstance(self.content, list)
            and len(now) > len(self.content)
        ):
            grow = lambda value: home[key].extend([home[key][-1]] * min(value - len(home[key]), _MOST_ITEMS))  # noqa: E731
            yield Number(name, path, lambda: len(home[key]), grow)
        elif now is self.value and isinstance(self.content, KeptDict):
            inner = self.content
            for at in list(inner.keys() & set(inner._home)):
                before = inner._before.get(at) or _Kept(None)
                yield from before.numbers(inner._home, at, name, begun, f"{path}.{at}")
        elif (
            isinstance(now, list | collections.deque)
            and isinstance(self.content, list)
            and len(now) == len(self.content)
        ):
            for at, before in enumerate(self.content):
                yield from before.numbers(now, at, name, begun, f"{path}.{at}")

    def _same_tensor(self, now: Tensor) -> bool:
        if isinstance(self.content, Tensor):
            return same_bits(now, self.content)
        return now is self.value and _version(now) == self.content

    def restore(self, begun: set[int]) -> Any:
        """Restore the value's content and return the value."""
        value = self.value
        if isinstance(value, ATOMS) or id(value) in begun:
            return value
        begun.add(id(value))
        if isinstance(value, Tensor):
            if isinstance(self.content, Tensor) and not same_bits(value, self.content):
                with torch.inference_mode() if value.is_inference() else torch.no_grad():
                    if value.shape == self.content.shape and value.dtype == self.content.dtype:
                        value.data.copy_(self.content)
                    else:
                        value.data = self.content.clone()
        elif isinstance(value, np.ndarray):
            if self.content is not None and not _same_array(value, self.content):
                value[...] = self.content
        elif self.content is None:
            pass
        elif isinstance(value, itertools.count):
            return value if repr(value) == repr(self.content) else copy_of_count(self.content)
        elif (state := _state_of(value)) is not None:
            state[1](self.content)
        elif isinstance(self.content, KeptDict):
            self.content.restore(begun)
        elif isinstance(self.content, list):
            items = [before.restore(begun) for before in self.content]
            if len(value) != len(items) or not all(map(operator.is_, value, items)):
                if isinstance(value, list):
                    value[:] = items
                elif isinstance(value, set | collections.deque):
                    value.clear()
                    (value.update if isinstance(value, set) else value.extend)(items)
        return value


class ValueKeeper:
    """Copier of values and what they refer to, each object once; skips namespaces that are copied `elsewhere`."""

    def __init__(self, elsewhere: Collection[int]) -> None:
        self._elsewhere = elsewhere  # ids of the namespaces
        self.large: list[Tensor] = []  # tensors that are not copied here: a guard copies them before a write
        self.items_left = _MOST_ITEMS
        self._bytes_left, self._depth = _MOST_BYTES_IN_ALL, 0
        self._seen: dict[int, _Kept] = {}

    def keep(self, value: Any) -> _Kept:
        """Copy a value. Beyond the limits of items and depth the content is None, and only the object is compared."""
        self.items_left -= 1
        if isinstance(value, ATOMS):
            return _Kept(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        if self._depth == _MOST_DEPTH:
            return _Kept(value)
        copied = self._seen[id(value)] = _Kept(value)
        self._depth += 1
        copied.content = self._content(value)
        self._depth -= 1
        return copied

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if is_plain(value) and self._is_small(value.nbytes):
                return value.detach().clone()
            if not value.is_inference():  # outside of inference mode no code writes such a tensor
                self.large.append(value)
            return _version(value)
        if isinstance(value, np.ndarray):
            return value.copy() if value.flags.writeable and self._is_small(value.nbytes) else None
        if (state := _state_of(value)) is not None:
            return state[0]()
        if isinstance(value, dict | list | tuple | set | collections.deque):
            if len(value) > self.items_left:
                return len(value)
            return KeptDict(value, (), self) if isinstance(value, dict) else [self.keep(item) for item in list(value)]
        attributes = _attributes(value) if self.items_left > 0 else None
        if attributes is not None and id(attributes) not in self._elsewhere:
            return KeptDict(attributes, OF_TORCH - {"_parameters", "_buffers", "_modules"}, self)
        return None

    def _is_small(self, num_bytes: int) -> bool:
        if num_bytes > min(_MOST_BYTES, self._bytes_left):
            return False
        self._bytes_left -= num_bytes
        return True


def _version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor; 0 for a tensor from inference mode, which counts no writes."""
    return 0 if tensor.is_inference() else tensor._version


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return functions that read and set the state of a generator, buffer or iterator; None for other values."""
    if isinstance(value, torch.Generator):
        return (lambda: value.get_state().numpy().tobytes()), lambda s: value.set_state(
            torch.frombuffer(bytearray(s), dtype=torch.uint8)
        )
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return (lambda: copy.deepcopy(bits.state)), lambda state: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.BitGenerator):
        return (lambda: copy.deepcopy(value.state)), lambda state: setattr(value, "state", state)
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, bytearray | array.array) and len(value) * getattr(value, "itemsize", 1) <= _MOST_BYTES:
        return (lambda: value[:]), lambda state: operator.setitem(value, slice(None), state)
    if isinstance(value, itertools.count):  # cannot be set: see _Kept.restore
        return (lambda: copy_of_count(value)), lambda state: None
    if isinstance(value, _ITERATORS):
        return (lambda: value.__reduce__()[2:]), lambda state: value.__setstate__(*state) if state else None
    if _is_one_way(value):
        return (lambda: _place_of(value)), lambda state: None
    return None


def _is_one_way(value: Any) -> bool:
    """Return True if a value is a built-in iterator that cannot be set back: a generator, a cycle, a zip."""
    is_iterator = isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
    return is_iterator and not isinstance(value, (itertools.count, *_ITERATORS))


def _place_of(value: Any) -> Any:
    """Return the positions of an iterator and of the iterators that it reads.

    For any other value return its identity and, for a list, its length.
    """
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        own = {} if frame is None else {k: v for k, v in frame.f_locals.items() if isinstance(v, ATOMS)}
        return frame is None or frame.f_lasti, own
    if isinstance(value, Iterator | tuple):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):  # an iterator without __reduce__
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on
            return [_place_of(part) for part in (value if isinstance(value, tuple) else value.__reduce__())]
    if isinstance(value, ATOMS):
        return value
    return id(value), len(value) if isinstance(value, list) else None


def copy_of_count(counter: itertools.count[Any]) -> itertools.count[Any]:
    """Return a count that continues from the current position of `counter`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on
        return copy.copy(counter)


def _same_array(one: Any, other: Any) -> bool:
    if one.dtype.kind == "O":  # elements may be arrays, which have no truth value
        return one.shape == other.shape and all(map(operator.is_, one.flat, other.flat))
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def _attributes(value: Any) -> MutableMapping[str, Any] | None:
    """Return the attributes of a module or another object, also of a library's class; None for classes and functions.

    Also None for objects of shoal and torch.distributed, which divide a model, and for those that belong to the
    process: a forward may write such an object, and its memory cannot be restored.
    """
    kind: Any = type(value)
    if isinstance(value, nn.Module):
        return vars(value)
    if isinstance(value, type | types.FunctionType | types.MethodType | functools.partial):
        return None
    package, is_distributed = kind.__module__.partition(".")[0], f"{kind.__module__}.".startswith("torch.distributed.")
    if is_distributed or package in ("shoal", *OF_PROCESS, "_io", "socket", "ssl"):
        return None
    if slots := _slots(kind):

        def read(key: str) -> Any:
            try:
                return object.__getattribute__(value, key)
            except AttributeError:
                raise KeyError(key) from None

        return _View(
            lambda: [*(key for key in slots if hasattr(value, key)), *getattr(value, "__dict__", ())],
            read,
            functools.partial(object.__setattr__, value),
            functools.partial(object.__delattr__, value),
        )
    try:
        attributes = getattr(value, "__dict__", None)
    except Exception:  # a proxy without an object
        return None
    if not isinstance(attributes, dict) or any(isinstance(one, threading.Thread) for one in attributes.values()):
        return None  # a thread writes the object, too
    return attributes


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names in `__slots__` of a class and of its bases."""
    every = {k: v for base in kind.__mro__ if "__slots__" in vars(base) for k, v in vars(base).items()}
    return tuple(k for k, v in every.items() if isinstance(v, types.MemberDescriptorType))


def _is_users(kind: Any) -> bool:
    """Return True if a class, function or module is the job's own code, neither an installed library's nor shoal's."""
    module = kind if isinstance(kind, types.ModuleType) else sys.modules.get(getattr(kind, "__module__", None) or "")
    where = getattr(module, "__file__", None)
    package = str(getattr(module, "__name__", "")).partition(".")[0]
    return where is None or (not is_installed(where) and package != "shoal")


class _View(MutableMapping[str, Any]):
    """Variables that are in no dict of their own, by name: functions return the names and read, set and delete one."""

    def __init__(
        self,
        names: Callable[[], list[str]],
        read: Callable[[str], Any],
        write: Callable[[str, Any], object],
        delete: Callable[[str], object],
    ) -> None:
        self._names, self._read, self._write, self._delete = names, read, write, delete

    def __getitem__(self, key: str) -> Any:
        return self._read(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._write(key, value)

    def __delitem__(self, key: str) -> None:
        self._delete(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


def _closure_of(function: types.FunctionType) -> _View:
    """Return the variables of a function's closure."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read(key: str) -> Any:
        try:
            return cells[key].cell_contents
        except ValueError:  # the variable is set later
            return None

    return _View(
        lambda: list(cells),
        read,
        lambda key, value: setattr(cells[key], "cell_contents", value),
        lambda key: delattr(cells[key], "cell_contents"),
    )


def _globals_of(home: MutableMapping[str, Any], names: Iterable[str]) -> _View:
    """Return selected globals of a module."""
    chosen = sorted(names)
    return _View(
        lambda: [name for name in chosen if name in home], home.__getitem__, home.__setitem__, home.__delitem__
    )


def _data_of(kind: type) -> _View:
    """Return a class's own data at the time of access."""
    own = vars(kind)
    return _View(
        lambda: [n for n, v in own.items() if not n.startswith("__") and _is_data(v) and n not in _OF_CLASSES],
        own.__getitem__,
        functools.partial(setattr, kind),
        functools.partial(delattr, kind),
    )


# Attributes that abc and dataclasses add to a class, which are not the job's.
_OF_CLASSES = frozenset({"_abc_impl", "_is_protocol", "_parameters", "_fields"})


def _is_data(value: Any) -> bool:
    """Return True if a value in a namespace is no function, class, module or descriptor."""
    return not (callable(value) or isinstance(value, types.ModuleType) or hasattr(type(value), "__get__"))


def clear_caches(functions: Mapping[str, Any]) -> None:
    """Empty the `functools.lru_cache` of the functions that a job's functions call, such as after a trace."""
    caches: list[Any] = []
    reachable((), functions, caches)
    for cache in caches:
        cache.cache_clear()


def reachable(  # noqa: C901 - a case for each kind of value
    modules: Collection[nn.Module], functions: Mapping[str, Any], caches: list[Any]
) -> list[tuple[str, MutableMapping[str, Any], frozenset[str]]]:
    """Return the namespaces that the job's functions and the classes of its modules can write.

    Each has a name for people and the keys to skip. Appends the functions with a functools cache to `caches`.
    """
    places: list[tuple[str, MutableMapping[str, Any], frozenset[str]]] = []
    seen: set[int] = {id(module) for module in modules}

    def visit(name: str, value: Any) -> None:
        if id(value) in seen or (isinstance(value, ATOMS) and not isinstance(value, type)):
            return
        seen.add(id(value))
        if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
            caches.append(value)
            visit(name, getattr(value, "__wrapped__", None))
        elif isinstance(value, functools.partial | types.MethodType):
            if isinstance(value, types.MethodType):
                parts: dict[str, Any] = {"__func__": value.__func__, "__self__": value.__self__}
            else:
                parts = {
                    "func": value.func,
                    **dict(zip(map(str, itertools.count()), value.args, strict=False)),
                    **value.keywords,
                }
                places.append((name, {key: part for key, part in parts.items() if _is_data(part)}, frozenset()))
            for part in parts.values():
                visit(name, part)
        elif isinstance(value, types.FunctionType):
            if _is_users(value):
                visit_function(name, value)
        elif isinstance(value, type):
            if _is_users(value):
                places.append((value.__qualname__.rpartition(".")[2], _data_of(value), frozenset()))
                for member in list(vars(value).values()):
                    inner = (getattr(member, kind, None) for kind in ("__func__", "func", "fget", "fset"))
                    for part in (member, *inner) if not isinstance(member, type) else ():
                        visit(value.__name__, part if callable(part) else None)
        elif isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                own_name = f"{name}.{inner}" if inner else name
                places.append((own_name, vars(module), OF_TORCH - {"_parameters", "_buffers"}))
                visit(own_name, type(module))
        elif (attributes := _attributes(value)) is not None:
            places.append((name, attributes, frozenset()))
            visit(name, type(value))

    def visit_function(name: str, function: types.FunctionType) -> None:
        cells, code = _closure_of(function), function.__code__
        places.append((name, cells, frozenset()))
        places.append((name, vars(function), frozenset()))
        outer = function.__globals__
        names = _names_in(code, "GLOBAL") - vars(builtins).keys()
        places.append(
            (name, _globals_of(outer, [n for n in names if n not in outer or _is_data(outer[n])]), frozenset())
        )
        read = [outer[n] for n in names if n in outer]
        for module in (one for one in read if isinstance(one, types.ModuleType) and _is_users(one)):
            inner = {n: vars(module)[n] for n in _names_in(code, "ATTR", "METHOD") if n in vars(module)}
            places.append(
                (module.__name__, _globals_of(vars(module), [n for n in inner if _is_data(inner[n])]), frozenset())
            )
            read += inner.values()
        arguments = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}
        places.append((name, {n: value for n, value in defaults.items() if _is_data(value)}, frozenset()))
        for value in (*cells.values(), *read, *defaults.values()):
            if callable(value):
                visit(getattr(value, "__name__", None) or name, value)

    for name, function in functions.items():
        visit(name, function)
    for kind in {type(module): None for module in modules}:
        for base in kind.__mro__:
            visit(base.__name__, base)
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            visit(getattr(hook, "__name__", None) or type(hook).__name__, hook)
    return places


def _names_in(code: types.CodeType, *kinds: str) -> set[str]:
    """Return the names that a function's code, or a function within it, reads or sets.

    `kinds`: endings of the operations' names, GLOBAL, or ATTR and METHOD for attributes of an object.
    """
    own = {str(one.argval) for one in dis.get_instructions(code) if one.opname.endswith(kinds)}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return own.union(*(_names_in(one, *kinds) for one in inner))
