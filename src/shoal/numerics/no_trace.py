"""Looks that leave no trace: a context that restores a model, its code and the generators bit for bit.

A look is a computation that is not part of the training: the probe before the first step, the rehearsal of an
evaluation, the trial of a memory format. `NoTrace` copies what is small or may change: generators, buffers, and the
Python state that modules and functions can reach. Parameters are copied only when an operator is about to write them.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.numerics.checksum import bits_checksum
from shoal.numerics.operators import OperatorMode
from shoal.numerics.python_state import ATOMS, OF_TORCH, KeptDict, Number, ValueKeeper, is_plain, reachable, same_bits

# Parameters of a model that uses torch.compile are copied up to this size, and not restored beyond it.
_MOST_COPIED_BYTES = 256 << 20
# Number of words that the checksum of a large parameter reads, evenly spread.
_SAMPLED_WORDS = 1 << 16
_HOOKS = {key for key in vars(nn.Module()) if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))}


@dataclass(frozen=True)
class StateChange:
    """Change of Python state: its dotted name, as Job(allow_state=...) takes it, and its kind.

    `kind`: number, tensor, container or generator. The values that a generator has yielded cannot be restored.
    `home`, `key`: namespace and key of the attribute or variable, which may be gone.
    """

    name: str
    kind: str
    home: MutableMapping[str, Any]
    key: str


def copy_of(batch: Any) -> Any:
    """Return a copy of a batch that shares no memory with it; leaves that cannot be copied stay as they are."""
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, ATOMS):
            return leaf
        if id(leaf) not in memo:
            try:
                if isinstance(leaf, Tensor):
                    memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                else:
                    memo[id(leaf)] = copy.deepcopy(leaf)
            except Exception:  # a user's class: the batch has to be read again instead
                memo[id(leaf)] = leaf
        return memo[id(leaf)]

    return tree_map(copied, batch)


class NoTrace(AbstractContextManager["NoTrace"]):
    """Context for a look at a model and at functions of a job. `restore` and the end of the context restore all state.

    Args:
        model: The model with the modules, buffers and parameters to restore. None if the look has a model of its own.
        functions: The job's functions by name, such as its loss. Their closures, globals and objects are restored.
        gathers: Whether modules gather their parameters while they compute. Writes to gathered parameters are lost.
    """

    def __init__(self, model: nn.Module | None, functions: Mapping[str, Any], *, gathers: bool = False) -> None:
        self._stack = ExitStack()
        self._gathering = model if gathers else None
        modules = {} if model is None else dict(model.named_modules())
        self._places = [(name, vars(module), OF_TORCH) for name, module in modules.items()]
        # Some models register hooks in their first forward and record that in an attribute.
        self._hooks = [[home for key, home in vars(module).items() if key in _HOOKS] for module in modules.values()]
        own = {
            f"{name}.{key}".lstrip("."): value
            for name, module in modules.items()
            for key, value in vars(module).items()
            if key not in OF_TORCH and callable(value) and not isinstance(value, nn.Module)
        }
        self._caches: list[Any] = []
        self._places += reachable(modules.values(), {**functions, **own}, self._caches)
        self._parameters = {} if model is None else {name: _own(p) for name, p in model.named_parameters()}
        self._places += (
            [] if model is None else [(n, vars(p), frozenset()) for n, p in model.named_parameters() if is_plain(p)]
        )
        # Modules that gather their parameters replace these by other tensors themselves.
        gathers = gathers or (model is not None and any(hasattr(p, "to_local") for p in model.parameters()))
        self._places_of = {
            f"{prefix}.{key}".lstrip("."): (module._parameters, key, parameter)
            for prefix, module in ({} if gathers else modules).items()
            for key, parameter in module._parameters.items()
        }
        self._modules = list(modules.values())
        self.replaced: set[str] = set()  # parameters that `restore` has put back after a replacement
        self._named = {} if model is None else dict(model.named_parameters())
        self.hooked: set[str] = set()  # parameters from which `restore` has removed a hook
        self._buffers = {
            f"{prefix}.{key}".lstrip("."): (module._buffers, key)
            for prefix, module in modules.items()
            for key, value in module._buffers.items()
            if value is not None
        }

    def __enter__(self) -> NoTrace:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._generators = torch.default_generator.get_state(), cuda, random.getstate(), np.random.get_state()
        self._computed = [cache.cache_info().misses for cache in self._caches]
        keeper = ValueKeeper({id(home) for _, home, _ in self._places})
        self._namespaces = [(name, home, KeptDict(home, skip, keeper, each=True)) for name, home, skip in self._places]
        self._was_buffer = {n: (home[k], home[k].detach().clone()) for n, (home, k) in self._buffers.items()}
        self._was = {n: (p.data, p.requires_grad, p.grad, _mark(p)) for n, p in self._parameters.items()}
        self._registered = [[dict(home) for home in homes] for homes in self._hooks]
        self._on_gradients = {name: {n for home in _hooks_on(p) for n in home} for name, p in self._named.items()}
        self._guard = None
        watched = [
            *(data for data, *_ in self._was.values()),
            *(t for t, _ in self._was_buffer.values()),
            *keeper.large,
        ]
        if watched or self._gathering is not None:
            guard = _WriteGuard(watched, self._gathering)
            # A process that uses torch.compile: its functions fail under a dispatch mode, then and later.
            # torch._dynamo.disable, which optimizers use, leaves an entry that is no backend.
            frames = sys.modules.get("torch._dynamo.eval_frame")
            if frames is None or not any(getattr(frames, "cached_backends", {0: True}).values()):
                self._guard = self._stack.enter_context(guard)
            elif sum(tensor.nbytes for tensor in watched) <= _MOST_COPIED_BYTES:
                guard.copy(watched)
                self._guard, guard.sees = guard, False
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.restore()

    def restore(self) -> None:
        """Restore the state at the beginning of the context."""
        self._restore_values()
        self._restore_hooks()
        for _, _, before in self._namespaces:
            before.restore()
        for place, cache in enumerate(self._caches):
            if cache.cache_info().misses != self._computed[place]:
                cache.cache_clear()
                self._computed[place] = 0

    def keep_state(self, *, but: Collection[str] = (), only: str | None = None) -> None:
        """Restore everything but the Python state, which the next forward sees as the last forward has left it.

        `but`: names of changes that are restored too. `only`: the one change that stays.
        """
        self._restore_values()
        if only is not None:
            self._restore_hooks()
        for name, _, before in self._namespaces:
            names = {key: f"{name}.{key}".lstrip(".") for key in before.keys()}  # noqa: SIM118 - no mapping
            before.restore(stays=[k for k, n in names.items() if n not in but and (only is None or n == only)])

    def _restore_values(self) -> None:
        if self._gathering is not None:
            from torch.distributed.fsdp import FSDPModule  # takes half a second, and other models do not need it

            for unit in (module for module in self._gathering.modules() if isinstance(module, FSDPModule)):
                unit.reshard()  # else what a forward without a backward has gathered, and perhaps written, stays
        for name, (home, key, parameter) in self._places_of.items():
            if home.get(key) is not parameter:
                home[key] = parameter
                self.replaced.add(name)
                refresh_recurrent(self._modules)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for name, (home, key) in self._buffers.items():
                tensor, value = self._was_buffer[name]
                if tensor.dtype == value.dtype and tensor.shape == value.shape:
                    if not same_bits(tensor, value):
                        tensor.data.copy_(value)
                    home[key] = tensor
                else:
                    home[key] = value.clone()
            if self._guard is not None:
                self._guard.put_back()
            for name, parameter in self._parameters.items():
                data, required, gradient, _ = self._was[name]
                if is_plain(parameter) and parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if parameter.requires_grad != required and parameter.is_leaf:
                    parameter.requires_grad_(required)
                parameter.grad = gradient
        own, cuda, pythons, numpys = self._generators
        torch.default_generator.set_state(own)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(pythons)
        np.random.set_state(numpys)

    def _restore_hooks(self) -> None:
        """Remove new hooks on modules and parameters, and put back hooks that were removed from modules.

        shoal's own hooks on modules stay as they are.
        """
        for name, parameter in self._named.items():
            for home in _hooks_on(parameter):
                for number in [number for number in home if number not in self._on_gradients[name]]:
                    del home[number]
                    self.hooked.add(name)
        for homes, registered in zip(self._hooks, self._registered, strict=True):
            if all(home.keys() == before.keys() for home, before in zip(homes, registered, strict=True)):
                continue
            own = {
                number
                for home in (*homes, *registered)
                for number, hook in home.items()
                if str(getattr(hook, "__module__", "")).startswith("shoal.")
            }
            for home, before in zip(homes, registered, strict=True):
                hooks = {number: hook for number, hook in before.items() if number not in own or number in home}
                hooks |= {number: hook for number, hook in home.items() if number in own}
                home.clear()
                home.update(hooks)

    def changed_buffers(self) -> list[str]:
        """Return the names of buffers that were written, including writes through `.data` and of equal values."""
        written = self._guard.written() if self._guard is not None else set()
        names = []
        for name, (home, key) in self._buffers.items():
            now, (tensor, value) = home.get(key), self._was_buffer[name]
            if now is not tensor or id(tensor) in written or not same_bits(now, value):
                names.append(name)
        return names

    def written_parameters(self) -> list[str]:
        """Return the names of parameters that an operator wrote, even if the values stayed equal."""
        if self._guard is None:
            return []
        written = self._guard.written()
        return [*self._guard.gathered, *(name for name, (data, *_) in self._was.items() if id(data) in written)]

    def changed_parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters that have other values than before, by name."""
        copies = {}
        for name, parameter in self._parameters.items():
            data, *_, mark = self._was[name]
            _, before = self._guard.copies.get(id(data), (None, None)) if self._guard is not None else (None, None)
            moved = is_plain(parameter) and parameter.data_ptr() != data.data_ptr()
            if before is None and not moved:
                differs = mark != _mark(parameter)
            else:
                differs = not same_bits(parameter, data if before is None else before)
            if differs:
                copies[name] = parameter.detach().clone()
        return copies

    def unrestored(self) -> list[str]:
        """Return the names of parameters with writes that were not seen, so that `restore` could not restore them."""
        return [name for name, parameter in self._parameters.items() if self._was[name][3] != _mark(parameter)]

    def changes(self) -> list[StateChange]:
        """Return the attributes, variables and containers that changed."""
        return [
            StateChange(f"{name}.{key}".lstrip("."), kind, home, key)
            for name, home, before in self._namespaces
            for key, kind in before.differences()
        ]

    def names(self) -> set[str]:
        """Return the names of all attributes and variables, of the beginning and of now."""
        return {f"{name}.{key}".lstrip(".") for name, _, of in self._namespaces for key in of.keys()}  # noqa: SIM118

    def numbers(self) -> list[Number]:
        """Return the numbers that have changed, including numbers within containers and objects."""
        return [number for name, _, before in self._namespaces for number in before.numbers(name)]


