"""Ranks as threads of one process: a collective that adds in memory, for what needs sums and no messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle, Operation, Waiting, combine

T = TypeVar("T")


class Board:
    """What the ranks of a group hand each other."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.barrier = world_size, threading.Barrier(world_size, timeout=20.0)
        self.posted: list[Any] = [None] * world_size
        self.bytes = 0  # that rank 0 has given to collectives

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.posted[rank] = value
        self.barrier.wait()
        found = list(self.posted)
        self.barrier.wait()
        return found


class InThreads(Collective):
    """Every call is over when it returns; all ranks have to make the same ones."""

    name = "threads"

    def __init__(self, board: Board, rank: int) -> None:
        self.group, self.rank, self.world_size, self._board = None, rank, board.world_size, board

    def _all(self, kind: str, tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous()
        if self.rank == 0:
            self._board.bytes += tensor.numel() * tensor.itemsize
        found = self._board.exchange(self.rank, (kind, tensor.clone()))
        assert {(k, t.dtype, t.numel()) for k, t in found} == {(kind, tensor.dtype, tensor.numel())}
        return [t for _, t in found]

    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        values = self._all(f"all_reduce {op}", tensor)
        total = values[0].clone()  # the others are read by all
        for value in values[1:]:
            combine(op, total, value, total)
        tensor.copy_(total)
        return Waiting()

    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        torch.cat([t.view(-1) for t in self._all("all_gather", tensor)], out=output.view(-1))
        return Waiting()

    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        tensor.copy_(self._all("broadcast", tensor)[root])
        return Waiting()


def on_ranks(world_size: int, work: Callable[[Collective], T]) -> list[T]:
    """What `work` gives on each rank. Raises: what it raises on any."""
    board = Board(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, InThreads(board, rank)) for rank in range(world_size)]
        return [future.result() for future in futures]
