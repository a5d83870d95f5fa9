"""Checkpointed state of callbacks: JSON values, whole tensors, and tensors that are sharded like the parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.pieces import fill
from shoal.checkpoint.state import TENSOR, decode, encode, raw
from shoal.checkpoint.store import SavedCheckpoint, TensorEntry
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlice, TensorSlices

# GROUP: key in the checkpoint's document and group of whole tensors. _CUT: prefix of groups sharded like parameters.
GROUP, _CUT = "callbacks", "callback-"
AVERAGES = f"{_CUT}EMA"


class CheckpointedCallbacks(Protocol):
    """Interface of a run's callbacks to checkpoints."""

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the state of each callback by the callback's name."""

    def parameter_tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return each callback's tensors of parameters: callback name -> parameter name -> tensor."""

    def restore(self, states: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Restore callback states. Return a message for each state that no callback takes."""

    def differ(self, digests: Sequence[Mapping[str, str] | None]) -> list[str]:
        """Record the callbacks whose states differ between ranks."""

    def saved(self, folder: Path | str) -> None:
        """Notify the callbacks that a checkpoint was saved to `folder`."""


@dataclass(frozen=True)
class CallbackState:
    """State of a run's callbacks on one rank: a JSON `document`, and `tensors` by group."""

    document: dict[str, Any]
    tensors: dict[str, TensorSlices]

    @classmethod
    def of(cls, callbacks: CheckpointedCallbacks, model: ShardedModel) -> CallbackState:
        """Collect the current state; tensors are not copied. Raises: UserCodeError for unsupported state."""
        whole: dict[str, Tensor] = {}

        def leaf(path: str, tensor: Tensor) -> dict[str, Any]:
            whole[path] = tensor.detach()
            return {TENSOR: path}

        document = {key: encode(state, key, "callback", leaf) for key, state in callbacks.states().items()}
        tensors: dict[str, TensorSlices] = {}
        if whole:
            tensors[GROUP] = {path: (TensorSlice.whole(t.shape), t) for path, t in whole.items()}
        parts = {name: model.part(name, p) for name, p in model.parameters()}
        for key, named in callbacks.parameter_tensors().items():
            tensors[f"{_CUT}{key}"] = {name: (parts[name], tensor) for name, tensor in named.items()}
        return cls(document, tensors)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each callback's JSON state and whole tensors, to compare ranks."""
        digests = {}
        for key, state in self.document.items():
            digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
            for path, (_, tensor) in sorted(self.tensors.get(GROUP, {}).items()):
                if path.partition("/")[0] == key:
                    digest.update(raw(tensor))
            digests[key] = digest.hexdigest()
        return digests


def restore(saved: SavedCheckpoint, callbacks: CheckpointedCallbacks, model: ShardedModel) -> list[str]:
    """Restore callbacks from a checkpoint, with tensors cut for this rank. Return messages on unused state.

    Raises: ManifestError.
    """
    known: Mapping[str, Mapping[str, TensorEntry]] = saved.document["tensors"]
    targets = _room(known.get(GROUP, {}), {})
    fill(saved, GROUP, targets)
    states = {
        key: decode(document, lambda t: targets[t[TENSOR]][1])
        for key, document in saved.document.get(GROUP, {}).items()
    }
    parameters = dict(model.parameters())
    tensors: dict[str, dict[str, Tensor]] = {}
    for group in (name for name in known if name.startswith(_CUT)):
        cut = _room(known[group], {name: model.part(name, p) for name, p in parameters.items()}, only=True)
        fill(saved, group, cut)
        own = {name: tensor.to(parameters[name].device) for name, (_, tensor) in cut.items()}
        tensors[group.removeprefix(_CUT)] = own
    return callbacks.restore(states, tensors)


def _room(known: Mapping[str, TensorEntry], parts: Mapping[str, TensorSlice], *, only: bool = False) -> TensorSlices:
    """Allocate memory for tensors of a checkpoint, whole or cut as in `parts`. `only`: skip tensors without a part."""
    room: TensorSlices = {}
    for path, entry in known.items():
        if only and path not in parts:
            continue
        part = parts.get(path) or TensorSlice.whole(entry["shape"])
        room[path] = part, torch.empty(part.local_shape, dtype=getattr(torch, entry["dtype"]))
    return room
