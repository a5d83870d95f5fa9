"""Whole optimizers: inner optimizers, their groups, attributes that steps change, and the call of torch's own steps."""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import itertools
import json
import operator
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.distributed.failures import user_error
from shoal.errors import UserCodeError
from shoal.numerics.python_state import OF_PROCESS, copy_of_count

# Leaf: makes the JSON value that stands for a tensor at a path. Read: returns the tensor of such a value.
Leaf = Callable[[str, Tensor], dict[str, Any]]
Read = Callable[[dict[str, Any], torch.device | None], Tensor]

# Checkpoint group of the parameters' evaluation values, if an optimizer trains with other values.
EVALUATED = "evaluated"
# Key in a group of which the optimizer's own steps, or hooks of them, change the learning rate.
OWN_RATE = "shoal_own_rate"
# Path prefix of tensors that belong to no parameter.
ATTRIBUTES = "attributes"
_BASELINE = "_shoal_baseline"
# Attributes of torch's base class and of its schedulers, and the baseline of `begin`.
_TORCHS = (
    "state",
    "param_groups",
    "defaults",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_opt_called",
    _BASELINE,
)
_SAME, _NAMED, _ITEMS, _PAIRS, _OBJECT = "$same", "$parameter", "$items", "$pairs", "$object"
_GENERATOR, _DRAWS, _ARRAY = "$generator", "$draws", "$array"
_ENUM, _LITERAL, _COUNT = "$enum", "$literal", "$count"
_KINDS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "set": set,
    "frozenset": frozenset,
}
_ITERATORS: tuple[Any, ...] = (GeneratorType, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0))))
_IN_HOOKS = (bool, int, float, str, dict, list, deque, set, LRScheduler)
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, Optimizer)


def parts(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer under "", and each inner optimizer under its path, such as "parts[0]"."""
    by_path: dict[str, Any] = {"": optimizer}
    seen = {id(optimizer)}

    def visit(value: Any, path: str) -> None:
        for place, child in _children(value, path):
            if id(child) in seen or isinstance(child, Tensor | str | int | float | None):
                continue
            seen.add(id(child))
            if isinstance(child, Optimizer):
                by_path[place] = child
            visit(child, place)

    if not is_torchs(optimizer):
        visit(optimizer, "")
    return by_path


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", child) for key, child in value.items() if not isinstance(key, Tensor))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"{path}[{number}]", child) for number, child in enumerate(value))
    elif isinstance(value, Optimizer) or not isinstance(value, _CODE):
        yield from ((f"{path}.{name}".removeprefix("."), child) for name, child in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    """Return the object's own attributes that may be state."""
    module = type(value).__module__.partition(".")[0]
    if module in (*OF_PROCESS, "queue", "weakref"):
        return {}
    own = getattr(value, "__dict__", {})
    if not hasattr(value, "param_groups"):
        bases = type(value).__mro__ if module not in sys.stdlib_module_names else ()
        slots = [name for base in bases for name, of in vars(base).items() if isinstance(of, MemberDescriptorType)]
        return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **own}
    return {k: v for k, v in own.items() if k not in _TORCHS and not k.startswith("_optimizer_")}


def groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the distinct parameter groups of the optimizer and its inner optimizers."""
    if is_torchs(optimizer):
        return list(optimizer.param_groups)
    every = [group for part in parts(optimizer).values() for group in part.param_groups]
    return list({id(group): group for group in every}.values())


def rated(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the distinct groups with a learning rate, of optimizers as in `parts`."""
    every = {id(group): group for part in optimizers for group in part.param_groups}
    return [group for group in every.values() if "lr" in group]


def rates_seen(optimizers: Iterable[Any]) -> list[Any]:
    """Return the learning rates of `rated`, to compare; a tensor is its count of changes, so that nothing is read."""
    rates = [group["lr"] for group in rated(optimizers)]
    return [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]


