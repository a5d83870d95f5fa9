"""Interface of collectives: every algorithm that moves or sums tensors among the ranks of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveError

Operation = Literal["sum", "max", "min"]
OPERATIONS: tuple[Operation, ...] = ("sum", "max", "min")
NARROW = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
# The dtypes that every algorithm takes; their places in this list are what ranks tell each other.
DTYPES = (torch.float32, torch.float64, *NARROW, *_INTEGERS)
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


class Handle(Protocol):
    """Handle of an asynchronous collective, which owns its tensors until `wait` has returned."""

    def wait(self) -> object:
        """Returns when the result is there. Raises: what the collective raises."""


@dataclass(frozen=True)
class Waiting:
    """Handle of work on a collective's own thread, or of none that is left."""

    future: Future[None] | None = None

    def wait(self) -> None:
        """Waits for the thread."""
        if self.future is not None:
            self.future.result()


@dataclass(frozen=True)
class Team:
    """Ranks of a collective: a process group, None for all ranks, and how it and others like it divide all ranks.

    `partition` lists the global ranks of every such group, the same on every rank; empty where there is only the one.
    """

    group: dist.ProcessGroup | None = None
    partition: Sequence[Sequence[int]] = ()

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The partition, also where it has one part."""
        return self.partition or [range(dist.get_world_size())]


class Collective(ABC):
    """An algorithm on a group of ranks. Every method is collective over that group and called in one order by all.

    Tensors are contiguous, of a dtype in DTYPES, on the CPU; results are equal on all ranks, bit for bit. 16-bit sums
    are added up in float32 where the algorithm says so. One thread at a time calls it.
    """

    name: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` None for all ranks."""
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, flat, in memory where this algorithm is fastest. Collective where `allocates_together`."""
        return torch.zeros(numel, dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        """Releases memory of `allocate`; no view of it is used any more."""
        return

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Where `all_reduce` leaves the sum of a tensor from `allocate`: in the tensor itself."""
        return tensor

    def buffers(self) -> list[Tensor]:
        """The memory that this algorithm keeps besides what it allocated for others."""
        return []

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        """Every rank's `tensor` becomes the sum (or maximum, minimum) of all of them, in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        """`output` becomes every rank's `tensor`, in the order of the ranks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        """Every rank's `tensor` becomes that of the rank `root` of the group."""

    def close(self) -> None:
        """Ends threads and gives memory back. Not collective."""
        return


def check(kind: str, tensors: Iterable[Tensor], op: str = "sum") -> None:
    """Raises: CollectiveError for a tensor or operation that no algorithm takes."""
    for tensor in tensors:
        wrong = [
            *(() if tensor.dtype in DTYPES else (f"dtype {tensor.dtype}",)),
            *(() if tensor.is_contiguous() else (f"strides {tuple(tensor.stride())}",)),
            *(() if tensor.device.type == "cpu" else (f"device {tensor.device}",)),
        ]
        if wrong:
            raise CollectiveError(
                given=f"{kind} of a tensor of shape {list(tensor.shape)}: {', '.join(wrong)}",
                conflict="it takes contiguous tensors of numbers on the CPU",
                remedy="call .contiguous() and .cpu(), or convert it",
            )
    if op not in OPERATIONS:
        raise CollectiveError(
            given=f"{kind} with op={op!r}", conflict="there is no such reduction", remedy=f"write one of {OPERATIONS}"
        )


def check_parts(kind: str, whole: Tensor, part: Tensor, world_size: int) -> None:
    """Raises: CollectiveError where `whole` is not `world_size` times `part`."""
    if whole.numel() != world_size * part.numel() or whole.dtype != part.dtype:
        raise CollectiveError(
            given=f"{kind} of {whole.numel()} elements of {whole.dtype} and {part.numel()} of {part.dtype}",
            conflict=f"{world_size} ranks have {world_size} equal parts",
            remedy=f"give {world_size * part.numel()} elements of {part.dtype}, padded where they do not divide",
        )


def call_numbers(kind: str, tensor: Tensor, op: Operation, times: int = 1) -> tuple[int, int, int, int]:
    """By which ranks tell each other what they call: a collective of `times` tensors like that one."""
    return KINDS.index(kind), OPERATIONS.index(op), DTYPES.index(tensor.dtype), times * tensor.numel()


def call_in_words(numbers: Sequence[int]) -> str:
    """The call of these `call_numbers`."""
    kind, op, dtype, numel = numbers[:4]
    if not 0 <= kind < len(KINDS) or not 0 <= dtype < len(DTYPES):
        return "nothing known"
    name = f"{KINDS[kind]} ({OPERATIONS[op]})" if "reduce" in KINDS[kind] else KINDS[kind]
    return name if name == "barrier" else f"{name} of {numel} elements of {str(DTYPES[dtype]).removeprefix('torch.')}"


def combine(op: Operation, first: Tensor, second: Tensor, out: Tensor) -> None:
    """out = first op second, elementwise; `out` may be one of them."""
    by_name: dict[Operation, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    by_name[op](first, second, out=out)


def reduce_in_order(op: Operation, values: list[Tensor], out: Tensor, wide: Tensor | None = None) -> None:
    """out = values[0] op values[1] op ... from the left; `out` may be any one of the values.

    `wide`: float32 memory of at least their length, for sums of more than two narrow values, rounded once.
    """
    if len(values) == 1:
        out.copy_(values[0])
        return
    if wide is not None and op == "sum" and len(values) > 2 and out.dtype in NARROW:
        total = wide[: out.numel()]
        total.copy_(values[0])
        for value in values[1:]:
            total.add_(value)
        out.copy_(total)
        return
    place = next((i for i, v in enumerate(values) if v.data_ptr() == out.data_ptr()), 0)
    if place > 1:  # `out` is read later than it would first be written
        total = values[0].clone()
        for value in values[1:]:
            combine(op, total, value, total)
        out.copy_(total)
        return
    combine(op, values[0], values[1], out)
    for value in values[2:]:
        combine(op, out, value, out)


class Threaded(Collective):
    """Collective whose asynchronous calls run on a thread of its own, in the order of the calls.

    An algorithm has `_reduce` and `_pass_on`; an all-gather is a broadcast from each rank where it has none of its own.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        check("all_reduce", [tensor], op)

        def work() -> None:
            self._compare("all_reduce", tensor, op)
            self._reduce(tensor.view(-1), op)

        return self._start(work, asynchronous)

    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        check("all_gather", [output, tensor])
        check_parts("all_gather", output, tensor, self.world_size)

        def work() -> None:
            self._compare("all_gather", tensor, "sum")
            parts = list(output.view(self.world_size, -1))
            parts[self.rank].copy_(tensor.view(-1))
            self._gather(parts)

        return self._start(work, asynchronous)

    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        check("broadcast", [tensor])

        def work() -> None:
            self._compare("broadcast", tensor, "sum", root)
            self._pass_on(tensor.view(-1), root)

        return self._start(work, asynchronous)

    def _compare(self, kind: str, tensor: Tensor, op: Operation, root: int = 0) -> None:
        """Raises: CollectiveError where ranks do not make the same call, as far as the algorithm looks."""

    @abstractmethod
    def _reduce(self, flat: Tensor, op: Operation) -> None:
        """The all-reduce of a flat tensor, in place."""

    @abstractmethod
    def _pass_on(self, flat: Tensor, root: int) -> None:
        """The broadcast of a flat tensor."""

    def _gather(self, parts: Sequence[Tensor]) -> None:
        for root, part in enumerate(parts):
            self._pass_on(part, root)

    def _start(self, work: Callable[[], None], asynchronous: bool) -> Handle:
        """Does `work` now, after everything that was started before, or on the thread."""
        if asynchronous:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"shoal-{self.name}")
            self._last = self._thread.submit(work)
            return Waiting(self._last)
        if self._last is not None:
            self._last.exception()
            self._last = None
        work()
        return Waiting()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
