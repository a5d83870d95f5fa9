"""Conversion of the training state to tensors and JSON under logical names, and back."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.distributed.process_setup import is_torchs
from shoal.errors import JobMismatchError, UserCodeError
from shoal.parallel.model.sharded_model import laid_out, local

TENSOR = "$tensor"
_TUPLE, _PAIRS, _HOST = "$tuple", "$pairs", "$host"
_CPU = torch.device("cpu")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once however many names it has, on the CPU and owned by the result."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _owned(tensor) for name, tensor in named}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets parameters and buffers. Raises: JobMismatchError where names, shapes or dtypes are not the model's."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    refuse_differences(
        {name: f"{t.dtype} {list(t.shape)}" for name, t in named.items()},
        {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()},
    )
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(tensors[name])


def refuse_differences(mine: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raises: JobMismatchError where a checkpoint has other names than the model, or of one another dtype and shape."""
    wrong = [f"{n}: not in the checkpoint" for n in mine.keys() - saved.keys()]
    wrong += [f"{n}: not in the model" for n in saved.keys() - mine.keys()]
    both = mine.keys() & saved.keys()
    wrong += [f"{n}: {saved[n]} in the checkpoint, {mine[n]}" for n in both if mine[n] != saved[n]]
    if wrong:
        raise JobMismatchError(
            given="a checkpoint of another model: " + "\n".join(sorted(wrong)[:8]),
            conflict=f"{len(wrong)} names, shapes or dtypes differ from the job's model",
            remedy="resume with the job and settings that the run began with, or start anew with another --out",
        )


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, copy: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors by path, and a JSON document of everything else, by parameter name.

    The tensors are copies on the CPU, or without `copy` this rank's own memory of them.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}

    def leaf(device: torch.device, path: str, tensor: Tensor) -> dict[str, Any]:
        """`device` is the parameter's: what the optimizer keeps on the host beside it is marked."""
        tensors[path] = tensor
        return {TENSOR: path} if tensor.device.type == device.type else {TENSOR: path, _HOST: True}

    state = {
        names[id(p)]: encode(values, names[id(p)], "optimizer", functools.partial(leaf, p.device))
        for p, values in optimizer.state.items()
    }
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        rest = {k: v for k, v in group.items() if k != "params"}
        members = [names[id(p)] for p in group["params"]]
        groups.append(
            {"params": members, "values": encode(rest, f"group{number}", "optimizer", functools.partial(leaf, _CPU))}
        )
    made = {path: _owned(tensor) if copy else local(tensor) for path, tensor in tensors.items()}
    return made, {"state": state, "groups": groups}


