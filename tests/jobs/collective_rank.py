"""One rank of tests/ranks/test_collectives.py: does the scenario that it is told, and prints JSON lines."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import DTYPES, OPERATIONS, Collective, Team, combine
from shoal.distributed.collectives.choose import open_collective, open_tree
from shoal.distributed.collectives.fixed_tree import SharedTreeSum
from shoal.distributed.collectives.shared_memory import process_group
from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
from shoal.distributed.collectives.shared_memory.process_group import SharedGroup, open_group
from shoal.distributed.mesh import new_group
from shoal.distributed.traffic_meter import Traffic
from shoal.errors import ShoalError
from shoal.hardware.detect import ALGORITHMS
from shoal.plans.accounting.all_reduce import messages
from shoal.plans.accounting.collectives import Volumes

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")
# Nothing, one, fewer than ranks, odd, one more than a mailbox holds, several staging areas.
SIZES = (0, 1, 3, 1001, 16385, 600_001)


@functools.cache
def value(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers: every order of summation gives the same. Nobody may change it."""
    return ((torch.arange(numel) + rank) % (5 + rank)).to(dtype)


@functools.cache
def expected(numel: int, dtype: torch.dtype, op: Any) -> Tensor:
    total = value(numel, dtype, 0).clone()
    for rank in range(1, WORLD):
        combine(op, total, value(numel, dtype, rank), total)
    return total


def same(found: Tensor, wanted: Tensor, *what: Any) -> None:
    assert torch.equal(found, wanted), (RANK, *what, found[:9].tolist(), wanted[:9].tolist())


def everything(collective: Collective) -> None:
    """Every operation, dtype and size, in place, asynchronous, and in allocated memory."""
    for dtype in DTYPES[:1] if collective.name == "native" else DTYPES:
        for numel in sizes(dtype):
            tensors = [torch.empty(numel, dtype=dtype), *([collective.allocate(numel, dtype)] if numel else [])]
            for op in OPERATIONS:
                for tensor in tensors:
                    tensor.copy_(value(numel, dtype, RANK))
                    collective.all_reduce(tensor, op, asynchronous=op == "sum").wait()
                    same(tensor, expected(numel, dtype, op), "all_reduce", op, dtype, numel)
            parts(collective, tensors, numel, dtype)
            if numel:
                collective.release(tensors.pop())
    several(collective)


def sizes(dtype: torch.dtype) -> tuple[int, ...]:
    """On three ranks, which every run of the tests takes, only one dtype has them all, and the others an odd one."""
    if WORLD == 3 and dtype != DTYPES[0]:
        return SIZES[3:4]
    return SIZES if dtype in DTYPES[:3] else SIZES[2:5]


def parts(collective: Collective, tensors: list[Tensor], numel: int, dtype: torch.dtype) -> None:
    own = value(numel, dtype, RANK)
    for tensor in tensors:
        tensor.copy_(own)
        whole = torch.empty(WORLD * numel, dtype=dtype)
        collective.all_gather(whole, tensor)
        same(whole, torch.cat([value(numel, dtype, r) for r in range(WORLD)]), "all_gather", dtype, numel)
        same(tensor, own, "the input of all_gather")
        for root in {0, WORLD - 1}:
            tensor.copy_(own)
            collective.broadcast(tensor, root)
            same(tensor, value(numel, dtype, root), "broadcast", root, dtype, numel)
    if isinstance(collective, SharedMemory):  # behind torch's process groups, which ask for it
        part = torch.empty(numel, dtype=dtype)
        copies = own.repeat(WORLD)
        collective.reduce_scatter(part, copies.view(WORLD, -1).unbind())
        same(part, expected(numel, dtype, "sum"), "reduce_scatter", dtype, numel)
        same(copies, own.repeat(WORLD), "the input of reduce_scatter")


