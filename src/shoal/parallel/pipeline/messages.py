"""Messages between pipeline stages: sends return at once, receives wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, new_group
from shoal.parallel.pipeline.stage_trace import Blank


class StageMessages:
    """Messages of the rank at index `place` in `ranks`. With P ranks, stage s is on ranks[s % P]."""

    def __init__(self, ranks: Sequence[int], place: int, groups: dict[str, dist.ProcessGroup | None]) -> None:
        self._ranks, self.place, self._groups = list(ranks), place, groups
        self.num_ranks = len(self._ranks)
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._here: dict[tuple[str, int, int], list[Tensor]] = {}

    @classmethod
    def open(cls, every: Sequence[Sequence[int]], rank: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> StageMessages:
        """Return the messages of this rank's stages. `every`: the ranks of each pipeline of the run.

        Each direction has its own group: over NCCL, messages between two ranks of one group wait for each other, even
        in opposite directions. Collective: all ranks, four new groups per pipeline.
        """
        mine = next((ranks for ranks in every if rank in ranks), (rank,))
        several = [ranks for ranks in every if len(ranks) > 1]
        ways = ("forward", "forward around", "backward", "backward around")
        return cls(mine, list(mine).index(rank), {way: new_group(several, timeout) for way in ways})

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the messages."""
        return [group for group in self._groups.values() if group is not None]

    def send(self, way: str, stage: int, microbatch: int, values: Sequence[Tensor]) -> None:
        """Send `values` to a stage in the direction `way` ("forward" or "backward")."""
        to = stage % self.num_ranks
        if to == self.place:
            self._here[way, stage, microbatch] = [value.detach() for value in values]
            return
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()
        group = self._group(way, self.place, to)
        for value in values:
            whole = value.detach().contiguous()
            work = dist.isend(whole, self._ranks[to], group=group)
            self._pending.append((work, whole))  # keeps the tensor alive until it is sent

    def receive(self, way: str, stage: int, microbatch: int, blanks: Sequence[Blank]) -> list[Tensor]:
        """Wait for the values that the neighbour in direction `way` sent to `stage`.

        `blanks`: their shapes and dtypes.
        """
        source = (stage - 1 if way == "forward" else stage + 1) % self.num_ranks
        if source == self.place:
            return self._here.pop((way, stage, microbatch))
        group = self._group(way, source, self.place)
        values = [blank.empty() for blank in blanks]
        for value in values:
            dist.recv(value, self._ranks[source], group=group)
        return values

    def _group(self, way: str, source: int, to: int) -> dist.ProcessGroup | None:
        straight = to == source + 1 if way == "forward" else to == source - 1
        return self._groups[way if straight else f"{way} around"]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the pipeline's ranks. Collective: the ranks of the pipeline, one all-reduce."""
        if self.num_ranks > 1:
            dist.all_reduce(values, group=self._groups["forward"])
        return values

    def finish(self) -> None:
        """Wait until all messages are sent."""
        while self._pending:
            self._pending.popleft()[0].wait()
        self._here.clear()
