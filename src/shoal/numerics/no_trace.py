"""Looks that leave no trace: a context that puts a model, its code and the generators back as they were, bit for bit.

A look is a computation that is not part of the training: the probe before the first step, the rehearsal of an
evaluation, the trial of a memory format. `NoTrace` keeps by value what is small or may change: generators, buffers, and
the Python state that modules and functions can reach. Parameters are copied only when an operator is about to write
them.
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shoal.numerics.checksum import bits_checksum

# Containers of more items are compared by length, arrays of more bytes not at all: they are data. Tensors of more bytes
# are copied only when an operator is about to write them.
_MOST_ITEMS, _MOST_BYTES = 10_000, 1 << 20
# Parameters of a model that uses torch.compile are copied up to this size, and not put back beyond it.
_MOST_COPIED_BYTES = 256 << 20
# Words of a large parameter that its checksum reads, evenly spread.
_SAMPLED_WORDS = 1 << 16
# What a module keeps for torch itself.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_ATOMS: tuple[type, ...] = (
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
_ATOMS += (types.ModuleType, types.BuiltinFunctionType)
_MISSING = object()


@dataclass(frozen=True)
class StateChange:
    """A change of Python state: its dotted name, as Job(allow_state=...) takes it, and number, tensor or container."""

    name: str
    kind: str


def copy_of(batch: Any) -> Any:
    """Return a copy of a batch that shares no memory with it; leaves that cannot be copied stay as they are."""
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, _ATOMS):
            return leaf
        if id(leaf) not in memo:
            try:
                if isinstance(leaf, Tensor):
                    memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                else:
                    memo[id(leaf)] = copy.deepcopy(leaf)
            except Exception:  # of a user's class: it has to be read again instead
                memo[id(leaf)] = leaf
        return memo[id(leaf)]

    return tree_map(copied, batch)


class NoTrace(AbstractContextManager["NoTrace"]):
    """Context for a look at a model and at functions of a job; `restore` puts all back, and so does its end.

    Args:
        model: The model, whose modules, buffers and parameters are kept. None if the look has a model of its own.
        functions: The job's functions by name, such as its loss. Their closures, globals and objects are kept.
        gathers: Whether modules gather their parameters while they compute. What is written there is lost.
    """

    def __init__(self, model: nn.Module | None, functions: Mapping[str, Any], *, gathers: bool = False) -> None:
        self._stack = ExitStack()
        self._gathering = model if gathers else None
        modules = {} if model is None else dict(model.named_modules())
        self._places = [(name, vars(module), _OF_TORCH) for name, module in modules.items()]
        own = {
            f"{name}.{key}".lstrip("."): value
            for name, module in modules.items()
            for key, value in vars(module).items()
            if key not in _OF_TORCH and callable(value) and not isinstance(value, nn.Module)
        }
        self._caches: list[Any] = []
        self._places += _reachable(modules.values(), {**functions, **own}, self._caches)
        self._parameters = {} if model is None else {name: _own(p) for name, p in model.named_parameters()}
        self._buffers = {
            f"{prefix}.{key}".lstrip("."): (module._buffers, key)
            for prefix, module in modules.items()
            for key, value in module._buffers.items()
            if value is not None
        }

    def __enter__(self) -> NoTrace:
        self._generators = _generators()
        self._filled = [cache.cache_info().currsize for cache in self._caches]
        large: list[Tensor] = []
        self._kept = [(name, home, _Dict(home, skip, {}, large)) for name, home, skip in self._places]
        self._was_buffer = {n: (home[k], home[k].detach().clone()) for n, (home, k) in self._buffers.items()}
        self._was = {n: (p.data, p.requires_grad, p.grad, _mark(p)) for n, p in self._parameters.items()}
        self._guard = None
        watched = [*(data for data, *_ in self._was.values()), *(t for t, _ in self._was_buffer.values()), *large]
        if watched or self._gathering is not None:
            guard = _WriteGuard(watched, self._gathering)
            if not _compiles():
                self._guard = self._stack.enter_context(guard)
            elif sum(tensor.nbytes for tensor in watched) <= _MOST_COPIED_BYTES:
                guard.copy(watched)
                self._guard, guard.sees = guard, False
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.restore()

    def restore(self) -> None:
        """Put everything back as it was at the beginning."""
        self._restore_values()
        for _, _, kept in self._kept:
            kept.restore()
        for cache, size in zip(self._caches, self._filled, strict=True):
            if cache.cache_info().currsize != size:
                cache.cache_clear()

    def keep_state(self, *, but: Collection[str] = (), only: str | None = None) -> None:
        """Put all back but the Python state, which the next forward finds as the last one has left it.

        `but`: names of changes that are put back too. `only`: the one change that stays.
        """
        self._restore_values()
        for name, _, kept in self._kept:
            names = {key: f"{name}.{key}".lstrip(".") for key in kept.keys()}  # noqa: SIM118 - no mapping
            kept.restore(stays=[k for k, n in names.items() if n not in but and (only is None or n == only)])

    def _restore_values(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for name, (home, key) in self._buffers.items():
                tensor, value = self._was_buffer[name]
                if tensor.dtype == value.dtype and tensor.shape == value.shape:
                    if not _same_bits(tensor, value):
                        tensor.data.copy_(value)
                    home[key] = tensor
                else:
                    home[key] = value.clone()
            if self._guard is not None:
                self._guard.put_back()
            for name, parameter in self._parameters.items():
                data, required, gradient, _ = self._was[name]
                if _is_plain(parameter) and parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if parameter.requires_grad != required and parameter.is_leaf:
                    parameter.requires_grad_(required)
                parameter.grad = gradient
        _set_generators(self._generators)

    def changed_buffers(self) -> list[str]:
        """Names of the buffers that were written, also through `.data` or by the value that they had."""
        found = []
        for name, (home, key) in self._buffers.items():
            now, (tensor, value) = home.get(key), self._was_buffer[name]
            if now is not tensor or self._is_written(tensor) or not _same_bits(now, value):
                found.append(name)
        return found

    def written_parameters(self) -> list[str]:
        """Names of the parameters that an operator has written, perhaps by the values that they had."""
        gathered = self._guard.gathered if self._guard is not None else ()
        return [*gathered, *(name for name, (data, *_) in self._was.items() if self._is_written(data))]

    def _is_written(self, tensor: Tensor) -> bool:
        return self._guard is not None and self._guard.sees and self._guard.before(tensor) is not None

    def changed_parameters(self) -> dict[str, Tensor]:
        """Copies of the parameters whose values differ from what they were, by name."""
        found = {}
        for name, parameter in self._parameters.items():
            data, *_, mark = self._was[name]
            before = self._guard.before(data) if self._guard is not None else None
            moved = _is_plain(parameter) and parameter.data_ptr() != data.data_ptr()
            if before is None and not moved:
                differs = mark != _mark(parameter)
            else:
                differs = not _same_bits(parameter, data if before is None else before)
            if differs:
                found[name] = parameter.detach().clone()
        return found

    def unrestored(self) -> list[str]:
        """Names of the parameters that were written unseen, and that `restore` cannot put back."""
        return [name for name, parameter in self._parameters.items() if self._was[name][3] != _mark(parameter)]

    def changes(self) -> list[StateChange]:
        """The attributes, variables and containers that differ from what they were."""
        return [
            StateChange(f"{name}.{key}".lstrip("."), kind)
            for name, _, kept in self._kept
            for key, kind in kept.differences()
        ]

    def names(self) -> set[str]:
        """Names of all attributes and variables that are kept, and of those that came since."""
        return {f"{name}.{key}".lstrip(".") for name, _, kept in self._kept for key in kept.keys()}  # noqa: SIM118

    def numbers(self) -> list[tuple[str, MutableMapping[str, Any], str]]:
        """Name, home and key of each number that has changed."""
        return [
            (f"{name}.{key}".lstrip("."), home, key)
            for name, home, kept in self._kept
            for key, kind in kept.differences()
            if kind == "number" and key in home and not isinstance(home[key], bool)
        ]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own on this rank."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _own(parameter: Tensor) -> Tensor:
    """This rank's memory of a parameter that is cut over ranks as a DTensor; any other parameter itself."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local().detach()


