"""Plans as TOML: what is written is read back equal, and a file that is no plan is refused."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.plans import Plan
from shoal.plans.plan import Dtype, plan_text, read_plan

DEGREES = st.integers(1, 10**6)
NAMES = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
DTYPES = st.sampled_from(get_args(Dtype))


def literal(section: str, key: str) -> st.SearchStrategy[Any]:
    annotation = type(getattr(Plan(), section)).model_fields[key].annotation
    return st.sampled_from(get_args(annotation))


PLANS = st.fixed_dictionaries(
    {
        "schema": st.just(1),
        "layout": st.fixed_dictionaries(
            {
                **dict.fromkeys(("data", "shard", "tensor", "pipeline", "context", "expert"), DEGREES),
                "shares": st.lists(DEGREES, max_size=3),
            }
        ),
        "batch": st.fixed_dictionaries({"grains_per_microbatch": st.integers(0, 10**6)}),
        "shard": st.fixed_dictionaries(
            {
                "level": literal("shard", "level"),
                "reduce": literal("shard", "reduce"),
                "offload": st.booleans(),
                "sizes": st.lists(DEGREES, max_size=3),
            }
        ),
        "tensor": st.fixed_dictionaries({"sequence": st.booleans()}),
        "pipeline": st.fixed_dictionaries(
            {
                "schedule": literal("pipeline", "schedule"),
                "stages_per_rank": DEGREES,
                "split": st.lists(NAMES, max_size=3),
            }
        ),
        "precision": st.fixed_dictionaries(
            {
                "parameters": DTYPES,
                "compute": DTYPES,
                "products": literal("precision", "products"),
                "reduce": DTYPES,
                "loss_scale": st.sampled_from(["none", "dynamic"]) | st.floats(1e-300, 1e300),
            }
        ),
        "memory": st.fixed_dictionaries({"recompute": literal("memory", "recompute"), "shared": st.booleans()}),
        "collectives": st.fixed_dictionaries({k: literal("collectives", k) for k in ("all_reduce", "compression")}),
        "server": st.fixed_dictionaries(
            {"mode": literal("server", "mode"), "staleness": st.integers(0, 64), "num_servers": DEGREES}
        ),
        "compression": st.fixed_dictionaries(
            {
                "block": DEGREES,
                "density": st.floats(1e-9, 1.0),
                "rank": DEGREES,
                "feedback": st.booleans(),
                "guard_every": st.integers(0, 10**6),
                "guard_lost": st.floats(1e-9, 1e9),
            }
        ),
        "data": st.fixed_dictionaries({"workers": st.integers(0, 64)}),
        "execution": st.fixed_dictionaries(
            {
                **{name: st.booleans() for name in ("exact", "channels_last", "cuda_graph")},
                "compile": literal("execution", "compile"),
            }
        ),
        "prediction": st.dictionaries(NAMES, VALUES, max_size=3),
    }
)


@settings(max_examples=40)
@given(PLANS)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    plan = Plan.from_mapping(document, source="drawn")
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    path.write_text(plan_text(plan), encoding="utf-8")
    assert read_plan(path) == plan
    assert read_plan(path).to_mapping() == document


def test_keys_left_out_take_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[layout]\ndata = 4\n")
    assert read_plan(path) == Plan().with_sections(layout={"data": 4})
    path.write_text("")
    assert read_plan(path) == Plan()


@pytest.mark.parametrize("content", [b"[layout\n", b"data = \n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="it is not TOML"):
        read_plan(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_plan(tmp_path / "nowhere.toml")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        read_plan(tmp_path)


def test_mistakes_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[layout]\ndat = 4\nshard = 0\n")
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert str(path) in caught.value.given
    assert "layout.dat" in caught.value.given
    assert "layout.shard" in caught.value.given
