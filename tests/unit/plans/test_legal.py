"""Bad layouts are refused all at once, each with the nearest legal values; what has no effect warns."""

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plans.checking import check

from shoal.errors import PlanError, SettingWarning
from shoal.plans import AXES, Layout, Plan
from shoal.plans.legal import (
    CONFLICTS,
    ModelFacts,
    World,
    around,
    conflicts,
    degrees_for,
    fits,
    idle,
    nearest_worlds,
    neighbours,
    notes,
    num_microbatches,
    other_world,
)
from shoal.plans.rules import WITHOUT_EFFECT, value

BLOCKS = tuple(f"blocks.{i}" for i in range(6))
GPT = ModelFacts(
    num_grains=8,
    grain_size=4,
    blocks=BLOCKS,
    cuts=("positions", *BLOCKS, "norm", "head"),
    num_heads=4,
    num_kv_heads=4,
    widths=(32, 128),
    sequence=64,
    num_experts=(8, 8),
)


def of(**sections: dict[str, Any]) -> Plan:
    return Plan().with_sections(**sections)


def refused(plan: Plan, facts: ModelFacts | None = GPT, world: World | None = None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check(plan, facts, world)
    return caught.value


def piped(pipeline: int, grains: int = 1, **section: Any) -> Plan:
    return of(layout={"pipeline": pipeline}, pipeline=section, batch={"grains_per_microbatch": grains})


@pytest.mark.parametrize(
    ("plan", "given", "conflict", "remedy"),
    [
        (
            of(layout={"data": 3, "shard": 4}, shard={"level": "optimizer"}),
            "12 data ranks for a job of grains=8",
            "at most as many data ranks (data x shard) as grains",
            "use 1 to 8 (evenly: 1, 2, 4, 8) data ranks; with layout.shard = 4, layout.data = 2 at most, "
            "or Job(grains=12) (which changes the run)",
        ),
        (
            of(layout={"tensor": 256}),
            "layout.tensor = 256",
            "the widest layer has 128 rows or columns, and attention 4 heads",
            "layout.tensor = 128 at most; 4 at most where attention is to be divided too",
        ),
        (
            piped(8),
            "layout.pipeline = 8",
            "8 stages for a model of 6 layers (blocks.0 to blocks.5): a stage has at least one",
            "layout.pipeline = 6 at most",
        ),
        (
            piped(4, schedule="interleaved_1f1b", stages_per_rank=2),
            "layout.pipeline = 4, pipeline.stages_per_rank = 2",
            "8 stages for a model of 6 layers",
            "layout.pipeline = 3, or pipeline.stages_per_rank = 1 at most",
        ),
        (
            of(layout={"pipeline": 8}, pipeline={"schedule": "interleaved_1f1b", "stages_per_rank": 7}),
            "layout.pipeline = 8, pipeline.stages_per_rank = 7",
            "56 stages",
            "layout.pipeline = 1 (no pipeline) at most",
        ),
        (
            piped(3, split=("blocks.2",)),
            'pipeline.split = ["blocks.2"] for 3 stages',
            "2 names, not 1",
            'give 2 names, for example ["blocks.2", "blocks.4"], or layout.pipeline = 2',
        ),
        (
            piped(2, split=("blok.3",)),
            'pipeline.split = ["blok.3"]',
            "no stage can begin with 'blok.3'",
            "did you mean 'blocks.3'",
        ),
        (
            piped(3, split=("blocks.4", "blocks.2")),
            'pipeline.split = ["blocks.4", "blocks.2"]',
            "stages follow each other",
            'split = ["blocks.2", "blocks.4"]',
        ),
        (piped(3, split=("blocks.4", "blocks.4")), '"blocks.4", "blocks.4"', "another one", 'split = ["blocks.4"]'),
        (
            piped(4, grains=4),
            'pipeline.schedule = "1f1b" with 2 microbatches a step (8 grains over 1 data ranks, 4 a microbatch)',
            "a microbatch for every rank of layout.pipeline = 4",
            'batch.grains_per_microbatch = 2, or pipeline.schedule = "gpipe"',
        ),
        (
            of(layout={"pipeline": 3, "data": 4}, batch={"grains_per_microbatch": 1}),
            "with 2 microbatches",
            "layout.pipeline = 3",
            'Job(grains=12) (which changes the run), or pipeline.schedule = "gpipe"',
        ),
        (
            of(layout={"context": 128}),
            "layout.context = 128",
            "the longest has 64 tokens",
            "layout.context = 4",
        ),
        (
            of(layout={"context": 5}),
            "layout.context = 5",
            "each rank of a context axis attends for at least one head, of 4",
            "layout.context = 4",
        ),
        (
            of(layout={"data": 2, "shard": 3, "expert": 4}),
            "layout.expert = 4, layout.data = 2, layout.shard = 3",
            "data x shard x context x tensor = 6",
            "layout.data = 4, or layout.expert = 3 or 6",
        ),
        (
            of(layout={"data": 3, "expert": 3}),
            "layout.expert = 3",
            "the model has 8 in a layer",
            "layout.expert = 1",
        ),
        (
            of(layout={"context": 4, "tensor": 2}),
            "layout.context = 4",
            "at least one head, of 2 (4 over layout.tensor = 2)",
            "layout.context = 2",
        ),
    ],
)
def test_a_layout_that_does_not_fit(plan: Plan, given: str, conflict: str, remedy: str) -> None:
    error = refused(plan)
    assert given in error.given
    assert conflict in error.conflict
    assert remedy in error.remedy


def test_interleaved_rounds_are_equal() -> None:
    plan = piped(3, schedule="interleaved_1f1b", stages_per_rank=2)
    assert check(plan, GPT) == []  # 8 in two rounds of 4
    error = refused(plan, replace(GPT, num_grains=7))
    assert "with 7 microbatches" in error.given
    assert "equal rounds of at least layout.pipeline = 3" in error.conflict
    assert error.remedy.startswith("batch.grains_per_microbatch = 2, ")


def test_a_world_of_another_size() -> None:
    plan = of(layout={"data": 2, "tensor": 4})
    error = refused(plan, None, World(16, "WORLD_SIZE=16"))
    assert error.given == "WORLD_SIZE=16 with a plan whose layout is data = 2, tensor = 4"
    assert error.conflict == "the plan's degrees make a world of 8"
    assert error.remedy == "start 8 processes, or write layout.data = 4, or layout.tensor = 8"
    assert refused(plan, None, World(9, "--devices 9")).remedy == "start 8 processes, or 12 with another layout.data"
    assert refused(plan, None, World(3, "--devices 3")).remedy == "start 8 processes, or 4 with another layout.data"
    assert "data = 1" in refused(Plan(), None, World(2, "--devices 2")).given
    assert check(plan, None, World(8, "--devices 8")) == []


def test_a_model_without_experts_divides_none() -> None:
    error = refused(of(layout={"data": 2, "expert": 2}), replace(GPT, num_experts=()))
    assert (error.given, error.remedy) == ("layout.expert = 2", "layout.expert = 1")
    assert "no mixture of experts" in error.conflict


def test_everything_is_told_at_once() -> None:
    plan = of(
        layout={"data": 16, "tensor": 256, "pipeline": 8, "context": 5},
        pipeline={"schedule": "interleaved_1f1b"},
        execution={"exact": True},
    )
    error = refused(plan, GPT, World(2, "--devices 2"))
    keys = ["layout", "layout.data", "layout.tensor", "layout.context", "layout.pipeline", "pipeline.stages_per_rank"]
    for key in keys:
        assert f"{key}: " in error.conflict
        assert any(line.startswith((f"{key}: ", f"{key} = ")) for line in error.remedy.splitlines())
    assert len(error.conflict.splitlines()) == len(error.remedy.splitlines()) == 1 + len(conflicts(plan, GPT))


def test_what_is_not_known_is_not_judged() -> None:
    unknown = ModelFacts(num_grains=8, grain_size=4)
    assert unknown.most_stages is None
    plan = of(
        layout={"tensor": 4096, "pipeline": 2},
        pipeline={"split": ["anything"]},
        batch={"grains_per_microbatch": 1},
    )
    assert check(plan, unknown) == []
    assert check(of(layout={"data": 99})) == []


def test_a_first_stage_is_not_named() -> None:
    facts = replace(GPT, cuts=BLOCKS[1:])
    assert "the first stage has it already" in refused(piped(2, split=("blocks.0",)), facts).remedy


def test_more_places_than_heads_are_noted() -> None:
    assert check(of(layout={"tensor": 8}), GPT) == [
        "layout.tensor = 8: attention has 4 heads and stays whole on every rank; "
        "layout.tensor = 4 or less divides it too"
    ]
    assert check(of(layout={"tensor": 4}), GPT) == []


def test_a_pipeline_of_one_microbatch_is_noted() -> None:
    plan = piped(2, grains=8, schedule="gpipe")
    assert "smaller batch.grains_per_microbatch" in next(notes(plan, GPT))
    assert list(notes(piped(2), GPT)) == []


# ------------------------------------------------------------------------------------------------------- tables

SHARED_SUMS: dict[str, Any] = {"collectives": {"all_reduce": "shared_memory"}}
EXCLUDED = (
    [
        (
            of(layout={axis: 2}, execution={"exact": True}, batch={"grains_per_microbatch": 1}),
            f"layout.{axis} = 2, execution.exact = true",
            f"layout.{axis} = 1",
        )
        for axis in ("tensor", "pipeline", "context")
    ]
    + [
        (
            of(layout={"data": 2, "expert": 2}, execution={"compile": "default"}),
            'execution.compile = "default", layout.expert = 2',
            'execution.compile = "none", or layout.expert = 1',
        ),
        (
            of(layout={"data": 2, "expert": 2}, collectives={"compression": "bfloat16"}),
            'collectives.compression = "bfloat16", layout.expert = 2',
            "layout.expert = 1",
        ),
        (
            of(layout={"tensor": 2, "expert": 2}, tensor={"sequence": True}),
            "layout.expert = 2, tensor.sequence = true",
            "tensor.sequence = false, or layout.expert = 1",
        ),
    ]
    + [
        (
            of(layout={"shard": 2}, shard={"level": level}, execution={"exact": True}),
            f'shard.level = "{level}", layout.shard = 2, execution.exact = true',
            'shard.level = "optimizer"',
        )
        for level in ("gradients", "parameters")
    ]
)
EXCLUDED += [
    (
        of(layout={"data": 2, "shares": [3, 2, 1]}, batch={"grains_per_microbatch": 1}),
        "layout.shares = [3, 2, 1], layout.data = 2",
        "layout.shares with a number for each of these ranks",
    ),
    (
        of(layout={"shard": 2}, shard={"level": "optimizer", "sizes": [3, 2, 1]}),
        "shard.sizes = [3, 2, 1], layout.shard = 2",
        "shard.sizes with a number for each of these ranks",
    ),
    (
        of(layout={"shard": 2}, shard={"level": "parameters", "sizes": [3, 1]}),
        'shard.sizes = [3, 1], shard.level = "parameters"',
        'shard.level = "optimizer", or no shard.sizes',
    ),
    (
        of(layout={"data": 2}, collectives={"compression": "int8"}, execution={"exact": True}),
        'collectives.compression = "int8", execution.exact = true',
        'collectives.compression = "none", or execution.exact = false',
    ),
    (
        of(layout={"shard": 2}, collectives={"compression": "topk"}),
        'collectives.compression = "topk", shard.level = "parameters", layout.shard = 2',
        'shard.level = "optimizer"',
    ),
    *(
        (
            of(
                layout={"data": 2, axis: 2},
                collectives={"compression": "bfloat16"},
                batch={"grains_per_microbatch": 1},
            ),
            f'collectives.compression = "bfloat16", layout.{axis} = 2',
            f"layout.{axis} = 1" + (" and a larger data axis" if axis != "expert" else ""),
        )
        for axis in ("tensor", "pipeline", "context")
    ),
    (
        of(layout={"data": 2}, collectives={"compression": "powersgd"}, precision={"reduce": "bfloat16"}),
        'collectives.compression = "powersgd", precision.reduce = "bfloat16"',
        'precision.reduce = "float32"',
    ),
    (
        of(layout={"data": 16, "shard": 2}, shard={"level": "optimizer"}, collectives={"compression": "int8"}),
        'collectives.compression = "int8", layout.data = 16, layout.shard = 2',
        "at most 31 data ranks",
    ),
    (
        of(layout={"data": 2}, collectives={"all_reduce": "ring"}, execution={"exact": True}),
        'collectives.all_reduce = "ring", execution.exact = true',
        'collectives.all_reduce = "native" or "shared_memory", or execution.exact = false',
    ),
    (
        of(execution={"channels_last": True, "exact": True}),
        "execution.channels_last = true, execution.exact = true",
        "execution.channels_last = false, or execution.exact = false",
    ),
    (
        of(layout={"shard": 2}, collectives={"all_reduce": "ring"}),
        'collectives.all_reduce = "ring", shard.level = "parameters", layout.shard = 2',
        'collectives.all_reduce = "native" or "shared_memory", or shard.level = "optimizer"',
    ),
    (
        of(layout={"shard": 2}, shard={"level": "optimizer", "offload": True}),
        'shard.offload = true, shard.level = "optimizer"',
        "shard.offload = false",
    ),
    (
        of(
            layout={"pipeline": 2},
            pipeline={"schedule": "zero_bubble"},
            batch={"grains_per_microbatch": 1},
            execution={"compile": "default"},
        ),
        'execution.compile = "default", pipeline.schedule = "zero_bubble"',
        'execution.compile = "none", or pipeline.schedule = "1f1b"',
    ),
    (
        of(layout={"tensor": 2, "context": 2}, tensor={"sequence": True}),
        "tensor.sequence = true, layout.tensor = 2, layout.context = 2",
        "tensor.sequence = false, or layout.context = 1",
    ),
    (piped(2, schedule="interleaved_1f1b"), "pipeline.stages_per_rank = 1", "pipeline.stages_per_rank = 2 or more"),
    (piped(2, schedule="1f1b", stages_per_rank=2), "pipeline.stages_per_rank = 2", 'schedule = "interleaved_1f1b"'),
    (piped(2, schedule="zero_bubble", stages_per_rank=2), "stages_per_rank = 2", "pipeline.stages_per_rank = 1"),
    (
        of(layout={"tensor": 2}, tensor={"sequence": True}, execution={"compile": "default"}),
        'execution.compile = "default", tensor.sequence = true',
        'execution.compile = "none", or tensor.sequence = false',
    ),
    (
        of(layout={"context": 2}, execution={"compile": "default"}),
        'execution.compile = "default", layout.context = 2',
        'execution.compile = "none", or layout.context = 1',
    ),
    (
        of(memory={"recompute": "selective"}, execution={"compile": "default"}),
        'execution.compile = "default", memory.recompute = "selective"',
        'memory.recompute = "none" or "full"',
    ),
    (
        of(execution={"compile": "max-autotune", "exact": True}),
        'execution.compile = "max-autotune", execution.exact = true',
        'execution.compile = "default", or execution.exact = false',
    ),
    (
        of(layout={"data": 2}, memory={"shared": True}),
        'memory.shared = true, collectives.all_reduce = "native"',
        'collectives.all_reduce = "shared_memory", or memory.shared = false',
    ),
    *(
        (
            of(layout={"data": 2, axis: 2}, memory={"shared": True}, **SHARED_SUMS, **more),
            f"memory.shared = true, layout.{axis} = 2",
            f"layout.{axis} = 1{' and a larger layout.data' if axis != 'expert' else ''}, or memory.shared = false",
        )
        for axis, more in (
            ("shard", {"shard": {"level": "optimizer"}}),
            ("tensor", {}),
            ("pipeline", {"pipeline": {"schedule": "gpipe"}}),
            ("context", {}),
            ("expert", {}),
        )
    ),
    (
        of(
            layout={"data": 2},
            memory={"shared": True},
            collectives={"all_reduce": "shared_memory", "compression": "bfloat16"},
        ),
        'memory.shared = true, collectives.compression = "bfloat16"',
        'collectives.compression = "none", or memory.shared = false',
    ),
    (
        of(precision={"products": "float8_rows"}),
        'precision.compute = "float32", precision.products = "float8_rows"',
        'precision.compute = "bfloat16", or precision.products = "same"',
    ),
    (
        of(precision={"parameters": "bfloat16", "compute": "bfloat16", "products": "float8_blocks"}),
        'precision.parameters = "bfloat16", precision.products = "float8_blocks"',
        'precision.parameters = "float32", or precision.products = "same"',
    ),
    (
        of(
            layout={"tensor": 2},
            execution={"compile": "default"},
            precision={"compute": "bfloat16", "products": "float8_rows"},
        ),
        'execution.compile = "default", precision.products = "float8_rows", layout.tensor = 2',
        'execution.compile = "none", layout.tensor = 1, or precision.products = "same"',
    ),
]


@pytest.mark.parametrize(("plan", "given", "remedy"), EXCLUDED)
def test_settings_that_exclude_each_other(plan: Plan, given: str, remedy: str) -> None:
    fits = plan.layout.divides_grains <= GPT.num_grains
    for facts in (None, GPT) if fits else (None,):
        error = refused(plan, facts)
        assert given in error.given
        assert remedy in error.remedy
        assert error.remedy.count("\n") == 0  # this alone


def test_each_row_is_tried() -> None:
    assert [rule for rule in CONFLICTS if not any(rule.applies(plan) for plan, _, _ in EXCLUDED)] == []
    for rule in CONFLICTS:
        assert not rule.applies(Plan())
        for key in rule.keys:
            value(Plan(), key)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (of(shard={"level": "gradients"}), 'shard.level = "gradients": no effect, since layout.shard is 1'),
        (of(layout={"data": 2}, shard={"offload": True}), "shard.offload = true: no effect"),
        (of(tensor={"sequence": True}), "tensor.sequence = true: no effect, since layout.tensor is 1"),
        (of(pipeline={"schedule": "gpipe"}), 'pipeline.schedule = "gpipe": no effect, since layout.pipeline is 1'),
        (
            of(pipeline={"stages_per_rank": 2, "split": ["a"]}),
            'pipeline.stages_per_rank = 2, pipeline.split = ["a"]: no effect',
        ),
        (of(collectives={"compression": "int8"}), 'collectives.compression = "int8": no effect'),
        (
            of(layout={"data": 2}, collectives={"compression": "topk"}, compression={"block": 64}),
            'compression.block = 64: no effect, since it belongs to collectives.compression = "int8"',
        ),
        (of(layout={"data": 2}, compression={"guard_lost": 0.9}), "compression.guard_lost = 0.9: no effect"),
        (
            of(layout={"data": 2}, collectives={"compression": "float16"}, compression={"feedback": False}),
            "compression.feedback = false: no effect",
        ),
        (
            of(
                layout={"data": 2},
                collectives={"compression": "int8"},
                compression={"guard_every": 0, "guard_lost": 0.9},
            ),
            "compression.guard_lost = 0.9: no effect, since compression.guard_every is 0",
        ),
    ],
)
def test_what_has_no_effect_warns(plan: Plan, text: str) -> None:
    with pytest.warns(SettingWarning) as caught:
        check(plan, GPT)
    assert len(caught) == 1
    assert text in str(caught[0].message)