def states(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the state of each parameter, in the optimizer and its inner optimizers."""
    for part in parts(optimizer).values():
        yield from part.state.values()


def make_states_dense(optimizer: Any) -> None:
    """Make sparse tensors in parameters' states dense, such as the first momentum of a sparse gradient.

    A checkpoint stores dense tensors, and a resumed run must add in the same order.
    """
    for state in states(optimizer):
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, Tensor) and value.is_sparse:
                state[key] = value.to_dense()


# ----------------------------------------------------------------------------------------------------------- attributes
def begin(optimizer: Any) -> None:
    """Record an optimizer's attributes before the first step. Attributes that differ later belong to its state.

    Unchanged attributes are not stored: a rank number, for example, must not come from a checkpoint of another layout.
    The record is an attribute of the optimizer, since callers that need the state have only the optimizer.
    Raises: UserCodeError for an iterator among the attributes, since its position cannot be stored.
    """
    if is_torchs(optimizer) and not is_hooked(optimizer):
        return
    aside = containers(optimizer)
    for part in parts(optimizer).values():
        baseline = {}
        for name, value in _attributes(part).items():
            encoder = _Encoder({}, aside)
            baseline[name] = encoder.plain(value)
            encoder.refuse_iterator(name, part)
        baseline |= {name: _Encoder({}, aside).plain(cell.cell_contents) for name, cell in _of_hooks(part).items()}
        setattr(part, _BASELINE, baseline)


def _of_hooks(part: Any) -> dict[str, CellType]:
    """Return variables in hooks of an optimizer's step that are numbers, texts, containers or schedulers, by place."""
    cells = {}
    for kind in ("step_pre_hooks", "step_post_hooks"):
        for number, hook in enumerate(getattr(part, f"_optimizer_{kind}", {}).values()):
            names = hook.__code__.co_freevars if isinstance(hook, FunctionType) else ()
            for name, cell in zip(names, getattr(hook, "__closure__", None) or (), strict=False):
                if cell != CellType() and isinstance(cell.cell_contents, _IN_HOOKS):
                    cells[f"{kind}[{number}].{name}"] = cell
    return cells


def containers(optimizer: Any) -> set[int]:
    """Return the ids of the containers of states and groups, in the optimizer and its inner optimizers."""
    own = ("state", "param_groups")  # properties are excluded: they may return new objects
    every = [vars(part) for part in parts(optimizer).values()]
    return {id(attributes[name]) for attributes in every for name in own if name in attributes}


def attributes(part: Any, where: str, names: Mapping[int, str], leaf: Leaf, aside: set[int]) -> dict[str, Any]:
    """Return the JSON value of each attribute of `part` that steps have changed or that has tensors.

    `names`: names of the model's tensors by id.
    `aside`: ids from `containers`, which attributes may refer to.
    Raises: UserCodeError for an object that exists only after a step.
    """
    baseline: dict[str, str] = getattr(part, _BASELINE, {})
    documents: dict[str, Any] = {}
    for name, value in _attributes(part).items() if hasattr(part, _BASELINE) else ():
        encoder = _Encoder(names, aside)
        plain = encoder.plain(value)
        encoder.refuse_iterator(name, part)
        if not encoder.has_state or (baseline.get(name) == plain and not encoder.has_tensors):
            continue
        if encoder.has_objects and baseline.get(name, "null") == "null":
            raise UserCodeError(
                given=f"the attribute {name} of optimizer {type(part).__name__}, of type {type(value).__name__}",
                conflict="a step has made it, and a resumed run has nothing to put its state into",
                remedy="make it in the optimizer's __init__, or keep tensors and numbers in attributes",
            )
        documents[name] = _Encoder(names, aside, leaf).encode(value, "/".join(filter(None, (ATTRIBUTES, where, name))))
    for name, cell in _of_hooks(part).items() if hasattr(part, _BASELINE) else ():
        encoder, value = _Encoder(names, aside), cell.cell_contents
        changed = encoder.plain(value) != baseline.get(name)
        if changed and not encoder.has_tensors and (isinstance(value, LRScheduler) or not encoder.has_objects):
            documents[name] = _Encoder(names, aside).encode(value, "")
    return documents


def restore_attributes(
    part: Any, saved: Mapping[str, Any], parameters: Mapping[str, Tensor], read: Read, aside: set[int]
) -> None:
    """Set attributes from `attributes`. Attributes that are not in `saved` get their values before the first step."""
    baseline = getattr(part, _BASELINE, None)
    if baseline is None:
        return
    for name, value in _attributes(part).items():
        encoder = _Encoder({id(t): name for name, t in parameters.items()}, aside)
        plain = encoder.plain(value)
        if name in saved or not encoder.has_state or (encoder.has_tensors and name in baseline):
            continue
        if name not in baseline:
            delattr(part, name)
        elif plain != baseline[name]:
            setattr(part, name, restored(json.loads(baseline[name]), value, parameters, read))
    cells = _of_hooks(part)
    for name, cell in cells.items():
        document = saved.get(name, json.loads(baseline[name]) if name in baseline else None)
        plain = _Encoder({}, aside).plain(cell.cell_contents)
        if document is not None and json.dumps(document) != plain:
            cell.cell_contents = restored(document, cell.cell_contents, parameters, read)
    for name, document in saved.items():
        if name not in cells:
            setattr(part, name, restored(document, getattr(part, name, None), parameters, read))


class _Encoder:
    """Conversion of an attribute to JSON: numbers, strings, tensors and generators in containers and objects.

    `has_objects`: True if the value has objects that `restored` cannot create, so that the live attribute must have
        them.
    """

    def __init__(self, names: Mapping[int, str], aside: set[int], leaf: Leaf | None = None) -> None:
        self._names, self._leaf = names, leaf
        self._seen = set(aside)
        self.has_state = self.has_tensors = self.has_objects = self.has_others = False
        self._iterator = ""  # type of an iterator with values left

    def plain(self, value: Any) -> str:
        """Return the JSON text without tensors, for comparison."""
        return json.dumps(self.encode(value, ""))

    def refuse_iterator(self, name: str, part: Any) -> None:
        """Raise UserCodeError if the attribute `name` of `part` contains an iterator with values left."""
        if self._iterator:
            raise UserCodeError(
                given=f"the attribute {name} of optimizer {type(part).__name__}, with a {self._iterator}",
                conflict="steps take values from it, and a resumed run cannot begin where the last one has stopped",
                remedy="compute the value from a number that the optimizer counts, or from itertools.count",
            )

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, enum.Enum):
            self.has_objects = True
            return {_ENUM: self.encode(value.value, path)}
        if value is None or isinstance(value, bool | int | float | str):
            self.has_state = True
            return value
        if isinstance(value, bytes | complex):
            self.has_state = True
            return {_LITERAL: repr(value)}
        if id(value) in self._names:
            return {_NAMED: self._names[id(value)]}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            try:
                return {_ARRAY: self._tensor(torch.from_numpy(value.copy()), path)}
            except TypeError:  # an array of strings or objects
                return self._same()
        if isinstance(value, torch.Generator):
            return {_GENERATOR: self._tensor(value.get_state(), path)}
        if id(value) in self._seen or isinstance(value, _CODE):
            return self._same()
        self._seen.add(id(value))
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            self.has_state = self.has_objects = True
            own = value.getstate() if isinstance(value, random.Random) else _bits(value).state
            return {_DRAWS: self.encode(own, path)}
        if isinstance(value, itertools.count):
            self.has_state = True
            following = copy_of_count(value)
            return {_COUNT: [self.encode(next(following), path) for _ in range(2)]}
        if isinstance(value, _ITERATORS):
            is_over = getattr(value, "gi_frame", value) is None or operator.length_hint(value, 1) == 0
            self._iterator = self._iterator if is_over else type(value).__name__
            return self._same()
        if isinstance(value, Mapping):
            self.has_objects |= isinstance(value, defaultdict)
            items = enumerate(value.items())
            pairs = [[self.encode(k, path), self.encode(v, f"{path}/{number}")] for number, (k, v) in items]
            return {_PAIRS: pairs} if {_SAME: True} not in [k for k, _ in pairs] else self._same()
        kind = next((kind for kind, of in _KINDS.items() if isinstance(value, of)), None)  # type: ignore[arg-type]
        if kind is not None:
            self.has_objects |= getattr(value, "maxlen", None) is not None
            return {_ITEMS: [self.encode(v, f"{path}/{number}") for number, v in enumerate(value)], "kind": kind}
        own = _attributes(value)
        if not own:
            return self._same()
        self.has_objects = True
        return {_OBJECT: {name: self.encode(v, f"{path}/{name}") for name, v in own.items()}}

    def _same(self) -> dict[str, Any]:
        self.has_others = True
        return {_SAME: True}

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        self.has_state = self.has_tensors = True
        return self._leaf(path, tensor.detach()) if self._leaf is not None else {}


