"""Schedulers' state as JSON, and back. The loop steps them; a checkpoint keeps where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import JobError, JobMismatchError

_PAIRS, _TUPLE, _TENSOR = "$pairs", "$tuple", "$tensor"


class Schedulers:
    """Those of a Session, in the order of `prepare`."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = list(schedulers)

    def state(self) -> list[dict[str, Any]]:
        """A JSON value. Raises: JobError for a state that is none."""
        found = []
        for scheduler in self._schedulers:
            name = type(scheduler).__name__
            found.append({"kind": name, "state": _encode(scheduler.state_dict(), name)})
        return found

    def restore(self, saved: Sequence[dict[str, Any]]) -> None:
        """From `state`. Raises: JobMismatchError for those of other schedulers."""
        mine, theirs = [type(s).__name__ for s in self._schedulers], [document["kind"] for document in saved]
        if mine != theirs:
            raise JobMismatchError(
                given=f"a session with the schedulers {', '.join(mine) or 'none'}",
                conflict=f"the checkpoint is of one with {', '.join(theirs) or 'none'}",
                remedy="give prepare() the schedulers that the training began with, in that order, or start anew with "
                "another checkpoints=",
            )
        for scheduler, document in zip(self._schedulers, saved, strict=True):
            scheduler.load_state_dict(_decode(document["state"]))


def _encode(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value) and type(value) is dict:
            return {key: _encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [[_encode(k, path), _encode(item, f"{path}[{k!r}]")] for k, item in value.items()]
        return {_PAIRS: pairs, "counter": isinstance(value, Counter)}
    if isinstance(value, list):
        return [_encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item, f"{path}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, Tensor):
        return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise JobError(
        given=f"a scheduler's state {path} of type {type(value).__name__}",
        conflict="a checkpoint holds numbers, texts, tensors, and lists, tuples and dicts of them; never code",
        remedy="use a scheduler whose state_dict() is made of these, or a Session without checkpoints=",
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _PAIRS in value:
        pairs = {_decode(key): _decode(item) for key, item in value[_PAIRS]}
        return Counter(pairs) if value["counter"] else pairs
    if _TUPLE in value:
        return tuple(_decode(item) for item in value[_TUPLE])
    if _TENSOR in value:
        return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    return {key: _decode(item) for key, item in value.items()}
