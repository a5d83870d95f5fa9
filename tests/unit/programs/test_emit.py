"""Configurations of other frameworks say the plan, and their packages read them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from benchmarks.emitted import LOADERS, load

from shoal.errors import CommandError
from shoal.plans.plan import Plan
from shoal.programs.emit import FRAMEWORKS, Facts, framework

FACTS = Facts(64, 32, sequence=128, blocks=tuple(f"model.layers.{index}" for index in range(8)))
BF16 = {"parameters": "bfloat16", "compute": "bfloat16"}
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "replicas": {"layout": {"data": 8}, "precision": BF16},
    "zero1": {"layout": {"shard": 8}, "shard": {"level": "optimizer"}},
    "zero2": {"layout": {"shard": 8}, "shard": {"level": "gradients"}, "precision": BF16},
    "zero3": {"layout": {"shard": 8}, "memory": {"recompute": "full"}, "precision": BF16},
    "half": {"layout": {"shard": 4}, "precision": {"compute": "float16", "loss_scale": "dynamic"}},
    "hybrid": {"layout": {"data": 2, "shard": 4}, "precision": BF16},
    "tensor": {"layout": {"shard": 4, "tensor": 2}, "shard": {"level": "gradients"}, "tensor": {"sequence": True}},
    "context": {"layout": {"shard": 2, "context": 2}, "precision": BF16},
    "selective": {"layout": {"data": 2}, "memory": {"recompute": "selective"}, "precision": BF16},
    "pipeline": {"layout": {"data": 4, "pipeline": 2}, "pipeline": {"schedule": "1f1b"}, "precision": BF16},
    "interleaved": {
        "layout": {"data": 2, "tensor": 2, "pipeline": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        "memory": {"recompute": "full"},
        "precision": BF16,
    },
}
# Plans that a framework's configuration cannot say.
NOT: dict[str, set[str]] = {
    "accelerate": {"zero1", "selective", "pipeline", "interleaved"},
    "deepspeed": {"hybrid", "context", "selective", "pipeline", "interleaved"},
    "torchtitan": {"zero1", "half", "selective"},
    "megatron": {"hybrid"},
    "lightning": {"zero1", "context", "selective", "pipeline", "interleaved"},
    "fsdp2": {"zero1", "tensor", "context", "selective", "pipeline", "interleaved"},
}
# A key of each file, without which the package must not read it.
KEYS = {
    "accelerate": "num_machines",
    "deepspeed": "gradient_accumulation_steps",
    "torchtitan": "tensor_parallel_degree",
    "megatron": "params_dtype",
    "lightning": "accumulate_grad_batches",
    "fsdp2": "reshard_after_forward",
}


def plan(name: str) -> Plan:
    return Plan().with_sections(batch={"grains_per_microbatch": 2}, **PLANS[name])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_it_cannot_say_is_refused(name: str) -> None:
    row = FRAMEWORKS[name]
    assert {other for other in PLANS if row.beyond(plan(other), FACTS)} == NOT[name]
    uneven = plan("replicas").with_sections(batch={"grains_per_microbatch": 3})
    assert "one size" in row.beyond(uneven, FACTS)
    assert "one size" in row.beyond(plan("replicas").with_sections(layout={"data": 5}), FACTS)


@pytest.mark.parametrize("other", PLANS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_its_package_reads_it(name: str, other: str) -> None:
    package = LOADERS[name][0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    row, asked = FRAMEWORKS[name], plan(other)
    if row.beyond(asked, FACTS):
        return  # as above
    text, notes = row.configuration(asked, FACTS, "Head.")
    assert all(note.endswith(".") for note in notes)
    load(name, text, asked.layout.world_size)
    with pytest.raises(Exception, match=r"\w"):
        load(name, text.replace(KEYS[name], "surprise"), asked.layout.world_size)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(CommandError, match="deepspeed"):
        framework("deepsped")
