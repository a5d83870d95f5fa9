"""Keras 3 models on the torch backend as modules that train like any other.

A Keras model is an nn.Module, but not one in torch's ways: layers of a Sequential are no submodules, all variables hang
on the model under names that count how many layers the process has made, what is no weight is a frozen parameter, a
variable keeps its own reference to its tensor, `module.training` means nothing, and random layers draw from counters
of their own. `adapt` mends these in place and leaves the model's parameters, layers and mathematics as they are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.utils.naming import to_snake_case
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.randomness import GrainScope, active_scope

_INT31 = 2**31 - 1
_GLOBAL_SEEDS = "global_seed_generator"  # the name under which Keras keeps its own


def adapt(model: Any) -> Any:
    """The same model, whose layers are its submodules and whose variables are their parameters and buffers.

    Parameters stay the same objects. Raises: JobError where a layer has no weights yet. May be called again.
    """
    if hasattr(model, "_shoal_calls"):
        return model
    layers = model._flatten_layers()
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise JobError(
            given=f"the Keras model {model.name!r}, whose layers {', '.join(unbuilt[:3])} have no weights yet",
            conflict="the optimizer needs the weights before the first batch is seen",
            remedy="begin the model with keras.Input(shape), or call it once on zeros in the function that builds it",
        )
    calls = _Calls()
    children = {id(layer): _children(layer) for layer in layers}
    for layer in layers:
        _hold(layer, children[id(layer)])
        for generator in layer._seed_generators:
            generator.__class__, generator._initial_seed = _GrainSeeds, None
    for layer in layers:
        kind: Any = type(layer)
        object.__setattr__(layer, "_shoal_calls", calls)
        object.__setattr__(layer, "_shoal_policy", layer.dtype_policy)
        object.__setattr__(layer, "__class__", _adapted_class(kind))
    return model


# ------------------------------------------------------------------------------------------- submodules and variables


def _children(layer: Any) -> dict[str, nn.Module]:
    """The modules directly in a layer, by names that do not depend on what else the process has made."""
    own = [child for child in layer._layers if not isinstance(child, keras.layers.InputLayer)]
    known = {id(child) for child in own}
    # An attribute's name where there is one; modules that are no Keras layers are those of a TorchModuleWrapper.
    named = {
        name: module
        for name, module in layer._modules.items()
        if id(module) in known or (name == "module" and not isinstance(module, keras.Layer))
    }
    attributes = {id(module) for module in named.values()}
    for child in own:
        if id(child) not in attributes:
            named[_free(_plain_name(child), named)] = child
    return named


def _plain_name(layer: Any) -> str:
    """The layer's name, without the number that Keras puts behind a name it makes itself."""
    made = to_snake_case(type(layer).__name__)
    name: str = made if re.fullmatch(rf"{re.escape(made)}_\d+", layer.name) else layer.name
    return re.sub(r"\W", "_", name)


def _free(name: str, taken: dict[str, Any]) -> str:
    """The name, or the name with the first free number behind it."""
    numbered = name
    number = 0
    while numbered in taken:
        number += 1
        numbered = f"{name}_{number}"
    return numbered


def _hold(layer: Any, children: dict[str, nn.Module]) -> None:
    """Makes a layer's variables its parameters and buffers, and `children` its submodules."""
    # What is no layer of its own stays an attribute: a Sequential's graph, say, which holds the same layers.
    layer.__dict__.update({name: m for name, m in layer._modules.items() if m not in children.values()})
    layer._modules.clear()
    layer._modules.update(children)
    # Keras looks here before it lists parameters; not registered, since what it holds is registered where it belongs.
    layer.__dict__["_torch_params"] = nn.ParameterDict()
    foreign = {id(p) for child in children.values() if not isinstance(child, keras.Layer) for p in child.parameters()}
    names: dict[str, Any] = {}
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        if id(variable._value) in foreign or any(variable is held for held in names.values()):
            continue
        name = _free(re.sub(r"\W", "_", variable.name), {**layer._modules, **names})
        names[name] = variable
        if any(variable is weight for weight in layer._trainable_variables):
            layer._parameters[name] = variable._value
            home = layer._parameters
        else:
            layer._buffers[name] = variable._value.detach()
            home = layer._buffers
        if not isinstance(variable, _Held):  # one that two layers share stays with the first
            _hold_in(variable, home, name)


class _Held:
    """A variable whose tensor is whatever its layer holds under its name: modules may move, replace or divide it."""

    _shoal_home: tuple[dict[str, Any], str]

    @property
    def _value(self) -> Any:
        home, name = self._shoal_home
        return home[name]

    @_value.setter
    def _value(self, value: Any) -> None:
        home, name = self._shoal_home
        home[name] = value

    @property
    def _dtype(self) -> str:
        return str(self._value.dtype).removeprefix("torch.")

    @_dtype.setter
    def _dtype(self, value: Any) -> None:
        pass

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._value.shape)

    @_shape.setter
    def _shape(self, value: Any) -> None:
        pass


def _hold_in(variable: Any, home: dict[str, Any], name: str) -> None:
    kind: Any = type(variable)
    for key in ("_value", "_dtype", "_shape"):
        del variable.__dict__[key]
    variable.__dict__["_shoal_home"] = home, name
    variable.__class__ = _held_class(kind)


