"""The pruned search gives what predicting every plan gives, and keeps its reasons."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from math import ceil
from typing import TypeVar

import pytest
from tests.unit.planner import made
from tests.unit.planner.models import facts, gpus, mixture, transformer
from tests.unit.plans.checking import check
from tests.usual import parametrize

from shoal.errors import PlanError
from shoal.planner.answer.outlook import curve
from shoal.planner.calibrate.comparison import section
from shoal.planner.predict.lower_bounds import (
    Blocks,
    BlockSize,
    BlockStates,
    Costs,
    MicrobatchSeconds,
    PipelineShape,
    costs_of,
    filled,
)
from shoal.planner.predict.workload import Prediction, Program, Workload
from shoal.planner.search.search import (
    DISTINCT,
    Aim,
    Candidate,
    Limit,
    NothingFitsError,
    Search,
    Wanted,
    choose,
    limit_of,
    parse,
    tied,
)
from shoal.planner.search.space import (
    Degrees,
    Level,
    MicrobatchSchedule,
    ModelDegrees,
    ScheduleFamily,
    Space,
    counts,
    illegal,
    microbatch_sizes,
    simplicity,
)
from shoal.plans.legal import ModelFacts
from shoal.plans.plan import Plan, described, plan_text, read_plan

MEMORY, NEVER = 100.0, float("inf")
_Part = TypeVar("_Part")


def noise(*parts: object) -> float:
    """The same number in [0, 1) for the same parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6]) / 2**48


class Roomy(BlockStates):
    """Blocks that always fit."""

    def is_crowded(self, size: BlockSize, pipeline: int, microbatches: int, memory: float) -> bool:
        return False


