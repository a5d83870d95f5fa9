"""Traffic and memory on real ranks: what is counted in a step is what the formulas say of it, byte for byte."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.models import GPT
from tests.conformance.cases import job as small
from tests.launching import JOBS, Run, run
from tests.unit.planner.made import cluster, predict
from tests.unit.planner.worlds import Case, Transformer, backward, shard, sharding
from tests.usual import parametrize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.distributed.traffic_meter import Traffic
from shoal.launch.environment import Environment
from shoal.planner.calibrate.comparison import section
from shoal.planner.predict.workload import Workload
from shoal.planner.profile.profiles import profile_job
from shoal.plans.accounting.collectives import (
    StateShape,
    Volumes,
    cut,
    fully_sharded,
    gathered_parameters,
    optimizer_state,
    scattered_gradients,
    sharded_parameters,
)
from shoal.plans.plan import Layout
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.observe.metering import MEASURED_STEPS, MemoryMeter, Shares, StepMeter, describe, predicted
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.job_model import with_grains
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks


class Normed(nn.Module):
    """Batch statistics, which travel with the sums, and enough parameters for several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 900), nn.BatchNorm1d(900)
        self.second, self.last = nn.Linear(900, 1300), nn.Linear(1300, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.second(self.norm(self.first(x)))))
        return out


def transformer(**changes: Any) -> shoal.Job:
    """Blocks, of which fully_shard makes units."""

    def data(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        found = torch.randint(50, (samples, 9), generator=torch.Generator().manual_seed(seed))
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    defaults: dict[str, Any] = {"model": Transformer}
    return small(
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        train_data=partial(data, 100),
        eval_data=None,
        metrics={},
        **{**defaults, **changes},
    )


adamw = partial(torch.optim.AdamW, lr=0.01)
JOBS_TO_COUNT = {
    "small": small,
    "several buckets": partial(small, model=Normed, optimizer=adamw),
    "transformer": partial(transformer, optimizer=adamw),
}
PLANS: dict[str, dict[str, Any]] = {
    "fast": {"layout": {"data": 2}},
    "fast on 5": {"layout": {"data": 5}},
    "two microbatches": {"layout": {"data": 2}, "batch": {"grains_per_microbatch": 2}},
    "narrow sums": {
        "layout": {"data": 2},
        "precision": {"parameters": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"},
    },
    "exact": {"layout": {"data": 3}, "execution": {"exact": True}},
    "zero 1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "zero 2": {"layout": {"shard": 2}, "shard": {"level": "gradients"}, "batch": {"grains_per_microbatch": 2}},
    "zero 3": {"layout": {"shard": 3}, "shard": {"level": "parameters"}},
    "zero 2, late": {
        "layout": {"shard": 2},
        "shard": {"level": "gradients", "reduce": "last_microbatch"},
        "batch": {"grains_per_microbatch": 1},
    },
    "zero 3, late": {
        "layout": {"data": 2, "shard": 2},
        "shard": {"reduce": "last_microbatch"},
        "batch": {"grains_per_microbatch": 1},
    },
    "zero 3, hybrid": {"layout": {"data": 2, "shard": 2}, "shard": {"level": "parameters"}},
    "zero 1, exact": {"layout": {"data": 2, "shard": 2}, "shard": {"level": "optimizer"}, "execution": {"exact": True}},
}


def measured(job: shoal.Job, sections: dict[str, Any], folder: Path, steps: int = 3) -> list[dict[str, Any]]:
    """Trains some steps on forked ranks; what each of them measured, and what the formulas say."""

    plan = judged(job, shoal.Plan().with_sections(**sections)).plan

    def work(environment: Environment) -> None:
        around = Surroundings(lambda line: None, lambda record, rank: None, lambda: False)
        with open_mesh(environment, plan.layout) as mesh:
            meter = StepMeter()
            engine = build(job, plan, mesh, Options(telemetry=False, observer=meter))
            try:
                wires = engine.pipeline.messages.groups if engine.pipeline is not None else []
                meter.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy, wires)
                outcome = engine.trainer(None, steps, around, RecordWriter(None)).train()
                found = MicrobatchPolicy.from_json(outcome.state.computation or {})
                grains = engine.order.grains(meter.step or 0)
                shares = Shares(engine.job.num_grains, grains, found.effective_grains, engine.buffers.num_values)
                step = describe(engine.sharded_model, engine.updater.optimizer, plan, engine.precision, shares)
                told = {"measured": meter.to_json(), "predicted": predicted(plan, step, mesh.rank)}
                (folder / f"told-{mesh.rank}.json").write_text(json.dumps(told))
            finally:
                meter.close()
                engine.close()

    with forked(plan.layout.world_size, work, folder) as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(plan.layout.world_size)]


