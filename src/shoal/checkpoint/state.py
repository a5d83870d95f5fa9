"""Conversion of the training state to tensors and JSON under logical names, and back."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Required, TypedDict

import torch
from torch import Tensor, nn

from shoal.checkpoint.whole_optimizer import (
    ATTRIBUTES,
    attributes,
    containers,
    extras,
    is_hooked,
    is_torchs,
    load_extras,
    parts,
    restore_attributes,
)
from shoal.errors import JobMismatchError, UserCodeError
from shoal.numerics.operators import raw_bytes
from shoal.parallel.model.sharded_model import laid_out, local, replaced

TENSOR = "$tensor"
_TUPLE, _PAIRS, _HOST = "$tuple", "$pairs", "$host"
_CPU = torch.device("cpu")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return CPU copies of parameters and buffers by name; tied tensors have one entry."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _owned(tensor) for name, tensor in named}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers. Raises: JobMismatchError if names, shapes or dtypes differ from the model's."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    refuse_differences(
        {name: f"{t.dtype} {list(t.shape)}" for name, t in named.items()},
        {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()},
    )
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(tensors[name])


def refuse_differences(mine: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Compare the model's names, dtypes and shapes with a checkpoint's. Raises: JobMismatchError if they differ."""
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


class GroupDocument(TypedDict):
    """A parameter group of an optimizer as JSON: the names of its parameters, and its other values."""

    params: list[str]
    values: dict[str, Any]


class OptimizerDocument(TypedDict, total=False):
    """An optimizer's state other than tensors, as JSON, by parameter name.

    `others`: keys and values of state that belongs to no parameter. `attributes`, `extras`: as in `whole_optimizer`.
    `inner`: the parts of inner optimizers by their paths.
    """

    state: Required[dict[str, Any]]
    groups: Required[list[GroupDocument]]
    others: list[list[Any]]
    attributes: dict[str, Any]
    extras: dict[str, Any]
    inner: dict[str, OptimizerDocument]


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, copy: bool = True
) -> tuple[dict[str, Tensor], OptimizerDocument]:
    """Return the optimizer's tensors by path, and a JSON document of all other state by parameter name.

    Inner optimizers are in the document's `inner`; attributes that steps change are included. The tensors are CPU
    copies or, without `copy`, this rank's own memory.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}

    def leaf(device: torch.device, path: str, tensor: Tensor) -> dict[str, Any]:
        """Store a tensor; `device` is the parameter's. Tensors that the optimizer keeps on the host are marked."""
        tensors[path] = tensor
        return {TENSOR: path} if tensor.device.type == device.type else {TENSOR: path, _HOST: True}

    on_host, seen = functools.partial(leaf, _CPU), set[int]()
    every = {**names, **{id(b): name for name, b in model.named_buffers()}}
    device = next((p.device for p in model.parameters()), _CPU)
    documents: dict[str, OptimizerDocument] = {}
    aside = containers(optimizer)
    for where, part in parts(optimizer).items():
        within = f"/{where}" if where else ""
        document: OptimizerDocument = {"state": {}, "groups": []}
        entries = [(p, values) for p, values in part.state.items() if id(values) not in seen]  # an earlier part's: no
        seen.update(id(values) for _, values in entries if isinstance(values, dict))
        for p, values in entries:
            if id(p) in names:
                path = f"{names[id(p)]}{within}"
                own = functools.partial(leaf, p.device)
                document["state"][names[id(p)]] = encode(values, path, "optimizer", own)
            else:
                pairs = document.setdefault("others", [])
                path = f"{ATTRIBUTES}{within}/state/{len(pairs)}"
                pairs.append([encode(p, path, "optimizer", on_host), encode(values, path, "optimizer", on_host)])
        for group in _groups(part, seen):
            rest = {k: v for k, v in group.items() if k != "params"}
            path = f"group{len(document['groups'])}{within}"
            lost = next((number for number, p in enumerate(group["params"]) if id(p) not in names), None)
            if lost is not None:
                raise replaced(f"{lost} of the optimizer's group {len(document['groups'])}")
            members = [names[id(p)] for p in group["params"]]
            document["groups"].append({"params": members, "values": encode(rest, path, "optimizer", on_host)})
        if not is_torchs(part) or is_hooked(part):
            on_device = functools.partial(leaf, device)
            if changed := attributes(part, where, every, on_device, aside):
                document["attributes"] = changed
            if more := extras(part, where, every, on_device, list(tensors.values())):
                document["extras"] = more
        documents[where] = document
    first = documents.pop("")
    inner = {where: document for where, document in documents.items() if any(document.values())}
    if inner:
        first["inner"] = inner
    return {path: _owned(tensor) if copy else local(tensor) for path, tensor in tensors.items()}, first