def _bits(value: Any) -> Any:
    """Return the bit generator of a NumPy generator."""
    return value._bit_generator if isinstance(value, np.random.RandomState) else value.bit_generator


def restored(  # noqa: C901 - a case for each kind of value
    saved: Any, live: Any, parameters: Mapping[str, Tensor], read: Read
) -> Any:
    """Return the value of a document from `_Encoder`. Parts of `live` that are not state stay unchanged."""

    def again(document: Any, own: Any) -> Any:
        return restored(document, own, parameters, read)

    match saved:
        case {"$same": _}:
            return live
        case {"$literal": text}:
            return ast.literal_eval(text)
        case {"$enum": _} | {"$object": _} | {"$draws": _} if live is None:
            raise UserCodeError(
                given="an optimizer with an object in its attributes that only the checkpoint has",
                conflict="a resumed run has nothing to put the object's state into",
                remedy="make as many objects in the optimizer's __init__, or keep tensors and numbers in attributes",
            )
        case {"$enum": document}:
            return type(live)(again(document, None))
        case {"$count": [first, second]}:
            return itertools.count(again(first, None), again(second, None) - again(first, None))
        case {"$parameter": name}:
            return parameters[name]
        case {"$generator": leaf}:
            generator = live if isinstance(live, torch.Generator) else torch.Generator()
            generator.set_state(read(leaf, torch.device("cpu")))
            return generator
        case {"$array": leaf}:
            return read(leaf, torch.device("cpu")).numpy()
        case {"$draws": document}:
            if isinstance(live, random.Random):
                live.setstate(again(document, None))
            else:
                _bits(live).state = again(document, None)
            return live
        case {"$pairs": pairs}:
            keys = [again(k, None) for k, _ in pairs]
            own = live if isinstance(live, Mapping) else {}
            values = {k: again(v, own.get(k)) for k, (_, v) in zip(keys, pairs, strict=True)}
            if isinstance(live, MutableMapping):
                live.clear()
                live.update(values)
                return live
            return values
        case {"$items": items, "kind": kind}:
            before = list(live) if isinstance(live, _KINDS[kind]) else []  # type: ignore[arg-type]
            after = [again(item, before[n] if n < len(before) else None) for n, item in enumerate(items)]
            if isinstance(live, list):
                live[:] = after
                return live
            if isinstance(live, deque):
                return deque(after, live.maxlen)
            return type(live)(*after) if hasattr(live, "_fields") else _KINDS[kind](after)
        case {"$object": own}:
            for name, document in own.items():
                object.__setattr__(live, name, again(document, getattr(live, name, None)))  # the object may be frozen
            return live
        case dict():
            tensor = read(saved, live.device if isinstance(live, Tensor) else None)
            if isinstance(live, Tensor) and (live.shape, live.dtype) == (tensor.shape, tensor.dtype):
                with torch.no_grad():
                    live.copy_(tensor)
                return live
            return tensor
    return saved