def test_what_has_an_effect_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Plan())
        check(of(layout={"shard": 2}, shard={"level": "gradients", "offload": True}, memory={"recompute": "full"}))
        check(piped(2, schedule="zero_bubble", split=("blocks.3",)), GPT)
        check(piped(2, schedule="gpipe", stages_per_rank=2, grains=4), GPT)
        check(of(layout={"data": 8, "shard": 1}, execution={"exact": True}), GPT)
    assert all(value(Plan(), key) is not None for row in WITHOUT_EFFECT for key in row.keys)
    assert list(idle(Plan())) == []


def test_a_tensor_axis_alone_sums_through_shared_memory() -> None:
    plan = of(layout={"tensor": 2}, collectives={"all_reduce": "shared_memory"})
    assert list(idle(plan)) == []
    assert "no effect" in next(idle(plan.with_sections(collectives={"all_reduce": "ring"})))


# ------------------------------------------------------------------------------------------------------ numbers

degrees = st.integers(1, 6)
layouts = st.builds(Layout, **dict.fromkeys(AXES, degrees))


@given(st.integers(0, 50), st.sets(st.integers(0, 50), min_size=1))
def test_neighbours_are_legal_and_nothing_legal_is_nearer(wanted: int, legal: set[int]) -> None:
    found = neighbours(wanted, legal)
    assert found
    assert set(found) <= legal
    assert around(wanted, legal) == " or ".join(map(str, found))
    if wanted in legal:
        assert found == [wanted]
        return
    assert not any(min(found) < v < wanted for v in legal if min(found) < wanted)
    assert not any(wanted < v < max(found) for v in legal if max(found) > wanted)


