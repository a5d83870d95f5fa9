"""Transformers from their dimensions, as plain modules that a user would write, with their losses and batches.

GPT: Radford et al. 2019. MPT: MosaicML 2023. Llama: Touvron et al., arXiv 2302.13971. BERT: Devlin et al., 1810.04805.
`fused_kernels` has the passes over memory that Megatron-LM (arXiv 1909.08053) and its kin fuse by hand in one launch.
"""

from __future__ import annotations

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
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d = d
        self.norm1, self.attention = Norm(d), Attention(d)
        self.norm2, self.mlp = Norm(d), FeedForward(d)

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
        self.blocks = nn.ModuleList(Block(d) for _ in range(d.layers))
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
        if re.search(r"attention\.(qkv|q|k|v)\.\w+$|mlp\.(up|gate)\.(linear\.)?\w+$|^(embedding|head)\.\w+$", name):
            found[name] = 0
        elif re.search(r"(attention\.out|mlp\.down)\.linear\.weight$", name):
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
