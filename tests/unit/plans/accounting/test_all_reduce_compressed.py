"""What compressed gradients send, as numbers; on real ranks in tests/ranks/test_compression.py."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.plans.accounting.all_reduce import CollectiveCall, compressed, compressed_calls, factored, num_kept
from shoal.plans.accounting.collectives import WORLD, Array, Gradients, Volumes
from shoal.plans.accounting.rank import Described, traffic

SHAPES: list[tuple[int, ...]] = [(100, 50), (50,), (8, 2, 3), ()]
NUMEL = 5000 + 50 + 48 + 1


def plan(scheme: str, algorithm: str = "native", ranks: int = 2, **options: Any) -> shoal.Plan:
    return shoal.Plan().with_sections(
        layout={"data": ranks}, collectives={"all_reduce": algorithm, "compression": scheme}, compression=options
    )


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (plan("bfloat16"), [CollectiveCall(NUMEL, 2)]),
        (plan("float16"), [CollectiveCall(1, 4, adds=False), CollectiveCall(NUMEL, 2)]),
        (plan("int8", block=256), [CollectiveCall(20, 4, adds=False), CollectiveCall(NUMEL, 1, adds=False)]),
        (plan("topk", density=0.01), [CollectiveCall(2 * 51, 4, "all_gather")]),
        (plan("powersgd", rank=4), [CollectiveCall(50 + 48 + 1 + 4 * 100, 4), CollectiveCall(4 * 50, 4)]),
        (plan("powersgd", rank=2), [CollectiveCall(50 + 1 + 2 * 108, 4), CollectiveCall(2 * 56, 4)]),
    ],
)
def test_the_collectives_of_a_bucket(made: shoal.Plan, expected: list[CollectiveCall]) -> None:
    assert compressed_calls(made, SHAPES) == expected


@given(st.integers(1, 10**6), st.floats(1e-9, 1.0))
def test_topk_sends_a_value_at_least_and_no_more_than_there_are(numel: int, density: float) -> None:
    assert 1 <= num_kept(numel, density) <= numel


@given(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6), st.integers(1, 4))
def test_every_value_is_factored_or_sent(shapes: list[tuple[int, ...]], rank: int) -> None:
    matrices, plain = factored(shapes, rank)
    places = [(m.start, m.start + m.rows * m.columns) for m in matrices] + plain
    assert sorted(i for start, stop in places for i in range(start, stop)) == list(range(sum(map(prod, shapes))))
    assert all(rank * (m.rows + m.columns) < m.rows * m.columns for m in matrices)


GRADIENTS = Gradients(tuple(Array(shape) for shape in SHAPES))


def volumes(made: shoal.Plan, rank: int = 0, sampled: bool = False) -> Volumes:
    return Volumes.of(compressed(GRADIENTS, made, rank, sampled))


def payload(made: shoal.Plan) -> int:
    (members,) = GRADIENTS.groups
    return sum(call.numel * call.itemsize for call in compressed_calls(made, [SHAPES[i] for i in members]))


def test_bytes_are_fewer_as_claimed() -> None:
    assert [4 * NUMEL / payload(plan(s)) for s in ("bfloat16", "float16", "int8", "topk")] == pytest.approx(
        [2.0, 2.0, 4.0, 5.0], rel=0.02
    )
    assert 4 * NUMEL / payload(plan("topk", density=0.01)) == pytest.approx(50.0, rel=0.02)


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling"])
@pytest.mark.parametrize("scheme", ["topk", "int8"])
def test_what_is_sent_arrives(scheme: str, algorithm: str, world_size: int) -> None:
    for sampled in (False, True):
        told = [volumes(plan(scheme, algorithm, world_size), r, sampled) for r in range(world_size)]
        totals = [
            [getattr(found[WORLD, kind], what) for found in told]
            for what in ("messages", "bytes")
            for kind in ("send", "recv")
        ]
        assert sum(totals[0]) == sum(totals[1])
        assert sum(totals[2]) == sum(totals[3])


def test_shared_memory_sends_nothing_and_hosts_are_not_known() -> None:
    assert volumes(plan("int8", "shared_memory"), sampled=True) == {}
    assert traffic(plan("int8", "hierarchical"), Described(GRADIENTS), 0) is None


def test_a_sampled_step_sends_exact_sums_too() -> None:
    plain, sampled = (volumes(plan("int8", ranks=8), sampled=sampled) for sampled in (False, True))
    plain.add(WORLD, "all_reduce", 4 * NUMEL, 2)
    plain.add(WORLD, "broadcast", 48)
    assert sampled == plain
