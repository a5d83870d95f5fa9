"""Copies of adapted Keras models, which Keras itself would save and load again, without what was adapted."""

from __future__ import annotations

import copy
from typing import Any

from keras.src.ops.function import Function
from keras.src.utils.tracking import DotNotTrackScope


def copied(layer: Any, memo: dict[int, Any]) -> Any:
    """A copy of an adapted layer with all layers in it, for its `__deepcopy__`."""
    with DotNotTrackScope():
        return _copied(layer, memo)


def _copied(layer: Any, memo: dict[int, Any]) -> Any:
    # First as empty shells: layers, their calls in a graph and the symbols between them refer to each other.
    family = {id(each): each for each in _family(layer)}
    memo |= {key: object.__new__(type(each)) for key, each in family.items()}
    kinds = ("_trainable_variables", "_non_trainable_variables")
    variables = {id(v): v for each in family.values() for kind in kinds for v in getattr(each, kind, ())}
    memo |= {key: copy.copy(variable) for key, variable in variables.items()}
    for each in family.values():
        # Calls from or to what is not copied are the original's history, of which a copy takes no part.
        nodes = (*each._inbound_nodes, *each._outbound_nodes)
        memo |= {id(node): node for node in nodes if not _is_within(node, family)}
    for key, each in family.items():
        # Keras has wrapped these methods of the original; a copy is built.
        held = {name: value for name, value in vars(each).items() if name not in ("build", "quantize")}
        memo[key].__dict__.update({name: copy.deepcopy(value, memo) for name, value in held.items()})
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
    return memo[id(layer)]


def _family(layer: Any) -> list[Any]:
    """A layer, the layers in it, and the operations of their graphs, which need not be layers."""
    found = list(layer._flatten_layers())
    for each in found:  # which grows
        inner = [value for value in vars(each).values() if isinstance(value, Function)]
        graphs = [each, *inner] if isinstance(each, Function) else inner
        for other in (*inner, *(operation for graph in graphs for operation in graph.operations)):
            if all(other is not known for known in found):
                found.append(other)
    return found


def _is_within(node: Any, family: dict[int, Any]) -> bool:
    callers = (symbol._keras_history.operation for symbol in node.input_tensors)
    return id(node.operation) in family and all(caller is None or id(caller) in family for caller in callers)
