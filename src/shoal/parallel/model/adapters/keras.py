"""Adapter of Keras 3 models on the torch backend to modules that train like any other.

A Keras model is an nn.Module, but does not follow torch's conventions. Layers of a Sequential are no submodules. All
variables are on the model, under names that count the layers made in the process. Non-weights are frozen parameters. A
variable keeps its own reference to its tensor. `module.training` has no effect, and random layers draw from their own
counters. `adapt` corrects these in place and does not change parameters, layers or mathematics. This module also copies
such a model: Keras itself would save and load it again, without the adaptation.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain, count
from typing import Any

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.ops.function import Function
from keras.src.utils.naming import to_snake_case
from keras.src.utils.tracking import DotNotTrackScope
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import JobError
from shoal.numerics.grain_randomness import active_scope
from shoal.parallel.model.sharded_model import Outputs

_INT31 = 2**31 - 1
_GLOBAL_SEEDS = "global_seed_generator"  # Keras's own name for its seed generator


def adapt(model: Any) -> Any:
    """Adapt the model in place: layers become submodules, variables become parameters and buffers. Return the model.

    Parameters stay the same objects, and a second call has no effect. Raises: JobError if a layer has no weights yet.
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
    # The modules directly in each layer, under names independent of what else the process has made.
    children_of: dict[int, dict[str, nn.Module]] = {}
    for layer in layers:
        own = [child for child in layer._layers if not isinstance(child, keras.layers.InputLayer)]
        known = {id(child) for child in own}
        # The attribute's name, if there is one. Modules that are no Keras layers belong to a TorchModuleWrapper.
        named = {
            name: module
            for name, module in layer._modules.items()
            if id(module) in known or (name == "module" and not isinstance(module, keras.Layer))
        }
        attributes = {id(module) for module in named.values()}
        for child in own:
            if id(child) not in attributes:
                plain = to_snake_case(type(child).__name__)  # without the number that Keras appends to a generated name
                name = plain if re.fullmatch(rf"{re.escape(plain)}_\d+", child.name) else child.name
                named[_free(re.sub(r"\W", "_", name), named)] = child
        children_of[id(layer)] = named
    for layer in layers:  # its variables become parameters and buffers, its children submodules
        children = children_of[id(layer)]
        # Other modules stay attributes: a Sequential's graph, for example, contains the same layers.
        layer.__dict__.update({name: m for name, m in layer._modules.items() if m not in children.values()})
        layer._modules.clear()
        layer._modules.update(children)
        # Keras looks here before it lists parameters. It is not registered: its parameters are registered in their own
        # layers.
        layer.__dict__["_torch_params"] = nn.ParameterDict()
        foreign = {
            id(p) for child in children.values() if not isinstance(child, keras.Layer) for p in child.parameters()
        }
        names: dict[str, Any] = {}
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            if id(variable._value) in foreign or any(variable is other for other in names.values()):
                continue
            name = _free(re.sub(r"\W", "_", variable.name), {**layer._modules, **names})
            names[name] = variable
            trains = any(variable is weight for weight in layer._trainable_variables)
            home = layer._parameters if trains else layer._buffers
            home[name] = variable._value if trains else variable._value.detach()
            if not isinstance(variable, _Held):  # a variable that two layers share stays with the first
                cls: Any = type(variable)
                for key in ("_value", "_dtype", "_shape"):
                    del variable.__dict__[key]
                variable.__dict__["_shoal_home"] = home, name
                variable.__class__ = _held_class(cls)
        for generator in layer._seed_generators:
            generator.__class__, generator._initial_seed = _GrainSeeds, None
    for layer in layers:
        kind: Any = type(layer)
        object.__setattr__(layer, "_shoal_calls", calls)
        object.__setattr__(layer, "_shoal_policy", layer.dtype_policy)
        object.__setattr__(layer, "__class__", _adapted_class(kind))
    return model


# ------------------------------------------------------------------------------------------- submodules and variables


def _free(name: str, names: dict[str, Any]) -> str:
    """Return the name, with the first free number appended if the name is taken."""
    return next(each for each in chain([name], (f"{name}_{number}" for number in count(1))) if each not in names)


class _Held:
    """Variable that reads its tensor from its layer by name: modules may move, replace or divide that tensor."""

    _shoal_home: tuple[dict[str, Any], str]

    @property
    def _value(self) -> Any:
        home, name = self._shoal_home
        return home[name]

    @_value.setter
    def _value(self, value: Any) -> None:
        home, name = self._shoal_home
        home[name] = value

    # Keras only sets these to the value's own.
    _dtype = property(lambda self: str(self._value.dtype).removeprefix("torch."), lambda self, value: None)
    _shape = property(lambda self: tuple(self._value.shape), lambda self, value: None)