@parametrize(
    ("sections", "job"),
    product(PLANS.values(), JOBS_TO_COUNT.values()),
    ids=map("-".join, product(PLANS, JOBS_TO_COUNT)),
    usual=["fast-several buckets", "exact-small", "zero 1-small", "zero 3-transformer", "zero 3, hybrid-small"],
)
def test_a_step_sends_and_holds_what_the_formulas_say(job: Any, sections: dict[str, Any], tmp_path: Path) -> None:
    for told in measured(job(), sections, tmp_path / "ranks"):
        found, wanted = told["measured"], told["predicted"]
        assert found["step"] == MEASURED_STEPS
        assert found["traffic"] == wanted["traffic"]
        assert found["memory"] | {"activations": None} == wanted["memory"]
        assert found["memory"]["activations"] > 0


ZERO_BUBBLE = {"schedule": "zero_bubble"}
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {"layout": {"data": 2, "pipeline": 2}},
    "zero bubble on 3": {"layout": {"pipeline": 3}, "pipeline": ZERO_BUBBLE},
    "zero 1": {"layout": {"shard": 2, "pipeline": 2}, "shard": {"level": "optimizer"}},
    "zero 2": {"layout": {"shard": 2, "pipeline": 2}, "shard": {"level": "gradients"}, "pipeline": ZERO_BUBBLE},
    "zero 3": {"layout": {"shard": 2, "pipeline": 2}, "pipeline": INTERLEAVED},
    "zero 3, zero bubble": {"layout": {"shard": 2, "pipeline": 2}, "pipeline": ZERO_BUBBLE},
    "zero 3, late": {
        "layout": {"shard": 3, "pipeline": 2},
        "shard": {"reduce": "last_microbatch"},
        "batch": {"grains_per_microbatch": 1},
    },
}


SLICED: dict[str, dict[str, Any]] = {
    "context": {"layout": {"context": 2}, "batch": {"grains_per_microbatch": 2}},
    "context, data": {"layout": {"data": 2, "context": 2}},
    "context, pipeline": {"layout": {"context": 2, "pipeline": 2}},
    "context, zero 3": {"layout": {"context": 2, "shard": 2}},
}
STAGED |= SLICED


@parametrize("sections", STAGED.values(), ids=STAGED, usual=["context, pipeline"])
def test_stages_send_and_hold_what_the_formulas_say(sections: dict[str, Any], tmp_path: Path) -> None:
    model = partial(Transformer, blocks=2 * sections.get("pipeline", {}).get("stages_per_rank", 1))
    for told in measured(transformer(optimizer=adamw, model=model), sections, tmp_path / "r"):
        found, wanted = told["measured"], told["predicted"]
        assert found["traffic"] == wanted["traffic"]
        known = {kind: size for kind, size in wanted["memory"].items() if size is not None}
        assert {kind: found["memory"][kind] for kind in known} == known
        assert {"parameters", "optimizer"} <= known.keys()


TENSOR: dict[str, dict[str, Any]] = {
    "tensor": {"layout": {"tensor": 2}},
    "tensor on 3": {"layout": {"tensor": 3}},
    "tensor, two microbatches": {"layout": {"tensor": 2, "data": 2}, "batch": {"grains_per_microbatch": 2}},
    "tensor, by positions": {"layout": {"tensor": 2}, "tensor": {"sequence": True}},
    "tensor, by positions on 3": {"layout": {"tensor": 3, "data": 2}, "tensor": {"sequence": True}},
}


