"""Transformers from their dimensions, as plain modules that a user would write, with their losses and batches.

GPT: Radford et al. 2019. MPT: MosaicML 2023. Llama: Touvron et al., arXiv 2302.13971. BERT: Devlin et al., 1810.04805.
`fused_kernels` has the passes over memory that Megatron-LM (arXiv 1909.08053) and its kin fuse by hand in one launch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.kernels import BiasGelu, CrossEntropy, DropoutAdd, MaskedSoftmax, Rotate, SwiGLU


class Recipe(NamedTuple):
    """What `shoal.planner.profile.profile` takes."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    batch: Callable[[int], Any]


class Latent(NamedTuple):
    """Ranks of the queries and of keys and values, and widths of a head: without and with positions, and of values."""

    query: int
    key: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What makes a transformer. `positions`: "alibi" is computed inside of fused attention and has no parameters."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    ffn: int | None = None  # 4 hidden where None
    kv_heads: int | None = None
    head_width: int | None = None
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = None  # as `dropout` where None
    bias: bool = True
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_first: bool = True
    narrow_norm: bool = False  # normalises in the dtype that it gets, also under autocast
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"
    causal: bool = True
    one_qkv: bool = True
    fused_attention: bool = True
    fused_kernels: bool = False
    fused_loss: bool = False
    float_logits: bool = True  # the loss is computed from float32 logits
    metrics: int = 0  # times that a step computes the loss once more, to print it
    token_types: int = 0
    time_first: bool = False  # [T, B, hidden] inside, as Megatron-LM has it: unfused attention then copies less
    head: Literal["tokens", "span", "masked"] = "tokens"
    predictions: int | None = None  # of masked tokens a sample; all positions where None
    experts: int = 0  # of each mixture; 0 for a model without one
    chosen: int = 1  # experts that compute a token
    expert_ffn: int = 0  # width of one expert
    shared: int = 0  # experts that compute all tokens
    dense_first: int = 0  # blocks before the first mixture
    every: int = 1  # of the further blocks the last of so many has a mixture
    latent: Latent | None = None  # attention by low ranks (DeepSeek-V2, arXiv 2405.04434)

    @property
    def width(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden


class Norm(nn.Module):
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d = d
        self.weight = nn.Parameter(torch.ones(d.hidden))
        self.bias = nn.Parameter(torch.zeros(d.hidden)) if d.norm == "layer" and d.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.d.narrow_norm:
            return self._norm(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            bias = self.bias.to(x.dtype) if self.bias is not None else None
            return self._norm(x, self.weight.to(x.dtype), bias)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.d.norm == "layer":
            return F.layer_norm(x, weight.shape, weight, bias)
        return F.rms_norm(x, weight.shape, weight, 1e-5)


class Linear(nn.Module):
    """A layer whose bias may be left to the kernel that comes after it: then it gives (product, bias)."""

    def __init__(self, num_in: int, num_out: int, d: Dimensions) -> None:
        super().__init__()
        apart = d.bias and d.fused_kernels
        self.linear = nn.Linear(num_in, num_out, bias=d.bias and not apart)
        self.bias = nn.Parameter(torch.zeros(num_out)) if apart else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear(x), self.bias


class Attention(nn.Module):
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d = d
        self.kv_heads = d.kv_heads or d.heads
        own, other = d.heads * d.width, self.kv_heads * d.width
        if d.one_qkv and own == other:
            self.qkv = nn.Linear(d.hidden, 3 * own, bias=d.bias)
        else:
            self.q = nn.Linear(d.hidden, own, bias=d.bias)
            self.k = nn.Linear(d.hidden, other, bias=d.bias)
            self.v = nn.Linear(d.hidden, other, bias=d.bias)
        self.out = Linear(own, d.hidden, d)
        self.dropout = d.dropout if d.attention_dropout is None else d.attention_dropout

    def forward(self, x: Tensor, angles: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        d = self.d
        if hasattr(self, "qkv"):  # each head's three side by side, so that heads can be divided
            q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * d.width)).split(d.width, -1)
        else:
            q, k, v = (part.unflatten(-1, (-1, d.width)) for part in (self.q(x), self.k(x), self.v(x)))
        if angles is not None:
            q, k = rotated(q, angles, d.fused_kernels), rotated(k, angles, d.fused_kernels)
        if d.time_first:
            return self.out(self._time_first(q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if d.fused_attention:
            mixed = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=d.causal, enable_gqa=d.heads != self.kv_heads
            )
        else:
            if self.kv_heads != d.heads:
                k, v = (t.repeat_interleave(d.heads // self.kv_heads, 1) for t in (k, v))
            mixed = self._weights(q @ k.transpose(-1, -2), mask) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.d.fused_kernels:
            weights = MaskedSoftmax.apply(scores)
        else:
            scores = scores / math.sqrt(self.d.width)
            weights = (scores if mask is None else scores.masked_fill(mask, float("-inf"))).softmax(-1)
        return F.dropout(weights, self.dropout, self.training)

    def _time_first(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, B, heads, width] each: products over samples and heads as they lie."""
        time, samples, heads, width = q.shape
        if self.kv_heads != heads:
            k, v = (t.repeat_interleave(heads // self.kv_heads, 2) for t in (k, v))
        q, k, v = (t.flatten(1, 2).transpose(0, 1) for t in (q, k, v))
        if self.d.fused_attention:
            q, k, v = (t.unflatten(0, (samples, heads)) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.d.causal)
        else:
            scores = torch.bmm(q, k.transpose(1, 2)).view(samples, heads, time, -1)
            mixed = torch.bmm(self._weights(scores, None).view(samples * heads, time, -1), v)
        return mixed.view(samples, heads, time, width).permute(2, 0, 1, 3).reshape(time, samples, heads * width)


def rotated(x: Tensor, angles: Tensor, fused: bool) -> Tensor:
    """Rotary positions for [B, T, heads, width]."""
    if fused:
        return Rotate.apply(x, angles)
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class LatentAttention(nn.Module):
    """Attention of DeepSeek-V2 and V3 in training: keys and values of all heads come from a narrow latent vector."""

    def __init__(self, d: Dimensions, ranks: Latent) -> None:
        super().__init__()
        self.d, self.ranks = d, ranks
        narrow = dataclasses.replace(d, bias=False, latent=None)
        self.q_a, self.q_norm = nn.Linear(d.hidden, ranks.query, bias=False), Norm(_wide(narrow, ranks.query))
        self.q_b = nn.Linear(ranks.query, d.heads * (ranks.plain + ranks.rotated), bias=False)
        self.kv_a = nn.Linear(d.hidden, ranks.key + ranks.rotated, bias=False)
        self.kv_norm = Norm(_wide(narrow, ranks.key))
        self.kv_b = nn.Linear(ranks.key, d.heads * (ranks.plain + ranks.value), bias=False)
        self.out = Linear(d.heads * ranks.value, d.hidden, narrow)

    def forward(self, x: Tensor, angles: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        d, ranks = self.d, self.ranks
        assert angles is not None, "its positions are rotations"
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (-1, ranks.plain + ranks.rotated))
        latent, position = self.kv_a(x).split((ranks.key, ranks.rotated), -1)
        k, v = (
            self.kv_b(self.kv_norm(latent))
            .unflatten(-1, (-1, ranks.plain + ranks.value))
            .split((ranks.plain, ranks.value), -1)
        )
        angles = angles[:, : ranks.rotated]
        turned = rotated(position[:, :, None], angles, d.fused_kernels).expand(*k.shape[:3], ranks.rotated)
        plain, with_position = q.split((ranks.plain, ranks.rotated), -1)
        q = torch.cat((plain, rotated(with_position, angles, d.fused_kernels)), -1)
        q, k, v = (part.transpose(1, 2) for part in (q, torch.cat((k, turned), -1), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=d.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _wide(d: Dimensions, width: int) -> Dimensions:
    return dataclasses.replace(d, hidden=width, heads=1)


class Experts(nn.Module):
    """Experts as grouped products, called as those of Transformers: rows of equal experts lie side by side."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(d.experts, d.hidden, 2 * d.expert_ffn))
        self.down = nn.Parameter(torch.zeros(d.experts, d.expert_ffn, d.hidden))
        self.num_experts, self.fused = d.experts, d.fused_kernels

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        experts, order = index.flatten().sort(stable=True)
        offsets = torch.histc(experts.float(), self.num_experts, 0, self.num_experts - 1).cumsum(0).int()
        rows = F.grouped_mm(hidden[order // index.shape[1]], self.gate_up, offs=offsets)
        gate, up = rows.chunk(2, -1)
        inner = SwiGLU.apply(gate, up) if self.fused else F.silu(gate) * up
        rows = F.grouped_mm(inner, self.down, offs=offsets) * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, order // index.shape[1], rows)


class Mixture(nn.Module):
    """A router that chooses experts for each token, and experts that compute all tokens."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.router = nn.Linear(d.hidden, d.experts, bias=False)
        self.experts, self.chosen = Experts(d), d.chosen
        whole = dataclasses.replace(d, ffn=d.shared * d.expert_ffn, experts=0)
        self.shared = FeedForward(whole) if d.shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = x.flatten(0, 1)
        weights, index = self.router(hidden).float().softmax(-1).topk(self.chosen)
        out = self.experts(hidden, index, weights.to(x.dtype)).view_as(x)
        return (out if self.shared is None else out + self.shared(x)[0]), None


class FeedForward(nn.Module):
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d = d
        self.up = Linear(d.hidden, d.inner, d)
        self.gate = Linear(d.hidden, d.inner, d) if d.gated else None
        self.down = Linear(d.inner, d.hidden, d)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        up, bias = self.up(x)
        if self.gate is not None:
            gate, _ = self.gate(x)
            inner = SwiGLU.apply(gate, up) if self.d.fused_kernels else F.silu(gate) * up
        else:
            inner = F.gelu(up) if bias is None else BiasGelu.apply(up, bias.to(up.dtype))
        return self.down(inner)


class Block(nn.Module):
    def __init__(self, d: Dimensions, place: int = 0) -> None:
        super().__init__()
        self.d = d
        self.norm1, self.attention = Norm(d), LatentAttention(d, d.latent) if d.latent else Attention(d)
        has_mixture = d.experts and place >= d.dense_first and (place - d.dense_first + 1) % d.every == 0
        self.norm2, self.mlp = Norm(d), Mixture(d) if has_mixture else FeedForward(d)

    def forward(self, x: Tensor, angles: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if self.d.norm_first:
            x = self._add(x, *self.attention(self.norm1(x), angles, mask))
            return self._add(x, *self.mlp(self.norm2(x)))
        x = self.norm1(self._add(x, *self.attention(x, angles, mask)))
        return self.norm2(self._add(x, *self.mlp(x)))

    def _add(self, x: Tensor, more: Tensor, bias: Tensor | None) -> Tensor:
        d = self.d
        if d.fused_kernels and (bias is not None or d.dropout):
            return DropoutAdd.apply(more, bias, x, d.dropout if self.training else 0.0)
        return x + F.dropout(more, d.dropout, self.training)


class Transformer(nn.Module):
    """int64 [B, T] -> logits [B, T, vocab], or as `head` says."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d = d
        self.embedding = nn.Embedding(d.vocab, d.hidden)
        self.positions = nn.Embedding(d.seq_len, d.hidden) if d.positions == "learned" else None
        self.types = nn.Embedding(d.token_types, d.hidden) if d.token_types else None
        self.first_norm = None if d.norm_first else Norm(d)
        self.blocks = nn.ModuleList(Block(d, place) for place in range(d.layers))
        self.norm = Norm(d) if d.norm_first else None
        if d.head == "masked":
            self.dense, self.dense_norm = nn.Linear(d.hidden, d.hidden), Norm(d)
        self.head = nn.Linear(d.hidden, 2 if d.head == "span" else d.vocab, bias=d.head != "tokens")
        if d.tied and d.head != "span":
            self.head.weight = self.embedding.weight
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, d.width, 2) / d.width)
        angles = torch.outer(torch.arange(d.seq_len), frequencies)
        self.register_buffer("angles", torch.cat((angles, angles), -1) if d.positions == "rope" else None, False)
        hidden = torch.ones(d.seq_len, d.seq_len, dtype=torch.bool).triu(1)
        needs_mask = d.causal and not d.fused_attention and not d.fused_kernels
        self.register_buffer("mask", hidden if needs_mask else None, False)

    def forward(self, ids: Tensor, picked: Tensor | None = None) -> Tensor:
        d = self.d
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids))
        if self.first_norm is not None:
            x = self.first_norm(x)
        x = F.dropout(x, d.dropout, self.training)
        if d.time_first:
            x = x.transpose(0, 1).contiguous()
        for block in self.blocks:
            x = block(x, self.angles, self.mask)
        if self.norm is not None:
            x = self.norm(x)
        if d.head == "masked":
            if picked is not None:
                x = x.flatten(0, 1)[picked.flatten()]
            x = self.dense_norm(F.gelu(self.dense(x)))
        return self.head(x)


def _loss(d: Dimensions, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    if d.head == "span":
        ids, start, end = batch
        logits = model(ids)
        total = sum(
            F.cross_entropy(part, at, reduction="sum") for part, at in zip(logits.unbind(-1), (start, end), strict=True)
        )
        return total, 2 * ids.shape[0]
    ids, targets, *picked = batch
    logits, targets = model(ids, *picked).flatten(0, -2), targets.flatten()
    with torch.no_grad():
        for _ in range(d.metrics):
            F.cross_entropy(logits.float(), targets)
    if d.fused_loss:
        return CrossEntropy.apply(logits, targets).sum(), targets.numel()
    logits = logits.float() if d.float_logits else logits
    return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def _batch(d: Dimensions, samples: int) -> Any:
    ids = torch.zeros(samples, d.seq_len, dtype=torch.int64)
    if d.head == "span":
        return ids, ids[:, 0].clone(), ids[:, 0].clone()
    if d.predictions is None or d.head != "masked":
        return ids, ids.clone()
    picked = torch.zeros(samples, d.predictions, dtype=torch.int64)
    return ids, picked.clone(), picked


def recipe(d: Dimensions) -> Recipe:
    """The module, the loss and the batches of these dimensions."""
    return Recipe(lambda: Transformer(d), lambda model, batch: _loss(d, model, batch), lambda n: _batch(d, n))


_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "mpt": {"bias": False, "positions": "alibi", "one_qkv": True, "narrow_norm": True},
    "llama": {"bias": False, "gated": True, "norm": "rms", "positions": "rope", "tied": False, "one_qkv": False},
    "bert": {
        "dropout": 0.1,
        "norm_first": False,
        "causal": False,
        "token_types": 2,
        "one_qkv": False,
        "fused_attention": False,
        "head": "masked",
    },
}


def transformer(family: str, **dimensions: Any) -> Recipe:
    """A family's member: `Dimensions`, of which the family says what is not given."""
    return recipe(Dimensions(**{**_FAMILIES[family], **dimensions}))


def cut_in_pairs(model: nn.Module) -> dict[str, int]:
    """{parameter: dim} as Megatron-LM cuts it: columns, then rows in attention and MLP; the vocabulary on both ends."""
    found = {}
    for name, _ in model.named_parameters():
        if re.search(
            r"attention\.(qkv|q|k|v|q_b|kv_b)\.\w+$|mlp\.(shared\.)?(up|gate)\.(linear\.)?\w+$|^(embedding|head)\.\w+$",
            name,
        ):
            found[name] = 0
        elif re.search(r"(attention\.out|mlp\.(shared\.)?down)\.linear\.weight$", name):
            found[name] = 1
    return found


# 30,522 padded to a multiple of 8, as NVIDIA's run_pretraining.py and run_squad.py do.
_BERT = {
    "base": {"layers": 12, "hidden": 768, "heads": 12, "vocab": 30528},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 30528},
}


def bert(size: str = "base", task: str = "squad", seq_len: int = 384, **changes: Any) -> Recipe:
    """BERT for questions on SQuAD, or its pretraining, which predicts 15 % of the tokens (20 of 128, 80 of 512)."""
    if task == "squad":
        return transformer("bert", **{**_BERT[size], "seq_len": seq_len, "head": "span", **changes})
    predictions = {128: 20, 512: 80}.get(seq_len, math.ceil(0.15 * seq_len))
    return transformer("bert", **{**_BERT[size], "seq_len": seq_len, "predictions": predictions, **changes})


__all__ = ["Dimensions", "Recipe", "Transformer", "bert", "cut_in_pairs", "recipe", "transformer"]