@cache
def _held_class(cls: Any) -> Any:
    return type(cls.__name__, (_Held, cls), {"__module__": cls.__module__})


# -------------------------------------------------------------------------------------------------------------- calls


class _Calls:
    """How deep in calls of one model's layers this process is: the outermost call says what holds for all in it."""

    def __init__(self) -> None:
        self.depth = 0
        self.seeds = _GrainSeeds(seed=0)


class _Adapted:
    """A layer that trains where `module.training` says so, in its parameters' dtype, on their device."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = self._shoal_calls
        if calls.depth:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("training") is None:
            kwargs["training"] = self.training
        with _outermost(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """A layer without layers in it; Keras' own saves it and loads it again, without what `adapt` did."""
        if self._modules:
            raise TypeError(f"{self.name} holds layers: only single layers of an adapted Keras model can be copied")
        own = memo[id(self)] = object.__new__(type(self))
        homes = {id(home): copy.deepcopy(home, memo) for home in (self._parameters, self._buffers)}
        copies: dict[int, Any] = {}
        for variable in (*self._trainable_variables, *self._non_trainable_variables):
            if id(variable._shoal_home[0]) in homes:
                copies[id(variable)] = own_variable = copy.copy(variable)
                own_variable._shoal_home = homes[id(variable._shoal_home[0])], variable._shoal_home[1]
        own.__dict__.update({key: copies.get(id(value), value) for key, value in self.__dict__.items()})
        own.__dict__.update(_parameters=homes[id(self._parameters)], _buffers=homes[id(self._buffers)])
        for key in ("_trainable_variables", "_non_trainable_variables"):
            own.__dict__[key] = [copies.get(id(variable), variable) for variable in self.__dict__[key]]
        return own

    def get_parameter(self: Any, target: str) -> nn.Parameter:
        """torch's own looks at the attribute, which is Keras' variable."""
        found: nn.Parameter = dict(self.named_parameters(remove_duplicate=False))[target]
        return found

    def get_buffer(self: Any, target: str) -> Tensor:
        """As `get_parameter`."""
        found: Tensor = dict(self.named_buffers(remove_duplicate=False))[target]
        return found


class _BatchNormalization(_Adapted):
    """Normalises each grain by itself, and moves the statistics by the mean over grains, as torch's under shoal."""

    def call(self: Any, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
        scope = active_scope()
        if scope is None or not training or not self.trainable:
            normalised: Tensor = super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
            return normalised
        scope.calls += 1
        return _grain_by_grain(super().call, scope, self, inputs, mask)  # type: ignore[misc]


def _grain_by_grain(call: Any, scope: GrainScope, layer: Any, inputs: Tensor, mask: Tensor | None) -> Tensor:
    parts = scope.split(inputs)
    masks = [None] * len(parts) if mask is None else scope.split(mask)
    statistics = [variable.value for variable in layer._non_trainable_variables]
    start = [value.clone() for value in statistics]
    sums = [torch.zeros_like(value) for value in statistics]
    outputs = []
    for part, its_mask in zip(parts, masks, strict=True):
        outputs.append(call(part, training=True, mask=its_mask))
        with torch.no_grad():
            for value, total, before in zip(statistics, sums, start, strict=True):
                total.add_(value, alpha=len(part) / len(inputs))
                value.copy_(before)
    with torch.no_grad():
        for value, total in zip(statistics, sums, strict=True):
            value.copy_(total)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@cache
def _adapted_class(cls: Any) -> Any:
    kind = _BatchNormalization if issubclass(cls, keras.layers.BatchNormalization) else _Adapted
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__})


@contextmanager
def _outermost(layer: Any) -> Iterator[None]:
    """A context of one call from outside, however it ends."""
    held: Tensor | None = next((p for p in layer.parameters() if p.is_floating_point()), None)
    seeds = global_state.get_global_attribute(_GLOBAL_SEEDS)
    with ExitStack() as stack:
        if held is not None:
            _follow(layer, held.dtype)
            stack.enter_context(keras.device(str(held.device)))
        # For layers that call keras.random without a seed: the counter of the process would go on from call to call.
        global_state.set_global_attribute(_GLOBAL_SEEDS, layer._shoal_calls.seeds)
        stack.callback(global_state.set_global_attribute, _GLOBAL_SEEDS, seeds)
        layer._shoal_calls.depth += 1
        try:
            yield
        finally:
            layer._shoal_calls.depth -= 1


def _follow(layer: Any, dtype: torch.dtype) -> None:
    """Sets the layers' dtype policies to their own, or to the dtype that the parameters were brought to."""
    name = str(dtype).removeprefix("torch.")
    if layer.dtype_policy.variable_dtype == name:
        return
    for each in layer._flatten_layers():
        own = each._shoal_policy
        if own.variable_dtype.startswith(("float", "bfloat")):
            each.dtype_policy = own if own.variable_dtype == name else name


# --------------------------------------------------------------------------------------------------------- randomness


class _GrainSeeds(keras.random.SeedGenerator):  # type: ignore[misc]
    """Seeds drawn from torch's global generator, which shoal seeds for each grain, instead of from a counter.

    Without an initial seed, so that Dropout is torch's own, whose mask is drawn by grain in a fused forward.
    """

    def next(self, ordered: bool = True) -> Tensor:
        """Two words."""
        return torch.randint(_INT31, (2,))
