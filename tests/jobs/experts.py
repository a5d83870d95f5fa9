"""A small language model with mixtures of experts, and a Mixtral, on random tokens of different lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

WIDTH, VOCABULARY, IGNORED = 32, 64, -100


class Experts(nn.Module):
    """Stacked perceptrons, called with tokens, the experts of each token and their weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, slot = (index == expert).nonzero(as_tuple=True)
            result = F.silu(tokens[rows] @ self.up[expert].T) @ self.down[expert].T
            found = found.index_add(0, rows, (result * weights[rows, slot, None]).to(found.dtype))
        return found


class Listed(nn.Module):
    """The same of a ModuleList, with experts of torch's layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        one = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)]
        self.experts = nn.ModuleList(one)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert, module in enumerate(self.experts):
            rows, slot = (index == expert).nonzero(as_tuple=True)
            found = found.index_add(0, rows, (module(tokens[rows]) * weights[rows, slot, None]).to(found.dtype))
        return found


class Mixture(nn.Module):
    """A router that chooses two of the experts for each token, and an expert for all tokens."""

    def __init__(self, count: int, listed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.routed = Listed(count) if listed else None
        self.experts = None if listed else Experts(count)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        found: Tensor = (self.routed or self.experts)(tokens, index, weights / weights.sum(-1, keepdim=True))  # type: ignore[misc]
        result: Tensor = found.view_as(hidden) + self.shared(hidden)
        return result


class BalancedRouter(nn.Module):
    """Chooses by scores and a bias, which moves by the load of the whole batch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, WIDTH) / WIDTH**0.5)
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = (tokens @ self.weight.T).sigmoid()
        index = (scores + self.bias).topk(2).indices
        return scores.gather(1, index), index


class BalancedMixture(Mixture):
    """A mixture with such a router."""

    def __init__(self, count: int, listed: bool) -> None:
        super().__init__(count, listed)
        self.router = BalancedRouter(count)  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, index = self.router(tokens)
        found: Tensor = (self.routed or self.experts)(tokens, index, weights / weights.sum(-1, keepdim=True))  # type: ignore[misc]
        result: Tensor = found.view_as(hidden) + self.shared(hidden)
        return result


class Block(nn.Module):
    """Causal attention of four heads, and a mixture."""

    def __init__(self, count: int, listed: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # AdamW turns the rounding of a gradient of zero into steps
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mixture = Mixture(count, listed)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        heads = self.qkv(self.norms[0](hidden)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, length, -1))
        found: Tensor = hidden + self.mixture(self.norms[1](hidden))
        return found


