"""A plan is complete, frozen and exact about its keys; every mistake is told at once."""

from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from shoal.errors import PlanError
from shoal.plans import Layout, Plan


def mistakes(document: dict[str, Any]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping({"schema": 1, **document}, source="p.toml")
    return caught.value


def test_every_mistake_is_told_at_once_with_its_path() -> None:
    error = mistakes(
        {
            "layout": {"dta": 2, "shard": 0, "tensor": True},
            "precison": {},
            "execution": 3,
            "collectives": {"all_reduce": "rinf"},
            "batch": {"grains_per_microbatch": "2"},
        }
    )
    paths = ["layout.dta", "layout.shard", "layout.tensor", "precison", "execution", "collectives.all_reduce"]
    for path in [*paths, "batch.grains_per_microbatch"]:
        for beat in (error.given, error.conflict, error.remedy):
            assert path in beat, path
    assert error.given.startswith("in p.toml: ")
    assert len(error.conflict.splitlines()) == 7


@pytest.mark.parametrize(
    ("document", "hint"),
    [
        ({"layout": {"dta": 2}}, "did you mean 'data'?"),
        ({"precison": {}}, "did you mean 'precision'?"),
        ({"collectives": {"all_reduce": "rinf"}}, "did you mean 'ring'?"),
        ({"collectives": {"all_reduce": "natives"}}, "did you mean 'native'?"),
        ({"precision": {"loss_scale": "dynamc"}}, "did you mean 'dynamic'?"),
        ({"execution": {"compile": "max_autotune"}}, "did you mean 'max-autotune'?"),
    ],
)
def test_the_nearest_name_is_offered(document: dict[str, Any], hint: str) -> None:
    assert hint in mistakes(document).remedy


@pytest.mark.parametrize(
    ("document", "remedy"),
    [
        (
            {"shard": {"level": "zero3"}},
            "shard.level: write one of optimizer, gradients, parameters",
        ),
        ({"shard": {"level": 3}}, "shard.level: write one of optimizer, gradients, parameters"),
        ({"layout": {"data": 0}}, "layout.data: write 1 or more"),
        ({"layout": {"data": "2"}}, "layout.data: write a whole number, without quotes or a point"),
        ({"layout": {"data": 2.5}}, "layout.data: write a whole number, without quotes or a point"),
        ({"compression": {"density": 0.0}}, "compression.density: write more than 0.0"),
        ({"compression": {"density": 2.0}}, "compression.density: write 1.0 or less"),
        ({"compression": {"density": "a"}}, "compression.density: write a number, without quotes"),
        ({"execution": {"exact": 1}}, "execution.exact: write true or false"),
        ({"execution": 3}, "execution: write a table with any of exact, channels_last, cuda_graph, compile"),
        ({"pipeline": {"split": "a"}}, "pipeline.split: write a list in brackets"),
        ({"pipeline": {"split": [1]}}, "pipeline.split.0: write a text in quotes"),
        ({"prediction": 1}, "prediction: write a table"),
        ({"schema": 2}, "schema: write 1, or read the plan with the version of shoal that wrote it"),
        (
            {"precision": {"loss_scale": "off"}},
            "precision.loss_scale: write one of none, dynamic; or write a number, without quotes",
        ),
        (
            {"precision": {"loss_scale": -1.0}},
            "precision.loss_scale: write one of none, dynamic; or write more than 0.0",
        ),
    ],
)
def test_a_refused_value_comes_with_what_to_write(document: dict[str, Any], remedy: str) -> None:
    assert mistakes(document).remedy == remedy


def test_an_unknown_key_lists_the_known_ones() -> None:
    error = mistakes({"memory": {"zzz": 1}})
    assert "memory.zzz: unknown key" in error.conflict
    assert "use one of recompute" in error.remedy
    assert "did you mean" not in error.remedy


@pytest.mark.parametrize(
    "document",
    [
        {"schema": 2},
        {"schema": "1"},
        {"layout": {"data": 2.0}},
        {"layout": [1]},
        {"execution": {"exact": 1}},
        {"execution": {"exact": "true"}},
        {"shard": {"level": "zero3"}},
        {"pipeline": {"split": "blocks.6"}},
        {"pipeline": {"split": [6]}},
        {"precision": {"loss_scale": 0}},
        {"precision": {"loss_scale": -2.0}},
        {"data": {"workers": -1}},
        {"prediction": 3},
    ],
)
def test_wrong_types_and_values_are_refused(document: dict[str, Any]) -> None:
    section, content = next(iter(document.items()))
    path = f"{section}.{next(iter(content))}" if isinstance(content, dict) else section
    assert path in mistakes(document).conflict


@pytest.mark.parametrize("scale", [True, "12"])
def test_a_loss_scale_is_a_number_or_a_name(scale: object) -> None:
    assert "precision.loss_scale" in mistakes({"precision": {"loss_scale": scale}}).conflict


def test_a_whole_number_is_a_loss_scale() -> None:
    plan = Plan.from_mapping({"schema": 1, "precision": {"loss_scale": 1024}}, source="p")
    assert plan.precision.loss_scale == 1024.0


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: Layout(dta=2), "did you mean 'data'"),  # type: ignore[call-arg]
        (lambda: Layout(data=0), "write 1 or more"),
        (lambda: Plan(layuot=Layout()), "did you mean 'layout'"),  # type: ignore[call-arg]
    ],
)
def test_a_section_in_python_says_what_to_write(build: Callable[[], object], remedy: str) -> None:
    with pytest.raises(PlanError) as error:
        build()
    assert remedy in error.value.remedy


def test_a_plan_is_frozen() -> None:
    plan = Plan()
    with pytest.raises(pydantic.ValidationError):
        plan.layout.data = 3  # type: ignore[misc]


def test_sections_are_replaced_in_part() -> None:
    plan = Plan().with_sections(layout={"data": 4}, execution={"exact": True})
    changed = plan.with_sections(layout={"shard": 2})
    assert changed.layout == Layout(data=4, shard=2)
    assert changed.execution.exact
    assert plan.layout == Layout(data=4)
    with pytest.raises(PlanError, match="unknown key"):
        plan.with_sections(layout={"datum": 1})


def test_the_mapping_has_every_key_and_the_schema_first() -> None:
    document = Plan().to_mapping()
    assert next(iter(document.items())) == ("schema", 1)
    assert document["pipeline"] == {"schedule": "1f1b", "stages_per_rank": 1, "split": []}
    assert set(document) == {
        *("schema", "layout", "batch", "shard", "tensor", "pipeline", "precision", "memory", "collectives", "data"),
        *("compression", "server", "execution", "prediction"),
    }
