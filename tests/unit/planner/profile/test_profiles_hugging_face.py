"""Decoders of Transformers from their configurations alone: what tensor parallelism cuts, as a run decides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.parallel.tensor.plan import decide, follow
from shoal.planner.profile.profiles import profile
from shoal.planner.profile.values import OperationKind, Profile

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'shoal[hf]'")

SEQUENCE = 24
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Gemma2": {"head_dim": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "Phi": {},
    "Phi3": {},
    "StableLm": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Olmo2": {},
}
# By family: linear layers of a block that are in no pair.
ALONE = {"Olmo2": {"q_proj", "k_proj", "v_proj", "o_proj"}}


def built(family: str, **settings: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{family}Config")(**settings)
    return lambda: getattr(transformers, f"{family}ForCausalLM")(config)  # type: ignore[no-any-return]


def next_token(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return shoal.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(samples: int, length: int = SEQUENCE, vocabulary: int = 96) -> Tensor:
    return torch.arange(samples * (length + 1)).view(samples, -1) % vocabulary


def cuts(found: Profile) -> dict[str, int | None]:
    return {
        f"{unit.name}.{w.name}": w.tensor_dim for unit in found.units if unit.body.repeated for w in unit.body.weights
    }


@parametrize("family", FAMILIES, usual=["Llama", "Falcon", "Mixtral", "Olmo2"])
def test_a_planner_cuts_what_a_run_cuts(family: str) -> None:
    make = built(family, **{**TINY, **FAMILIES[family]})
    found = profile(make, next_token, batch)
    assert not [note for note in found.notes if "not known" in note]
    model = make()
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trace = follow(model, next_token, batch(4), lambda name: values[name].detach(), 2)
    plan = decide(model, trace, lambda name: values[name].detach(), 2)
    rows = {f"{p.candidate.row}.weight" for p in plan.pairs}
    columns = {f"{name}.weight" for p in plan.pairs for name in p.candidate.columns}
    seen = {name: dim for name, dim in cuts(found).items() if name.endswith("weight")}
    assert rows | columns
    assert {name for name, dim in seen.items() if dim == 1} == rows
    assert {name for name, dim in seen.items() if dim == 0} - columns == {
        f"{module}.weight" for module in plan.gathered if f"{module}.weight" in seen
    }
    alone = {name.split(".")[-1] for name in plan.gathered if "layers." in name or ".h." in name}
    assert alone == ALONE.get(family, set())


def test_masks_that_follow_from_shapes_are_those_of_a_run() -> None:
    """Positions that follow each other are no packed sequences: attention is causal by a flag, without a mask."""
    found = profile(built("Llama", **TINY), next_token, batch)
    attention = [o for unit in found.units for o in unit.body.operations if o.kind is OperationKind.ATTENTION]
    width, length = 64, SEQUENCE
    assert {o.flops.per_sample for o in attention if o.name == "attention"} == {2.0 * length * length * width}


def test_experts_are_not_cut_and_multiply() -> None:
    settings = {**TINY, **FAMILIES["Mixtral"]}
    found = profile(built("Mixtral", **settings), next_token, batch)
    experts = [w for unit in found.units for w in unit.body.weights if "experts" in w.name]
    assert len(experts) == 2 * settings["num_hidden_layers"]
    assert {w.tensor_dim for w in experts} == {None}
    body = next(unit.body for unit in found.units if unit.body.repeated)
    products = [o for o in body.operations if o.name.endswith("grouped_mm") and o.phase == "forward"]
    # Each token goes to two experts, which multiply by gate, up and down.
    assert sum(o.flops.per_sample for o in products) == 2 * 2 * SEQUENCE * 3 * 64 * 96
    assert {o.kind for o in products} == {OperationKind.MATMUL}
    # Rows of 64 numbers in float32 travel, two for each token.
    assert [(d.num_bytes.per_sample, d.experts, d.chosen) for d in body.dispatches] == [(2 * SEQUENCE * 64 * 4, 4, 2)]
    assert all(w.of_experts for w in experts)
    assert sum(o.flops.per_sample for o in body.operations if o.of_experts and o.phase == "forward") == sum(
        o.flops.per_sample for o in products
    )
    assert not any("MixtralExperts" in note for note in found.notes)  # an expert axis divides them
