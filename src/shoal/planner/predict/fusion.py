"""Fusion of elementwise operators, as Inductor compiles a block: a chain of them becomes one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from shoal.planner.profile.values import NOTHING, Amount, Operation, OperationKind, Phase, TensorCut


def fused(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations with the work of each chain in its last one; the others start no kernel and move nothing.

    A chain is of operators that only move memory, of one phase and divided alike, between two that multiply. Each
    reads what the one before it wrote, which stays in registers: memory has what else they read, and what the last
    one writes. What autograd would have kept within a chain is computed again in the backward's own kernel.
    """
    found: list[Operation] = []
    for key, group in groupby(operations, _chain):
        chain = tuple(group)
        found += chain if key is None or len(chain) == 1 else _one_kernel(chain)
    return tuple(found)


def _chain(operation: Operation) -> tuple[Phase, TensorCut] | None:
    """What operators of one chain have in common; None of those that are in none."""
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
