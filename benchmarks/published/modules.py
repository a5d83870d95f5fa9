"""Transformers from their dimensions: plain modules, as anyone would write them, for the planner to trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published import kernels


@dataclass(frozen=True)
class Dimensions:
    """A transformer. `family`: gpt (learned positions, LayerNorm, GELU), llama (rotary, RMSNorm, SwiGLU) or bert.

    `fused_kernels`: bias and activation, bias and dropout and addition, mask and softmax are one kernel each.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    length: int
    tied: bool = True
    family: str = "gpt"
    fused_attention: bool = True
    fused_kernels: bool = False
    dropout: float = 0.0
    bias: bool = True

    @property
    def causal(self) -> bool:
        """Whether a position sees only those before it."""
        return self.family != "bert"

    @property
    def is_llama(self) -> bool:
        """Whether blocks are of Llama's kind."""
        return self.family == "llama"


@dataclass(frozen=True)
class Made:
    """A model's factory with its loss and batches; `cuts` says by which dim tensor parallelism cuts a parameter."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    batch: Callable[[int], Any]
    cuts: Callable[[nn.Module], dict[str, int]] | None = None


def transformer(dimensions: Dimensions) -> Made:
    """The model of these dimensions on random tokens; loss: the sum of the tokens' cross entropy."""

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        shape = (samples, dimensions.length)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        logits = model(tokens)
        flat = logits.flatten(0, -2).float()
        return functional.cross_entropy(flat, targets.flatten(), reduction="sum"), torch.tensor(targets.numel())

    return Made(lambda: Transformer(dimensions), loss, batch, tensor_cuts)


def tensor_cuts(model: nn.Module) -> dict[str, int]:
    """Megatron-LM's: what widens is cut along its outputs, what narrows along its inputs, tokens along the vocabulary."""
    dims = {"qkv": 0, "up": 0, "tokens": 0, "head": 0, "out": 1, "down": 1}
    found = {}
    for name, parameter in model.named_parameters():
        layer = name.split(".")[-2] if "." in name else ""
        if layer in dims and (parameter.ndim > 1 or dims[layer] == 0):
            found[name] = dims[layer]
    return found


class Transformer(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocab)."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.dimensions = d
        self.tokens = nn.Embedding(d.vocab, d.hidden)
        self.positions = None if d.is_llama else nn.Parameter(torch.zeros(d.length, d.hidden))
        self.blocks = nn.ModuleList(Block(d) for _ in range(d.layers))
        self.norm = _norm(d)
        self.head = nn.Linear(d.hidden, d.vocab, bias=False)
        if d.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each position."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = functional.dropout(x + self.positions, self.dimensions.dropout, self.dimensions.dropout > 0)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _norm(d: Dimensions) -> nn.Module:
    return nn.RMSNorm(d.hidden) if d.is_llama else nn.LayerNorm(d.hidden, bias=d.bias)


class Block(nn.Module):
    """A pre-norm block; x (batch, length, hidden)."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.dimensions = d
        self.width = d.hidden // d.heads
        self.norm1, self.norm2 = _norm(d), _norm(d)
        self.qkv = nn.Linear(d.hidden, (d.heads + 2 * d.kv_heads) * self.width, bias=d.bias)
        self.out = nn.Linear(d.heads * self.width, d.hidden, bias=False)
        self.up = nn.Linear(d.hidden, d.ffn * (2 if d.is_llama else 1), bias=False)
        self.down = nn.Linear(d.ffn, d.hidden, bias=False)
        if d.bias:
            self.out_bias, self.down_bias = (nn.Parameter(torch.zeros(d.hidden)) for _ in range(2))
            self.up_bias = nn.Parameter(torch.zeros(d.ffn))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, shaped as its input."""
        d = self.dimensions
        x = self._add(self.out(self._attention(self.norm1(x))), self.out_bias if d.bias else None, x)
        y = self.up(self.norm2(x))
        if d.is_llama:
            y = self._gated(y)
        elif d.bias and d.fused_kernels:
            y = kernels.bias_gelu(y, self.up_bias)
        else:
            y = functional.gelu(y + self.up_bias if d.bias else y)
        return self._add(self.down(y), self.down_bias if d.bias else None, x)

    def _gated(self, y: Tensor) -> Tensor:
        if self.dimensions.fused_kernels:
            return kernels.swiglu(y)
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def _add(self, y: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        d = self.dimensions
        if d.fused_kernels and bias is not None:
            return kernels.dropout_add(y, bias, residual, d.dropout)[0]
        y = y + bias if bias is not None else y
        return functional.dropout(y, d.dropout) + residual if d.dropout else y + residual

    def _attention(self, x: Tensor) -> Tensor:
        d, (batch, length, _) = self.dimensions, x.shape
        parts = self.qkv(x).split([d.heads * self.width, d.kv_heads * self.width, d.kv_heads * self.width], dim=-1)
        q, k, v = (part.view(batch, length, -1, self.width).transpose(1, 2) for part in parts)
        if d.is_llama:
            q, k = self._rotated(q), self._rotated(k)
        if d.fused_attention:
            y = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=d.dropout, is_causal=d.causal, enable_gqa=d.kv_heads != d.heads
            )
        else:
            y = self._unfused(q, k, v)
        return y.transpose(1, 2).reshape(batch, length, -1)

    def _rotated(self, x: Tensor) -> Tensor:
        if self.dimensions.fused_kernels:
            return kernels.rotate(x, False)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        places = torch.zeros(x.shape[-2], x.shape[-1], dtype=x.dtype, device=x.device)
        return x * places + turned * places

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        d, scale = self.dimensions, self.width**-0.5
        if d.kv_heads != d.heads:
            k, v = (t.repeat_interleave(d.heads // d.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2)
        if d.fused_kernels:
            weights = kernels.scores_softmax(scores, scale, d.causal)
        else:
            weights = (scores * scale).softmax(-1)
        return functional.dropout(weights, d.dropout) @ v if d.dropout else weights @ v