@cache
def _held_class(cls: Any) -> Any:
    return type(cls.__name__, (_Held, cls), {"__module__": cls.__module__})


# -------------------------------------------------------------------------------------------------------------- calls


class _Calls:
    """Depth of nested calls of one model's layers in this process. The outermost call sets device, dtype and seeds."""

    def __init__(self) -> None:
        self.depth = 0
        self.seeds = _GrainSeeds(seed=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        """Return a new object: a copied model is not in a call."""
        return _Calls()


class _Adapted:
    """Layer that trains according to `module.training`, in its parameters' dtype, on their device."""

    @property
    def holds_steps(self: Any) -> bool:
        """True if the layer calls its inner layers in sequence, as far as a graph allows; a pipeline may cut there."""
        return isinstance(self, keras.Sequential | Function)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._shoal_calls.depth:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("training") is None:
            kwargs["training"] = self.training
        with _outermost(self, (args, kwargs)):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return a copy with all layers in it."""
        with DotNotTrackScope():
            # Create empty shells first: layers, their calls in a graph and the symbols between them refer to each
            # other.
            inside = list(self._flatten_layers())  # the layers in it, and the operations of their graphs
            for each in inside:  # the list grows meanwhile
                functions = [value for value in vars(each).values() if isinstance(value, Function)]
                graphs = [each, *functions] if isinstance(each, Function) else functions
                for other in (*functions, *(operation for graph in graphs for operation in graph.operations)):
                    if all(other is not known for known in inside):
                        inside.append(other)
            family = {id(each): each for each in inside}
            memo |= {key: object.__new__(type(each)) for key, each in family.items()}
            kinds = ("_trainable_variables", "_non_trainable_variables")
            variables = {id(v): v for each in family.values() for kind in kinds for v in getattr(each, kind, ())}
            memo |= {key: copy.copy(variable) for key, variable in variables.items()}
            for each in family.values():
                # Calls from or to objects that are not copied belong to the original's history, not to the copy's.
                nodes = (*each._inbound_nodes, *each._outbound_nodes)
                for node in nodes:
                    callers = [symbol._keras_history.operation for symbol in node.input_tensors]
                    is_inside = all(caller is None or id(caller) in family for caller in callers)
                    if not (id(node.operation) in family and is_inside):
                        memo[id(node)] = node
            for key, each in family.items():
                # Keras has wrapped these methods of the original; a copy is built already.
                attributes = {name: value for name, value in vars(each).items() if name not in ("build", "quantize")}
                memo[key].__dict__.update({name: copy.deepcopy(value, memo) for name, value in attributes.items()})
            for key, variable in variables.items():
                if hasattr(variable, "_shoal_home"):
                    home, name = variable._shoal_home
                    memo[key].__dict__["_shoal_home"] = memo.get(id(home), home), name
                else:
                    memo[key].__dict__["_value"] = copy.deepcopy(variable._value, memo)
            for key in family:
                tracker: Any = getattr(memo[key], "_tracker", None)
                for name, (_, store) in tracker.config.items() if tracker is not None else ():
                    tracker.stored_ids[name] = {id(value) for value in store}
            return memo[id(self)]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        """Replace a parameter by a tensor of its name, as in any module; Keras's variable stays the attribute."""
        if isinstance(value, Tensor) and name in self.__dict__.get("_parameters", ()):
            self._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def get_parameter(self: Any, target: str) -> nn.Parameter:
        """Return a parameter by name. torch's own method would return Keras's variable."""
        parameter: nn.Parameter = dict(self.named_parameters(remove_duplicate=False))[target]
        return parameter

    def get_buffer(self: Any, target: str) -> Tensor:
        """Return a buffer by name, as `get_parameter`."""
        buffer: Tensor = dict(self.named_buffers(remove_duplicate=False))[target]
        return buffer


class _BatchNormalization(_Adapted):
    """Layer that normalises each grain separately and updates its statistics by the mean over grains."""

    def call(self: Any, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
        scope = active_scope()
        if scope is None or not training or not self.trainable:
            normalised: Tensor = super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
            return normalised
        if scope.batch_norm is not None:
            raise JobError(
                given=f'Job(batch_norm="batch") with the Keras layer {self.name}',
                conflict="a Keras layer computes its own statistics, which shoal adds up over grains alone",
                remedy='write batch_norm="grain", or torch.nn.BatchNorm2d in its place',
            )
        scope.calls += 1
        parts = scope.split(inputs)
        masks = [None] * len(parts) if mask is None else scope.split(mask)
        statistics = [variable.value for variable in self._non_trainable_variables]
        start = [value.clone() for value in statistics]
        sums = [torch.zeros_like(value) for value in statistics]
        outputs = []
        for part, its_mask in zip(parts, masks, strict=True):
            outputs.append(super().call(part, training=True, mask=its_mask))  # type: ignore[misc]
            with torch.no_grad():
                for value, total, before in zip(statistics, sums, start, strict=True):
                    total.add_(value, alpha=len(part) / len(inputs))
                    value.copy_(before)
        with torch.no_grad():
            for value, total in zip(statistics, sums, strict=True):
                value.copy_(total)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Product(_Adapted):
    """Dense layer or convolution. Each rank of a tensor axis may compute some of its outputs."""

    def tensor_outputs(self: Any) -> Outputs | None:
        """Return how the layer's outputs can be sliced; None if they are not computed separately, as by Keras."""
        base = keras.layers.Dense if isinstance(self, keras.layers.Dense) else keras.layers.Conv2D
        changed = [n for n in ("call", "kernel", "convolution_op") if _of(type(self), n) is not _of(base, n)]
        if changed or self._parameters.keys() - {"kernel", "bias"} or self.kernel is not self._kernel:
            return None
        if self.activation not in _by_element() or getattr(self, "groups", 1) != 1:
            return None
        kernel = self._parameters["kernel"]
        dims = {"kernel": kernel.ndim - 1, **({"bias": 0} if "bias" in self._parameters else {})}
        channels_first = getattr(self, "data_format", None) == "channels_first" and base is keras.layers.Conv2D
        return Outputs(dims, kernel.shape[-1], -1 - self.rank if channels_first else -1)

    def keep_outputs(self: Any, size: int) -> None:
        """Set the number of outputs. A convolution shapes its bias by this number."""
        if isinstance(self, keras.layers.Conv2D):
            self.__dict__["filters"] = size


def _of(cls: Any, name: str) -> Any:
    return inspect.getattr_static(cls, name, None)


@cache
def _by_element() -> frozenset[Any]:
    """Return the activations that act on each element separately."""
    names = "linear relu relu6 leaky_relu elu selu celu gelu silu mish tanh sigmoid hard_sigmoid hard_silu hard_tanh"
    more = "softplus softsign exponential log_sigmoid soft_shrink hard_shrink tanh_shrink squareplus"
    return frozenset((None, *(getattr(keras.activations, name) for name in f"{names} {more}".split())))


@cache
def _adapted_class(cls: Any) -> Any:
    layers = keras.layers
    is_product = issubclass(cls, layers.Dense | layers.Conv2D)
    kind = _BatchNormalization if issubclass(cls, layers.BatchNormalization) else _Product if is_product else _Adapted
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__})


