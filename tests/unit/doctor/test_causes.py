"""Each planted slowness is the first cause that is told, with what its remedy brings; a healthy run has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.doctor.causes import LostTime, Remedy, causes, on_devices
from shoal.doctor.run_times import Periodic, RankSpread, RunTimes

SPANS = {
    "data_wait": 0.0005,
    "host_to_device": 0.0,
    "forward": 0.007,
    "backward": 0.013,
    "exposed_communication": 0.001,
    "optimizer": 0.001,
    "other": 0.0002,
}


def run(**changes: Any) -> RunTimes:
    """A healthy run of two processes on eight cores; `spans` are those that differ."""
    spans = {**SPANS, **changes.pop("spans", {})}
    step = sum(spans.values())
    exposed = spans["exposed_communication"]
    ranks = {
        "exposed_communication": RankSpread(exposed, exposed),
        "busy_seconds": RankSpread(step - exposed, step - exposed, 1, 0.5),
        "data_wait": RankSpread(spans["data_wait"], spans["data_wait"]),
        **changes.pop("ranks", {}),
    }
    plain = RunTimes(
        num_steps=100,
        step=step,
        spread=(0.9, 1.1),
        spans=spans,
        undisturbed=spans,
        ranks=ranks,
        evaluation=Periodic(),
        checkpoint=Periodic(),
        world_size=2,
        threads=4,
        cores=8,
        grains=8,
        parameters=10_000_000,
        samples=64.0,
        plan={"layout": {"data": 2}, "batch": {"grains_per_microbatch": 4}, "collectives": {"all_reduce": "native"}},
    )
    return replace(plain, **changes)


HEALTHY = run()
STEP = HEALTHY.step


def test_a_healthy_run_has_no_cause() -> None:
    assert causes(HEALTHY) == ()
    assert causes(run(world_size=1, plan={}, ranks={}, threads=8)) == ()


PLANTED: dict[str, tuple[RunTimes, str, str, float]] = {
    "slow dataset": (run(spans={"data_wait": 0.1}), "data", "workers", 1 - (STEP - 0.0005 + 0.005) / (STEP + 0.0995)),
    "slow rank": (
        run(
            spans={"exposed_communication": 0.041},
            ranks={
                "exposed_communication": RankSpread(0.001, 0.041),
                "busy_seconds": RankSpread(0.0217, 0.0617, 1, 0.97),
            },
        ),
        "slow rank",
        "mend-slow-rank",
        0.04 / (STEP + 0.04),
    ),
    "tiny buckets": (
        run(spans={"exposed_communication": 0.041}, messages=400, message_bytes=3 << 20),
        "messages",
        "shared-memory",
        0.041 * (1 - 4 / 400) / (STEP + 0.04),
    ),
    "tiny buckets where sending takes the cores": (
        run(
            spans={"exposed_communication": 0.041, "backward": 0.026},
            undisturbed=SPANS,
            messages=400,
            message_bytes=3 << 20,
            threads=4,
        ),
        "messages",
        "shared-memory",
        (0.041 + 0.013 - 0.041 * 4 / 400) / (STEP + 0.053),
    ),
    "large sums": (
        run(spans={"exposed_communication": 0.011, "forward": 0.07}, messages=4, message_bytes=80 << 20),
        "sums",
        "bfloat16",
        0.0055 / (STEP + 0.073),
    ),
    "too many ranks": (
        run(spans={"exposed_communication": 0.05}, world_size=8, threads=1, samples=8.0, parameters=1000),
        "devices",
        "fewer-devices",
        0.6,
    ),
    "evaluation": (
        run(evaluation=Periodic(0.3, 10.0, 0.03)),
        "evaluation",
        "evaluate-rarely",
        0.03 * 0.9 / (STEP + 0.03),
    ),
    "checkpoints": (
        run(checkpoint=Periodic(0.04, 1.0, 0.04)),
        "checkpoints",
        "checkpoint-rarely",
        (0.04 - 0.01 * STEP) / (STEP + 0.04),
    ),
    "checkpoints that a thread writes beside": (
        run(checkpoint=Periodic(0.01, 2.0, 0.005), writing=0.03, threads=2),
        "checkpoints",
        "checkpoint-rarely",
        (0.005 + 0.4 * 0.015 - 0.01 * STEP) / (STEP + 0.005),
    ),
    "best states": (
        run(evaluation=Periodic(0.01, 10.0, 0.001), best=Periodic(0.3, 10.0, 0.03)),
        "evaluation",
        "evaluate-rarely",
        0.031 * 0.9 / (STEP + 0.031),
    ),
    "threads": (run(threads=8, cores=2), "threads", "threads", (STEP - 0.0005) * (1 - 2 / 16) / STEP),
    "threads that wait for each other": (
        run(threads=5, cores=8, undisturbed={"forward": 0.002, "backward": 0.003}),
        "threads",
        "threads",
        (STEP - 0.005) / STEP,
    ),
    "uneven shares": (run(share_of_grains=1.5), "shares", "even-shares", 0.02 / 3 / STEP),
    "bubbles": (
        run(plan={"layout": {"pipeline": 2}, "batch": {"grains_per_microbatch": 4}}, microbatches=2),
        "bubbles",
        "microbatches",
        0.02 * (1 - (1 - 1 / 3) / (1 - 1 / 5)) / STEP,
    ),
    "host": (run(spans={"other": 0.02}), "host", "", 0.02 / (STEP + 0.0198)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_cause_is_what_was_planted(name: str) -> None:
    times, cause, remedy, gain = PLANTED[name]
    first = causes(times)[0]
    assert first.cause == cause
    assert remedy in [r.name for r in first.remedies] or not remedy
    found = next((r.gain for r in first.remedies if r.name == remedy), first.regained)
    assert found == pytest.approx(gain, rel=0.1 if name == "too many ranks" else 1e-6)


def test_what_the_planner_expected_of_fewer_devices_is_told() -> None:
    times = PLANTED["too many ranks"][0]
    first = causes(
        replace(times, plan={**times.plan, "prediction": {"step_seconds": 0.1, "curve": {"1": 0.5, "8": 0.1}}})
    )
    told = next(loss for loss in first if loss.cause == "devices").remedies[0]
    assert told.devices == 1
    assert "its plan expected 5 times the time" in told.words


def test_fewer_devices_cost_less_where_they_take_as_long() -> None:
    # A rank's computing hardly grows with its samples, and what it grows the sums make up for.
    times = run(spans={"exposed_communication": 0.0077}, world_size=4, threads=1, parameters=1000)
    (loss,) = [loss for loss in causes(times) if loss.cause == "devices"]
    (remedy,) = loss.remedies
    assert abs(remedy.gain) < 0.4
    assert remedy.cost == remedy.devices / 4
    assert remedy.device_time == pytest.approx(remedy.cost * (1 - remedy.gain))


def test_the_same_time_on_fewer_devices_is_worth_telling() -> None:
    same = Remedy("fewer-devices", "2 devices instead of 4", -0.01, devices=2, cost=0.5)
    assert LostTime("devices", "", 0.0, 0.0, "", (same,)).is_worth_telling
    assert not LostTime("devices", "", 0.0, 0.0, "", (replace(same, gain=-0.2),)).is_worth_telling
    assert not LostTime("devices", "", 0.0, 0.0, "", (replace(same, devices=None, cost=1.0),)).is_worth_telling


def test_checkpoints_that_a_callback_asks_for_are_for_people_to_change() -> None:
    (asked,) = causes(run(requested=Periodic(0.04, 1.0, 0.04)))
    assert asked.cause == "checkpoints"
    assert not asked.remedies[0].can_be_tried
    assert "the job's callback" in asked.remedies[0].words


def test_steps_that_a_checkpoint_makes_longer_are_named() -> None:
    (longer,) = causes(run(checkpoint=Periodic(0.004, 10.0, 0.0104)))
    assert "the steps at it take 100 ms longer" in longer.seen


def test_causes_come_by_what_would_come_back() -> None:
    times = run(evaluation=Periodic(0.1, 10.0, 0.01), checkpoint=Periodic(0.04, 1.0, 0.04))
    assert [loss.cause for loss in causes(times)][:2] == ["checkpoints", "evaluation"]
    regained = [loss.regained for loss in causes(times)]
    assert regained == sorted(regained, reverse=True)


def test_an_evaluation_that_a_callback_asks_for_is_for_people_to_change() -> None:
    times = run(evaluation=Periodic(0.3, 10.0, 0.03), asks_evaluations=True)
    (remedy,) = causes(times)[0].remedies
    assert not remedy.can_be_tried
    assert "callback" in remedy.words


def test_reading_that_computes_gets_no_workers_where_no_core_is_left() -> None:
    spans = {"data_wait": 0.006}  # 0.2 ms for each of a rank's 32 samples would be a wait
    assert [loss.cause for loss in causes(run(spans=spans, cores=8, threads=4))] == []
    waits = causes(run(spans={"data_wait": 0.03}, cores=8, threads=4))
    assert waits[0].cause == "data"
    assert waits[0].remedies[0].sections == {"data": {"workers": 2}}


def test_a_rank_that_is_slow_now_and_then_is_no_slow_rank() -> None:
    ranks = {"busy_seconds": RankSpread(0.0217, 0.0617, 1, 0.5)}
    assert "slow rank" not in [loss.cause for loss in causes(run(ranks=ranks))]


def test_one_device_reads_all_samples_too() -> None:
    spans = {"data_wait": 0.046, "exposed_communication": 0.03}
    ranks = {"busy_seconds": RankSpread(0.067, 0.097, 1, 1.0)}
    slow = next(loss for loss in causes(run(spans=spans, ranks=ranks)) if loss.cause == "slow rank")
    assert [remedy.name for remedy in slow.remedies] == ["mend-slow-rank"]
    bursts = {"data_wait": 0.018, "exposed_communication": 0.015, "forward": 0.001, "backward": 0.001}
    ranks = {"busy_seconds": RankSpread(0.006, 0.022, 1, 0.9)}  # a step waits for samples on one rank, then the other
    slow = next(loss for loss in causes(run(spans=bursts, ranks=ranks)) if loss.cause == "slow rank")
    assert [remedy.name for remedy in slow.remedies] == ["mend-slow-rank"]


def test_uneven_shares_are_not_laid_to_a_slow_rank() -> None:
    ranks = {"busy_seconds": RankSpread(0.020, 0.030, 1, 1.0)}
    found = [loss.cause for loss in causes(run(ranks=ranks, share_of_grains=1.5))]
    assert "slow rank" not in found
    assert "shares" in found


def test_on_one_device_there_are_no_sums() -> None:
    times = run(spans={"exposed_communication": 0.5}, parameters=0)
    # Without FLOPs half of computing grows with the samples: twice as many on one device.
    assert on_devices(times, 1) == pytest.approx(0.02 * 1.5 + 0.0012 + 2 * 0.0005 + 0.05 * 0.5, rel=0.05)
    assert on_devices(replace(times, plan={"layout": {"shard": 2}}), 1) is None