class Invented(Costs):
    """Costs without physics that keep what `Costs` promises."""

    def __init__(self, seed: int, num_grains: int) -> None:
        self.memory_bytes, self.memory_margin = MEMORY, 0.0
        self.seed, self.num_grains = seed, num_grains
        self.num_predicted = 0

    def microbatches(self, plan: Plan) -> int:
        return -(-self.share(plan) // plan.batch.grains_per_microbatch)

    def share(self, plan: Plan) -> int:
        return -(-self.num_grains // (plan.layout.data * plan.layout.shard))

    def staged(self, plan: Plan) -> float:
        at, size, pipeline = plan.layout, plan.batch.grains_per_microbatch, plan.pipeline
        again = {"none": 1.0, "selective": 1.1, "full": 1.4}[plan.memory.recompute]
        one = size * again * (1 + noise(self.seed, at.tensor, at.context, plan.tensor.sequence)) + 0.3
        shape = PipelineShape(pipeline.schedule, at.pipeline, pipeline.stages_per_rank, self.microbatches(plan))
        waits = 1.0 + noise(self.seed, pipeline.schedule, pipeline.stages_per_rank) if at.pipeline > 1 else 1.0
        return filled(one / (at.tensor * at.context), shape) * waits

    def at(self, plan: Plan) -> float:
        replicas = plan.layout.data * plan.layout.shard
        return self.staged(plan) * (1 + 0.2 * noise(self.seed, replicas, plan.layout.pipeline))

    def nearly(self, plan: Plan) -> float:
        alone = 40.0 if self.seed % 2 else 0.0  # what no division makes faster
        at = plan.layout
        beside = self.beside(at.world_size, at.tensor * at.pipeline * at.context > 1)
        return alone + beside + self.at(plan) * (1 + 0.3 * noise(self.seed, plan.layout, plan.shard.level))

    def least_bytes(self, plan: Plan) -> float:
        at = plan.layout
        kept = {"none": 9.0, "selective": 5.0, "full": 2.0}[plan.memory.recompute]
        depth = {"optimizer": 60.0, "gradients": 40.0, "parameters": 20.0}[plan.shard.level] if at.shard > 1 else 120.0
        parts = at.tensor * at.pipeline * at.context
        return depth / parts + 80.0 / (at.shard * parts) + kept * plan.batch.grains_per_microbatch / parts

    def block_states(self, plans: Sequence[Plan]) -> tuple[BlockStates, ...]:
        return tuple(Roomy(1, 0.0, 0.0, 1.0) for _ in plans)

    def block_size(self, plan: Plan) -> BlockSize:
        return BlockSize()

    def beside(self, num_devices: int, is_divided: bool) -> float:
        return 3.0 * num_devices if self.seed % 3 else 0.0

    def microbatch(self, plan: Plan) -> MicrobatchSeconds:
        assert self.microbatches(plan) == plan.layout.pipeline == 1
        return MicrobatchSeconds(self.staged(plan), Blocks())

    def predict(self, plan: Plan) -> Prediction:
        self.num_predicted += 1
        seconds = self.nearly(plan) * (1 + 0.5 * noise(self.seed, *plan.to_mapping().items()))
        peak = self.least_bytes(plan) * (
            1 + 0.2 * noise(self.seed, plan.layout, plan.memory, plan.shard, plan.pipeline)
        )
        bubble = 0.4 * noise(self.seed, plan.layout) if plan.layout.pipeline > 1 else 0.0
        terms = {"compute": seconds * (1 - bubble), "bubble": seconds * bubble}
        lacks = max(0.0, peak - MEMORY)
        return Prediction(seconds, terms, {"parameters": peak}, peak, lacks == 0, lacks, bubble, 1.0, None)

    def floor(self, samples: float, replicas: int, tensor: int, pipeline: int, context: int) -> float:
        return 0.0

    def costs(self) -> Costs:
        return self


def ways(space: Space, place: Degrees, family: ScheduleFamily) -> Iterator[MicrobatchSchedule]:
    """The schedules of a family at a place."""
    for order in space.orders(place.cut.pipeline, -(-space.share(place) // family.grains)):
        yield MicrobatchSchedule(*family, *order)


def every_plan(space: Space) -> Iterator[Plan]:
    """All plans of a space, one by one."""
    for place in space.places:
        for family in space.families(place):
            for way in ways(space, place, family):
                yield from space.plans(place, way)


def small(seed: int) -> tuple[Space, Invented]:
    pick = random.Random(seed)
    grains = pick.choice([4, 6, 8, 12])
    found = facts(grains, layers=pick.choice([2, 4, 6]), heads=pick.choice([2, 4, 6]))
    cluster = gpus(pick.choice([1, 2, 3]), pick.choice([2, 4]))
    space = Space(Plan(), found, counts(cluster), engine=pick.random() < 0.7)
    invented = Invented(seed, grains)
    return space, invented


@cache
def predicted(seed: int) -> tuple[Candidate, ...]:
    """All plans of a small space that are not refused."""
    space, invented = small(seed)
    plans = (plan for plan in every_plan(space) if space.refusal(plan) is None)
    return tuple(Candidate(plan, invented.predict(plan)) for plan in plans)


def fitting(seed: int) -> list[Candidate]:
    return [candidate for candidate in predicted(seed) if candidate.prediction.fits]


AIMS = ["fastest", "cheapest", "deadline=900s", "efficiency=0.7", "widest=0.6"]


@pytest.mark.parametrize("seed", range(12))
def test_the_order_is_that_of_all_plans(seed: int) -> None:
    space, invented = small(seed)
    every, num_plans = fitting(seed), len(predicted(seed))
    costs = invented.costs()
    search = Search(space, lambda devices: costs, 1)
    for text in AIMS:
        aim = parse(text)
        limit = limit_of(search, aim, 100)
        wanted = sorted(aim.key(c.devices, c.seconds) for c in every if limit.allows(c.devices, c.seconds))
        assert [aim.key(c.devices, c.seconds) for c in search.take(Wanted(aim, limit, number=NEVER))] == wanted
    fresh = Search(space, lambda devices: costs, 1)
    invented.num_predicted = 0
    fresh.take(Wanted())
    assert invented.num_predicted < max(2, num_plans // 2)


def simplest_of(candidates: list[Candidate], aim: Aim) -> Candidate:
    """The simplest of those tied with the best, one by one."""
    keys = {id(c): aim.key(c.devices, c.seconds) for c in candidates}
    best = min(keys.values())
    return min((c for c in candidates if tied(keys[id(c)], best)), key=lambda c: simplicity(c.plan))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("text", AIMS)
def test_the_choice_is_the_simplest_of_the_best(seed: int, text: str) -> None:
    space, invented = small(seed)
    aim, costs = parse(text), invented.costs()
    search = Search(space, lambda devices: costs, 1)
    limit = limit_of(search, aim, 100)
    allowed = [c for c in fitting(seed) if limit.allows(c.devices, c.seconds)]
    if not allowed:
        with pytest.raises(NothingFitsError):
            choose(search, aim, 100)
        return
    wanted = simplest_of(allowed, aim)
    near = [c for c in allowed if c.devices < wanted.devices and c.seconds <= wanted.seconds * (1 + DISTINCT)]
    near = [c for c in near if c.devices * c.seconds <= wanted.devices * wanted.seconds]
    choice = choose(search, aim, 100)
    if aim.name == "fastest" and near:
        assert choice.faster is not None
        assert choice.faster.plan == wanted.plan
        fewest = min(c.devices for c in near)
        wanted = simplest_of([c for c in near if c.devices == fewest], aim)
    else:
        assert choice.faster is None
    assert choice.chosen.plan == wanted.plan
    places = {(c.devices, described(c.plan)) for c in choice.alternatives}
    assert len(places) == len(choice.alternatives)
    assert all(c.devices == choice.chosen.devices for c in choice.alternatives)
    told = {r.what for r in choice.rejected if r.devices == choice.chosen.devices}
    assert len(told) == len(search.by_devices[choice.chosen.devices]) - 1
    assert all(r.reason for r in choice.rejected)
    lacking = {r.what for r in choice.rejected if r.reason.startswith("does not fit")}
    assert not lacking & {str(c.place) for c in fitting(seed) if c.devices == choice.chosen.devices}


class Uneven(Invented):
    """Costs of the replicas alone: on 15 devices a step takes as long as given, on 16 it takes 100 s, else too long."""

    seconds_on_15 = 0.0

    def predict(self, plan: Plan) -> Prediction:
        seconds = {15: self.seconds_on_15, 16: 100.0}.get(plan.layout.data, 1e4)
        return Prediction(seconds, {"compute": seconds}, {}, 0.0, True, 0.0, 0.0, 1.0, None)

    def staged(self, plan: Plan) -> float:
        return 0.0

    def nearly(self, plan: Plan) -> float:
        return 0.0

    def least_bytes(self, plan: Plan) -> float:
        return 0.0


@pytest.mark.parametrize(("seconds", "devices"), [(103.0, 15), (108.0, 16)])  # 16 devices cost 1,600 device-seconds
def test_fewer_devices_cost_no_more_device_seconds(
    seconds: float, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.planner.search.search.DISTINCT", 0.1)
    costs = Uneven(0, 16)
    costs.seconds_on_15 = seconds
    space = Space(Plan(), facts(16, layers=1, heads=1), counts(gpus(16, 1)), data_only=True)
    assert choose(Search(space, lambda _: costs, 1), Aim()).chosen.devices == devices


class Shuffled(Space):
    """A space that names its parts in an order of its own each time."""

    def shuffled(self, found: Iterable[_Part]) -> list[_Part]:
        return random.sample(several := list(found), len(several))

    @cached_property
    def cuts(self) -> tuple[ModelDegrees, ...]:
        return tuple(self.shuffled(super().cuts))

    def orders(self, pipeline: int, microbatches: int) -> tuple[tuple[str, int], ...]:
        return tuple(self.shuffled(super().orders(pipeline, microbatches)))

    def plans(self, place: Degrees, way: MicrobatchSchedule) -> Iterator[Plan]:
        return iter(self.shuffled(super().plans(place, way)))


class Coarse(Invented):
    """Costs with many ties."""

    def predict(self, plan: Plan) -> Prediction:
        found = super().predict(plan)
        return replace(found, step_seconds=ceil(found.step_seconds / 10.0) * 10.0)


# Of the others each answer takes three seconds.
@parametrize(("seed", "text"), product(range(6), AIMS), usual=["0-fastest", *(f"1-{text}" for text in AIMS)])
def test_the_answer_does_not_depend_on_the_order_of_candidates(
    seed: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, invented = small(seed)
    aim, answers = parse(text), []
    for trial in range(4):
        costs = Coarse(seed, invented.num_grains)
        given = space
        if trial:
            own = {one.name: getattr(space, one.name) for one in dataclass_fields(space) if one.init}
            given = Shuffled(**{**own, "counts": tuple(random.sample(space.counts, len(space.counts)))})
            numbers = random.sample(range(10**6), 10**5)
            monkeypatch.setattr("shoal.planner.search.search.count", lambda numbers=numbers: iter(numbers))
        search = Search(given, lambda devices, costs=costs: costs, 1)
        try:
            found = choose(search, aim, 100)
            points = curve(search, found.chosen.devices).points
            candidates = [found.chosen, found.faster, *found.alternatives, *(point.best for point in points)]
            answers.append(([c and (c.plan, c.prediction) for c in candidates], found.num_tied, found.rejected))
        except NothingFitsError as error:
            answers.append(str(error))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_each_place_comes_once_and_in_order(seed: int) -> None:
    space, invented = small(seed)
    best: dict[Degrees, float] = {}
    for candidate in fitting(seed):
        best[candidate.place] = min(candidate.seconds, best.get(candidate.place, candidate.seconds))
    costs = invented.costs()
    search = Search(space, lambda devices: costs, 1)
    for devices, places in search.by_devices.items():
        wanted = sorted((best[place], place) for place in places if place in best)
        asked = Wanted(fewest=devices, most=devices, number=len(places), each_place=True)
        assert [(c.seconds, c.place) for c in search.take(asked)] == wanted


def test_what_efficiency_means() -> None:
    space, invented = small(3)
    costs = invented.costs()
    search = Search(space, lambda devices: costs, 1)
    every = fitting(3)
    least = min(c.devices * c.seconds for c in every)
    efficient = [c for c in every if least / (c.devices * c.seconds) >= 0.7]
    assert choose(search, parse("efficiency=0.7")).chosen.devices == min(c.devices for c in efficient)
    assert choose(search, parse("widest=70%")).chosen.devices == max(c.devices for c in efficient)


@pytest.mark.parametrize("engine", [True, False])
def test_a_space_has_all_legal_degrees(engine: bool) -> None:
    found = facts(6, layers=4, heads=4)
    if not engine:
        found = replace(found, num_experts=(4, 2))
    space = Space(Plan(), found, (1, 2, 3, 4, 8), engine=engine)
    degrees = {tuple(plan.layout.model_dump(exclude={"shares"}).values()) for plan in every_plan(space)}
    legal = set()
    for layout in product(range(1, 9), repeat=5):
        data, shard, tensor, pipeline, context = layout
        world = data * shard * tensor * pipeline * context
        divides = 4 % tensor == 0 and (4 // tensor) % context == 0
        if world not in space.counts or data * shard > 6 or pipeline > 4 or not divides:
            continue
        legal.add((*layout, 1))
        if not engine and world // pipeline % 2 == 0:  # mixtures of four and of two experts
            legal.add((*layout, 2))
    assert degrees == legal


def test_without_known_cuts_there_is_no_tensor_axis() -> None:
    space = Space(Plan(), facts(6, layers=4, heads=4), (1, 2, 4), tensor=False)
    assert {plan.layout.tensor for plan in every_plan(space)} == {1}
    assert "tensor > 1" in [found.what for found in illegal(space)]


def test_where_gradients_cannot_be_divided_the_optimizer_alone_is() -> None:
    space = Space(Plan(), facts(6, layers=4, heads=4), (1, 2, 4), whole="this torch is too old")
    levels = {plan.shard.level for plan in every_plan(space) if plan.layout.shard > 1}
    assert levels == {"optimizer"}
    assert "this torch is too old" in [found.reason for found in illegal(space)]


def test_every_plan_is_one_that_the_engine_admits() -> None:
    found = facts(6, layers=4, heads=4)
    space = Space(Plan(), found, (1, 2, 4, 8))
    plans = list(every_plan(space))
    assert len(plans) == len({repr(plan) for plan in plans})
    for plan in plans[:: max(1, len(plans) // 400)]:
        again = Plan.from_mapping(plan.to_mapping(), source="test")
        assert again == plan
        check(again, found)


@pytest.mark.parametrize("share", [1, 2, 7, 12, 64, 100])
def test_microbatch_sizes(share: int) -> None:
    numbers = {-(-share // size): size for size in range(share, 0, -1)}
    assert list(microbatch_sizes(share)) == sorted(numbers.values(), reverse=True)


def test_counts_are_whole_hosts() -> None:
    cluster = gpus(4, 4)
    assert counts(cluster) == (1, 2, 3, 4, 8, 12, 16)
    assert counts(cluster, 9) == (1, 2, 3, 4, 8)
    assert counts(cluster, 3) == (1, 2, 3)


@pytest.fixture(
    scope="module", params=[False, True, 5e-3, "experts"], ids=["a copy each", "one copy", "a slow host", "experts"]
)
def real(request: pytest.FixtureRequest) -> tuple[Space, Workload, Search]:
    profile = transformer(layers=4, width=1024, ffn=2048, vocabulary=8192, positions=512, heads=8)
    work, cluster = Workload(profile, 16, 16), gpus(2, 4, gib=6)
    mapped = dict.fromkeys(range(2, 9), "shared_memory")
    facts_of_it = facts(16, layers=4, heads=8, positions=512)
    space = Space(Plan(), facts_of_it, counts(cluster), all_reduces=mapped, one_copy=request.param is True)
    if request.param == "experts":  # beside all axes, also those with which this version does not divide experts
        work = replace(work, profile=mixture(profile))
        space = Space(Plan(), replace(facts_of_it, num_experts=(4,) * 4), counts(cluster), engine=False)
    program = Program(host_seconds=float(request.param) if isinstance(request.param, float) else 0.0)
    return space, work, Search(space, costs_of(work, cluster, program), work.grain_size)


def test_bounds_of_the_step_model_are_bounds(real: tuple[Space, Workload, Search]) -> None:
    space, _, search = real
    plans, bounds, memory = list(every_plan(space)), search.bounds, search.bounds.memory
    for plan in random.Random(0).sample(plans, 600):
        at = plan.layout
        cut = at.tensor, at.pipeline, at.context, at.expert
        place = next(p for p in search.by_devices[at.world_size] if p.cut == cut)
        costs = search.bounds.costs_at(place)
        predicted = costs.predict(plan)
        almost = 1 + 1e-9
        beside = costs.beside(place.devices, place.cut.ranks > 1)
        assert (
            costs.floor(space.share(place), place.replicas, *place.cut[:3]) + beside <= predicted.step_seconds * almost
        )
        assert costs.staged(plan) <= costs.at(plan) * almost
        assert costs.at(plan) + beside <= costs.nearly(plan) * almost
        assert costs.nearly(plan) <= predicted.step_seconds * almost
        assert costs.least_bytes(plan) <= predicted.peak_bytes * almost
        way = MicrobatchSchedule(
            plan.batch.grains_per_microbatch,
            plan.memory.recompute,
            plan.tensor.sequence,
            plan.pipeline.schedule,
            plan.pipeline.stages_per_rank,
        )
        assert memory.lacks(place, way, plan) == costs.least_bytes(plan) - costs.memory_bytes
        alike = [p for p in space.places if p.cut == place.cut and space.share(p) == space.share(place)]
        for node in search.classes(alike):  # what prunes a whole class holds for each of its places
            assert node.seconds <= predicted.step_seconds * almost
            assert memory.schedule_lacks(node.layouts.divided, way) <= memory.schedule_lacks(place, way) + 1
        assert memory.schedule_lacks(place, way) <= predicted.peak_bytes - costs.memory_bytes + 1
        (node,) = search.classes([place])
        families = {family: seconds for seconds, family in bounds.families(node.layouts)}
        family = ScheduleFamily(*way[:3])
        if dict(memory.crowded(place))[family]:
            assert memory.schedule_lacks(place, way) > -1
            assert not predicted.fits
            assert family not in families
        else:
            schedules = {way: seconds for seconds, way in bounds.schedules(node.layouts, family)}
            assert families[family] + beside <= predicted.step_seconds * almost
            assert schedules[way] + beside <= predicted.step_seconds * almost


def test_the_data_axis_alone(real: tuple[Space, Workload, Search]) -> None:
    """Among plans of replicas alone the search finds the best of all that there are."""
    space, work, search = real
    alone = replace(space, data_only=True)
    plans = list(every_plan(alone))
    assert {(plan.layout.world_size, plan.layout.data) for plan in plans} == {(n, n) for n in space.counts}
    predictions = [search.costs(plan.layout.world_size).predict(plan) for plan in plans]
    best = min(one.step_seconds for one in predictions if one.fits)
    found = choose(Search(alone, search.costs, work.grain_size), parse("fastest"))
    fastest = found.faster or found.chosen
    assert fastest.plan.layout.data == fastest.plan.layout.world_size
    assert fastest.seconds == pytest.approx(best)


def test_the_bounds_of_one_rank_know_that_it_may_have_all_cores() -> None:
    profile = transformer(layers=2, width=256, ffn=512, vocabulary=512, positions=64, heads=4)
    one = gpus(1, 2)
    twice = {dtype: 2 * flops for dtype, flops in one.device.flops.items()}
    fast = replace(one.device, flops=twice, memory_bytes_per_second=2 * one.device.memory_bytes_per_second)
    cluster = replace(one, alternatives={1: fast})
    work = Workload(profile, 8, 8)
    space = Space(Plan(), facts(8, layers=2, heads=4, positions=64), counts(cluster))
    search = Search(space, costs_of(work, cluster), work.grain_size)
    for place in (p for places in search.by_devices.values() for p in places):
        for least, family in search.bounds.families(search.classes([place])[0].layouts):
            for way in ways(space, place, family):
                for plan in space.plans(place, way):
                    costs = search.costs(place.devices)
                    beside = costs.beside(place.devices, place.cut.ranks > 1)
                    assert least + beside <= costs.predict(plan).step_seconds * (1 + 1e-9), (place, way)
    every = [search.costs(n).predict(plan) for n in (1, 2) for plan in every_plan(replace(space, counts=(n,)))]
    best = min(p.step_seconds for p in every if p.fits)
    assert search.take(Wanted())[0].seconds == pytest.approx(best, rel=1e-12)


def test_the_real_search_is_exact(real: tuple[Space, Workload, Search]) -> None:
    space, _, search = real
    on_two = replace(space, counts=(2,))
    every = [search.costs(2).predict(plan) for plan in every_plan(on_two)]
    best = min(p.step_seconds for p in every if p.fits)
    (found,) = search.take(Wanted(fewest=2, most=2))
    assert found.seconds == pytest.approx(best, rel=1e-12)


def test_a_prediction_does_not_depend_on_those_before(real: tuple[Space, Workload, Search]) -> None:
    space, work, search = real
    plans = list(every_plan(space))
    sampled = random.Random(1).sample(range(len(plans) - 3), 12)
    for plan in (plan for place in sampled for plan in plans[place : place + 3]):  # neighbours are of one family
        num_devices = plan.layout.world_size
        alone = costs_of(work, gpus(2, 4, gib=6), search.costs(1)._predictor.program)(num_devices).predict(plan)
        assert search.costs(num_devices).predict(plan) == alone


def test_with_more_memory_it_is_the_search_of_such_devices(real: tuple[Space, Workload, Search]) -> None:
    space, work, _ = real
    more, cluster = 1 << 30, gpus(2, 4, gib=1)
    search = Search(space, costs_of(work, cluster), work.grain_size)
    larger = replace(cluster, device=replace(cluster.device, memory_bytes=cluster.device.memory_bytes + more))
    asked = Wanted(fewest=4, most=4, number=40)
    before = search.take(asked)
    found = search.with_more_memory(more).take(asked)
    assert found == Search(space, costs_of(work, larger), 1).take(asked)
    assert found != before
    assert before == search.take(asked)


def test_a_deadline_that_cannot_be_met_says_what_can(real: tuple[Space, Workload, Search]) -> None:
    with pytest.raises(NothingFitsError, match=r"whole job.*--aim deadline="):
        choose(real[2], parse("deadline=0.001s"), 1000)
    with pytest.raises(PlanError, match="length of this job"):
        choose(real[2], parse("deadline=1h"), None)


def test_nothing_fits_says_by_how_much() -> None:
    profile = transformer(layers=4, width=1024, ffn=2048, vocabulary=8192, positions=512, heads=8)
    work, cluster = Workload(profile, 4, 4), gpus(1, 1, gib=1.2)
    space = Space(Plan(), facts(4, layers=4, heads=8, positions=512), counts(cluster))
    search = Search(space, costs_of(work, cluster), work.grain_size)
    least = min(search.costs(1).predict(plan).missing_bytes for plan in every_plan(space))
    with pytest.raises(NothingFitsError, match=r"needs \d+\.\d [MG]iB more") as error:
        choose(search, Aim())
    amount = float(str(error.value).split("needs ")[1].split(" ")[0])
    unit = 1 << (30 if "GiB more" in str(error.value) else 20)
    assert amount == pytest.approx(least / unit, abs=0.06)


def test_a_model_without_heads_and_layers_is_divided_by_data_alone() -> None:
    space = Space(Plan(), ModelFacts(8, 4), (1, 2, 4))
    assert {tuple(cut) for cut in space.cuts} == {(1, 1, 1, 1)}
    assert [i.what for i in illegal(space)] == ["context > 1", "pipeline > 1"]


def test_grains_stay_apart_where_they_must() -> None:
    space = Space(Plan(), ModelFacts(8, 4), (1, 2), max_grains=1)
    assert {plan.batch.grains_per_microbatch for plan in every_plan(space)} == {1}


def test_a_plan_travels_with_its_prediction(
    real: tuple[Space, Workload, Search], tmp_path_factory: pytest.TempPathFactory
) -> None:
    chosen = choose(real[2], Aim()).chosen
    document = chosen.plan.to_mapping()
    document["prediction"] = section(chosen.prediction, {"cluster": "two hosts", "factors": {}})
    plan = Plan.from_mapping(document, source="test")
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(plan_text(plan))
    assert read_plan(path) == plan
    assert sum(read_plan(path).prediction["terms"].values()) == pytest.approx(chosen.seconds)


def test_limits() -> None:
    assert Limit().allows(8, 1e9)
    assert not Limit(seconds=1.0).allows(1, 1.1)
    assert not Limit(device_seconds=4.0).allows(5, 1.0)


def test_places_in_words() -> None:
    space = Space(Plan(), facts(8, layers=4, heads=4), (1, 2, 4))
    assert {str(place) for place in space.places if place.devices == 1} == {"one device"}
    assert any(str(Degrees(2, cut)) == "data x shard 2, tensor 2" for cut in space.cuts)


def test_ranks_exchange_by_what_is_fastest_among_so_many() -> None:
    space = Space(Plan(), facts(8, layers=4, heads=4), (1, 2, 3, 4), all_reduces={2: "shared_memory", 3: "ring"})

    def chosen(replicas: int, shard: int = 1, level: Level = "parameters", tensor: int = 1) -> str:
        return space.plan(
            Degrees(replicas, ModelDegrees(tensor)), MicrobatchSchedule(1), shard, level
        ).collectives.all_reduce

    assert chosen(2) == chosen(2, 2, "optimizer") == chosen(2, 2) == chosen(1, tensor=2) == "shared_memory"
    assert chosen(3) == chosen(3, 3, "optimizer") == "ring"
    assert chosen(1) == chosen(3, 3) == chosen(4) == "native"  # fully_shard has no ring
    # By its own ranks, whatever the replicas.
    assert [chosen(replicas, tensor=3) for replicas in (1, 2, 3)] == ["native", "native", "ring"]
    assert chosen(3, tensor=2) == "shared_memory"
    exact = replace(space, base=Plan().with_sections(execution={"exact": True}))
    assert exact.plan(Degrees(2, ModelDegrees()), MicrobatchSchedule(1)).collectives.all_reduce == "native"


def test_ranks_that_sum_through_shared_memory_have_one_copy() -> None:
    mapped = {2: "shared_memory", 3: "ring", 4: "shared_memory"}
    space = Space(Plan(), facts(8, layers=4, heads=4), (1, 2, 3, 4), all_reduces=mapped, one_copy=True)

    def shared(replicas: int, shard: int = 1, tensor: int = 1, space: Space = space) -> bool:
        degrees = Degrees(replicas, ModelDegrees(tensor))
        return space.plan(degrees, MicrobatchSchedule(1, "full"), shard, "optimizer").memory.shared

    assert [shared(replicas) for replicas in (1, 2, 3, 4)] == [False, True, False, True]
    assert not shared(2, 2)
    assert not shared(4, 2)
    assert not shared(2, tensor=2)
    assert not shared(2, space=replace(space, one_copy=False))
    compressed = Plan().with_sections(collectives={"compression": "int8"})
    assert not shared(2, space=replace(space, base=compressed))
    assert not space.refusal(space.plan(Degrees(2, ModelDegrees()), MicrobatchSchedule(1)))


@pytest.mark.parametrize("one_copy", [False, True])
@pytest.mark.parametrize("name", ["fastest", "widest"])
def test_what_fits_of_one_number_of_replicas_is_not_taken_from_another(name: str, one_copy: bool) -> None:
    """Of 8 grains 5, 6 and 7 replicas leave a rank 2, but each maps the buckets of all others: 7 do not fit."""
    work, aim = made.work(), Aim(name)
    mapped = dict.fromkeys((5, 6, 7), "shared_memory")
    space = Space(Plan(), ModelFacts(8, 1), (5, 6, 7), all_reduces=mapped, one_copy=one_copy)
    cores = replace(made.cluster(7, device=replace(made.DEVICE, kind="cpu")), memory_margin=0.0)
    of_six = space.plan(Degrees(6, ModelDegrees()), MicrobatchSchedule(1, "full"))
    peak = costs_of(work, cores)(6).predict(of_six).peak_bytes
    costs = costs_of(work, replace(cores, device=replace(cores.device, memory_bytes=int(peak) + 1)))
    every = [(plan.layout, costs(plan.layout.world_size).predict(plan)) for plan in every_plan(space)]
    whole = {layout.data for layout, found in every if found.fits and layout.shard == 1}
    assert whole == {5, 6}
    wanted = sorted(aim.key(layout.world_size, found.step_seconds) for layout, found in every if found.fits)
    found = Search(space, costs, work.grain_size).take(Wanted(aim, number=NEVER))
    assert [aim.key(c.devices, c.seconds) for c in found] == wanted
