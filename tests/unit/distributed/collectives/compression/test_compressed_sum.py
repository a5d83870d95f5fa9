"""Compression over steps: nothing is lost, a step that does not update leaves no trace, and the guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.distributed.collectives.threads import on_ranks
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle
from shoal.distributed.collectives.compression.codecs import Codec
from shoal.distributed.collectives.compression.compressed_sum import HORIZON_STEPS, Comparison, Compression, ErrorSums
from shoal.plans.plan import CompressionSection

SHAPES: list[list[tuple[int, ...]]] = [[(12, 9), (7,)], [(50, 40)]]
SIZES = [115, 2000]
NUMEL = 2115
CPU = torch.device("cpu")
FEEDING = ("int8", "topk", "powersgd")


def opened(collective: Collective, scheme: str, **options: object) -> Compression:
    made = Compression(collective, scheme, CompressionSection(**{"guard_every": 0, "density": 0.1, **options}))
    place = 0
    for shapes in SHAPES:
        made.add(range(place, place + len(shapes)), shapes, CPU)
        place += len(shapes)
    return made


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def one_step(made: Compression, flats: list[Tensor], step: int, unit: float = 1.0) -> Comparison | None:
    """A step up to its update; the sums are in `flats`."""
    made.begin(step)
    made.step_unit = unit
    handles = [made.start(number, flat) for number, flat in enumerate(flats)]
    for handle in handles:
        handle.wait()
    return made.settle(flats, [])


def held(made: Compression) -> Tensor:
    return torch.cat([values for _, values in made.withheld_of()])


@pytest.mark.parametrize("scheme", FEEDING)
@settings(max_examples=15, deadline=None)
@given(units=st.lists(st.sampled_from([0.25, 1.0, 3.0, 64.0]), min_size=2, max_size=5), world_size=st.integers(1, 3))
def test_all_gradients_are_sent_but_for_what_is_held_back(scheme: str, units: list[float], world_size: int) -> None:
    """The identity of error feedback, also where a step weighs more, or the loss scale is another, than before."""

    def work(collective: Collective) -> tuple[Tensor, Tensor, Tensor]:
        made = opened(collective, scheme)
        sent, given = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for step, unit in enumerate(units):
            flats = [g * unit for g in gradients(collective.rank, step)]
            given += torch.cat(flats).double() / unit
            one_step(made, flats, step, unit)
            made.commit()
            sent += torch.cat(flats).double() / unit
        return sent, given, held(made).double() / made.unit

    found = on_ranks(world_size, work)
    missing = sum(given - kept for _, given, kept in found)
    for sent, _, _ in found:
        torch.testing.assert_close(sent, missing, rtol=0.0, atol=1e-4)
        assert torch.equal(sent, found[0][0]), "replicas stay equal"


@pytest.mark.parametrize("scheme", FEEDING)
def test_a_step_without_an_update_leaves_no_trace(scheme: str) -> None:
    """It is computed again, or was not finite: the next is as if it had not been."""

    def work(collective: Collective, disturbed: bool) -> list[Tensor]:
        made = opened(collective, scheme)
        sums = []
        for step in range(4):
            if disturbed and step == 2:
                one_step(made, [torch.full((size,), torch.nan) for size in SIZES], step)
                one_step(made, [g * 1e5 for g in gradients(collective.rank, 77)], step)
            flats = gradients(collective.rank, step)
            one_step(made, flats, step)
            made.commit()
            sums += flats
        return sums

    calm, disturbed = (on_ranks(2, partial(work, disturbed=disturbed)) for disturbed in (False, True))
    for own, other in zip(calm, disturbed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def test_without_samples_a_rank_keeps_what_it_holds_back() -> None:
    def work(collective: Collective) -> tuple[Tensor, Tensor]:
        made = opened(collective, "topk")
        one_step(made, gradients(collective.rank, 0), 0)
        made.commit()
        before = held(made).clone()
        weighs = collective.rank == 0
        one_step(made, [g * weighs for g in gradients(collective.rank, 1)], 1, float(weighs))
        made.commit()
        return before, held(made)

    (first, after_first), (second, after_second) = on_ranks(2, work)
    assert not torch.equal(first, after_first)
    assert torch.equal(second, after_second)


def test_what_nobody_used_is_still_held_back() -> None:
    """A parameter without a gradient is not updated: what would have been sent of it is not lost."""

    def work(collective: Collective) -> tuple[Tensor, Tensor]:
        made = opened(collective, "int8")
        one_step(made, gradients(collective.rank, 0), 0, 2.0)
        made.commit()
        before = held(made)[108:115] / made.unit
        made.begin(1)
        made.step_unit = 4.0
        flats = gradients(collective.rank, 1)
        flats[0][108:115] = 0.0
        for handle in [made.start(number, flat) for number, flat in enumerate(flats)]:
            handle.wait()
        made.settle(flats, [(0, 108, 115)])
        made.commit()
        return before, held(made)[108:115] / made.unit

    for before, after in on_ranks(2, work):
        assert before.any()
        torch.testing.assert_close(before, after)


@pytest.mark.parametrize("scheme", ["bfloat16", "float16", *FEEDING])
def test_what_travels_with_the_gradients_is_exact(scheme: str) -> None:
    def work(collective: Collective) -> Tensor:
        made = opened(collective, scheme)
        flats = gradients(collective.rank, 0)
        flats[1] = torch.cat([flats[1], torch.tensor([1234567.0, 1.0 + 2.0**-23])])
        one_step(made, flats, 0)
        return flats[1][-2:]

    for found in on_ranks(3, work):
        assert torch.equal(found, torch.tensor([3.0 * 1234567.0, 3.0 * (1.0 + 2.0**-23)]))


# ------------------------------------------------------------------------------------------------------------ guard

GOOD = [
    ("bfloat16", {}),
    ("float16", {}),
    ("int8", {"block": 32}),
    ("int8", {"block": 32, "feedback": False}),
    ("topk", {"density": 0.1}),
    ("powersgd", {"rank": 2}),
]


@pytest.mark.parametrize(("scheme", "options"), GOOD)
def test_the_guard_is_silent_on_good_sums(scheme: str, options: dict[str, object]) -> None:
    def work(collective: Collective) -> list[Comparison | None]:
        made = opened(collective, scheme, guard_every=2, **options)
        found = []
        for step in range(6):
            found.append(one_step(made, gradients(collective.rank, step), step))
            made.commit()
        assert made.fell_back is None
        return found

    told = on_ranks(2, work)
    assert told[0] == told[1], "every rank sees the same"
    assert [c is not None for c in told[0]] == [True, False] * 3
    assert all(0 < c.cosine <= 1.0001 and 0 <= c.residual < 1 for c in told[0] if c is not None)


@pytest.mark.parametrize("scheme", FEEDING)
def test_what_is_left_of_a_dead_unit_does_not_alarm_the_guard(scheme: str) -> None:
    """Its gradient is zero from some step on, and what is held back of it shrinks below all numbers."""

    def work(collective: Collective) -> list[float]:
        made = opened(collective, scheme, guard_every=10, block=256)
        found = []
        for step in range(41):
            flats = gradients(collective.rank, step)
            if step:
                flats[1][:1700] = 0.0
            compared = one_step(made, flats, step)
            made.commit()
            found += [compared.lost] if compared is not None else []
        return found

    for found in on_ranks(2, work):
        assert len(found) == 5
        assert max(found) < 0.01


def outliers(rank: int, step: int) -> list[Tensor]:
    """One huge value in each bucket."""
    found = gradients(rank, step)
    for flat in found:
        flat[3] = 1e6
    return found


class Broken(Codec):
    """Sends nothing and says that it has."""

    def sum(self, values: Tensor, total: Tensor, keep: bool) -> Iterator[Handle]:
        yield self.wire.sum(torch.zeros(1))
        values.zero_()
        total.zero_()

    def buffers(self) -> list[Tensor]:
        return []


PLANTED: list[tuple[str, dict[str, object], Callable[[int, int], list[Tensor]]]] = [
    ("topk", {"density": 1e-4, "feedback": False}, gradients),
    ("int8", {"block": 1 << 20}, outliers),
    ("int8", {"block": 1 << 20, "feedback": False}, outliers),
    ("powersgd", {"rank": 1, "feedback": False}, gradients),
    ("broken", {}, gradients),
]


@pytest.mark.parametrize(("scheme", "options", "gradient"), PLANTED)
def test_the_guard_falls_back_and_nothing_is_lost(
    scheme: str, options: dict[str, object], gradient: Callable[[int, int], list[Tensor]]
) -> None:
    """From the sampled step on sums are exact, the first with all that was held back."""

    def work(collective: Collective) -> tuple[Tensor, Tensor]:
        made = opened(collective, "topk" if scheme == "broken" else scheme, guard_every=2, **options)
        if scheme == "broken":
            for bucket in made._buckets:
                bucket.codec = Broken(bucket.codec.wire)
        made.begin(1)
        one_step(made, gradient(collective.rank, 0), 1)
        made.commit()
        kept = held(made).clone() if made.feedback else torch.zeros(NUMEL)
        flats = gradient(collective.rank, 2)
        wanted = torch.cat(flats) + kept
        found = one_step(made, flats, 2)
        assert found is not None
        assert made.fell_back is None, "not before the update"
        made.commit()
        assert made.fell_back == {"step": 3, **found.to_json()}
        sums = torch.cat(flats)
        later = gradient(collective.rank, 3)
        exact = torch.cat(later)
        assert one_step(made, later, 4) is None
        made.commit()
        return torch.stack([sums, torch.cat(later)]), torch.stack([wanted, exact])

    found = on_ranks(2, work)
    total = sum(wanted for _, wanted in found)
    for sums, _ in found:
        torch.testing.assert_close(sums, total, rtol=1e-6, atol=1e-6)


def fallen_back(collective: Collective, guard_every: int) -> tuple[Compression, Tensor]:
    """After one compressed step, and what that held back."""
    made = opened(collective, "topk", guard_every=guard_every)
    one_step(made, gradients(collective.rank, 1), 1, 2.0)
    made.commit()
    kept = held(made).clone()
    made.fell_back = {"step": 2}
    for bucket in made._buckets:
        bucket.attempt = None
    return made, kept


def test_after_a_fall_back_what_a_rank_still_holds_goes_out_with_its_next_samples() -> None:
    def work(collective: Collective) -> tuple[Tensor, Tensor]:
        made, kept = fallen_back(collective, guard_every=3)
        flats = [torch.ones(size) for size in SIZES]
        one_step(made, flats, 2, 4.0)
        made.commit()
        assert made.unit == 0.0
        return torch.cat(flats), kept * 2.0 + 1.0

    found = on_ranks(2, work)
    for sums, _ in found:
        torch.testing.assert_close(sums, found[0][1] + found[1][1])


def test_after_a_fall_back_what_is_held_of_an_unused_parameter_stays() -> None:
    def work(collective: Collective) -> tuple[Tensor, Tensor]:
        made, kept = fallen_back(collective, guard_every=0)
        flats = [torch.ones(size) for size in SIZES]
        made.begin(2)
        made.step_unit = 4.0
        for number, flat in enumerate(flats):
            made.start(number, flat)
        made.drain()
        made.settle(flats, [(0, 0, 3)])
        made.commit()
        assert made.unit == 2.0
        return held(made), torch.cat([kept[:3], torch.zeros(NUMEL - 3)])

    for left, wanted in on_ranks(2, work):
        assert left[:3].any()
        assert torch.equal(left, wanted)


def test_what_is_held_back_is_judged_by_what_is_left_of_it_later() -> None:
    wanted = torch.ones(600)
    for by_chunk in (True, False):
        for size, lost in ((0.5, 0.25**HORIZON_STEPS), (1e9, torch.inf), (torch.nan, torch.nan)):
            seen = {}
            for feedback in (True, False):
                tally = ErrorSums(by_chunk, feedback)
                tally.add(wanted, wanted, wanted - size)
                seen[feedback] = tally.comparison()
            assert seen[True].residual == pytest.approx(size**2, nan_ok=True)
            assert seen[True].lost == pytest.approx(lost, nan_ok=True)
            assert seen[False].lost == pytest.approx(size**2, nan_ok=True)


def test_a_tally_over_chunks_gives_each_the_same_say() -> None:
    wanted, found = torch.ones(1000), torch.ones(1000)
    wanted[0] = found[0] = 1e6
    found[256:512] = 0.0
    by_chunk, by_energy = ErrorSums(True, True), ErrorSums(False, True)
    for tally in (by_chunk, by_energy):
        tally.add(wanted, wanted, found)
    assert by_chunk.comparison().residual == by_chunk.comparison().lost == pytest.approx(0.25)
    assert by_energy.comparison().residual == pytest.approx(256 / (1e12 + 999))
    assert ErrorSums(True, True).comparison() == Comparison(1.0, 0.0, 0.0)


def test_buckets_are_started_in_order_and_go_on_together() -> None:
    """A bucket's last round begins with the next bucket, whatever the order in which they are waited for."""

    def work(collective: Collective) -> list[Tensor]:
        made = opened(collective, "int8")
        made.begin(0)
        made.step_unit = 1.0
        flats = gradients(collective.rank, 0)
        handles = [made.start(number, flat) for number, flat in enumerate(flats)]
        for handle in reversed(handles):
            handle.wait()
        return flats

    first, second = on_ranks(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
