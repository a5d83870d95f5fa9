"""Counts of the calls of gathered units, so that unequal counts raise an error at once.

A rank that calls a unit once more than another rank waits in its gather, while the other waits in another collective.
Ranks therefore post their counts in the store of the process group, outside of collectives. A post does not wait. Ranks
read each other's posts only if a count differs from the last microbatch's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shoal.distributed.mesh import Mesh
from shoal.errors import JobError
from shoal.parallel.shard.torch_release import param_groups

_POLL_SECONDS = 0.0005
# Sums over 1024 ranks of smaller numbers and of their squares, and products of the sums, are exact in float64.
_NUM_ORDERS = 1 << 13


class UnitCalls:
    """Calls that gather a unit, within a microbatch's forward or an evaluation, on this rank and its peers.

    `order`: a hash below 2^13 of the sequence of units called in a step.
    """

    def __init__(self, model: nn.Module, units: Sequence[FSDPModule], mesh: Mesh) -> None:
        """Register the hooks. All ranks of a mesh create equal numbers of these objects, in the same order."""
        assert mesh.store is not None, "several ranks have one"
        self._model, self._rank = model, mesh.rank
        self._peers = next(list(ranks) for ranks in mesh.layout.groups("data", "shard") if mesh.rank in ranks)
        self._serial = self._count = self._usual = self.order = 0
        self._trains = self._met = False
        opened = mesh.store.add(f"unit calls/{mesh.rank}", 1)
        self._store = PrefixStore(f"unit calls {opened}", mesh.store)
        self._post("at")
        # runs before fully_shard's own hook, which gathers
        self._handles = [
            unit.register_forward_pre_hook(partial(self._called, number), prepend=True)  # type: ignore[attr-defined]
            for number, unit in enumerate(units, 1)
        ]

    def _called(self, number: int, unit: Any, args: Any) -> None:
        state = unit._get_fsdp_state()
        is_recomputed = state._training_state == TrainingState.PRE_BACKWARD
        if is_recomputed or all(group.is_unsharded for group in param_groups(unit)):
            return
        self._count += 1
        self._trains = self._model.training
        self.order = (self.order * 31 + number) % _NUM_ORDERS
        self._post("at")
        if self._trains and self._count > self._usual:
            self._meet("at")

    def end(self) -> None:
        """End a microbatch's forward, or an evaluation. Raises: JobError if a peer's calls differ."""
        if not self._count:
            return
        self._post("end")
        if not self._trains or self._count != self._usual:
            self._meet("end")
        if self._trains:
            self._usual = self._count
        self._serial, self._count = self._serial + 1, 0

    def _post(self, where: str) -> None:
        self._store.set(str(self._rank), f"{self._serial} {self._count} {where}")

    def _meet(self, where: str) -> None:
        """Wait until each peer has made the same number of calls. Raises: JobError if a peer no longer can."""
        waited = [str(rank) for rank in self._peers if rank != self._rank]
        while not self._met and not self._store.check(waited):
            time.sleep(_POLL_SECONDS)
        self._met = True
        while waited:
            behind = []
            for rank, post in zip(waited, self._store.multi_get(waited), strict=True):
                serial, count, there = post.decode().split()
                if int(serial) < self._serial or (int(serial) == self._serial and int(count) < self._count):
                    if int(serial) == self._serial and there == "end":
                        raise unequal(
                            f"parts of the model {self._count} times or more, and on rank {rank} {count} times"
                        )
                    behind.append(rank)
                elif int(serial) == self._serial and where == "end":
                    if int(count) > self._count:
                        raise unequal(f"parts of the model {self._count} times, and on rank {rank} more often")
                    behind += [rank] if there == "at" else []
                elif int(serial) > self._serial and where == "at":
                    raise unequal(f"parts of the model {self._count} times or more, and on rank {rank} less often")
            waited = behind
            if waited:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def unequal(what: str) -> JobError:
    """Return the error of ranks that call units unequally."""
    return JobError(
        given=f"a model or loss that calls {what} in one microbatch",
        conflict="where gradients or parameters are cut over the shard axis, the ranks gather a part of the model "
        "together each time that it is called",
        remedy="call as much on every rank, whatever its samples (generate a fixed number of tokens, compute every "
        'block and mask its result), or use shard.level = "optimizer"',
    )