def _groups(part: Any, seen: set[int]) -> list[dict[str, Any]]:
    """Return a part's groups that no earlier part shares."""
    groups = [group for group in part.param_groups if id(group) not in seen]
    seen.update(map(id, groups))
    return groups


def documents_of(document: OptimizerDocument) -> dict[str, OptimizerDocument]:
    """Split a document of `optimizer_state`: the optimizer's own part under "", and the inner optimizers' parts."""
    own = document.copy()
    inner = own.pop("inner", {})
    return {"": own, **inner}


def of_parameters(document: OptimizerDocument, wanted: Callable[[str], bool]) -> OptimizerDocument:
    """Return the document with only the states of wanted parameters."""
    documents = {where: part.copy() for where, part in documents_of(document).items()}
    for part in documents.values():
        part["state"] = {name: values for name, values in part["state"].items() if wanted(name)}
    first = documents.pop("")
    if documents:
        first["inner"] = documents
    return first


def merged_optimizers(documents: Iterable[OptimizerDocument]) -> OptimizerDocument:
    """Merge the optimizer documents of all ranks: the first state of each parameter, and groups with equal values.

    Ranks may have different groups, for example stages of a pipeline if the job groups parameters by name.
    """
    merged: dict[str, OptimizerDocument] = {}
    for document in documents:
        for where, mine in documents_of(document).items():
            before = merged.setdefault(where, {"state": {}, "groups": []})
            groups = before["groups"]
            for own in mine["groups"]:
                group = next((g for g in groups if g["values"] == own["values"]), None)
                if group is None:
                    groups.append({"params": list(own["params"]), "values": own["values"]})
                else:
                    group["params"] += [name for name in own["params"] if name not in group["params"]]
            states = {**mine["state"], **before["state"]}
            merged[where] = {**mine, **before, "state": states, "groups": groups}
    first = merged.pop("", {"state": {}, "groups": []})
    if merged:
        first["inner"] = merged
    return first


# The engine sets the learning rates before each step and chooses the implementation of torch's optimizers.
_NOT_TRAINED_WITH = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
_MOVED_BY_CYCLES = ("momentum", "betas")  # changed by torch's schedulers with a base_momentum


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    document: OptimizerDocument,
    *,
    adds_groups: bool = False,
) -> list[str]:
    """Set the optimizer's state. Return a sentence for each of its settings that the checkpoint replaces.

    `adds_groups`: add groups that the optimizer lacks, since a user's own loop had added them.
    Raises: JobMismatchError if the inner optimizers or the parameter groups differ.
    """
    parameters = dict(model.named_parameters())
    every = {**parameters, **dict(model.named_buffers())}
    usual = next((p.device for p in parameters.values()), _CPU)

    def leaf(device: torch.device, saved: dict[str, Any]) -> Tensor:
        return tensors[saved[TENSOR]].to(_CPU if saved.get(_HOST) else device, copy=True)

    def read(saved: dict[str, Any], device: torch.device | None) -> Tensor:
        return leaf(usual, saved) if device is None else leaf(usual, saved).to(device)

    on_host = functools.partial(leaf, _CPU)
    documents, nothing = documents_of(document), OptimizerDocument(state={}, groups=[])
    for where, part in parts(optimizer).items():
        load_extras(part, documents.get(where, nothing).get("extras", {}), every, read)
    by_path = parts(optimizer)
    if documents.keys() - by_path.keys():
        raise JobMismatchError(
            given="a checkpoint of another optimizer",
            conflict=f"the job's holds none in {', '.join(sorted(documents.keys() - by_path.keys()))}",
            remedy="resume with the job that the run began with",
        )
    seen: set[int] = set()
    groups = {where: _groups(part, seen) for where, part in by_path.items()}
    settings: list[str] = []
    for where, part in by_path.items():
        saved = documents.get(where, nothing)["groups"]
        settings += _load_groups(part, groups[where], saved, parameters, on_host, adds_groups=adds_groups)
    aside = containers(optimizer)
    for part in by_path.values():
        part.state.clear()
    for where, part in by_path.items():
        saved_part = documents.get(where, nothing)
        on_device = {
            id(p): bool(group.get("capturable") or group.get("fused"))
            for group in part.param_groups
            for p in group["params"]
        }
        for name, values in saved_part["state"].items():
            parameter = parameters[name]
            decoded = decode(values, functools.partial(leaf, parameter.device))
            # torch's own optimizers keep their step counter on the CPU, unless the step is captured or fused.
            counter = decoded.get("step")
            if isinstance(counter, Tensor) and not on_device.get(id(parameter)):
                decoded["step"] = counter.cpu()
            for key, value in decoded.items():  # a value of a DTensor's local shape becomes a DTensor
                if isinstance(value, Tensor) and value.ndim > 0 and value.shape == local(parameter).shape:
                    decoded[key] = laid_out(value, parameter)
            part.state[parameter] = decoded
        for key, values in saved_part.get("others", ()):
            part.state[decode(key, on_host)] = decode(values, on_host)
        restore_attributes(part, saved_part.get("attributes", {}), every, read, aside)
    return list(dict.fromkeys(settings))


