"""The planner beside the doctor's own numbers: of plans alone, corrected by what a run measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.jobs.slowed import job
from tests.unit.doctor.test_causes import run
from tests.unit.planner.models import transformer

from shoal.doctor.causes import LostTime, Remedy
from shoal.doctor.planned import PlannedRun, base_of, planned_run, with_planner
from shoal.doctor.run_times import RunTimes
from shoal.errors import PlanError
from shoal.hardware.values import Cluster, Curve, Device, Link
from shoal.planner.answer import answer
from shoal.planner.answer.answer import question
from shoal.planner.calibrate.comparison import MeasuredStep
from shoal.planner.predict.workload import Workload
from shoal.plans.plan import Plan
from shoal.plans.resolve import complete

# A slow network, and memory that two ranks have half of each where a core's own caches do not serve them.
CORE = Device(
    "core",
    "cpu",
    10**10,
    1e10,
    {"float32": 1e11},
    memory=Curve(((1e6, 8.0), (1e7, 1.0))),
    memory_alone=Curve(((1e6, 8.0), (1e7, 2.0))),
    dispatch_seconds=1e-6,
)
MACHINE = Cluster("two cores", CORE, 2, within=Link("gloo", 1e8, 1e-6), alternatives={1: replace(CORE, name="both")})
FEWER = Remedy("fewer-devices", "1 device", 0.3, devices=1, cost=0.5)
NARROW = Remedy("bfloat16", "sums in bfloat16", 0.1, {"collectives": {"compression": "bfloat16"}})
WORKERS = Remedy("workers", "2 workers", 0.5, {"data": {"workers": 2}})
THREADS = Remedy("threads", "1 thread", 0.5, variables={"OMP_NUM_THREADS": "1"})


def records(times: RunTimes) -> list[MeasuredStep]:
    return [MeasuredStep(times.step, times.spans)] * 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PlannedRun:
    monkeypatch.setattr(answer, "find_cluster", lambda name: MACHINE)
    times = run(spans={"forward": 0.002, "backward": 0.004, "exposed_communication": 0.02}, samples=64.0)
    settings = getattr(request, "param", {"width": 256})
    job_ = job(**settings)
    plan = complete(Plan.from_mapping({"schema": 1, "layout": {"data": 2}}, "test"), job_.grains or 8, 1)
    return planned_run(question(job_, base_of(plan), "here", None).case, plan, records(times), times)


def test_the_runs_own_plan_takes_what_was_measured(asked: PlannedRun) -> None:
    assert asked.seconds == pytest.approx(asked.times.step, rel=0.02)


def test_a_plan_without_sums_takes_less_by_these(asked: PlannedRun) -> None:
    gain = asked.gain(FEWER)
    # Sums of 20 of 28 ms fall away, and a rank computes twice the samples.
    assert gain is not None
    alone = asked.predicted(complete(Plan(), 8, 8)).step_seconds
    assert gain == pytest.approx(1 - alone / asked.seconds)
    assert alone < asked.seconds


def test_half_the_bytes_take_half_of_the_sums(asked: PlannedRun) -> None:
    gain = asked.gain(NARROW)
    assert gain is not None
    assert 0.3 * 0.02 / asked.times.step < gain < 0.5 * 0.02 / asked.times.step


def test_fewer_ranks_have_no_more_threads_each(asked: PlannedRun) -> None:
    both = {1: replace(CORE, name="both", flops={"float32": 9e11}, memory_bytes_per_second=9e10)}
    case = replace(asked.plain, cluster=replace(MACHINE, alternatives=both))
    again = planned_run(case, asked.plan, records(asked.times), asked.times)
    assert again.gain(FEWER) == asked.gain(FEWER)


def test_what_is_no_plan_is_not_asked(asked: PlannedRun) -> None:
    assert asked.gain(WORKERS) is None
    assert asked.gain(THREADS) is None


def test_remedies_get_the_planners_number_beside_their_own(asked: PlannedRun) -> None:
    (loss,) = with_planner([LostTime("devices", "more devices", 0.01, 0.3, "seen", (FEWER, WORKERS))], asked)
    assert [remedy.gain for remedy in loss.remedies] == [0.3, 0.5]
    assert [remedy.planned for remedy in loss.remedies] == [asked.gain(FEWER), None]


def test_the_plan_that_the_planner_would_choose(asked: PlannedRun) -> None:
    chosen = asked.best()
    assert chosen is not None
    assert chosen.devices == 1
    assert chosen.cost == 0.5
    assert chosen.gain >= 0.03
    told = LostTime("devices", "more devices", 0.01, 0.3, "seen", (FEWER,))
    assert asked.best([told]) is None, "the same as a remedy that is told already"


@pytest.mark.parametrize("asked", [{"elementwise": 65_540, "grains": 32}], indirect=True)
def test_memory_that_ranks_share(asked: PlannedRun) -> None:
    assert asked.memory_share == pytest.approx(0.5, abs=0.1)
    found = asked.memory()
    assert found is not None
    assert found.cause == "memory"
    assert found.share == pytest.approx(asked.memory_share * asked.times.computing / asked.times.total)
    assert all("batch" not in remedy.sections for remedy in found.remedies)


def test_products_share_no_memory(asked: PlannedRun) -> None:
    assert asked.memory_share < 0.3
    unmeasured = replace(MACHINE, device=replace(CORE, memory_alone=None))
    assert replace(asked, case=replace(asked.case, cluster=unmeasured)).memory() is None


def test_one_rank_shares_its_memory_with_nobody(asked: PlannedRun) -> None:
    assert replace(asked, plan=complete(Plan(), 8, 8)).memory() is None


def test_a_gpu_that_waits_for_its_host_is_given_a_graph(asked: PlannedRun) -> None:
    """On one process; not a run that has the graph, nor one whose kernels take longer than their launches."""
    quick = Device("quick", "gpu", 10**10, 1e12, {"float32": 1e14}, dispatch_seconds=2e-4, launch_seconds=1e-6)
    one = Cluster("one GPU", quick, 1)
    alone = replace(asked, case=replace(asked.plain, cluster=one), plan=complete(Plan(), 8, 8))
    found = alone.launches()
    assert found is not None
    (remedy,) = found.remedies
    assert remedy.sections == {"execution": {"cuda_graph": True}}
    assert 0.3 < remedy.gain < 1.0
    assert found in with_planner([], alone)
    graph = alone.plan.with_sections(execution={"cuda_graph": True})
    assert replace(alone, plan=graph).launches() is None
    slow = replace(quick, dispatch_seconds=1e-9, flops={"float32": 1e6})
    assert replace(alone, case=replace(alone.case, cluster=replace(one, device=slow))).launches() is None
    assert asked.launches() is None


def test_a_vocabulary_that_tensor_cores_read_slowly_is_named_with_the_next_multiple(asked: PlannedRun) -> None:
    device = Device("tiled", "gpu", 10**10, 1e12, {"float32": 1e13, "bfloat16": 1e14}, unaligned=0.1)
    profile = transformer(layers=2, width=512, ffn=2048, vocabulary=50_257, positions=256, heads=8)
    base = Plan().with_sections(precision={"compute": "bfloat16"})
    work = Workload(profile, 8, 8)
    case = replace(asked.plain, work=work, cluster=Cluster("one GPU", device, 1))
    case = replace(case, space=replace(case.space, base=base))
    found = replace(asked, case=case, plan=complete(base, 8, 8)).vocabulary()
    assert found is not None
    assert "50,304 in place of 50,257" in found.remedies[0].words
    assert 0.1 < found.remedies[0].gain < 1.0
    compiled = case.space.base.with_sections(execution={"compile": "default"})
    padded = replace(case, space=replace(case.space, base=compiled))
    assert replace(asked, case=padded, plan=complete(compiled, 8, 8)).vocabulary() is None, "Inductor pads by itself"
    assert asked.vocabulary() is None


def test_nothing_is_predicted_of_servers(asked: PlannedRun) -> None:
    plan = asked.plan.with_sections(server={"mode": "synchronous", "num_servers": 1})
    with pytest.raises(PlanError, match="servers"):
        planned_run(asked.plain, plan, records(asked.times), asked.times)


def test_a_captured_step_is_proposed_to_no_other_layout() -> None:
    """A search from the run's plan varies its devices, and a step is captured on one."""
    found = base_of(Plan().with_sections(execution={"cuda_graph": True, "channels_last": True}))
    assert found.execution.channels_last
    assert not found.execution.cuda_graph


def test_more_ranks_than_cores_have_parts_of_them(asked: PlannedRun) -> None:
    four = complete(Plan.from_mapping({"schema": 1, "layout": {"data": 4}}, "test"), 8, 8)
    times = replace(asked.times, world_size=4)
    found = planned_run(question(job(), base_of(four), "here", None).case, four, records(times), times)
    assert found.seconds == pytest.approx(times.step, rel=0.02)
    assert found.gain(FEWER) is not None
