"""A process group in shared memory: what can be told of it without ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shoal.distributed.collectives.shared_memory import process_group
from shoal.distributed.collectives.shared_memory.process_group import SharedGroup

# What torch's PyProcessGroup hands to a subclass. Those that it does not find there it calls itself, with the
# interpreter's lock, for which threads of Gloo's wait.
HANDED = (
    "allgather",
    "all_gather_single_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "send",
    "recv",
)


@pytest.mark.parametrize("name", HANDED)
def test_nothing_is_left_to_a_base_class_that_keeps_the_lock(name: str) -> None:
    method = vars(SharedGroup)[name]
    assert "super" not in method.__code__.co_names
    assert "_gloo" in method.__code__.co_names


def test_reductions_by_their_names() -> None:
    # torch hands over a ReduceOp, which is equal to its kind and has another hash.
    told = [process_group._operation(SimpleNamespace(reduceOp=dist.ReduceOp(kind))) for kind in KINDS]
    assert told == ["sum", "max", "min", None, None]


KINDS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG)


def test_what_shared_memory_takes() -> None:
    whole = torch.ones(4, 6)
    assert process_group._fit([whole, whole[:2], whole.bfloat16(), torch.ones(3, dtype=torch.int64)])
    for other in (whole.t(), whole > 0, whole.to("meta"), whole.cfloat()):
        assert not process_group._fit([whole, other])
    assert process_group._alike([whole, whole.view(-1)])
    assert not process_group._alike([whole, whole[:2]])
    assert not process_group._alike([whole, whole.double()])
