"""A run that is taken up under any other layout goes on as if nothing had happened."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.launching import AT_ONCE, JOBS, Ended, Run, run

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'layouts.py'}:stack"  # dropout, ragged lengths, tied weights, AdamW with groups, clipping, a schedule
STEPS, CHANGED = 50, 25
BEFORE: dict[str, dict[str, Any]] = {"layout": {"shard": 2}, "shard": {"level": "parameters"}}
AFTER: dict[str, dict[str, dict[str, Any]]] = {
    "one process": {"layout": {"data": 1}},
    "data 2": {"layout": {"data": 2}},
    "tensor 2": {"layout": {"tensor": 2}},
    "pipeline 2": {"layout": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}},
    "context 2": {"layout": {"context": 2}},
    "shard 2 x pipeline 2": {"layout": {"shard": 2, "pipeline": 2}, "shard": {"level": "parameters"}},
    "context 2 x pipeline 2": {"layout": {"context": 2, "pipeline": 2}},
    "shard 2, optimizer, x tensor 2": {"layout": {"shard": 2, "tensor": 2}, "shard": {"level": "optimizer"}},
}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of a model so small two take longer
LIMIT = 150.0

# Relative, in units of float32's roundoff. A loss is a sum over some 150 tokens, whose roundings add as those of a
# random walk, in both of the runs that are compared. A step rounds each weight once, at the worst always in the
# direction that moves the loss most; what rounding makes of a gradient reaches a weight through a learning rate of 0.01
# at most.
TOKENS = 150
TOLERANCE = (2 * math.sqrt(TOKENS) + (STEPS - CHANGED)) * 2.0**-24


def plan(path: Path, sections: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    lines = ["schema = 1"]
    for name, keys in sections.items():
        lines += [f"[{name}]", *(f"{k} = {v!r}".replace("'", '"') for k, v in keys.items())]
    path.write_text("\n".join([*lines, ""]))
    return ("--plan", str(path))


def resumed(undisturbed: Ended, out: Path, sections: dict[str, dict[str, Any]], after: int = CHANGED) -> Run:
    """From a copy of the run as it was when the checkpoint in its middle was its newest."""
    shutil.copytree(undisturbed.out, out)
    (out / "result.json").unlink()
    kept = out / "checkpoints" / f"step-{after:08d}"
    for other in (out / "checkpoints").iterdir():
        if other != kept:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    assert kept.is_dir()
    return Run(
        JOB, out, None, arguments=(*plan(out.with_suffix(".toml"), sections), "--resume"), environment=ONE_THREAD
    )


def column(ended: Ended, key: str) -> list[Any]:
    """A value of every step, those before the change too."""
    assert [record["step"] for record in ended.records] == list(range(1, STEPS + 1))
    return [record[key] for record in ended.records]


def farthest(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow  # nine runs, each of which imports torch on two or four ranks
@pytest.mark.timeout(500)
def test_resumed_under_every_other_layout(tmp_path: Path) -> None:
    arguments = (*plan(tmp_path / "before.toml", BEFORE), "--checkpoint-every", str(CHANGED))
    undisturbed = run(Run(JOB, tmp_path / "before", None, arguments=arguments, environment=ONE_THREAD), LIMIT).expect(0)
    losses, result = column(undisturbed, "loss"), undisturbed.result
    # A step repeated or left out would be seen.
    assert min(abs(a - b) / b for a, b in pairwise(losses[CHANGED - 1 :])) > 10 * TOLERANCE
    runs = [resumed(undisturbed, tmp_path / f"after-{i}", sections) for i, sections in enumerate(AFTER.values())]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = dict(zip(AFTER, pool.map(partial(run, timeout=LIMIT), runs), strict=True))
    for name, one in ended.items():
        one.expect(0)
        assert f"resumed     after step {CHANGED}" in one.output, name
        assert column(one, "digest") == column(undisturbed, "digest"), name
        assert one.result["sample_digest"] == result["sample_digest"], name
        assert (one.result["steps"], one.result["samples"]) == (result["steps"], result["samples"]), name
        assert column(one, "loss")[:CHANGED] == losses[:CHANGED], name
        assert farthest(column(one, "loss")[CHANGED:], losses[CHANGED:]) <= TOLERANCE, name
        assert one.result["metrics"].keys() == result["metrics"].keys(), name
        assert farthest(list(one.result["metrics"].values()), list(result["metrics"].values())) <= TOLERANCE, name


def test_what_divided_stages_wrote_one_process_takes_up(tmp_path: Path) -> None:
    """Parameters cut over the shard axis in each stage; in the other direction: above."""
    staged = AFTER["shard 2 x pipeline 2"]
    short = ("--steps", "6")
    arguments = (*plan(tmp_path / "before.toml", staged), "--checkpoint-every", "3", *short)
    undisturbed = run(Run(JOB, tmp_path / "before", None, arguments=arguments, environment=ONE_THREAD), LIMIT).expect(0)
    wanted = resumed(undisturbed, tmp_path / "after", AFTER["one process"], 3)
    wanted.arguments = (*wanted.arguments, *short)
    ended = run(wanted, LIMIT).expect(0)
    assert ended.result["sample_digest"] == undisturbed.result["sample_digest"]
    losses = [[record["loss"] for record in one.records] for one in (ended, undisturbed)]
    assert len(losses[0]) == 6
    assert farthest(*losses) <= TOLERANCE