def _mark(parameter: Tensor) -> int:
    """A checksum of a parameter's values, of a large one of some; of one that is cut over ranks its version."""
    if not _is_plain(parameter) or nn.parameter.is_lazy(parameter):
        return parameter._version
    flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach()
    return bits_checksum(
        [flat[:: flat.numel() // _SAMPLED_WORDS] if flat.numel() > _SAMPLED_WORDS * 2 and flat.ndim == 1 else flat]
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    with torch._C.DisableTorchFunction():
        one, other = one.detach(), other.detach()
        return torch.equal(one, other) or (
            (one.is_floating_point() or one.is_complex())
            and bool(torch.equal(one.isnan(), other.isnan()))
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )


def _compiles() -> bool:
    """Whether torch.compile is in use in this process: under a dispatch mode its functions fail, then and later."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # torch._dynamo.disable, which optimizers use, leaves an entry that is no backend.
    return frames is not None and any(getattr(frames, "cached_backends", {0: True}).values())


class _WriteGuard(TorchDispatchMode):
    """Mode that copies a tensor before the first operator that writes into its memory."""

    supports_higher_order_operators = True  # such as flex_attention: they write nothing by themselves

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first operator: over a second

    def __init__(self, tensors: Iterable[Tensor], gathering: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gathering = gathering
        self.gathered: dict[str, None] = {}  # parameters that were written while they were gathered
        self._homes: dict[int, list[Tensor]] = collections.defaultdict(list)
        for tensor in filter(_is_plain, tensors):
            self._homes[tensor.untyped_storage()._cdata].append(tensor)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.sees = True  # whether it is in force, and has copied what was written alone
        self._writing: dict[Any, tuple[tuple[int, str], ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = self._writing.get(func)
        if places is None:
            schema = getattr(func, "_schema", None)
            arguments = enumerate(schema.arguments if schema is not None else ())
            writes = ((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
            places = self._writing[func] = tuple(writes)
        for place, name in places:
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in given if isinstance(given, list | tuple) else (given,):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                    self.copy(self._homes.get(tensor.untyped_storage()._cdata, ()))
                    if self._gathering is not None and func.namespace == "aten":
                        home = tensor.untyped_storage()._cdata
                        held = ((n, p) for n, p in self._gathering.named_parameters() if _is_plain(p))
                        self.gathered |= {n: None for n, p in held if p.untyped_storage()._cdata == home}
        return func(*args, **kwargs)

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors that have no copy yet."""
        for tensor in filter(_is_plain, tensors):
            if id(tensor) not in self._copies:
                self._copies[id(tensor)] = tensor, tensor.detach().clone()

    def before(self, tensor: Tensor) -> Tensor | None:
        """The value before the first write; None where nothing wrote."""
        found = self._copies.get(id(tensor))
        return None if found is None else found[1]

    def put_back(self) -> None:
        """Write the copies back; what is written from here on is seen anew."""
        for tensor, value in self._copies.values():
            if (
                tensor.shape != value.shape and not tensor.requires_grad
            ):  # a buffer that its first forward gives a shape
                tensor.resize_(value.shape)
            tensor.copy_(value)
        if self.sees:
            self._copies.clear()


# -------------------------------------------------------------------------------------------------------- generators


def _generators() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.default_generator.get_state(), cuda, random.getstate(), np.random.get_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    own, cuda, pythons, numpys = states
    torch.default_generator.set_state(own)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(pythons)
    np.random.set_state(numpys)


# ------------------------------------------------------------------------------------------------------ Python state


class _Dict:
    """Kept content of a namespace or dict, with what its values refer to."""

    def __init__(
        self, home: MutableMapping[Any, Any], skip: Iterable[Any], seen: dict[int, _Kept], large: list[Tensor]
    ) -> None:
        self._home, self._skip = home, frozenset(skip)
        self._kept = {key: _keep(value, seen, large) for key, value in home.items() if key not in self._skip}

    def keys(self) -> set[Any]:
        """Keys of then and of now."""
        return {key for key in self._home if key not in self._skip} | self._kept.keys()

    def differences(self) -> Iterator[tuple[str, str]]:
        """Key and kind of each entry that is another one now, or whose content is."""
        for key in self.keys():
            kept = self._kept.get(key)
            if key not in self._home:
                yield str(key), "container"
            elif kept is None or not kept.same(self._home[key], set()):
                yield str(key), _kind(self._home[key])

    def same(self, begun: set[int]) -> bool:
        now = {key for key in self._home if key not in self._skip}
        return now == self._kept.keys() and all(k.same(self._home[key], begun) for key, k in self._kept.items())

    def restore(self, begun: set[int] | None = None, stays: Collection[Any] = ()) -> None:
        """Put the entries back, but those that stay."""
        begun = set() if begun is None else begun
        for key, kept in self._kept.items():
            if key not in stays:
                value = kept.restore(begun)
                if key not in self._home or self._home[key] is not value:
                    self._home[key] = value
        for key in self.keys() - self._kept.keys():
            if key not in stays:
                del self._home[key]


@dataclass(slots=True)
class _Kept:
    """A value as it was: `content` depends on its kind, see `_keep`."""

    value: Any
    content: Any = None

    def same(self, now: Any, begun: set[int]) -> bool:
        value = self.value
        if isinstance(value, _ATOMS):
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
        state = _state_of(value)
        if state is not None:
            return repr(state[0]()) == repr(self.content)
        if isinstance(self.content, _Dict):
            return self.content.same(begun)
        if isinstance(self.content, list):
            items = list(value)
            return len(items) == len(self.content) and all(
                kept.same(item, begun) for kept, item in zip(self.content, items, strict=True)
            )
        return not isinstance(self.content, int) or len(value) == self.content

    def _same_tensor(self, now: Tensor) -> bool:
        if isinstance(self.content, Tensor):
            return _same_bits(now, self.content)
        return now is self.value and now._version == self.content

    def restore(self, begun: set[int]) -> Any:
        """Give the value, with the content that it had."""
        value = self.value
        if isinstance(value, _ATOMS) or id(value) in begun:
            return value
        begun.add(id(value))
        if isinstance(value, Tensor):
            if isinstance(self.content, Tensor) and not _same_bits(value, self.content):
                with torch.no_grad():
                    if value.shape == self.content.shape and value.dtype == self.content.dtype:
                        value.data.copy_(self.content)
                    else:
                        value.data = self.content.clone()
        elif isinstance(value, np.ndarray):
            if self.content is not None and not _same_array(value, self.content):
                value[...] = self.content
        elif (state := _state_of(value)) is not None:
            state[1](self.content)
        elif isinstance(self.content, _Dict):
            self.content.restore(begun)
        elif isinstance(self.content, list):
            items = [kept.restore(begun) for kept in self.content]
            if not self.same(value, set()):
                if isinstance(value, list):
                    value[:] = items
                elif isinstance(value, set | collections.deque):
                    value.clear()
                    (value.update if isinstance(value, set) else value.extend)(items)
        return value


def _keep(value: Any, seen: dict[int, _Kept], large: list[Tensor]) -> _Kept:
    """Keep a value with what it refers to, each object once."""
    if isinstance(value, _ATOMS):
        return _Kept(value)
    if id(value) in seen:
        return seen[id(value)]
    kept = seen[id(value)] = _Kept(value)
    if isinstance(value, Tensor):
        is_small = _is_plain(value) and value.nbytes <= _MOST_BYTES
        kept.content = value.detach().clone() if is_small else value._version
        if not is_small:
            large.append(value)
    elif isinstance(value, np.ndarray):
        kept.content = value.copy() if value.nbytes <= _MOST_BYTES and value.flags.writeable else None
    elif (state := _state_of(value)) is not None:
        kept.content = state[0]()
    elif isinstance(value, dict):
        kept.content = _Dict(value, (), seen, large) if len(value) <= _MOST_ITEMS else len(value)
    elif isinstance(value, list | tuple | set | collections.deque):
        kept.content = [_keep(item, seen, large) for item in list(value)] if len(value) <= _MOST_ITEMS else len(value)
    elif _holds_state(value):
        kept.content = _Dict(vars(value), _OF_TORCH - {"_parameters", "_buffers", "_modules"}, seen, large)
    return kept


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How the state of a random generator is read and set."""
    if isinstance(value, torch.Generator):
        return (lambda: value.get_state().numpy().tobytes()), lambda s: value.set_state(
            torch.frombuffer(bytearray(s), dtype=torch.uint8)
        )
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return (lambda: copy.deepcopy(bits.state)), lambda state: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    return None


def _same_array(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def _holds_state(value: Any) -> bool:
    """Whether an object's attributes are looked into: those of users' classes and of modules, not of libraries."""
    if isinstance(value, nn.Module):
        return True
    kind = type(value)
    return hasattr(value, "__dict__") and not callable(value) | isinstance(value, type) and _is_users(kind)


def _is_users(kind: Any) -> bool:
    """Whether a class or function is of the job's own code, not of an installed library."""
    module = sys.modules.get(getattr(kind, "__module__", None) or "")
    where = getattr(module, "__file__", None)
    return where is None or (not where.startswith(_LIBRARIES) and not _is_shoals(module))


def _is_shoals(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).partition(".")[0] == "shoal"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    return "number" if isinstance(value, bool | int | float | complex) else "container"


class _Cells(MutableMapping[str, Any]):
    """The variables of a function's closure by name."""

    def __init__(self, function: types.FunctionType) -> None:
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def __getitem__(self, key: str) -> Any:
        try:
            return self._cells[key].cell_contents
        except ValueError:  # of a variable that is set later
            return None

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cells[key].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class _Named(MutableMapping[str, Any]):
    """Some names of a namespace: of a module's globals those that a function reads, of a class its own data."""

    def __init__(self, home: MutableMapping[str, Any] | type, names: Iterable[str]) -> None:
        self._home, self._names = home, sorted(names)

    def __getitem__(self, key: str) -> Any:
        return vars(self._home)[key] if isinstance(self._home, type) else self._home[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(self._home, type):
            setattr(self._home, key, value)
        else:
            self._home[key] = value

    def __delitem__(self, key: str) -> None:
        if isinstance(self._home, type):
            delattr(self._home, key)
        else:
            del self._home[key]

    def __iter__(self) -> Iterator[str]:
        held = vars(self._home) if isinstance(self._home, type) else self._home
        return iter([name for name in self._names if name in held])

    def __len__(self) -> int:
        return len(list(iter(self)))


def clear_caches(functions: Mapping[str, Any]) -> None:
    """Empty the `functools.lru_cache` of the functions that a job's functions call, such as after a trace."""
    caches: list[Any] = []
    _reachable((), functions, caches)
    for cache in caches:
        cache.cache_clear()


def _reachable(  # noqa: C901 - a case for each kind of value
    modules: Iterable[nn.Module], functions: Mapping[str, Any], caches: list[Any]
) -> list[tuple[str, MutableMapping[str, Any], frozenset[str]]]:
    """Namespaces that the job's functions and the classes of its modules can write, with a name for people.

    Appends to `caches` the functions that keep results by functools.
    """
    found: list[tuple[str, MutableMapping[str, Any], frozenset[str]]] = []
    seen: set[int] = {id(module) for module in modules}

    def visit(name: str, value: Any) -> None:
        if id(value) in seen or (isinstance(value, _ATOMS) and not isinstance(value, type)):
            return
        seen.add(id(value))
        if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
            caches.append(value)
            visit(name, getattr(value, "__wrapped__", None))
        elif isinstance(value, functools.partial | types.MethodType):
            if isinstance(value, types.MethodType):
                parts: Iterable[Any] = (value.__func__, value.__self__)
            else:
                parts = (value.func, *value.args, *value.keywords.values())
            for part in parts:
                visit(name, part)
        elif isinstance(value, types.FunctionType):
            if _is_users(value):
                visit_function(name, value)
        elif isinstance(value, type):
            if _is_users(value):
                own = {k: v for k, v in vars(value).items() if not k.startswith("__")}
                plain = [k for k, v in own.items() if isinstance(v, bool | int | float | list | dict | set | Tensor)]
                found.append((value.__qualname__.rpartition(".")[2], _Named(value, plain), frozenset()))
                for member in own.values():
                    visit(value.__name__, getattr(member, "__func__", member) if not isinstance(member, type) else None)
        elif isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                own_name = f"{name}.{inner}" if inner else name
                found.append((own_name, vars(module), _OF_TORCH - {"_parameters", "_buffers"}))
                visit(own_name, type(module))
        elif hasattr(value, "__dict__") and _is_users(type(value)):
            found.append((name, vars(value), frozenset()))
            visit(name, type(value))

    def visit_function(name: str, function: types.FunctionType) -> None:
        cells, code = _Cells(function), function.__code__
        found.append((name, cells, frozenset()))
        found.append((name, vars(function), frozenset()))
        names = [n for n in _globals_of(code) if n in function.__globals__]
        data = [
            n
            for n in names
            if not callable(function.__globals__[n]) and not isinstance(function.__globals__[n], types.ModuleType)
        ]
        found.append((name, _Named(function.__globals__, data), frozenset()))
        for inner in (*cells.values(), *(function.__globals__[n] for n in names), *(function.__defaults__ or ())):
            if callable(inner):
                visit(getattr(inner, "__name__", None) or name, inner)

    for name, function in functions.items():
        visit(name, function)
    for kind in {type(module) for module in modules}:
        for base in kind.__mro__:
            visit(base.__name__, base)
    return found


def _globals_of(code: types.CodeType) -> set[str]:
    """Names of the globals that a function's code, or a function within it, reads or sets."""
    own = {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return own.union(*map(_globals_of, inner))