def gpt() -> shoal.Job:
    made = partial(GPT, layers=2, width=24, heads=4, block=16, dropout=0.1)
    return replace(transformer(optimizer=adamw), model=made)


@parametrize(
    ("sections", "job"),
    product(TENSOR.values(), [small, gpt]),
    ids=map("-".join, product(TENSOR, ["small", "gpt"])),
    usual=["tensor-small", "tensor, two microbatches-small", "tensor, by positions-gpt"],
)
def test_a_divided_model_sends_what_the_formulas_say(job: Any, sections: dict[str, Any], tmp_path: Path) -> None:
    for told in measured(job(), sections, tmp_path / "ranks"):
        found, wanted = told["measured"], told["predicted"]
        assert found["traffic"] == wanted["traffic"]
        assert found["memory"] | {"activations": None} == wanted["memory"]


SHARED = {"collectives": {"all_reduce": "shared_memory"}}


@parametrize(
    ("job", "sections"),
    [
        (JOBS_TO_COUNT["transformer"], PLANS["zero 3, hybrid"]),
        (gpt, {"layout": {"tensor": 2}, "tensor": {"sequence": True}}),
    ],
    ids=["zero 3", "tensor"],
    usual=["tensor"],
)
def test_groups_in_shared_memory_count_the_same(job: Any, sections: dict[str, Any], tmp_path: Path) -> None:
    """What fully_shard and a tensor axis ask torch for is a message wherever it goes."""
    for told in measured(job(), sections | SHARED, tmp_path / "ranks"):
        found, wanted = told["measured"], told["predicted"]
        assert found["traffic"] == wanted["traffic"]
        assert found["memory"] | {"activations": None} == wanted["memory"]
        assert {"shard", "data", "tensor"} & found["traffic"].keys()


@pytest.mark.slow
def test_parts_of_sequences_keep_less(tmp_path: Path) -> None:
    """Of each block: the residual sums that the norms take, and dropout's masks, twice each; of 8 positions 4."""
    plain, parts = (
        measured(gpt(), {"layout": {"tensor": 2}, "tensor": {"sequence": on}}, tmp_path / str(on))[0]["measured"]
        for on in (False, True)
    )
    hidden = 16 * 8 * 24 * 4
    saved = plain["memory"]["activations"] - parts["memory"]["activations"]
    assert saved > 2 * (2 + 2) * hidden / 2 * 0.9


def test_activations_grow_with_the_microbatch_and_not_with_their_number(tmp_path: Path) -> None:
    job = small(grains=8, global_batch=16)
    layout = {"layout": {"data": 2}}
    whole, parts = (
        measured(job, {**layout, "batch": {"grains_per_microbatch": n}}, tmp_path / str(n))[0]["measured"]["memory"]
        for n in (4, 1)
    )
    # A sample's input, tanh, logarithms and label; the scalar is the weight that the loss divides by.
    sample = (6 + 16 + 3) * 4 + 8
    assert whole["activations"] - parts["activations"] == 6 * sample


# How far the planner may be from what a rank keeps: not at all, where the model is whole. A profile knows what a batch
# keeps and not in which stage: inputs and targets of a microbatch, 0.5 %. In zero bubble the last stage's loss is
# let go of in the first half of the backward: 5 %. What a tensor axis leaves whole and the planner divides: 0.04 %.
PLANNED: dict[str, tuple[dict[str, Any], float]] = {
    "data": ({"layout": {"data": 2}, "batch": {"grains_per_microbatch": 2}}, 0.0),
    "zero 3": ({"layout": {"shard": 2}}, 0.0),
    "recomputed": ({"layout": {"data": 2}, "memory": {"recompute": "full"}}, 0.0),
    "gpipe": ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "gpipe"}}, 0.006),
    "1f1b, zero 3": ({"layout": {"shard": 2, "pipeline": 2}}, 0.006),
    "zero bubble": ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "zero_bubble"}}, 0.06),
    "tensor": ({"layout": {"tensor": 2}}, 0.001),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_what_autograd_keeps_is_what_the_plan_said(name: str, tmp_path: Path) -> None:
    sections, off = PLANNED[name]
    # A tensor axis takes the GPT's attention for a pair, the transformer's not.
    job = gpt() if name == "tensor" else transformer(optimizer=adamw, model=partial(Transformer, blocks=4))
    plan = judged(job, shoal.Plan().with_sections(**sections)).plan
    work = Workload(profile_job(job, plan, device="cpu"), job.global_batch, with_grains(job).num_grains)
    said = section(predict(plan, work, cluster(plan.layout.world_size)), {"device_kind": "cpu"})
    for told in measured(job, {**sections, "prediction": said}, tmp_path / "ranks"):
        found, wanted = told["measured"]["memory"], told["predicted"]["memory"]
        assert found["activations"] == pytest.approx(wanted["activations"], rel=off, abs=0)


