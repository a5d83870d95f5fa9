"""Modules of plain torch as people write them: recurrence, attention, norms, odd parameters and buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import shoal
from benchmarks.corpus.row import SAMPLES, Batch, Row, ids, numbers, torch_row

CLASSES = 4


def points(*shape: int) -> Batch:
    """Samples of a shape, and a class each."""
    return {"x": numbers(SAMPLES, *shape), "y": ids(SAMPLES, most=CLASSES, least=0, seed=1)}


def words(length: int = 6) -> Batch:
    """Token ids of ragged lengths, zero where nothing is, and a class each."""
    lengths = 2 + torch.arange(SAMPLES) % (length - 1)
    tokens = ids(SAMPLES, length, most=20, least=1) * (torch.arange(length) < lengths[:, None])
    return {"x": tokens, "lengths": lengths, "y": ids(SAMPLES, most=CLASSES, least=0, seed=1)}


def classified(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of one class a sample."""
    return shoal.cross_entropy(model(*(value for name, value in batch.items() if name != "y")), batch["y"])


class Recurrent(nn.Module):
    """Packed sequences through a recurrent layer."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.layer = kind(8, 6, batch_first=True, **settings)
        self.head = nn.Linear(6 * (2 if settings.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(outputs.sum(1) / lengths[:, None])


class Cells(nn.Module):
    """A loop over an LSTM cell and a GRU cell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(4, 6), nn.GRUCell(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state, upper = None, x.new_zeros(len(x), 6)
        for step in x.unbind(1):
            state = self.first(step, state)
            upper = self.second(state[0], upper)
        return self.head(upper)


class Translating(nn.Module):
    """nn.Transformer with masks for padding and for the future."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        nothing, inputs = x == 0, self.embed(x)
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(inputs)
        absent = torch.zeros_like(nothing, dtype=inputs.dtype).masked_fill(nothing, -torch.inf)
        return self.head(self.inner(inputs, inputs, tgt_mask=future, src_key_padding_mask=absent)[:, 0])


class Encoding(nn.Module):
    """nn.TransformerEncoder, before whose layers a norm stands."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x), src_key_padding_mask=x == 0).sum(1))


class Attending(nn.Module):
    """nn.MultiheadAttention with keys and values of other widths, and with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, kdim=4, vdim=4, add_bias_kv=True, batch_first=True)
        self.ask, self.head = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.attend(self.ask(x), x, x)
        return self.head(found.sum(1)) + weights.square().mean()


class Bags(nn.Module):
    """Two bags of words a sample; `mode` and `sparse` are EmbeddingBag's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, **settings), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.bag(x))


class Tied(nn.Module):
    """An embedding that is also the output's weight."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8, sparse=sparse)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))).sum(1))


class Complex(nn.Module):
    """A filter in the frequency domain: a complex parameter, or one of pairs of real numbers; and a complex buffer."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        numbers = torch.randn(5, dtype=torch.complex64)
        self.filter = nn.Parameter(torch.view_as_real(numbers).clone() if real else numbers)
        self.register_buffer("turn", torch.exp(1j * torch.arange(5)).to(torch.complex64))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        factors = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter.float())
        found = torch.fft.irfft(torch.fft.rfft(x.float()) * factors * self.turn, n=8)
        return self.head(found.to(x.dtype))


class Buffers(nn.Module):
    """Buffers of every dtype, some of which count."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                      torch.bfloat16, torch.float64, torch.complex64):  # fmt: skip
            self.register_buffer(f"of_{dtype}".replace("torch.", ""), torch.ones(8).to(dtype))
        self.register_buffer("scalar", torch.tensor(0.5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("unsaved", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.of_bfloat16.to(x.dtype) * self.of_bool * self.of_complex64.real.to(x.dtype)
        return self.head(x + self.unsaved.to(x.dtype) * self.scalar.to(x.dtype))


class Counting(nn.Module):
    """A running mean and a number of calls, kept by the forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
            self.calls += 1
        return self.head(x - self.mean.to(x.dtype))


class Rounded(nn.Module):
    """Weights and inputs on a grid in the forward, gradients straight through it: quantisation-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    @staticmethod
    def grid(value: Tensor) -> Tensor:
        step = value.detach().abs().amax() / 127 + 1e-8
        return value + ((value / step).round().clamp(-127, 127) * step - value).detach()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x.clamp(-3, 3), self.grid(self.first.weight), self.first.bias)
        return self.head(torch.relu(inner))


class Branching(nn.Module):
    """A branch that the data choose, one that is never taken, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.where(x[:, :1] > 0, self.left(x), self.right(x))
        return self.head(chosen + self.frozen(x))


class Again(nn.Module):
    """Blocks with dropout that are computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.blocks, self.head, self.reentrant = nn.ModuleList(blocks), nn.Linear(8, CLASSES), reentrant
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Gated(nn.Module):
    """nn.Bilinear and parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(4, 4, 6), nn.Linear(6, CLASSES)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.tensor(1.0))])
        self.others = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(6))})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pair(*x.chunk(2, -1)) * self.scales[0] * self.scales[1] + self.others["shift"])