# --------------------------------------------------------------------------------------------------- train() and eval()
def with_modes(optimizer: Any) -> list[Any]:
    """Return the outermost optimizers that have `train` and `eval`, such as schedule-free ones."""
    outermost: dict[str, Any] = {}
    for where, part in parts(optimizer).items():
        known = any(not outer or where.startswith((f"{outer}.", f"{outer}[")) for outer in outermost)
        if not known and all(callable(getattr(part, name, None)) for name in ("train", "eval")):
            outermost[where] = part
    return list(outermost.values())


def to_train(optimizer: Any) -> None:
    """Call `train` of optimizers that have it, which is required before a step. Raises: UserCodeError."""
    for part in with_modes(optimizer):
        _call(part, "train")


def _call(part: Any, mode: str) -> None:
    try:
        getattr(part, mode)()
    except Exception as error:
        raise user_error(f"{mode} of optimizer {type(part).__name__}", error) from error


@contextlib.contextmanager
def evaluated_weights(optimizer: Any) -> Iterator[list[Tensor]]:
    """Switch parameters to the values of the optimizer's `eval` within a context. Yield the affected parameters.

    `eval` and `train` round values. Afterwards, parameters, states, groups and attributes are restored bit for bit from
    copies, which need memory for all parameters and states.
    Raises: UserCodeError.
    """
    modes = with_modes(optimizer)
    if not modes:
        yield []
        return
    parameters = [p for group in groups(optimizer) for p in group["params"]]
    values = [v for state in states(optimizer) if isinstance(state, Mapping) for v in state.values()]
    with torch.no_grad():
        copies = [(t, t.detach().clone()) for t in [*parameters, *values] if isinstance(t, Tensor)]
    plain = [(group, dict(group)) for group in groups(optimizer)]
    for part in parts(optimizer).values():
        numbers = {k: v for k, v in _attributes(part).items() if isinstance(v, bool | int | float | str)}
        plain.append((vars(part), numbers))
    for part in modes:
        _call(part, "eval")
    try:
        yield parameters
    finally:
        for part in modes:
            _call(part, "train")
        with torch.no_grad():
            for tensor, value in copies:
                tensor.copy_(value)
        for mapping, before in plain:
            mapping.update(before)


# ------------------------------------------------------------------------------------------------ a state_dict's extras
def extras(part: Any, where: str, names: Mapping[int, str], leaf: Leaf, known: Iterable[Tensor]) -> dict[str, Any]:
    """Return entries of an optimizer's own `state_dict` that no attribute, group or parameter state has, as JSON.

    `known`: tensors that the document already has.
    """
    places, documents = {_place(t) for t in known}, {}
    for key, value in (_own_state_dict(part) or {}).items():
        if key in ("state", "param_groups") or key in _attributes(part) or _has(value, places):
            continue
        encoder = _Encoder(names, set())
        encoder.plain(value)
        if encoder.has_state and not encoder.has_others:
            documents[str(key)] = _Encoder(names, set(), leaf).encode(value, f"{ATTRIBUTES}/{where}/state_dict/{key}")
    return documents