def several(collective: Collective) -> None:
    """More calls at once than any ring of the algorithm has places for, large and small, waited for from the last."""
    tensors = [torch.full((5000 * (n % 4) + 1,), float(n + RANK)) for n in range(150)]
    handles = [collective.all_reduce(tensor, asynchronous=True) for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
    for n, tensor in enumerate(tensors):
        same(tensor, torch.full_like(tensor, float(n * WORLD + sum(range(WORLD)))), "call", n)
    if isinstance(collective, SharedMemory):
        collective.barrier()


def same_bits(collective: Collective) -> str:
    """The bits of sums that depend on their order, which every rank must have alike."""
    import hashlib

    digest = hashlib.sha256()
    generator = torch.Generator().manual_seed(RANK)
    for numel in (7, 5000, 300_001):
        tensor = torch.randn(numel, generator=generator)
        collective.all_reduce(tensor)
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def counted(collective: Collective) -> None:
    """Messages and bytes of an all-reduce are the formula's."""
    for numel in (1, 1001, 5000, 600_001):
        tensor = torch.ones(numel)
        with Traffic() as traffic:
            collective.all_reduce(tensor)
        expected = Volumes.of(messages(collective.name, numel, 4, RANK, WORLD))
        assert traffic.volumes == expected, (collective.name, numel, traffic.volumes, expected)


def scenario_all(*names: str) -> Iterator[Any]:
    for name in names or ALGORITHMS:
        collective = open_collective(name, Team(), CPU, timedelta(seconds=50))
        everything(collective)
        if name in ("ring", "tree", "recursive_doubling") and WORLD > 1:
            counted(collective)
        yield {name: same_bits(collective)}
        collective.close()


def scenario_teams() -> Iterator[Any]:
    """Two groups of two ranks side by side."""
    pairs = [[0, 2], [1, 3]]
    group = new_group(pairs, timedelta(seconds=50))
    for name in ALGORITHMS:
        collective = open_collective(name, Team(group, pairs), CPU, timedelta(seconds=50))
        tensor = torch.full((100_000,), float(RANK))
        collective.all_reduce(tensor)
        same(tensor, torch.full_like(tensor, 2.0 if RANK % 2 == 0 else 4.0), name)
        collective.close()
    yield "ok"


def scenario_tree() -> Iterator[Any]:
    """The fixed tree over sockets and through shared memory: the same bits, whoever holds which grains."""
    num_grains = 11
    generator = torch.Generator().manual_seed(7)
    for dtype, length in ((torch.float32, 40_001), (torch.float64, 3), (torch.bfloat16, 1001)):
        scales = 10.0 ** torch.randint(-3, 4, (num_grains, 1), generator=generator)
        values = (torch.randn(num_grains, length, generator=generator) * scales).to(dtype)
        trees = [open_tree(name, num_grains, values[0], timedelta(seconds=50)) for name in ("native", "shared_memory")]
        shared = isinstance(trees[1], SharedTreeSum)
        plain = torch.zeros(length, dtype=dtype)
        for held in [list(range(num_grains)), [0, 1, 2, 3, 7], [5], [], [10, 2, 3, 8, 0]]:
            for holders in ([held[r::WORLD] for r in range(WORLD)], [held] + [[]] * (WORLD - 1)):
                found = []
                for tree in trees:
                    tree.clear()
                    for grain in holders[RANK]:
                        tree.add(grain, tree.empty().copy_(values[grain]))
                    found.append(tree.total([sorted(own) for own in holders], RANK).clone())
                same(found[1], found[0], "tree", dtype, holders)
            plain = sum(values[sorted(held)[1:]], values[held[0]]) if len(held) > 4 else plain
            numbers = torch.zeros(WORLD, 3, dtype=torch.float64)
            numbers[RANK] = 1.1 + RANK
            trees[1].move(numbers)
            assert numbers[:, 0].tolist() == [1.1 + r for r in range(WORLD)]
        yield [shared, not torch.equal(found[0], plain)]
        for tree in trees:
            tree.close()


def scenario_fault(name: str, what: str) -> Iterator[Any]:
    """The last rank dies, stops or calls something else in its third call; the others say who it was."""
    collective = open_collective(name, Team(), CPU, timedelta(seconds=3 if what == "stopped" else 50))
    tensor = collective.allocate(400_000, torch.float32)
    yield {"pid": os.getpid()}
    for number in range(4):
        if number == 2 and RANK == WORLD - 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "shape":
                tensor = torch.ones(399_999)
            else:
                tensor = tensor.double()
        began = time.monotonic()
        try:
            collective.all_reduce(tensor)
        except ShoalError as error:
            yield {"kind": type(error).__name__, "text": f"{error.given}; {error.conflict}", "call": number}
            yield {"seconds": time.monotonic() - began}
            os._exit(0)
    yield "nothing happened"


def scenario_forever(name: str) -> Iterator[Any]:
    collective = open_collective(name, Team(), CPU, timedelta(seconds=50))
    tensor = collective.allocate(400_000, torch.float32)
    yield {"pid": os.getpid()}
    while True:
        collective.all_reduce(tensor)


def asked(group: dist.ProcessGroup, dtype: torch.dtype, numel: int) -> Iterator[tuple[str, Tensor]]:
    """What torch gives for each way of asking a group, of which every one of shoal's own is a part."""
    random = torch.Generator().manual_seed(numel)
    # Two numbers have one sum; of more, whole ones have.
    own = torch.randn(WORLD, numel, generator=random)[RANK] if WORLD == 2 and dtype.is_floating_point else None
    own = (value(numel, dtype, RANK) if own is None else own).to(dtype, copy=True)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        tensor = own.clone()
        dist.all_reduce(tensor, op, group=group)
        yield f"all_reduce {op}", tensor
    for root in {0, WORLD - 1}:
        tensor = own.clone()
        works = [dist.broadcast(tensor, group=group, group_src=root, async_op=True)]
        other = own + 1
        works.append(dist.all_reduce(other, group=group, async_op=True))
        for work in works:
            work.wait()
        yield f"broadcast {root}", tensor
        yield "all_reduce, asynchronous", other
    rows = [torch.empty_like(own) for _ in range(WORLD)]
    dist.all_gather(rows, own, group=group)
    yield "all_gather", torch.cat(rows)
    whole = torch.zeros(WORLD * numel, dtype=dtype)
    whole.view(WORLD, -1)[RANK] = own
    dist.all_gather_single(whole, whole.view(WORLD, -1)[RANK], group=group)
    yield "all_gather_single, in place", whole
    part, all_parts = torch.empty_like(own), torch.cat([own + r for r in range(WORLD)])
    dist.reduce_scatter(part, list(all_parts.chunk(WORLD)), group=group)
    yield "reduce_scatter", part
    again = torch.empty_like(own)
    dist.reduce_scatter_single(again, all_parts, group=group)
    yield "reduce_scatter_single", again
    functional, name = torch.ops._c10d_functional, group.group_name  # as DTensor and compiled code ask
    for kind, found in (
        ("all_reduce", functional.all_reduce(own, "sum", name)),
        ("all_gather", functional.all_gather_into_tensor(own, WORLD, name)),
        ("reduce_scatter", functional.reduce_scatter_tensor(all_parts, "sum", WORLD, name)),
    ):
        yield f"functional {kind}", functional.wait_tensor(found)
    with dist._coalescing_manager(group):
        pair = [own.clone(), own + 1]
        for tensor in pair:
            dist.all_reduce(tensor, group=group)
    yield "coalesced all_reduce", torch.cat(pair)
    dist.barrier(group=group)


def handed(group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """What is Gloo's to do."""
    product = torch.full((7,), RANK + 1.0)
    dist.all_reduce(product, dist.ReduceOp.PRODUCT, group=group)
    yield "product", product
    flags = [torch.empty(3, dtype=torch.bool) for _ in range(WORLD)]
    dist.all_gather(flags, torch.tensor([RANK == 0, True, False]), group=group)
    yield "all_gather of bool", torch.stack(flags)
    mixed = torch.empty(WORLD * 4)
    dist.all_to_all_single(mixed, torch.arange(WORLD * 4) + 100.0 * RANK, group=group)
    yield "all_to_all_single", mixed
    passed = torch.full((6,), float(RANK))
    if RANK == 0:
        dist.send(passed, group_dst=1, group=group)
    elif RANK == 1:
        dist.recv(passed, group_src=0, group=group)
    yield "send", passed
    kept = [torch.empty(4) for _ in range(WORLD)] if RANK == 0 else None
    dist.gather(torch.full((4,), float(RANK)), kept, group_dst=0, group=group)
    yield "gather", torch.stack(kept or [passed])


def scenario_group() -> Iterator[Any]:
    """A process group in shared memory gives what one over Gloo does, and counts the same messages and bytes."""
    everyone, limit = list(range(WORLD)), timedelta(seconds=50)
    over_gloo = dist.new_group(everyone, timeout=limit)
    shared = open_group([everyone], limit)
    assert isinstance(shared, SharedGroup)
    used = Used(shared)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for numel in SIZES[1:] if dtype == torch.float32 else (3, 16385):
            found, counts = [], []
            for group in (over_gloo, shared):
                with Traffic({"axis": group}) as traffic:
                    found.append(list(asked(group, dtype, numel)))
                counts.append(traffic.volumes.to_json())
            for (name, wanted), (_, own) in zip(*found, strict=True):
                same(own, wanted, name, dtype, numel)
            assert counts[0] == counts[1], counts
            assert set(counts[0]) == {"axis"}, counts
    calls = used.count
    for (name, wanted), (_, own) in zip(handed(over_gloo), handed(shared), strict=True):
        same(own, wanted, name)
    of_gloos = used.count - calls
    in_two_ways(shared)
    yield {"through shared memory": calls, "of Gloo's": of_gloos, "apart": apart()}


def in_two_ways(group: dist.ProcessGroup) -> None:
    """The first rank waits for a call only after the next one, which is Gloo's, and the others before it."""
    summed, told = torch.full((400_000,), float(RANK)), torch.tensor([RANK == 0])
    handle = dist.all_reduce(summed, group=group, async_op=True)
    if RANK != 0:
        handle.wait()
    dist.broadcast(told, 0, group=group)
    handle.wait()
    same(summed, torch.full_like(summed, float(sum(range(WORLD)))), "a sum beside a broadcast")
    assert told.item()


class Used:
    """How many collectives a group told of, which are those that it did itself."""

    def __init__(self, group: SharedGroup) -> None:
        self.count = 0
        group.listeners.append(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def scenario_group_fault(what: str) -> Iterator[Any]:
    """The last rank dies, or gathers another shape, in the third call that torch makes; the others say who it was."""
    group = open_group([list(range(WORLD))], timedelta(seconds=50))
    part, whole = torch.ones(400_000), torch.empty(WORLD * 400_000)
    yield {"pid": os.getpid()}
    for number in range(4):
        if number == 2 and RANK == WORLD - 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            part, whole = torch.ones(399_999), torch.empty(WORLD * 399_999)
        began = time.monotonic()
        try:
            dist.all_gather_single(whole, part, group=group)
        except ShoalError as error:
            yield {"kind": type(error).__name__, "text": f"{error.given}; {error.conflict}", "call": number}
            yield {"seconds": time.monotonic() - began}
            os._exit(0)
    yield "nothing happened"


def apart() -> int:
    """What ranks do in shared memory that say that they are on different hosts: nothing, the group is over Gloo."""
    places = process_group.places
    process_group.places = lambda: [[1, rank, 0] for rank in range(WORLD)]  # another host each
    group = open_group([list(range(WORLD))], timedelta(seconds=50))
    process_group.places = places
    assert isinstance(group, SharedGroup)
    used, tensor = Used(group), torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    same(tensor, torch.full((1000,), float(WORLD)))
    dist.barrier(group=group)
    return used.count


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    scenario, *arguments = sys.argv[1:]
    for found in globals()[f"scenario_{scenario}"](*arguments):
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