def merged_optimizers(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's documents of all ranks as one: of each parameter's state the first, groups by their values.

    Ranks may have other groups than each other, as the stages of a pipeline whose parameters the job groups by name.
    """
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for document in documents:
        state = {**document["state"], **state}
        for own in document["groups"]:
            group = next((g for g in groups if g["values"] == own["values"]), None)
            if group is None:
                groups.append({**own, "params": list(own["params"])})
            else:
                group["params"] += [name for name in own["params"] if name not in group["params"]]
    return {"state": state, "groups": groups}


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], document: dict[str, Any]
) -> list[str]:
    """Sets the optimizer's state; what of its own settings the checkpoint's replace, a sentence each.

    Raises: JobMismatchError where the parameter groups are not the same.
    """
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    homes = {name: number for number, group in enumerate(document["groups"]) for name in group["params"]}
    mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    found = [{homes.get(name) for name in group} for group in mine]
    strangers = (
        homes.keys() - {name for group in mine for name in group} - {n for n, p in parameters.items() if p.is_meta}
    )
    if strangers or any(len(numbers) > 1 or None in numbers for numbers in found):
        raise JobMismatchError(
            given="a checkpoint of another optimizer",
            conflict="its parameter groups hold other parameters than the job's",
            remedy="resume with the job that the run began with",
        )

    def leaf(device: torch.device, saved: dict[str, Any]) -> Tensor:
        return tensors[saved[TENSOR]].to(_CPU if saved.get(_HOST) else device, copy=True)

    replaced: list[str] = []
    for group, numbers in zip(optimizer.param_groups, found, strict=True):
        for number in numbers:  # one, or none for a group that is empty on this rank
            saved = decode(document["groups"][number]["values"], functools.partial(leaf, _CPU))
            replaced += _replaced(group, saved) if is_torchs(optimizer) else ()
            group.update(saved)
    optimizer.state.clear()
    counted_on_device = {
        id(p): bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, values in document["state"].items():
        parameter = parameters[name]
        decoded = decode(values, functools.partial(leaf, parameter.device))
        # torch's own optimizers keep their step counter on the CPU, unless told to capture or fuse the step.
        counter = decoded.get("step")
        if isinstance(counter, Tensor) and not counted_on_device[id(parameter)]:
            decoded["step"] = counter.cpu()
        optimizer.state[parameter] = {key: _as_parameter(value, parameter) for key, value in decoded.items()}
    return list(dict.fromkeys(replaced))


# The job's own rates are set before each step; how torch's optimizers compute is the engine's choice.
_NOT_TRAINED_WITH = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
_MOVED_BY_CYCLES = ("momentum", "betas")  # by torch's schedulers that have a base_momentum


def _replaced(group: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterable[str]:
    """The settings in a group of one of torch's optimizers, none of which changes them, that are not as saved."""
    left = (*_NOT_TRAINED_WITH, *(_MOVED_BY_CYCLES if "base_momentum" in saved else ()))
    for name, value in group.items():
        held = saved.get(name, value)
        if name not in left and isinstance(value, bool | int | float | tuple) and held != value:
            yield (
                f"{name} = {value} of the optimizer has no effect on a run that goes on with the checkpoint's {held}; "
                "a new run begins with it"
            )


def _as_parameter(value: Any, parameter: Tensor) -> Any:
    """A DTensor where the parameter is one and the value has its shape."""
    divided = isinstance(value, Tensor) and value.ndim > 0 and value.shape == local(parameter).shape
    return laid_out(value, parameter) if divided else value


def encode(value: Any, path: str, what: str, leaf: Callable[[str, Tensor], dict[str, Any]]) -> Any:
    """A JSON value of `what` something keeps; `leaf` gives that of a tensor, with the key TENSOR, from its path.

    Raises: UserCodeError for what is no state.
    """
    if isinstance(value, Tensor):
        return leaf(path, value)
    if isinstance(value, Mapping):
        items = {key: encode(item, f"{path}/{key}", what, leaf) for key, item in value.items()}
        if not isinstance(value, Counter) and all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {_PAIRS: [[encode(k, path, what, leaf), v] for k, v in items.items()], "counter": type(value) is Counter}
    if isinstance(value, tuple | list):
        found = [encode(item, f"{path}/{number}", what, leaf) for number, item in enumerate(value)]
        return {_TUPLE: found} if isinstance(value, tuple) else found
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserCodeError(
        given=f"{what} state {path} of type {type(value).__name__}",
        conflict="a checkpoint holds tensors, numbers, texts, and lists, tuples and dicts of them; never code",
        remedy=f"use a {what} whose state_dict() is made of these, or no checkpoints",
    )


def decode(value: Any, leaf: Callable[[dict[str, Any]], Tensor]) -> Any:
    """From `encode`; `leaf` gives a tensor from its JSON value."""
    if isinstance(value, list):
        return [decode(item, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return leaf(value)
    if _TUPLE in value:
        return tuple(decode(value[_TUPLE], leaf))
    if _PAIRS in value:
        pairs = {decode(key, leaf): decode(item, leaf) for key, item in value[_PAIRS]}
        return Counter(pairs) if value["counter"] else pairs
    return {key: decode(item, leaf) for key, item in value.items()}


def _owned(tensor: Tensor) -> Tensor:
    return local(tensor).to("cpu", copy=True).contiguous()


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over a state dict's tensors: names sorted, raw little-endian bytes, nothing else; hexadecimal."""
    return sha256_of(state_dict[name] for name in sorted(state_dict) if isinstance(state_dict[name], Tensor))


def sha256_of(tensors: Iterable[Tensor | None]) -> str:
    """SHA-256 over the bytes of tensors, one after the other; those that are None add nothing."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(raw(tensor))
    return digest.hexdigest()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian: its own memory where it lies on the CPU in one piece."""
    # Through uint8, since numpy has no bfloat16; torch runs on little-endian hosts only.
    flat = tensor.detach().to("cpu").contiguous().flatten()
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return array.data
