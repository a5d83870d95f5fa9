"""Fusion of elementwise operators into one kernel per chain, as Inductor compiles a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from shoal.planner.profile.values import NOTHING, Amount, Operation, OperationKind, Phase, TensorCut


def fused(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operations as a compiler fuses them: each chain becomes one kernel, at its last operation.

    A chain is consecutive operators of kind MEMORY in the same phase that tensor parallelism divides in the same way.
    An operator reads the output of the one before it from registers. The kernel's memory traffic is the other inputs
    and the last output. In the backward, another kernel computes again what autograd would have saved.
    """
    found: list[Operation] = []
    for key, group in groupby(operations, _chain):
        chain = tuple(group)
        found += chain if key is None or len(chain) == 1 else _one_kernel(chain)
    return tuple(found)


def _chain(operation: Operation) -> tuple[Phase, TensorCut] | None:
    """Return the key that all operators of a chain share, or None for an operator that is in no chain."""
    return (operation.phase, operation.cut) if operation.kind is OperationKind.MEMORY else None


def _one_kernel(chain: Sequence[Operation]) -> Iterable[Operation]:
    before, read = NOTHING, NOTHING
    for operation in chain:
        fixed = max(0.0, operation.read_bytes.fixed - before.fixed)
        per_sample = max(0.0, operation.read_bytes.per_sample - before.per_sample)
        read = Amount(read.fixed + fixed, read.per_sample + per_sample)
        before = operation.written_bytes
    inner = (replace(o, read_bytes=NOTHING, written_bytes=NOTHING, launches=0) for o in chain[:-1])
    launches = max(operation.launches for operation in chain)
    return (*inner, replace(chain[-1], read_bytes=read, launches=launches))
