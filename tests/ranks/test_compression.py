"""Compressed sums on real ranks: bytes as the formulas say, equal replicas, resumes, what is not finite, the guard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import classify, vectors
from tests.conformance.cases import job as small
from tests.ranks.test_counters import Normed, measured
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.checkpoint.state import sha256_of
from shoal.distributed.mesh import open_mesh
from shoal.launch.environment import Environment
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

SCHEMES = ("bfloat16", "float16", "int8", "topk", "powersgd")


def sections(scheme: str, algorithm: str = "native", ranks: int = 2, **options: Any) -> dict[str, Any]:
    return {
        "layout": {"data": ranks},
        "collectives": {"all_reduce": algorithm, "compression": scheme},
        "compression": {"guard_every": 0, **options},
    }


COUNTED = {
    **{f"{scheme}, native": sections(scheme) for scheme in SCHEMES},
    "int8, ring on 3": sections("int8", "ring", 3, block=100),
    "topk, ring on 3": sections("topk", "ring", 3),
    "topk, tree on 3": sections("topk", "tree", 3),
    "powersgd, halving on 3": sections("powersgd", "recursive_doubling", 3),
    "topk, shared memory": sections("topk", "shared_memory"),
    "int8, shared memory": sections("int8", "shared_memory"),
    "int8 without feedback, each step compared": sections("int8", feedback=False, guard_every=1),
    "topk, each step compared, ring": sections("topk", "ring", guard_every=1, density=0.3),
    "zero 1": {**sections("int8"), "layout": {"shard": 2}, "shard": {"level": "optimizer"}},
}


@parametrize("plan", COUNTED.values(), ids=COUNTED, usual=["int8, native", "topk, ring on 3", "powersgd, halving on 3"])
def test_a_step_sends_and_holds_what_the_formulas_say(plan: dict[str, Any], tmp_path: Path) -> None:
    """Three buckets, the last of which carries the sums of the step and of the batch statistics."""
    for told in measured(small(model=Normed), plan, tmp_path / "ranks"):
        found, wanted = told["measured"], told["predicted"]
        assert found["traffic"] == wanted["traffic"]
        assert found["memory"] | {"activations": None} == wanted["memory"]


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class Trained:
    """What came of a training on one rank."""

    weights: str
    losses: list[float | None]
    compared: list[dict[str, Any] | None]
    skipped: list[str | None]
    scales: list[float | None]
    compression: dict[str, Any] | None
    held: float  # the sum of it, for a weight of one
    unit: float
    notes: list[str] = field(default_factory=list)


def trained(
    job: shoal.Job, plan: dict[str, Any], folder: Path, steps: int, checkpoints: Path | None = None
) -> list[Trained]:
    """Trains, from the newest checkpoint where there is one, on forked ranks; what came of it on each."""
    complete_plan = judged(job, shoal.Plan().with_sections(**plan)).plan

    def work(environment: Environment) -> None:
        records: list[shoal.runs.records.StepRecord] = []
        notes: list[str] = []
        around = Surroundings(notes.append, lambda record, rank: records.append(record), lambda: False)
        with open_mesh(environment, complete_plan.layout) as mesh:
            engine = build(job, complete_plan, mesh, Options(checkpoints=checkpoints, telemetry=False))
            try:
                state, complaints = engine.load()
                engine.trainer(state, steps, around, RecordWriter(None)).train()
                compression = engine.strategy.compression
                held = 0.0
                if compression is not None and compression.unit:
                    held = sum(float(t.double().sum()) for _, t in compression.withheld_of()) / compression.unit
                told = Trained(
                    sha256_of(engine.model.state_dict().values()),
                    [r.loss for r in records],
                    [r.compression for r in records],
                    [r.skipped for r in records],
                    [r.loss_scale for r in records],
                    {"scheme": compression.scheme, "fell_back": compression.fell_back} if compression else None,
                    held,
                    compression.unit if compression is not None else 0.0,
                    [*complaints, *notes],
                )
                (folder / f"told-{mesh.rank}.json").write_text(json.dumps(vars(told)))
            finally:
                engine.close()

    with forked(complete_plan.layout.world_size, work, folder) as wait:
        wait()
    ranks = range(complete_plan.layout.world_size)
    return [Trained(**json.loads((folder / f"told-{rank}.json").read_text())) for rank in ranks]


LEARNT: list[tuple[str, dict[str, Any]]] = [
    ("bfloat16", {}),
    ("float16", {}),
    ("int8", {"block": 32}),
    ("topk", {"density": 0.1}),
    ("powersgd", {"rank": 1}),
]


@parametrize(("scheme", "options"), LEARNT, ids=[scheme for scheme, _ in LEARNT], usual=["bfloat16", "powersgd"])
def test_replicas_stay_equal_and_a_resume_changes_nothing(scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Uneven shares: 8 grains on 3 ranks."""
    plan, made = sections(scheme, ranks=3, **options | {"guard_every": 3}), small(length=shoal.Steps(12))
    whole = trained(made, plan, tmp_path / "whole", 12)
    trained(made, plan, tmp_path / "first", 5, tmp_path / "kept")
    resumed = trained(made, plan, tmp_path / "second", 12, tmp_path / "kept")
    assert {t.weights for t in whole} == {whole[0].weights} == {t.weights for t in resumed}
    assert resumed[0].losses == whole[0].losses[5:]
    assert [t.held for t in resumed] == [t.held for t in whole]
    assert whole[0].compression == {"scheme": scheme, "fell_back": None}
    compared = whole[0].compared
    assert [c is not None for c in compared] == [True, False, False] * 4
    assert all(0 < c["cosine"] < 1.0001 and c["lost"] < 0.5 and not c["fell_back"] for c in compared if c)
    if scheme in ("int8", "topk"):
        assert all(t.held for t in whole)