@contextmanager
def _outermost(layer: Any, given: Any) -> Iterator[None]:
    """Return a context for one call from outside with the arguments `given`."""
    parameter: Tensor | None = next((p for p in layer.parameters() if p.is_floating_point()), None)
    seeds = global_state.get_global_attribute(_GLOBAL_SEEDS)
    with ExitStack() as stack:
        if parameter is not None:
            # The layers' dtype policies are their own, or the parameters' dtype if that was changed.
            name = str(parameter.dtype).removeprefix("torch.")
            for each in layer._flatten_layers() if layer.dtype_policy.variable_dtype != name else ():
                own = each._shoal_policy
                if own.variable_dtype.startswith(("float", "bfloat")):
                    each.dtype_policy = own if own.variable_dtype == name else name
            # A pipeline stage has no data for parameters of other stages, but its arguments are on its device.
            tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            place = next(tensors, parameter) if parameter.is_meta else parameter
            stack.enter_context(keras.device(str(place.device)))
            global_state.set_global_attribute("torch_device", _Device(place.device))
        # For layers that call keras.random without a seed: the process's counter would differ between calls.
        global_state.set_global_attribute(_GLOBAL_SEEDS, layer._shoal_calls.seeds)
        stack.callback(global_state.set_global_attribute, _GLOBAL_SEEDS, seeds)
        layer._shoal_calls.depth += 1
        try:
            yield
        finally:
            layer._shoal_calls.depth -= 1


class _Device(str):
    """Keras's name of a device that also equals torch's device and the meta device, without being "meta" by name.

    Keras compares this name with each tensor's device, which torch reports as unequal, and then moves the tensor. A
    tensor on the meta device would become one of arbitrary values without a history. If the name is "meta", Keras's
    layers also return such a tensor.
    """

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.device):
            return other.type == "meta" or str(self) == str(other)
        return str(self) != "meta" and str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


# --------------------------------------------------------------------------------------------------------- randomness


class _GrainSeeds(keras.random.SeedGenerator):  # type: ignore[misc]
    """Seeds from torch's global generator, which shoal seeds for each grain, instead of from a counter.

    There is no initial seed, so that Dropout is torch's own and draws its mask by grain in a fused forward.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _GrainSeeds:
        """Return the object itself: it has no state."""
        return self

    def next(self, ordered: bool = True) -> Tensor:
        """Draw two words."""
        return torch.randint(_INT31, (2,))