@given(layouts, st.integers(1, 600))
def test_each_way_out_makes_the_world(layout: Layout, world: int) -> None:
    for way in degrees_for(layout, world):
        axis, degree = way.removeprefix("layout.").split(" = ")
        changed = {a: layout.degree(a) for a in AXES} | {axis: int(degree)}
        assert math.prod(changed.values()) == world
    for size in nearest_worlds(layout, world):
        assert size % (layout.world_size // layout.data) == 0
        assert size == world or size < world or size - world < layout.world_size


@given(layouts, st.integers(1, 600))
def test_a_world_is_refused_exactly_where_it_is_another(layout: Layout, world: int) -> None:
    plan = of(layout={axis: layout.degree(axis) for axis in AXES})
    found = other_world(plan, World(world, "so many"))
    assert bool(found) == (layout.world_size != world)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8), st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]))
def test_the_microbatches_that_are_proposed_are_legal(grains: int, pipeline: int, per: int, schedule: str) -> None:
    facts = ModelFacts(num_grains=grains, grain_size=1)
    stages = 2 if schedule == "interleaved_1f1b" else 1
    plan = piped(pipeline, grains=per, schedule=schedule, stages_per_rank=stages)
    found = [c for c in conflicts(plan, facts) if c.key == "pipeline.schedule"]
    (count,) = num_microbatches(plan, facts)
    assert count == -(-grains // per)
    assert bool(found) == (pipeline > 1 and not fits(schedule, pipeline, count))
    for text in [c.remedy for c in found if "batch." in c.remedy]:
        proposed = text.split(" = ")[1].split(",")[0]
        for number in proposed.split(" or "):
            assert fits(schedule, pipeline, -(-grains // int(number)))


def test_uneven_shares_make_two_numbers_of_microbatches() -> None:
    assert num_microbatches(of(layout={"data": 3}, batch={"grains_per_microbatch": 1}), GPT) == (2, 3)
    assert num_microbatches(of(layout={"data": 3}), GPT) == (1,)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (of(shard={"reduce": "last_microbatch"}), "layout.shard is 1"),
        (of(layout={"shard": 2}, shard={"level": "optimizer", "reduce": "last_microbatch"}), "summed with the last"),
        (of(layout={"shard": 2}, shard={"reduce": "last_microbatch"}), "one microbatch a step"),
    ],
)
def test_a_reduction_that_comes_last_anyway_warns(plan: Plan, reason: str) -> None:
    with pytest.warns(SettingWarning, match=reason):
        check(plan, GPT)


def test_a_late_reduction_of_several_microbatches_does_not_warn() -> None:
    check(of(layout={"shard": 2}, shard={"reduce": "last_microbatch"}, batch={"grains_per_microbatch": 1}), GPT)


def test_grains_that_leave_a_pipeline_waiting_are_named_first_with_the_number_that_does_not() -> None:
    plan = Plan().with_sections(layout={"pipeline": 8, "data": 2}, batch={"grains_per_microbatch": 1})
    first = next(notes(plan, ModelFacts(8, 256)))
    assert first == (
        "8 grains of 256 samples leave a rank 4 microbatches, and 8 stages wait 64% of a step; "
        "Job(grains=64) would bring that to 18% (which changes the run)"
    )
    assert not list(notes(plan, ModelFacts(64, 32))), "they wait little"
    assert not list(notes(plan, ModelFacts(8, 1))), "there is no smaller grain"
