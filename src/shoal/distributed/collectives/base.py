"""Interface of collectives: the algorithms that move or sum tensors among the ranks of a group."""

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
# The dtypes that every algorithm accepts. Ranks exchange indices into this list.
DTYPES = (torch.float32, torch.float64, *NARROW, *_INTEGERS)
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


class Handle(Protocol):
    """Handle of an asynchronous collective, which owns its tensors until `wait` has returned."""

    def wait(self) -> object:
        """Wait for the result. Raises: the errors of the collective."""


@dataclass(frozen=True)
class Waiting:
    """Handle of work on a collective's own thread, or of completed work."""

    future: Future[None] | None = None

    def wait(self) -> None:
        """Wait for the thread."""
        if self.future is not None:
            self.future.result()


@dataclass(frozen=True)
class Team:
    """Ranks of a collective: a process group (None means all ranks), and the division of all ranks into such groups.

    `partition` lists the global ranks of every such group, the same on every rank; empty if there is only one group.
    """

    group: dist.ProcessGroup | None = None
    partition: Sequence[Sequence[int]] = ()

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The partition, with one part if there is only one group."""
        return self.partition or [range(dist.get_world_size())]


class Collective(ABC):
    """Algorithm on a group of ranks. Every method is collective over the group, and all ranks call in the same order.

    Tensors are contiguous, of a dtype in DTYPES, on the CPU; results are equal on all ranks, bit for bit. Some
    algorithms accumulate 16-bit sums in float32. Only one thread at a time may call it.
    """

    name: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Join the group; None means all ranks."""
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return flat zeros in memory where this algorithm is fastest. Collective in some algorithms."""
        return torch.zeros(numel, dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        """Release memory of `allocate`. No view of it may be used afterwards."""
        return

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor where `all_reduce` leaves the sum of a tensor from `allocate`: here the tensor itself."""
        return tensor

    def buffers(self) -> list[Tensor]:
        """Return the memory that this algorithm owns, except memory allocated for callers."""
        return []

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Operation = "sum", *, asynchronous: bool = False) -> Handle:
        """Replace every rank's `tensor` by the sum (or maximum, minimum) of all ranks' tensors."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor, *, asynchronous: bool = False) -> Handle:
        """Fill `output` with every rank's `tensor`, in rank order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0, *, asynchronous: bool = False) -> Handle:
        """Replace every rank's `tensor` by that of the group's rank `root`."""

    def close(self) -> None:
        """End threads and release memory. Not collective."""
        return


def check(kind: str, tensors: Iterable[Tensor], op: str = "sum") -> None:
    """Raise CollectiveError for a tensor or operation that no algorithm accepts."""
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
    """Raise CollectiveError if `whole` does not have `world_size` times the elements of `part`."""
    if whole.numel() != world_size * part.numel() or whole.dtype != part.dtype:
        raise CollectiveError(
            given=f"{kind} of {whole.numel()} elements of {whole.dtype} and {part.numel()} of {part.dtype}",
            conflict=f"{world_size} ranks have {world_size} equal parts",
            remedy=f"give a whole tensor of {world_size * part.numel()} elements of {part.dtype}, padded to a multiple "
            f"of {world_size} if needed",
        )


def call_numbers(kind: str, tensor: Tensor, op: Operation, times: int = 1) -> tuple[int, int, int, int]:
    """Return numbers that describe a collective of `times` tensors like `tensor`, for comparison among ranks."""
    return KINDS.index(kind), OPERATIONS.index(op), DTYPES.index(tensor.dtype), times * tensor.numel()


def call_in_words(numbers: Sequence[int]) -> str:
    """Return a description of the call with these `call_numbers`."""
    kind, op, dtype, numel = numbers[:4]
    if not 0 <= kind < len(KINDS) or not 0 <= dtype < len(DTYPES):
        return "nothing known"
    name = f"{KINDS[kind]} ({OPERATIONS[op]})" if "reduce" in KINDS[kind] else KINDS[kind]
    return name if name == "barrier" else f"{name} of {numel} elements of {str(DTYPES[dtype]).removeprefix('torch.')}"


def combine(op: Operation, first: Tensor, second: Tensor, out: Tensor) -> None:
    """Compute out = first op second, elementwise; `out` may be one of the operands."""
    by_name: dict[Operation, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    by_name[op](first, second, out=out)


def reduce_in_order(op: Operation, values: list[Tensor], out: Tensor, wide: Tensor | None = None) -> None:
    """Compute out = values[0] op values[1] op ... from the left; `out` may be any one of the values.

    `wide`: float32 memory of at least their length, for sums of more than two 16-bit values, rounded once.
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
    if place > 1:  # `out` must not be written before it is read
        total = values[0].clone()
        for value in values[1:]:
            combine(op, total, value, total)
        out.copy_(total)
        return
    combine(op, values[0], values[1], out)
    for value in values[2:]:
        combine(op, out, value, out)


class Threaded(Collective):
    """Collective whose asynchronous calls run on its own thread, in the order of the calls.

    Subclasses define `_reduce` and `_pass_on`. By default an all-gather is a broadcast from each rank.
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
        """Raise CollectiveError if the ranks make different calls, in algorithms that compare calls."""

    @abstractmethod
    def _reduce(self, flat: Tensor, op: Operation) -> None:
        """Reduce a flat tensor in place."""

    @abstractmethod
    def _pass_on(self, flat: Tensor, root: int) -> None:
        """Broadcast a flat tensor."""

    def _gather(self, parts: Sequence[Tensor]) -> None:
        for root, part in enumerate(parts):
            self._pass_on(part, root)

    def _start(self, work: Callable[[], None], asynchronous: bool) -> Handle:
        """Run `work` on the thread if asynchronous, else here, after all earlier work has ended."""
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
