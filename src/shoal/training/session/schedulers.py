"""State of learning-rate schedulers as JSON, for checkpoints; the user's loop steps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint.state import TENSOR, decode, encode
from shoal.errors import JobMismatchError


class Schedulers:
    """Schedulers of a Session, in the order of `prepare`."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = list(schedulers)

    def state(self) -> list[dict[str, Any]]:
        """Return the schedulers' state as a JSON value. Raises: UserCodeError for a state that has none."""

        def leaf(path: str, tensor: Tensor) -> dict[str, Any]:
            return {TENSOR: tensor.tolist(), "dtype": str(tensor.dtype).removeprefix("torch.")}

        named = [(type(scheduler).__name__, scheduler) for scheduler in self._schedulers]
        return [{"kind": kind, "state": encode(s.state_dict(), kind, "scheduler", leaf)} for kind, s in named]

    def restore(self, saved: Sequence[dict[str, Any]]) -> None:
        """Restore the value of `state`. Raises: JobMismatchError for the state of other schedulers."""
        mine, theirs = [type(s).__name__ for s in self._schedulers], [document["kind"] for document in saved]
        if mine != theirs:
            raise JobMismatchError(
                given=f"a session with the schedulers {', '.join(mine) or 'none'}",
                conflict=f"the checkpoint is of one with {', '.join(theirs) or 'none'}",
                remedy="give prepare() the schedulers that the training began with, in that order, or start anew with "
                "another checkpoints=",
            )
        for scheduler, document in zip(self._schedulers, saved, strict=True):
            scheduler.load_state_dict(
                decode(document["state"], lambda t: torch.tensor(t[TENSOR], dtype=getattr(torch, t["dtype"])))
            )
