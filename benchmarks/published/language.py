"""Language and recommendation models of the data-parallel rows, with the sizes of the programs that were measured.

GNMT: Wu et al., arXiv 1609.08144. Transformer: Vaswani et al., 1706.03762. Transformer-XL: Dai et al., 1901.02860.
NCF: He et al., 1708.05031. Sizes: github.com/NVIDIA/DeepLearningExamples, PyTorch/{Translation,LanguageModeling,...}.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.modules import Recipe

# Tokens of a sentence of WMT's English and German in 32,000 pieces, padded to its batch: about 27 to 30.
SENTENCE = 28


def _sentences(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros(samples, SENTENCE, dtype=torch.int64)
    return ids, ids.clone(), ids.clone()


def _translate(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    source, target, labels = batch
    logits = model(source, target)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum"), labels.numel()


# --------------------------------------------------------------------------------------------------------------- GNMT


class Bahdanau(nn.Module):
    """Attention by a sum, normalised: queries [B, T, N], keys [B, S, N] -> [B, T, N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        both = torch.tanh(self.query(queries).unsqueeze(2) + self.key(keys).unsqueeze(1) + self.bias)
        return (both @ self.score).softmax(-1) @ keys


class GNMT(nn.Module):
    """Four layers each way of 1,024; the first of the encoder goes both ways."""

    def __init__(self, width: int = 1024, vocab: int = 32320, layers: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.dropout = nn.Dropout(dropout)
        self.first = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList(
            nn.LSTM(2 * width if i == 0 else width, width, batch_first=True) for i in range(layers - 1)
        )
        self.attend_first = nn.LSTM(width, width, batch_first=True)
        self.attention = Bahdanau(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, _ = self.first(self.dropout(self.embedding(source)))
        for i, layer in enumerate(self.encoder):
            out, _ = layer(self.dropout(x))
            x = out + x if i else out
        y, _ = self.attend_first(self.dropout(self.embedding(target)))
        attended = self.attention(y, x)
        for i, layer in enumerate(self.decoder):
            out, _ = layer(torch.cat((self.dropout(y), attended), -1))
            y = out + y if i else out
        return self.head(y)


# -------------------------------------------------------------------------------------------------------- Transformer


class Layer(nn.Module):
    """Post-norm attention, to a memory too where it is of a decoder, and a perceptron."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, decodes: bool) -> None:
        super().__init__()
        make = partial(nn.MultiheadAttention, width, heads, dropout=dropout, batch_first=True, bias=False)
        self.own, self.norm1 = make(), nn.LayerNorm(width)
        self.other = make() if decodes else None
        self.norm2 = nn.LayerNorm(width) if decodes else None
        self.up, self.down, self.norm3 = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.dropout(self.own(x, x, x)[0]))
        if self.other is not None:
            x = self.norm2(x + self.dropout(self.other(x, memory, memory)[0]))
        return self.norm3(x + self.dropout(self.down(self.dropout(F.relu(self.up(x))))))


class Translator(nn.Module):
    """Transformer-big: six layers each way of 1,024 with 16 heads, one table for all."""

    def __init__(
        self, width: int = 1024, heads: int = 16, inner: int = 4096, layers: int = 6, vocab: int = 33712
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(Layer(width, heads, inner, 0.1, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, inner, 0.1, True) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.zeros(SENTENCE, width), False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = (F.dropout(self.embedding(ids) * 32.0 + self.places, 0.1) for ids in (source, target))
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return self.head(y)


# ----------------------------------------------------------------------------------------------------- Transformer-XL


class RelativeLayer(nn.Module):
    """Attention to `memory` older positions too, by content and by distance."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.width = heads, width // heads
        self.qkv, self.relative = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.out, self.norm1 = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        self.by_content, self.by_place = (nn.Parameter(torch.zeros(heads, width // heads)) for _ in range(2))
        self.up, self.down, self.norm2 = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        time = x.shape[1]
        q, k, v = self.qkv(torch.cat((memory, x), 1)).unflatten(-1, (3, self.heads, self.width)).unbind(2)
        q, r = q[:, -time:], self.relative(places).unflatten(-1, (self.heads, self.width))
        content = torch.einsum("bihd,bjhd->bhij", q + self.by_content, k)
        place = torch.einsum("bihd,jhd->bhij", q + self.by_place, r)
        padded = F.pad(place, (1, 0)).view(*place.shape[:2], place.shape[3] + 1, time)  # the shift of its paper
        scores = (content + padded[:, :, 1:].reshape_as(place)) * self.width**-0.5
        weights = F.dropout(scores.float().softmax(-1).type_as(scores), 0.0)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        x = self.norm1(x + F.dropout(self.out(mixed), self.dropout))
        inner = F.dropout(F.relu(self.up(x)), self.dropout)
        return self.norm2(x + F.dropout(self.down(inner), self.dropout))


class TransformerXL(nn.Module):
    """WikiText-103: 267,735 words; of the tokens' targets about so many are in each of the adaptive softmax's parts."""

    cutoffs = (19997, 39997, 199997, 267735)
    shares = (0.84, 0.07, 0.07, 0.02)

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, length: int, shrink: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = [b - a for a, b in zip((0, *self.cutoffs), self.cutoffs, strict=False)]
        widths = [width // shrink**i for i in range(len(sizes))]
        self.tables = nn.ModuleList(nn.Embedding(n, w) for n, w in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(w, width, bias=False) for w in widths)
        self.layers = nn.ModuleList(RelativeLayer(width, heads, inner, dropout) for _ in range(layers))
        self.clusters = nn.Linear(width, len(sizes) - 1)
        self.register_buffer("places", torch.zeros(2 * length, width), False)
        self.width = width

    def forward(self, ids: Tensor, memories: Tensor, targets: Tensor) -> Tensor:
        flat, start, parts = ids.flatten(), 0, []
        ends = [round(flat.numel() * sum(self.shares[: i + 1])) for i in range(len(self.shares))]
        for table, projection, end in zip(self.tables, self.projections, ends, strict=True):
            parts.append(projection(table(flat[start:end])))
            start = end
        x = F.dropout(torch.cat(parts).view(*ids.shape, -1) * math.sqrt(self.width), 0.1)
        for layer, memory in zip(self.layers, memories.unbind(0), strict=True):
            x = layer(x, memory, self.places)
        return self._loss(x.flatten(0, 1), targets.flatten(), ends)

    def _loss(self, x: Tensor, targets: Tensor, ends: list[int]) -> Tensor:
        head = torch.cat((self._logits(x, 0), self.clusters(x)), 1)
        total = F.cross_entropy(head.float(), targets, reduction="sum")
        for i in range(1, len(ends)):
            rows = slice(ends[i - 1], ends[i])
            total = total + F.cross_entropy(self._logits(x[rows], i).float(), targets[rows], reduction="sum")
        return total

    def _logits(self, x: Tensor, part: int) -> Tensor:
        return (x @ self.projections[part].weight) @ self.tables[part].weight.t()


_XL = {
    "base": {"layers": 16, "width": 512, "heads": 8, "inner": 2048, "length": 192, "shrink": 1, "dropout": 0.1},
    "large": {"layers": 18, "width": 1024, "heads": 16, "inner": 4096, "length": 384, "shrink": 4, "dropout": 0.2},
}


def transformer_xl(size: str) -> Recipe:
    """A segment attends to as many positions before it, which are kept of the last step."""
    sizes: Any = _XL[size]

    def batch(samples: int) -> Any:
        ids = torch.zeros(samples, sizes["length"], dtype=torch.int64)
        return ids, torch.zeros(sizes["layers"], samples, sizes["length"], sizes["width"]), ids.clone()

    def loss(model: nn.Module, given: Any) -> tuple[Tensor, int]:
        return model(*given), given[0].numel()

    return Recipe(partial(TransformerXL, **sizes), loss, batch)


# ---------------------------------------------------------------------------------------------------------------- NCF


class NCF(nn.Module):
    """NeuMF on MovieLens-20M: 138,493 users, 26,744 items."""

    def __init__(self, factors: int = 64, widths: tuple[int, ...] = (256, 256, 128, 64)) -> None:
        super().__init__()
        users, items = 138493, 26744
        self.user_factors, self.item_factors = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.users, self.items = nn.Embedding(users, widths[0] // 2), nn.Embedding(items, widths[0] // 2)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1] + factors, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.user_factors(user) * self.item_factors(item)
        x = torch.cat((self.users(user), self.items(item)), 1)
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), 0.5)
        return self.head(torch.cat((product, x), 1))


def ncf() -> Recipe:
    def batch(samples: int) -> Any:
        ids = torch.zeros(samples, dtype=torch.int64)
        return ids, ids.clone(), torch.zeros(samples)

    def loss(model: nn.Module, given: Any) -> tuple[Tensor, int]:
        user, item, label = given
        return F.binary_cross_entropy_with_logits(model(user, item)[:, 0], label, reduction="sum"), len(user)

    return Recipe(NCF, loss, batch)


RECIPES = {
    "gnmt": lambda: Recipe(GNMT, _translate, _sentences),
    "transformer_big": lambda: Recipe(Translator, _translate, _sentences),
    "transformer_xl_base": lambda: transformer_xl("base"),
    "transformer_xl_large": lambda: transformer_xl("large"),
    "ncf": ncf,
}