def test_under_another_layout_all_that_was_held_back_is_still_there(tmp_path: Path) -> None:
    """Its sum, divided among the new ranks; one process has nobody to send it to, and says so."""
    made, kept = small(length=shoal.Steps(12)), tmp_path / "kept"
    plan = partial(sections, "topk", density=0.1)
    before = trained(made, plan(ranks=3), tmp_path / "three", 6, kept)
    whole = sum(t.unit for t in before)
    assert whole == 1.0, "16 samples, whose loss is over 16"
    backlog = sum(t.held * t.unit / whole for t in before)
    after = trained(made, plan(ranks=2), tmp_path / "two", 6, kept)  # no step: what it holds is what it took up
    assert after[0].held == pytest.approx(after[1].held, rel=1e-5) == pytest.approx(backlog, rel=1e-5)
    assert backlog != 0.0
    (alone,) = trained(made, {"layout": {"data": 1}}, tmp_path / "one", 7, kept)
    assert any("topk had held back" in note for note in alone.notes)


def with_outlier(value: float) -> tuple[Tensor, Tensor]:
    inputs, labels = vectors(100)
    inputs[41, 2] = value
    return inputs, labels


def spiked(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss that is finite, of which the gradient at a poisoned input is not."""
    inputs, labels = batch
    bad = inputs.abs() > 1e20
    total, weight = classify(model, (inputs.masked_fill(bad, 0.0), labels))
    if bool(bad.any()):
        total = total + torch.sqrt((next(model.parameters()) * 0.0).sum())
    return total, weight


@parametrize("scheme", SCHEMES, usual=["int8"])
def test_a_gradient_that_is_not_finite_is_seen(scheme: str, tmp_path: Path) -> None:
    """The step is skipped and named; what was held back is as if it had not been, and the run goes on."""
    data = partial(with_outlier, 1e30)
    made = small(train_data=data, loss=spiked, on_nonfinite="skip", length=shoal.Steps(9))
    found = trained(made, sections(scheme, density=0.1, rank=1), tmp_path / "ranks", 9)
    assert "nonfinite" in found[0].skipped
    assert found[0].skipped.count(None) >= 7
    first, last = found[0].losses[0], found[0].losses[-1]
    assert first is not None
    assert last is not None
    assert last < first
    assert found[0].weights == found[1].weights


def test_a_loss_scale_that_falls_changes_nothing_of_what_is_held_back(tmp_path: Path) -> None:
    precision = {"compute": "float16", "loss_scale": 2.0**10}
    falls = {"compute": "float16", "loss_scale": "dynamic"}
    losses = []
    for name, section in (("fixed", precision), ("falls", falls)):
        plan = {**sections("topk", density=0.2), "precision": section}
        found = trained(small(length=shoal.Steps(12)), plan, tmp_path / name, 12)
        assert found[0].weights == found[1].weights
        losses.append(found[0].losses[-1])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_guard_ends_it_for_the_rest_of_the_run_and_of_its_resumes(tmp_path: Path) -> None:
    plan = sections("topk", density=1e-4, feedback=False, guard_every=2)
    made, kept = small(length=shoal.Steps(8)), tmp_path / "kept"
    found = trained(made, plan, tmp_path / "first", 5, kept)
    (compared, *later) = found[0].compared
    assert compared is not None
    assert compared["fell_back"]
    assert compared["lost"] > 0.5
    assert later == [None] * 4
    said = [note for note in found[0].notes if "gradients are not compressed" in note]
    assert len(said) == 1
    assert said[0].startswith("step 1: topk loses ")
    resumed = trained(made, plan, tmp_path / "second", 8, kept)
    assert resumed[0].compared == [None] * 3
    assert resumed[0].compression == found[0].compression
    assert found[0].compression is not None
    assert found[0].compression["fell_back"]["step"] == 1
    # Exact from the first step on: the run that never compressed.
    plain = trained(made, {"layout": {"data": 2}}, tmp_path / "plain", 8)
    assert plain[0].losses == pytest.approx([*found[0].losses, *resumed[0].losses], rel=1e-6)


def test_verify_says_what_it_verifies() -> None:
    verdict = shoal.verify(small(), shoal.Plan().with_sections(**sections("int8")), steps=2)
    assert verdict.verified, verdict.render()
    assert any("collectives.compression" in note and "int8" in note for note in verdict.notes)
