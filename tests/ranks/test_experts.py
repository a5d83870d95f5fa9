"""Divided experts of Transformers' families and of a user's own modules against the same model on one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.usual import parametrize
from torch import Tensor, nn

from shoal.distributed.mesh import open_mesh
from shoal.launch.environment import Environment
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.experts.blocks import ExpertBlock, expert_blocks
from shoal.parallel.experts.exchange import divide_block
from shoal.plans.plan import Layout
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

# Sums over tokens in another order, in float32: 32 sums of up to 64 terms.
ROUNDING = 2e-6
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1, **LATENT}
    | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 48, "num_experts_per_tok": 1},
}


def transformers_model(family: str) -> nn.Module:
    import transformers

    name = {"Llama4": "Llama4TextConfig"}.get(family, f"{family}Config")
    sizes = {**SIZES, **FAMILIES[family]}
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**sizes))
    for parameter in model.parameters():
        if not parameter.any():  # routers that begin with equal scores
            nn.init.normal_(parameter, std=0.1)
    return model


class Expert(nn.Module):
    """A perceptron with another width of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


class Listed(nn.Module):
    """Experts in a list, of which those without tokens are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.back = nn.Linear(32, 4), nn.Linear(24, 32)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        out = tokens.new_zeros(len(tokens), 24)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                out = out.index_add(0, token, weights[token, slot, None] * expert(tokens[token]))
        result: Tensor = self.back(out).view_as(x)
        return result


class StackedExperts(nn.Module):
    """Experts that multiply their inputs by the weights, which is not the same as their results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 16) / 6), nn.Parameter(torch.randn(4, 16, 32) / 4)

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        inputs = x[:, None] * scores[..., None]
        hidden = torch.einsum("tkd,tkdh->tkh", inputs, self.up[chosen]).relu()
        return torch.einsum("tkh,tkhd->td", hidden, self.down[chosen])


class Stacked(nn.Module):
    """A user's own router and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(32, 4), StackedExperts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).sigmoid().topk(2)
        result: Tensor = self.experts(tokens, scores=scores, chosen=chosen).view_as(x)
        return result


class Own(nn.Module):
    """Two layers of a user's own experts."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "listed": partial(Own, Listed),
    "stacked": partial(Own, Stacked),
}
if find_spec("transformers") is not None:
    MODELS |= {family: partial(transformers_model, family) for family in FAMILIES}


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")


def cut(model: nn.Module, block: ExpertBlock, axis: TensorAxis) -> None:
    """Leaves a rank its experts alone."""
    own = range(block.count * axis.place // axis.degree, block.count * (axis.place + 1) // axis.degree)
    for name in block.parameters:
        module = model.get_submodule(name.rpartition(".")[0])
        value = model.get_parameter(name).detach()
        if not block.listed:
            value = value[own.start : own.stop].clone()
        elif int(name.removeprefix(f"{block.name}.").split(".")[0]) not in own:
            value = value.to("meta")
        module._parameters[name.rpartition(".")[2]] = nn.Parameter(value)


def difference(whole: nn.Module, axis: TensorAxis, mode: str) -> float:
    """The largest difference of loss and gradients from one process's, relative to a parameter's largest."""
    model = copy.deepcopy(whole)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(96, (8, 9), generator=generator)
    if mode == "few":  # all tokens choose the same experts, and ranks have none where the model computes that
        tokens = tokens[:1, :3].expand(8, 3)
        others = int(not isinstance(model, Own) or isinstance(model.layers[0], Listed))
        rows = range(8 - others) if axis.place == 0 else range(8 - others, 8)
    elif mode == "tensor":
        rows = range(8)
    else:
        rows = range(8 * axis.place // axis.degree, 8 * (axis.place + 1) // axis.degree)
    wanted_loss = loss(whole, tokens)
    wanted_loss.backward()  # type: ignore[no-untyped-call]
    blocks = expert_blocks(model)
    assert blocks
    for block in blocks:
        divide_block(model, block, axis, axis if mode == "tensor" else None)
        cut(model, block, axis)
    own_loss = loss(model, tokens[rows.start : rows.stop])
    own_loss.backward()  # type: ignore[no-untyped-call]
    total = own_loss.detach().clone()
    if mode != "tensor":
        dist.all_reduce(total)
    differences = [float((total - wanted_loss.detach()).abs() / wanted_loss.detach())]
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    of_experts = {name: block for block in blocks for name in block.parameters}
    for name, parameter in whole.named_parameters():
        own = model.get_parameter(name)
        if parameter.grad is None:  # not zero: optimizers skip it
            assert own.grad is None or name not in of_experts, name
            continue
        if own.is_meta:
            continue
        found, wanted = own.grad, parameter.grad
        if name not in of_experts:
            found = torch.zeros_like(wanted) if found is None else found
            if mode != "tensor":
                dist.all_reduce(found)
        elif not of_experts[name].listed:
            wanted = wanted.chunk(axis.degree)[axis.place]
        assert found is not None, name
        differences.append(float((found - wanted).abs().max() / parameter.grad.abs().max().clamp(min=0.01 * largest)))
    own_buffers = dict(model.named_buffers())
    assert all(torch.equal(own_buffers[name], buffer) for name, buffer in whole.named_buffers())
    return max(differences)


def in_ranks(world_size: int, work: Callable[[TensorAxis], Any], folder: Path) -> list[Any]:
    def rank(environment: Environment) -> None:
        with open_mesh(environment, Layout(data=world_size)) as mesh:
            result = work(TensorAxis(world_size, mesh.rank))
            (folder / f"{mesh.rank}.json").write_text(json.dumps(result))

    with forked(world_size, rank, folder) as wait:
        wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@parametrize(("world_size", "mode"), [(2, "plain"), (2, "few"), (4, "tensor")], usual=["2-few", "4-tensor"])
def test_the_loss_and_gradients_of_one_process(world_size: int, mode: str, tmp_path: Path) -> None:
    def work(axis: TensorAxis) -> dict[str, float]:
        return {name: difference(model, axis, mode) for name, model in models.items()}

    torch.manual_seed(5)
    models = {name: make() for name, make in MODELS.items()}  # once for all ranks, which are forks
    for differences in in_ranks(world_size, work, tmp_path / "ranks"):
        assert max(differences.values()) < ROUNDING, differences