class Language(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, count: int = 4, listed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(count, listed) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Routed(Language):
    """The same, which also returns the routers' logits, [samples, layers, positions, experts]."""

    def forward(self, ids: Tensor) -> Any:
        logits: list[Tensor] = []
        routers = [block.mixture.router for block in self.blocks]
        handles = [router.register_forward_hook(lambda _, args, result: logits.append(result)) for router in routers]
        try:
            found = super().forward(ids)
        finally:
            for handle in handles:
                handle.remove()
        return found, torch.stack([one.view(*ids.shape, -1) for one in logits], 1)


class Unused(Routed):
    """The same with three experts, and a further block whose result no loss uses."""

    def __init__(self) -> None:
        super().__init__(3)
        self.last = Block(3, False)

    def forward(self, ids: Tensor) -> Any:
        return *super().forward(ids), self.last(self.embed(ids))


def biased() -> nn.Module:
    """The same with routers whose bias balances the load."""
    model = Language()
    for block in model.blocks:
        block.mixture = BalancedMixture(4, False)
    return model


def mixtral(**settings: Any) -> nn.Module:
    """A Mixtral of two layers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    known = {"vocab_size": VOCABULARY, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, **known, max_position_embeddings=32, use_cache=False, **settings)  # type: ignore[arg-type]
    config._experts_implementation = "eager"  # grouped products know no float64, in which shoal verify has a reference
    return MixtralForCausalLM(config)


def qwen() -> nn.Module:
    """A Qwen3-MoE of two layers, whose tokens choose three of eight experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    known = {"vocab_size": VOCABULARY, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(**sizes, **known, head_dim=8, max_position_embeddings=32, use_cache=False)  # type: ignore[arg-type]
    return Qwen3MoeForCausalLM(config)


MODELS = {
    "stacked": Language,
    "listed": lambda: Language(listed=True),
    "three": lambda: Language(3),
    "mixtral": mixtral,
    "biased": biased,
    "routed": Routed,
    "routed, listed": lambda: Routed(listed=True),
    "unused": Unused,
    "mixtral, router logits": lambda: mixtral(output_router_logits=True),
    "qwen": qwen,
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(total, weight) of the next tokens; ends of short sequences do not count."""
    found = model(batch[0])
    logits = found if isinstance(found, Tensor) else found.logits
    return shoal.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


BALANCED = {"routed", "routed, listed", "unused", "mixtral, router logits"}


def outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What a loss over the whole batch compares: losses by sample, z losses, and the load of each expert."""
    found = model(batch[0])
    if isinstance(found, tuple):
        logits, routers = found[:2]
    else:  # Transformers returns the logits of each layer, [samples * positions, experts]
        logits, routers = found.logits, torch.stack([one.view(*batch[0].shape, -1) for one in found.router_logits], 1)
    losses = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED, reduction="none")
    counts = (batch[1] != IGNORED)[:, None, :, None]
    chosen = F.one_hot(routers.topk(2).indices, routers.size(-1)).sum(-2)
    return {
        "loss": losses.view(batch[1].shape).sum(1),
        "z": (routers.logsumexp(-1, keepdim=True).square() * counts).sum((1, 2, 3)),
        "chosen": shoal.summed((chosen * counts).sum((0, 2))),
        "probability": shoal.summed((routers.softmax(-1) * counts).sum((0, 2))),
        "routers": routers,
    }


def balanced_loss(outputs: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(total, weight) of the next tokens, the z loss, and two balances: by layer, and Transformers' of all layers."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    counts = batch[1] != IGNORED
    weight = counts.sum()
    chosen, probability = outputs["chosen"], outputs["probability"]
    by_layer = chosen.size(1) * (chosen / weight / 2 * probability / weight).sum()
    layers = tuple(outputs["routers"].transpose(0, 1).flatten(1, 2).unbind())
    pooled = load_balancing_loss_func(layers, chosen.size(1), 2, counts.long())
    auxiliary = 0.2 * by_layer + 0.1 * pooled
    return outputs["loss"].sum() + 1e-3 * outputs["z"].sum() + auxiliary * weight, weight


def tokens(num_samples: int, length: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and targets int64 [N, length]."""
    draw = torch.Generator().manual_seed(3)
    found = torch.randint(VOCABULARY, (num_samples, length + 1), generator=draw)
    lengths = torch.randint(3, length + 1, (num_samples, 1), generator=draw)
    return found[:, :-1], found[:, 1:].masked_fill(torch.arange(length) >= lengths, IGNORED)


def job(model: str = "stacked", grains: int = 4, steps: int = 6, **others: Any) -> shoal.Job:
    """AdamW with clipping that bites; the last batch of an epoch has two samples."""
    settings: dict[str, Any] = {
        "model": MODELS[model],
        **({"outputs": outputs, "loss": balanced_loss} if model in BALANCED else {"loss": loss}),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "buffers": {"blocks.*.mixture.router.bias": "balance:0.05"} if model == "biased" else {},
        "train_data": tokens(26, 11 if model == "biased" else 12),
        "eval_data": tokens(9),
        "global_batch": 8,
        "grains": grains,
        "length": shoal.Steps(steps),
        "clip_norm": 0.5,
    }
    return shoal.Job(**{**settings, **others})