def test_the_result_of_a_run_has_them_for_each_rank(tmp_path: Path) -> None:
    ended = run(Run(f"{JOBS / 'tiny.py'}:gpt", tmp_path / "run", 2, arguments=("--steps", "4"))).expect(0)
    for kind in ("traffic", "memory"):
        ranks = ended.result[kind]["ranks"]
        assert [(part["rank"], part["step"]) for part in ranks] == [(0, 2), (1, 2)]
        for part in ranks:
            known = {name for name, value in part["predicted"].items() if value is not None}
            assert {name: part["measured"][name] for name in known} == {name: part["predicted"][name] for name in known}
    bare = run(Run(f"{JOBS / 'tiny.py'}:gpt", tmp_path / "bare", 2, arguments=("--steps", "4", "--no-telemetry")))
    assert bare.expect(0).result["traffic"] is None
    assert bare.result["weights_sha256"] == ended.result["weights_sha256"]


# --------------------------------------------------------------------------------------------------------- fully_shard


@parametrize(("replicas", "degree"), [(1, 2), (1, 4), (2, 2)], usual=["1-2"])
def test_fully_shard_sends_and_holds_what_the_formulas_say(replicas: int, degree: int, tmp_path: Path) -> None:
    def work(environment: Environment) -> None:
        with open_mesh(environment, Layout(data=replicas * degree)) as own:
            mesh = init_device_mesh("cpu", (replicas, degree), mesh_dim_names=("data", "shard"))
            for case in (Case(), Case("gradients", 2), Case(microbatches=2, reduce_every=False)):
                one_case(case, mesh, own.rank)
            (folder / f"done-{own.rank}").touch()
            dist.barrier()

    folder = tmp_path / "ranks"
    with forked(replicas * degree, work, folder) as wait:
        wait()
    assert len(list(folder.glob("done-*"))) == replicas * degree


def one_case(case: Case, mesh: DeviceMesh, rank: int) -> None:
    """Two steps of a model that is cut anew; the second is compared."""
    replicas, degree = mesh.shape
    model = Transformer(vocabulary=51)  # not a multiple of the ranks
    expected = sharding(model, case, degree, replicas)
    shard(model, case, mesh if replicas > 1 else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer)
    traffic = Traffic({axis: mesh.get_group(axis) for axis in ("data", "shard")}, meter.collective)
    for _ in range(2):
        with traffic:
            meter.start()
            backward(model, case)
            meter.summed()
            optimizer.step()
            found = meter.stop()
        optimizer.zero_grad()
    assert traffic.volumes == Volumes.of(fully_sharded(expected))
    assert found.parameters == sharded_parameters(expected)
    assert found.gathered == gathered_parameters(expected)
    assert found.gradients == scattered_gradients(expected)
    state = [cut(a, rank % degree, degree) for unit in expected.units for a in unit]
    assert found.optimizer == optimizer_state(state, StateShape(2, 4))


def test_the_comparison_can_fail() -> None:
    volumes = Volumes()
    volumes.add("world", "all_reduce", 8)
    other = Volumes()
    other.add("world", "all_reduce", 9)
    assert volumes.to_json() != other.to_json()