class Symmetric(nn.Module):
    """A parametrization of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def dense(wrap: Any, *arguments: Any) -> nn.Module:
    """Two layers, the first wrapped."""
    return nn.Sequential(wrap(nn.Linear(8, 8), *arguments), nn.Tanh(), nn.Linear(8, CLASSES))


def convolved(norm: Any, *arguments: Any) -> nn.Module:
    """Convolutions, transposed and not, with a norm between them."""
    return nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), norm(*arguments), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4, padding=1)),
        *(nn.PixelShuffle(2), nn.ConvTranspose2d(2, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(4, CLASSES),
    )


def dropped(kind: Any) -> nn.Module:
    """A kind of dropout between two convolutions."""
    first = nn.Sequential(nn.Conv2d(2, 8, 3), kind(0.3), nn.Conv2d(8, 4, 1), nn.RReLU())
    return nn.Sequential(first, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))


def lazy() -> nn.Module:
    """Layers that learn their widths from a first forward in the builder."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES))
    model(torch.zeros(2, 8))
    return model


def double() -> nn.Module:
    """Parameters in float64."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def double_classified(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of a float64 model."""
    return shoal.cross_entropy(model(batch["x"].double()), batch["y"])


def fake_quantised() -> nn.Module:
    """torch.ao's quantisation-aware layers with moving averages of the range."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(8, 8), fake, nn.ReLU(), nn.Linear(8, CLASSES))


def chosen_ids() -> Batch:
    """Ids of the classes themselves, and a class each."""
    return {"x": ids(SAMPLES, 3, most=CLASSES, least=0), "y": ids(SAMPLES, most=CLASSES, least=0, seed=1)}


_IMAGE = partial(points, 2, 6, 6)
_POINT = partial(points, 8)
_STEPS = partial(points, 5, 4)


def _symmetric() -> nn.Module:
    return dense(lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()))


def _each(family: str, table: dict[str, tuple[Any, Any]], **others: Any) -> list[Row]:
    return [torch_row(family, name, model, classified, data, **others) for name, (model, data) in table.items()]


_BAG = partial(torch.optim.Adagrad, lr=0.1)
_PLAIN: dict[str, tuple[Any, Any]] = {
    "rnn": (partial(Recurrent, nn.RNN), words),
    "lstm": (partial(Recurrent, nn.LSTM, num_layers=2, dropout=0.2, bidirectional=True), words),
    "gru": (partial(Recurrent, nn.GRU, num_layers=2), words),
    "cells": (Cells, _STEPS),
    "transformer": (Translating, words),
    "transformer_encoder": (Encoding, words),
    "multihead_attention": (Attending, _STEPS),
    "embedding_bag": (partial(Bags, mode="mean", padding_idx=0), words),
    "tied": (Tied, chosen_ids),
    "complex_parameter": (partial(Complex, False), _POINT),
    "complex_filter": (partial(Complex, True), _POINT),
    "buffers_of_all_dtypes": (Buffers, _POINT),
    "straight_through": (Rounded, _POINT),
    "branches": (Branching, _POINT),
    "checkpointed": (partial(Again, False), _POINT),
    "checkpointed_reentrant": (partial(Again, True), _POINT),
    "bilinear": (Gated, _POINT),
    "lazy": (lazy, _POINT),
    "weight_norm_hook": (partial(dense, nn.utils.weight_norm), _POINT),
    "weight_norm": (partial(dense, parametrizations.weight_norm), _POINT),
    "spectral_norm_hook": (partial(dense, nn.utils.spectral_norm), _POINT),
    "spectral_norm": (partial(dense, parametrizations.spectral_norm), _POINT),
    "orthogonal": (partial(dense, parametrizations.orthogonal), _POINT),
    "symmetric": (_symmetric, _POINT),
    "group_norm": (partial(convolved, nn.GroupNorm, 2, 8), _IMAGE),
    "instance_norm": (partial(convolved, nn.InstanceNorm2d, 8, 1e-5, 0.1, True, True), _IMAGE),
    "layer_norm": (partial(convolved, nn.LayerNorm, (8, 6, 6)), _IMAGE),
    "batch_norm": (partial(convolved, nn.BatchNorm2d, 8), _IMAGE),
    "batch_norm_without_momentum": (partial(convolved, nn.BatchNorm2d, 8, 1e-5, None), _IMAGE),
    "local_response_norm": (partial(convolved, nn.LocalResponseNorm, 2), _IMAGE),
    "dropout2d": (partial(dropped, nn.Dropout2d), _IMAGE),
    "alpha_dropout": (partial(dropped, nn.AlphaDropout), _IMAGE),
    "feature_alpha_dropout": (partial(dropped, nn.FeatureAlphaDropout), _IMAGE),
}
ROWS = [
    *_each("torch layers", _PLAIN),
    # Their forward uses what it has just made of the batch: its samples are compared with each other on purpose.
    torch_row("torch layers", "counting_buffers", Counting, classified, _POINT, fuse=False),
    torch_row("torch layers", "fake_quantize", fake_quantised, classified, _POINT, fuse=False),
    torch_row("torch layers", "float64", double, double_classified, _POINT),
    torch_row(
        "torch layers",
        "sparse_embedding_bag",
        partial(Bags, mode="sum", sparse=True),
        classified,
        words,
        optimizer=_BAG,
        clip_norm=None,
    ),
]
