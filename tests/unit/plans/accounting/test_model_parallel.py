"""Messages of ranks that compute the same grains, by hand; on real ranks: tests/ranks/test_counters.py."""

from __future__ import annotations

from shoal.plans.accounting.collectives import Volume, Volumes
from shoal.plans.accounting.model_parallel import (
    Attention,
    Crossing,
    Partial,
    SlicedBlock,
    Staged,
    completed,
    exchanges,
    messages,
)
from shoal.plans.plan import Layout


def test_what_crosses_is_of_the_samples_or_of_one_size() -> None:
    assert Crossing.of((2, 5, 3), 4, 2, True) == Crossing(60, 0, True)
    assert Crossing.of((5, 3), 4, 2, False) == Crossing(0, 60, False)
    assert Crossing.of((), 4, 2, False) == Crossing(0, 4, False)


def test_a_stage_receives_and_sends_what_crosses_and_what_learns_comes_back() -> None:
    hidden, mask = Crossing(10), Crossing(0, 7, needs_gradient=False)
    cuts = ((hidden,), (hidden, mask), (hidden,))
    middle = Volumes.of(messages(Staged((1,), cuts), samples=(2, 3)))
    # Over the first cut it receives hidden states and sends gradients, over the second the other way round.
    assert middle == {
        ("pipeline", "recv"): Volume(2 + 2, 50 + 50),
        ("pipeline", "send"): Volume(2 + 2 + 2, 50 + 50 + 14),
    }
    assert list(messages(Staged((0, 1, 2, 3), cuts), (2,))) == []


def test_partial_gradients_are_summed_in_float32_at_least() -> None:
    partial = Partial("tensor", 3, ((10, 2), (5, 8)))
    assert Volumes.of(completed([partial])) == {("tensor", "all_reduce"): Volume(3, 3 * 4 + 10 * 4 + 5 * 8)}


def test_an_attention_is_two_exchanges_and_two_back() -> None:
    layout = Layout(context=2)
    block = SlicedBlock("b", 6, 8, opens=True, closes=False, attentions=(Attention(4, 4, 2, 2),))
    # Three positions a rank, of one sample: 4 heads of 2 for query, key and value; and 4 heads of 2 back.
    position = 3 * 4
    assert Volumes.of(exchanges([block], layout, 0, (1,))) == {
        ("context", "all_to_all"): Volume(4, 2 * position * (24 + 8)),
        ("context", "all_gather"): Volume(1, 2 * position * 8),
    }


def test_keys_that_several_ranks_read_are_sent_to_each() -> None:
    grouped = SlicedBlock("b", 6, 8, False, False, (Attention(4, 1, 2, 2, needs_gradient=False),))
    found = Volumes.of(exchanges([grouped], Layout(context=2), 1, (1,)))
    # Each rank has two query heads and reads the one key head: it gives and takes (2 + 1) * 2 + 2 numbers, twice.
    assert found == {("context", "all_to_all"): Volume(2, 3 * 4 * (2 * 8 + 8))}


def test_a_short_sequence_is_filled_up() -> None:
    block = SlicedBlock("b", 3, 8, False, True)
    found = Volumes.of(exchanges([block], Layout(context=3), 0, (2,)))
    assert found == {("context", "all_gather"): Volume(1, 2 * 2 * 4 * 3 * 8)}