def load_extras(part: Any, saved: Mapping[str, Any], parameters: Mapping[str, Tensor], read: Read) -> None:
    """Pass `extras` to the optimizer's own `load_state_dict`. Raises: UserCodeError if that raises."""
    own = _own_state_dict(part) if saved else None
    if own is not None:
        values = {key: restored(document, None, parameters, read) for key, document in saved.items()}
        try:
            part.load_state_dict({**own, **values})
        except Exception as error:
            raise user_error(f"load_state_dict of optimizer {type(part).__name__}", error) from error


def _own_state_dict(part: Any) -> Mapping[Any, Any] | None:
    """Return the state dict of an optimizer whose class saves and loads its own, else None. Raises: UserCodeError."""
    kind = type(part)
    if not isinstance(part, Optimizer) or Optimizer.state_dict is kind.state_dict:
        return None
    if kind.load_state_dict is Optimizer.load_state_dict:
        return None
    try:
        document = part.state_dict()
    except Exception as error:
        raise user_error(f"state_dict of optimizer {type(part).__name__}", error) from error
    return document if isinstance(document, Mapping) else {}


def _has(value: Any, places: set[Any]) -> bool:
    """Return True if a value contains a tensor at these places, or an optimizer's state dict."""
    if isinstance(value, Tensor):
        return _place(value) in places
    if isinstance(value, Mapping):
        return {"state", "param_groups"} <= value.keys() or any(_has(v, places) for v in value.values())
    return isinstance(value, list | tuple) and any(_has(v, places) for v in value)


def _place(tensor: Tensor) -> Any:
    own: Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory itself
    return own.untyped_storage().data_ptr(), own.storage_offset(), tuple(own.shape)


# torch.optim.Optimizer imports torch._dynamo in its constructor and in `step`, which takes more than a second, as long
# as torch itself. It only marks code that a compiler, which does not run, should skip. Inside `compiler_deferred` these
# imports get a stand-in with the same effect. See docs/decisions/0006-start-up.md.
_DYNAMO = "torch._dynamo"


def _stand_in() -> ModuleType:
    module = ModuleType(_DYNAMO)

    def disable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return fn

    def load(name: str) -> Any:
        """Replace the stand-in by the real module, since any other attribute is a real use."""
        sys.modules.pop(_DYNAMO, None)
        torch.__dict__.pop("_dynamo", None)
        return getattr(importlib.import_module(_DYNAMO), name)

    module.__getattr__ = load  # type: ignore[method-assign]
    module.disable = disable  # type: ignore[attr-defined]
    module.graph_break = lambda *args: None  # type: ignore[attr-defined]
    return module


_STAND_IN = _stand_in()


@contextlib.contextmanager
def compiler_deferred() -> Iterator[None]:
    """Make `import torch._dynamo` load nothing in this context. No effect if the compiler is already loaded.

    Only for calls into torch.optim's own classes: code that really compiles needs the real module.
    """
    if _DYNAMO in sys.modules:
        yield
        return
    sys.modules[_DYNAMO] = torch._dynamo = _STAND_IN
    try:
        yield
    finally:
        if sys.modules.get(_DYNAMO) is _STAND_IN:
            del sys.modules[_DYNAMO]
        if torch.__dict__.get("_dynamo") is _STAND_IN:
            del torch._dynamo


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is one of torch.optim's own classes."""
    return type(optimizer).__module__.startswith("torch.optim.")


def step_optimizer(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Call the optimizer's `step`. For torch.optim's own classes, skip the compiler and torch's profiler span.

    `closure`: computes the loss and its gradients again, for an optimizer that needs it.

    The span, a call into the profiler, took 20 us of a step of 150 us, and 100 us after a backward.
    """
    if closure is not None:
        optimizer.step(closure)
        return
    if not is_torchs(optimizer):
        optimizer.step()
        return
    step = type(optimizer).step
    plain = getattr(step, "hooked", False) and "step" not in vars(optimizer) and not is_hooked(optimizer)
    with compiler_deferred():
        if plain and not torch._C._autograd._profiler_enabled():
            step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        else:
            optimizer.step()


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's `step` has hooks before or after it."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step may draw random numbers. Only torch's own classes without hooks never do."""
    return not is_torchs(optimizer) or is_hooked(optimizer)