def refresh_recurrent(modules: Iterable[nn.Module]) -> None:
    """Update the separate list of weights in recurrent layers to the weights that the layers have now."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _hooks_on(parameter: Tensor) -> list[Any]:
    """Return a parameter's hooks by number: on its gradient, and after the gradient's accumulation."""
    return [home for home in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if home]


def _own(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter that is a DTensor; return any other parameter itself."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local().detach()


def _mark(parameter: Tensor) -> int:
    """Return a checksum of a parameter's values, sampled if it is large; return the version of a sharded one."""
    if not is_plain(parameter) or nn.parameter.is_lazy(parameter):
        return parameter._version
    flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach()
    return bits_checksum(
        [flat[:: flat.numel() // _SAMPLED_WORDS] if flat.numel() > _SAMPLED_WORDS * 2 and flat.ndim == 1 else flat]
    )


class _WriteGuard(OperatorMode):
    """Mode that copies a tensor before the first operator that writes into its memory."""

    supports_higher_order_operators = True  # such as flex_attention: they write nothing by themselves

    def __init__(self, tensors: Iterable[Tensor], gathering: nn.Module | None = None) -> None:
        super().__init__()
        self._gathering = gathering
        self.gathered: dict[str, None] = {}  # parameters that were written while they were gathered
        self._homes: dict[int, list[Tensor]] = collections.defaultdict(list)
        for tensor in filter(is_plain, tensors):
            self._homes[tensor.untyped_storage()._cdata].append(tensor)
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # a written tensor and its value before, by the tensor's id
        self.sees = True  # whether the mode is active, so that only written tensors are copied
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
                        plain = ((n, p) for n, p in self._gathering.named_parameters() if is_plain(p))
                        self.gathered |= {n: None for n, p in plain if p.untyped_storage()._cdata == home}
        return func(*args, **kwargs)

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors that have no copy yet."""
        for tensor in filter(is_plain, tensors):
            if id(tensor) not in self.copies:
                self.copies[id(tensor)] = tensor, tensor.detach().clone()

    def written(self) -> set[int]:
        """Return the ids of the tensors that operators wrote, as far as this mode sees operators."""
        return set(self.copies) if self.sees else set()

    def put_back(self) -> None:
        """Write the copies back; later writes are copied anew."""
        for tensor, value in self.copies.values():
            if tensor.shape != value.shape and not tensor.requires_grad:  # the first forward has set the buffer's shape
                tensor.resize_(value.shape)
            tensor.copy_(value)
        if self.sees:
            self.copies.clear()
