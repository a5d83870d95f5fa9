"""The models of the examples, in plain torch: LeNet, a ResNet-18 for 28x28 images, and a byte-level GPT."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Sequential):
    """LeNet with 20 and 50 channels: float32 images [N, 1, 28, 28] -> logits [N, 10]; 129,068 parameters.

    Source: after LeCun et al., Gradient-based learning applied to document recognition (1998), with ReLU.
    """

    def __init__(self) -> None:
        super().__init__(
            OrderedDict[str, nn.Module](
                conv1=nn.Conv2d(1, 20, 3),
                relu1=nn.ReLU(),
                pool1=nn.AvgPool2d(2),
                conv2=nn.Conv2d(20, 50, 5),
                relu2=nn.ReLU(),
                pool2=nn.AvgPool2d(2),
                flatten=nn.Flatten(),
                linear1=nn.Linear(800, 128),
                relu3=nn.ReLU(),
                linear2=nn.Linear(128, 10),
            )
        )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut: [N, in, H, W] -> [N, out, H/stride, W/stride]."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, float32 like `x`."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Sequential):
    """ResNet-18 for small images: float32 [N, 1, 28, 28] -> logits [N, 10]; 11,172,810 parameters.

    The stem is one 3x3 convolution without max pool, so the stages see 28, 14, 7 and 4 pixels a side.
    Source: He et al., arXiv 1512.03385; the initial values are those of He et al., arXiv 1502.01852.
    """

    def __init__(self, num_classes: int = 10) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv=nn.Conv2d(1, 64, 3, padding=1, bias=False), norm=nn.BatchNorm2d(64), relu=nn.ReLU()
        )
        widths = (64, 64, 128, 256, 512)
        for i, (num_in, num_out) in enumerate(pairwise(widths), start=1):
            stride = 1 if i == 1 else 2
            layers[f"stage{i}"] = nn.Sequential(BasicBlock(num_in, num_out, stride), BasicBlock(num_out, num_out, 1))
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(512, num_classes)}
        super().__init__(layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Attention(nn.Module):
    """Causal self-attention over several heads: [B, T, width] -> [B, T, width].

    Query, key and value are three matrices, not one: each can be cut by heads, and a rank that holds a part of them
    computes that many heads, because the number of heads is read off the matrices' outputs.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} does not divide by {heads} heads: give a multiple of {heads}")
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and to those before it."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # No dropout in here: fused kernels draw it from a state of their own, out of reach of a grain's generator.
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=True)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out


class Block(nn.Module):
    """One pre-norm transformer block: [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two-layer perceptron, each added to what came in."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """A byte-level GPT: int64 tokens [B, T], T <= block -> logits [B, T, 256]; 3,257,856 parameters by default.

    `head.weight` is `embedding.weight`, one parameter under two names (Press and Wolf, arXiv 1608.05859).
    Source: Radford et al., Language models are unsupervised multitask learners (2019), with its initial values.
    """

    def __init__(
        self, layers: int = 4, width: int = 256, heads: int = 4, block: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # What is added to the residual stream shrinks with depth, so that the sum keeps its variance.
                residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the byte after each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