def _load_groups(
    part: Any,
    own: list[dict[str, Any]],
    saved_groups: list[GroupDocument],
    parameters: Mapping[str, nn.Parameter],
    leaf: Callable[[dict[str, Any]], Tensor],
    *,
    adds_groups: bool,
) -> list[str]:
    """Set the values of one optimizer's groups and return the replaced settings, as `load_optimizer`."""
    names = {id(p): name for name, p in parameters.items()}
    if adds_groups and isinstance(part, torch.optim.Optimizer):  # groups of parameters that are in no group yet
        known = {names[id(p)] for group in part.param_groups for p in group["params"]}
        for saved in saved_groups[len(own) :]:
            new = [name for name in saved["params"] if name in parameters and parameters[name].requires_grad]
            if new and new == saved["params"] and not known.intersection(new):
                part.add_param_group({"params": [parameters[name] for name in new]} | decode(saved["values"], leaf))
                own.append(part.param_groups[-1])
    mine = [[names[id(p)] for p in group["params"]] for group in own]
    homes = {name: number for number, group in enumerate(saved_groups) for name in group["params"]}
    sources = [{homes.get(name) for name in group} for group in mine]
    known = {name for group in mine for name in group}
    strangers = homes.keys() - known - {n for n, p in parameters.items() if p.is_meta}
    if strangers or any(len(numbers) > 1 or None in numbers for numbers in sources):
        remedy = "resume with the job that the run began with"
        if adds_groups:
            remedy += "; groups of several optimizers that the loop had added are to be added before session.steps()"
        raise JobMismatchError(
            given="a checkpoint of another optimizer",
            conflict="its parameter groups hold other parameters than the job's",
            remedy=remedy,
        )
    settings: list[str] = []
    for group, numbers in zip(own, sources, strict=True):
        for number in numbers:  # one number, or none if the group is empty on this rank
            values = decode(saved_groups[number or 0]["values"], leaf)
            left = (*_NOT_TRAINED_WITH, *(_MOVED_BY_CYCLES if "base_momentum" in values else ()))
            for name, value in group.items() if is_torchs(part) else ():
                before = values.get(name, value)
                if name not in left and isinstance(value, bool | int | float | tuple) and before != value:
                    settings.append(
                        f"{name} = {value} of the optimizer has no effect on a run that goes on with the "
                        f"checkpoint's {before}; a new run begins with it"
                    )
            group.update(values)
    return settings


def encode(value: Any, path: str, what: str, leaf: Callable[[str, Tensor], dict[str, Any]]) -> Any:
    """Return the JSON value of state that a `what` (such as "callback") keeps.

    `leaf` returns the JSON value of a tensor, with the key TENSOR, from the tensor's path.
    Raises: UserCodeError for values that cannot be stored.
    """
    if isinstance(value, Tensor):
        return leaf(path, value)
    if isinstance(value, Mapping):
        items = {key: encode(item, f"{path}/{key}", what, leaf) for key, item in value.items()}
        if not isinstance(value, Counter) and all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {_PAIRS: [[encode(k, path, what, leaf), v] for k, v in items.items()], "counter": type(value) is Counter}
    if isinstance(value, tuple | list):
        items_of = [encode(item, f"{path}/{number}", what, leaf) for number, item in enumerate(value)]
        return {_TUPLE: items_of} if isinstance(value, tuple) else items_of
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserCodeError(
        given=f"{what} state {path} of type {type(value).__name__}",
        conflict="a checkpoint holds tensors, numbers, texts, and lists, tuples and dicts of them; never code",
        remedy=f"use a {what} whose state_dict() is made of these, or no checkpoints",
    )


def decode(value: Any, leaf: Callable[[dict[str, Any]], Tensor]) -> Any:
    """Return the value that `encode` converted; `leaf` returns a tensor from its JSON value."""
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
    """Return the hexadecimal SHA-256 of a state dict's raw little-endian tensor bytes, in sorted order of names."""
    return sha256_of(state_dict[name] for name in sorted(state_dict) if isinstance(state_dict[name], Tensor))


def sha256_of(tensors: Iterable[Tensor | None]) -> str:
    """Return the hexadecimal SHA-256 of the concatenated bytes of tensors; None is skipped."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(raw(tensor))
    return digest.hexdigest()


def raw(tensor: Tensor) -> memoryview:
    """Return the little-endian bytes of a tensor, without a copy if the tensor is contiguous on the CPU."""
    # Torch runs on little-endian hosts only.
    return raw_bytes(tensor.to("cpu")).numpy().data
