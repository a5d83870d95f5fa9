"""Fast mode: the number of processes changes nothing beyond rounding, for models that make that hard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, newest_checkpoint, run, run_all
from tests.usual import parametrize

pytestmark = pytest.mark.ranks

# Unit in the last place of float32, of bfloat16 and of float16: the spacing of numbers around 1.
FLOAT32_UNIT, BFLOAT16_UNIT, FLOAT16_UNIT = 2.0**-23, 2.0**-7, 2.0**-10
STEPS = 16
# One step's loss and gradient are sums over some thousand rounded operations in sequence, which differ between two
# orders of summation by the square root of their number: 64 units at most. The parameters carry each step's difference
# on, and a training that converges does not amplify it: so STEPS times that, of the loss at the start.
FAST_TOLERANCE = STEPS * 64 * FLOAT32_UNIT

# Autocast rounds each activation and each gradient of a weight to the narrow type, and a difference between layouts
# enters where gradients of differently fused batches are rounded: half a unit each step and layout, of a gradient that
# moves the loss by at most the learning rate (0.1). STEPS of them: 16 * 0.1 * unit.
NARROW_TOLERANCE = {"bf16": STEPS * 0.1 * BFLOAT16_UNIT, "fp16": STEPS * 0.1 * FLOAT16_UNIT}

# What the conformance suite has no case of, and the one with the most in it.
MODELS = ("gpt", "opaque", "contrastive")


def losses(ended: Ended) -> list[float]:
    return [record["loss"] for record in ended.records]


def furthest(one: Ended, other: Ended) -> float:
    """The largest difference of two runs' losses, of the first loss."""
    pairs = zip(losses(one), losses(other), strict=True)
    return max(abs(a - b) for a, b in pairs) / abs(losses(one)[0])


@parametrize("model", MODELS, usual=["gpt"])
def test_losses_within_rounding(model: str, tmp_path: Path) -> None:
    job = f"{JOBS / 'tiny.py'}:{model}"
    ends = [e.expect(0) for e in run_all([Run(job, tmp_path / str(n), n) for n in (1, 3)])]
    assert losses(ends[0])[-1] < losses(ends[0])[0]
    for ended in ends[1:]:
        assert furthest(ends[0], ended) <= FAST_TOLERANCE, ended.result["world_size"]
        assert ended.result["sample_digest"] == ends[0].result["sample_digest"]
        for name, value in ended.result["metrics"].items():
            assert value == pytest.approx(ends[0].result["metrics"][name], rel=FAST_TOLERANCE), name


@parametrize("model", ["convnet", "contrastive"], usual=["convnet"])
def test_fast_is_the_exact_run_within_rounding(model: str, tmp_path: Path) -> None:
    """Fused grains keep their own statistics, masks and pairs: exact mode computes each grain alone."""
    job = f"{JOBS / 'tiny.py'}:{model}"
    fast, exact = run_all([Run(job, tmp_path / "fast", 2), Run(job, tmp_path / "exact", 1, exact=True)])
    assert furthest(exact.expect(0), fast.expect(0)) <= FAST_TOLERANCE


def test_the_tolerance_tells_a_wrong_learning_rate(tmp_path: Path) -> None:
    """A tolerance that every run passes would be none: a thousandth of the learning rate is seen."""
    job = JOBS / "tiny.py"
    ends = run_all([Run(job, tmp_path / "a"), Run(job, tmp_path / "b", settings={"lr": 0.1001})])
    assert furthest(ends[0].expect(0), ends[1].expect(0)) > FAST_TOLERANCE


@parametrize("precision", ["bf16", "fp16"], usual=["bf16"])
def test_narrow_precisions(precision: str, tmp_path: Path) -> None:
    wanted = ("--precision", precision)
    job = JOBS / "tiny.py"
    one, two, full = (
        e.expect(0)
        for e in run_all(
            [
                Run(job, tmp_path / "1", 1, arguments=wanted),
                Run(job, tmp_path / "2", 2, arguments=wanted),
                Run(job, tmp_path / "f"),
            ]
        )
    )
    assert furthest(one, two) <= NARROW_TOLERANCE[precision]
    assert losses(one)[-1] < losses(one)[0]
    assert losses(one) != losses(full), f"{precision} computed in float32"
    assert one.result["sample_digest"] == two.result["sample_digest"] == full.result["sample_digest"]


@parametrize("devices", [1, 2], usual=["1"])
def test_float16_skips_steps_until_its_scale_fits(devices: int, tmp_path: Path) -> None:
    job = f"{JOBS / 'tiny.py'}:overflowing"
    ended = run(Run(job, tmp_path / "run", devices, arguments=("--precision", "fp16"))).expect(0)
    records = ended.records
    skipped = [record["skipped"] == "overflow" for record in records]
    num_skipped = sum(skipped)
    assert 0 < num_skipped < len(records)
    assert skipped[0]
    assert not skipped[-1]
    scales = [record["loss_scale"] for record in records]
    assert scales == [2.0 ** (16 - sum(skipped[: i + 1])) for i in range(len(records))]
    assert ended.result["skipped_steps"] == num_skipped
    assert records[-1]["loss"] < records[0]["loss"]
    assert saved_scale(ended.out) == scales[-1]


@pytest.mark.slow
def test_the_loss_scale_survives_a_resume(tmp_path: Path) -> None:
    job, wanted = f"{JOBS / 'tiny.py'}:overflowing", ("--precision", "fp16")
    whole = run(Run(job, tmp_path / "whole", 1, arguments=wanted)).expect(0)
    run(Run(job, tmp_path / "cut", 1, arguments=(*wanted, "--steps", "10"))).expect(0)
    resumed = run(Run(job, tmp_path / "cut", 1, arguments=("--resume", "--steps", "20"))).expect(0)
    assert [r["loss_scale"] for r in resumed.records] == [r["loss_scale"] for r in whole.records]
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]


def saved_scale(out: Path) -> float:
    """The loss scale in the newest checkpoint."""
    document = json.loads((newest_checkpoint(out) / "state.json").read_text(encoding="utf-8"))
    return float(document["run"]["loss_scale"]["scale"])
