"""Checkpointed state of callbacks: JSON values and whole tensors, and tensors cut as the parameters are."""

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
from shoal.checkpoint.store import SavedCheckpoint
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlices
from shoal.parallel.model.tensor_slice import TensorSlice

# The key of a checkpoint's document, the group of its whole tensors, and the beginning of groups cut as parameters are.
GROUP, _CUT = "callbacks", "callback-"
AVERAGES = f"{_CUT}EMA"


class KeptCallbacks(Protocol):
    """Callbacks of a run as far as checkpoints know them."""

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """Each one's state, by its name."""

    def parameter_tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Each one's tensors of parameters, by its name and theirs."""

    def restore(self, states: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Takes up states; lines about those that are not."""

    def differ(self, digests: Sequence[Mapping[str, str] | None]) -> list[str]:
        """Notes callbacks whose states are not the same on all ranks."""

    def saved(self, folder: Path | str) -> None:
        """A checkpoint was taken."""


def group_of(key: str) -> str:
    """Group of a checkpoint's tensors that a callback has for parameters."""
    return f"{_CUT}{key}"


@dataclass(frozen=True)
class CallbackState:
    """State of a run's callbacks on one rank; `document` JSON, `tensors` by group."""

    document: dict[str, Any]
    tensors: dict[str, TensorSlices]

    @classmethod
    def of(cls, callbacks: KeptCallbacks, model: ShardedModel) -> CallbackState:
        """State at this moment; tensors are the callbacks' own. Raises: UserCodeError for what is no state."""
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
            tensors[group_of(key)] = {name: (parts[name], tensor) for name, tensor in named.items()}
        return cls(document, tensors)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each callback's whole state, to compare ranks by."""
        found = {}
        for key, state in self.document.items():
            digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
            for path, (_, tensor) in sorted(self.tensors.get(GROUP, {}).items()):
                if path.partition("/")[0] == key:
                    digest.update(raw(tensor))
            found[key] = digest.hexdigest()
        return found


def restore(saved: SavedCheckpoint, callbacks: KeptCallbacks, model: ShardedModel) -> list[str]:
    """Gives callbacks their state, cut for this rank; lines about what has no taker. Raises: ManifestError."""
    known: Mapping[str, Mapping[str, Any]] = saved.document["tensors"]
    targets = _room(known.get(GROUP, {}), {})
    fill(saved, GROUP, targets)
    states = {
        key: decode(document, lambda t: targets[t[TENSOR]][1])
        for key, document in saved.document.get(GROUP, {}).items()
    }
    held = dict(model.parameters())
    tensors: dict[str, dict[str, Tensor]] = {}
    for group in (name for name in known if name.startswith(_CUT)):
        cut = _room(known[group], {name: model.part(name, p) for name, p in held.items()}, only=True)
        fill(saved, group, cut)
        own = {name: tensor.to(held[name].device) for name, (_, tensor) in cut.items()}
        tensors[group.removeprefix(_CUT)] = own
    return callbacks.restore(states, tensors)


def _room(known: Mapping[str, Any], parts: Mapping[str, TensorSlice], *, only: bool = False) -> TensorSlices:
    """Memory for tensors of a checkpoint, whole or cut as `parts`; `only`: no others than these."""
    found: TensorSlices = {}
    for path, entry in known.items():
        if only and path not in parts:
            continue
        part = parts.get(path) or TensorSlice.whole(entry["shape"])
        found[path] = part, torch.empty(part.local_shape, dtype=getattr(torch, entry["dtype"]))
    return found
