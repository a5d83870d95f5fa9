"""Speech recognition of the data-parallel rows.

Jasper: Li et al., arXiv 1904.03288. QuartzNet: Kriman et al., 1910.10261.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.modules import Recipe

# LibriSpeech cut at 16.7 s, padded to the longest of a batch, a frame each 10 ms; letters of its text.
FRAMES, LETTERS = 1600, 180


def _layer(
    num_in: int, num_out: int, kernel: int, stride: int = 1, dilation: int = 1, apart: bool = False
) -> nn.Module:
    """A convolution over time with batch normalisation; `apart`: each channel by itself, then all at each frame."""
    padding = dilation * (kernel - 1) // 2
    if not apart or kernel == 1:
        return nn.Sequential(
            nn.Conv1d(num_in, num_out, kernel, stride, padding, dilation, bias=False), nn.BatchNorm1d(num_out)
        )
    return nn.Sequential(
        nn.Conv1d(num_in, num_in, kernel, stride, padding, dilation, num_in, bias=False),
        nn.Conv1d(num_in, num_out, 1, bias=False),
        nn.BatchNorm1d(num_out),
    )


class Block(nn.Module):
    """Five layers, and what blocks before it gave."""

    def __init__(self, residuals: Sequence[int], num_out: int, kernel: int, dropout: float, apart: bool) -> None:
        super().__init__()
        ins = (residuals[-1], *(num_out,) * 4)
        self.layers = nn.ModuleList(_layer(n, num_out, kernel, apart=apart) for n in ins)
        self.residuals = nn.ModuleList(_layer(n, num_out, 1) for n in residuals)
        self.dropout = dropout

    def forward(self, given: list[Tensor]) -> Tensor:
        x = given[-1]
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < len(self.layers) - 1:
                x = F.dropout(F.relu(x), self.dropout)
        for residual, before in zip(self.residuals, given[-len(self.residuals) :], strict=True):
            x = x + residual(before)
        return F.dropout(F.relu(x), self.dropout)


class Recognizer(nn.Module):
    """[B, 64, frames] -> log-probabilities [frames / 2, B, 29]. `dense`: blocks add up what all before them gave."""

    def __init__(
        self, blocks: Sequence[tuple[int, int]], first: int, last: tuple[int, int], dense: bool, apart: bool
    ) -> None:
        super().__init__()
        self.dense = dense
        dropout = 0.2 if dense else 0.0
        self.prologue = _layer(64, 256, first, 2, apart=apart)
        widths, made = [256], []
        for width, kernel in blocks:
            made.append(Block(widths if dense else widths[-1:], width, kernel, dropout, apart))
            widths.append(width)
        self.blocks = nn.ModuleList(made)
        width, kernel = last
        self.epilogue = nn.ModuleList((_layer(widths[-1], width, kernel, 1, 2, apart), _layer(width, 1024, 1)))
        self.head = nn.Conv1d(1024, 29, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [F.relu(self.prologue(x))]
        for block in self.blocks:
            found.append(block(found if self.dense else found[-1:]))
        x = found[-1]
        for layer in self.epilogue:
            x = F.relu(layer(x))
        return self.head(x).permute(2, 0, 1).log_softmax(-1)


def _loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    sound, text = batch
    found = model(sound)
    # CTC reads the log-probabilities of a few letters; what it costs on a GPU is small beside the convolutions.
    return -(found.mean(0).gather(1, text)).sum(), len(sound)


def _batch(samples: int) -> Any:
    return torch.zeros(samples, 64, FRAMES), torch.zeros(samples, LETTERS, dtype=torch.int64)


_JASPER = [(w, k) for w, k in ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25)) for _ in range(2)]
_QUARTZ = [(w, k) for w, k in ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75)) for _ in range(3)]

RECIPES = {
    "jasper": lambda: Recipe(partial(Recognizer, _JASPER, 11, (896, 29), True, False), _loss, _batch),
    "quartznet": lambda: Recipe(partial(Recognizer, _QUARTZ, 33, (512, 87), False, True), _loss, _batch),
}
