"""Tape of tensor operations, replayed on demand for the values of the storages that they wrote.

The tape follows storages, not tensors: views share one storage, so a write through any view writes all of them. To
compute a value, the tape runs, in order, the operations on which its storage depends. Random operations start from the
generator state that they had when they were logged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.distributed.process_setup import one_thread
from shoal.numerics.isolation import undisturbed
from shoal.numerics.operators import replace_leaves, storage_key, tensors_in

_LARGE_BYTES = 1 << 20


class NotUnderstoodError(Exception):
    """Error of a constructor that does something with an unknown effect on the values."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Reference to a tensor: the key of its storage, and its geometry in the storage."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorRef:
        """Return a tensor's reference. Raises: NotUnderstoodError if the tensor is not plain strided memory."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise NotUnderstoodError(f"a tensor that is not plain memory, of shape {tuple(tensor.shape)}")
        return cls(
            storage_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor at this place of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def span_bytes(self) -> int:
        """Number of bytes from the first to the last element."""
        steps = sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        return 0 if 0 in self.size else (steps + 1) * self.dtype.itemsize

    def same_place(self, tensor: Tensor) -> bool:
        """Check whether the tensor has this geometry in its storage."""
        here = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return here == (self.dtype, self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One logged call: a `TensorRef` replaces each tracked tensor among the arguments; real tensors stay.

    `writes`: for each storage, whether the call overwrites all its contents. `generator`: state before a random
    operation.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef, ...]
    reads: frozenset[int]
    writes: dict[int, bool]
    generator: Tensor | None

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run the call on real storages and add those that it creates."""

        def real(ref: TensorRef) -> Tensor:
            if ref.key not in storages and self.writes.get(ref.key):
                fresh = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
                storages[ref.key] = fresh.untyped_storage()  # the old contents do not matter
            return ref.on(storages[ref.key])

        args, kwargs = replace_leaves((self.args, self.kwargs), TensorRef, real)
        if self.generator is not None and kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator().set_state(self.generator)
        elif self.generator is not None:
            torch.default_generator.set_state(self.generator)
        taken = {storage._cdata for storage in storages.values()}
        results = tensors_in(self.func(*args, **kwargs))
        for ref, result in zip(self.outputs, results, strict=True):
            if ref.key in storages:
                continue
            if not ref.same_place(result) or storage_key(result) in taken:
                raise NotUnderstoodError(f"{self.func} lays its result out otherwise than on the meta device")
            storages[ref.key] = result.untyped_storage()


class Tape:
    """Log of operations by the storages that they write."""

    def __init__(self) -> None:
        # Keeps the meta storages alive, so that no later storage gets an earlier one's key.
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._writers: dict[int, list[LoggedCall]] = {}
        self._count = 0

    def add(self, **values: Any) -> None:
        """Log an operation; `values` are its fields except the number."""
        operation = LoggedCall(number=self._count, **values)
        self._count += 1
        for key in operation.writes:
            self._writers.setdefault(key, []).append(operation)

    def needed(self, keys: Iterable[int]) -> list[LoggedCall]:
        """Return the operations on which the storages' contents depend, in order."""
        found: dict[int, LoggedCall] = {}
        seen: set[tuple[int, int]] = set()
        wanted = [(key, self._count) for key in keys]
        while wanted:
            key, before = wanted.pop()
            for operation in reversed(self._writers[key]):
                if operation.number >= before:
                    continue
                if (operation.number, key) in seen:
                    break
                seen.add((operation.number, key))
                if operation.number not in found:
                    found[operation.number] = operation
                    wanted += [(read, operation.number) for read in operation.reads]
                    # If the operation changes a storage only in part, it also needs the rest of that storage.
                    wanted += [(k, operation.number) for k in operation.writes if not operation.writes[k]]
                if operation.writes[key]:
                    break
        return [found[number] for number in sorted(found)]

    @one_thread()
    def replay(self, refs: list[TensorRef]) -> list[Tensor]:
        """Compute the tensors' current values; tensors that share a storage still share one."""
        operations = self.needed({ref.key for ref in refs})
        last = {key: op.number for op in operations for key in (*op.reads, *op.writes)}
        last |= {ref.key: self._count for ref in refs}
        storages: dict[int, torch.UntypedStorage] = {}
        if any(ref.span_bytes >= _LARGE_BYTES for operation in operations for ref in operation.outputs):
            _give_back()
        with undisturbed():
            for operation in operations:
                operation.run(storages)
                for key in {*operation.reads, *operation.writes}:
                    if last[key] <= operation.number:
                        storages.pop(key, None)
            return [ref.on(storages[ref.key]) for ref in refs]

    def keep(self, keys: set[int]) -> None:
        """Drop the operations on which the storages of these keys do not depend."""
        operations = self.needed(keys)
        self._writers.clear()
        for operation in operations:
            for key in operation.writes:
                self._writers.setdefault(key, []).append(operation)


def _give_back() -> None:
    """Return freed memory to the system.

    glibc keeps memory between smaller pieces in use, and aligned allocations seldom fit there again: without this call,
    truncated normal initial values of 400 MB, drawn one tensor at a time, occupied 2.7 GB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
