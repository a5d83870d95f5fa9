"""Image models as their papers have them, for the data-parallel rows: plain modules, their loss and their batches.

ResNet: He et al., arXiv 1512.03385 (v1.5: the stride is in the 3x3 convolution). ResNeXt: Xie et al., 1611.05431.
SE: Hu et al., 1709.01507. Inception v3: Szegedy et al., 1512.00567. AlexNet: Krizhevsky, 1404.5997. VGG: Simonyan and
Zisserman, 1409.1556. SSD: Liu et al., 1512.02325. U-Net: Isensee et al., 1809.10486. EfficientNet: Tan and Le,
1905.11946.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.modules import Recipe


def _images(size: int, channels: int, samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, channels, size, size), torch.zeros(samples, dtype=torch.int64)


def _classify(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    images, labels = batch
    found = model(images)
    outputs = found if isinstance(found, tuple) else (found,)
    weights = (1.0, 0.4)  # of Inception's auxiliary head: its paper's 0.3 to 0.4
    total = sum(w * F.cross_entropy(out, labels, reduction="sum") for w, out in zip(weights, outputs, strict=False))
    return total, len(labels)


def classifier(model: Callable[[], nn.Module], size: int = 224) -> Recipe:
    return Recipe(model, _classify, partial(_images, size, 3))


def conv(
    num_in: int, num_out: int, kernel: Any, stride: int = 1, groups: int = 1, padding: Any = None
) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else tuple(k // 2 for k in kernel)
    layer = nn.Conv2d(num_in, num_out, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))


# ------------------------------------------------------------------------------------------------------------ ResNet


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, inner: int, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.down, self.up, self.act = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1), act

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(self.act(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, inner: int, num_out: int, stride: int, groups: int, squeeze: bool) -> None:
        super().__init__()
        self.first = conv(num_in, inner, 1)
        self.second = conv(inner, inner, 3, stride, groups)
        self.third = nn.Conv2d(inner, num_out, 1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)
        self.squeeze = SqueezeExcite(num_out, num_out // 16) if squeeze else None
        self.shortcut = None
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.third(self.second(self.first(x))))
        if self.squeeze is not None:
            out = self.squeeze(out)
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(
        self, depths: Sequence[int], groups: int = 1, width: int = 64, squeeze: bool = False, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        stages, num_in = [], 64
        for i, depth in enumerate(depths):
            inner, num_out = groups * width * 2**i, 256 * 2**i
            blocks = []
            for j in range(depth):
                stride = 2 if i and not j else 1
                blocks.append(Bottleneck(num_in, inner, num_out, stride, groups, squeeze))
                num_in = num_out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(num_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))


# --------------------------------------------------------------------------------------------- AlexNet, VGG, Inception


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for num_in, num_out, kernel, stride, padding, pool in (
            (3, 64, 11, 4, 2, True),
            (64, 192, 5, 1, 2, True),
            (192, 384, 3, 1, 1, False),
            (384, 256, 3, 1, 1, False),
            (256, 256, 3, 1, 1, True),
        ):
            layers += [nn.Conv2d(num_in, num_out, kernel, stride, padding), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(3, 2)] if pool else []
        self.features = nn.Sequential(*layers)
        self.classifier = _fully_connected(256 * 36, dropout_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 6).flatten(1))


class VGG16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        num_in = 3
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU(inplace=True)]
                num_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = _fully_connected(512 * 49, dropout_first=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 7).flatten(1))


def _fully_connected(num_in: int, dropout_first: bool) -> nn.Sequential:
    first = [nn.Linear(num_in, 4096), nn.ReLU(inplace=True)]
    second = [nn.Linear(4096, 4096), nn.ReLU(inplace=True)]
    drop = nn.Dropout
    order = [drop(), *first, drop(), *second] if dropout_first else [*first, drop(), *second, drop()]
    return nn.Sequential(*order, nn.Linear(4096, 1000))


class Branches(nn.Module):
    """Several ways through, side by side."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({f"way{i}": way for i, way in enumerate(ways)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways.values()], 1)


def _chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def _pooled(num_in: int, num_out: int) -> nn.Sequential:
    return _chain(nn.AvgPool2d(3, 1, 1), conv(num_in, num_out, 1))


def _inception_a(n: int, pool: int) -> Branches:
    return Branches(
        conv(n, 64, 1),
        _chain(conv(n, 48, 1), conv(48, 64, 5)),
        _chain(conv(n, 64, 1), conv(64, 96, 3), conv(96, 96, 3)),
        _pooled(n, pool),
    )


def _inception_c(n: int, inner: int) -> Branches:
    across, down = (1, 7), (7, 1)
    return Branches(
        conv(n, 192, 1),
        _chain(conv(n, inner, 1), conv(inner, inner, across), conv(inner, 192, down)),
        _chain(
            conv(n, inner, 1),
            conv(inner, inner, down),
            conv(inner, inner, across),
            conv(inner, inner, down),
            conv(inner, 192, across),
        ),
        _pooled(n, 192),
    )


def _inception_e(n: int) -> Branches:
    def fork() -> Branches:
        return Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))

    return Branches(
        conv(n, 320, 1),
        _chain(conv(n, 384, 1), fork()),
        _chain(conv(n, 448, 1), conv(448, 384, 3), fork()),
        _pooled(n, 192),
    )


class InceptionV3(nn.Module):
    """Images of 299 pixels."""

    def __init__(self) -> None:
        super().__init__()
        valid = partial(conv, padding=0)
        self.stem = _chain(
            valid(3, 32, 3, 2), valid(32, 32, 3), conv(32, 64, 3), nn.MaxPool2d(3, 2), valid(64, 80, 1),
            valid(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        reduce_b = Branches(
            valid(288, 384, 3, 2),
            _chain(conv(288, 64, 1), conv(64, 96, 3), valid(96, 96, 3, 2)),
            nn.MaxPool2d(3, 2),
        )
        self.middle = _chain(
            _inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64), reduce_b, _inception_c(768, 128),
            _inception_c(768, 160), _inception_c(768, 160), _inception_c(768, 192),
        )  # fmt: skip
        self.aux = _chain(nn.AvgPool2d(5, 3), conv(768, 128, 1), valid(128, 768, 5), nn.AdaptiveAvgPool2d(1))
        self.aux_head = nn.Linear(768, 1000)
        reduce_d = Branches(
            _chain(conv(768, 192, 1), valid(192, 320, 3, 2)),
            _chain(conv(768, 192, 1), conv(192, 192, (1, 7)), conv(192, 192, (7, 1)), valid(192, 192, 3, 2)),
            nn.MaxPool2d(3, 2),
        )
        self.last = _chain(reduce_d, _inception_e(1280), _inception_e(2048), nn.AdaptiveAvgPool2d(1), nn.Dropout())
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.middle(self.stem(x))
        return self.head(self.last(x).flatten(1)), self.aux_head(self.aux(x).flatten(1))


# ------------------------------------------------------------------------------------------------------- EfficientNet


class InvertedResidual(nn.Module):
    def __init__(self, num_in: int, num_out: int, expand: int, kernel: int, stride: int, wide_se: bool) -> None:
        super().__init__()
        inner = num_in * expand
        self.expand = _swish_conv(num_in, inner, 1) if expand != 1 else None
        self.depthwise = _swish_conv(inner, inner, kernel, stride, inner)
        self.squeeze = SqueezeExcite(inner, (inner if wide_se else num_in) // 4, F.silu)
        self.project = nn.Sequential(nn.Conv2d(inner, num_out, 1, bias=False), nn.BatchNorm2d(num_out))
        self.residual = stride == 1 and num_in == num_out

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand is None else self.expand(x)
        out = self.project(self.squeeze(self.depthwise(out)))
        return out + x if self.residual else out


def _swish_conv(num_in: int, num_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(num_out), nn.SiLU(inplace=True))


class EfficientNet(nn.Module):
    """`width` and `depth` scale B0 (1.0, 1.0); B4 is (1.4, 1.8) on images of 380 pixels."""

    def __init__(self, width: float = 1.0, depth: float = 1.0, dropout: float = 0.2, wide_se: bool = False) -> None:
        super().__init__()

        def wide(channels: int) -> int:
            rounded = max(8, int(channels * width + 4) // 8 * 8)
            return rounded + 8 if rounded < 0.9 * channels * width else rounded

        self.stem = _swish_conv(3, wide(32), 3, 2)
        blocks: list[nn.Module] = []
        num_in = wide(32)
        for expand, channels, count, stride, kernel in (
            (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
            (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
        ):  # fmt: skip
            for i in range(math.ceil(count * depth)):
                num_out = wide(channels)
                blocks.append(InvertedResidual(num_in, num_out, expand, kernel, stride if i == 0 else 1, wide_se))
                num_in = num_out
        self.blocks = nn.Sequential(*blocks)
        self.last = _swish_conv(num_in, wide(1280), 1)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(wide(1280), 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.last(self.blocks(self.stem(x))), 1)
        return self.head(self.dropout(x.flatten(1)))


# ---------------------------------------------------------------------------------------------------------------- SSD


class SSD300(nn.Module):
    """On ResNet-50 cut after its third stage, which does not stride: 8,732 boxes, 81 classes."""

    boxes = (4, 6, 6, 6, 4, 4)

    def __init__(self, classes: int = 81) -> None:
        super().__init__()
        base = ResNet((3, 4, 6))
        base.stages[2][0].second[0].stride = (1, 1)
        base.stages[2][0].shortcut[0].stride = (1, 1)
        self.backbone = nn.Sequential(base.stem, base.stages)
        more, num_in, widths = [], 1024, [1024]
        for i, (inner, num_out) in enumerate(((256, 512), (256, 512), (128, 256), (128, 256), (128, 256))):
            stride, padding = (2, 1) if i < 3 else (1, 0)
            more.append(nn.Sequential(conv(num_in, inner, 1), conv(inner, num_out, 3, stride, padding=padding)))
            num_in = num_out
            widths.append(num_out)
        self.more = nn.ModuleList(more)
        self.places = nn.ModuleList(nn.Conv2d(w, b * 4, 3, padding=1) for w, b in zip(widths, self.boxes, strict=True))
        self.labels = nn.ModuleList(
            nn.Conv2d(w, b * classes, 3, padding=1) for w, b in zip(widths, self.boxes, strict=True)
        )
        self.classes = classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.backbone(x)
        maps = [x]
        for layer in self.more:
            maps.append(x := layer(x))
        places = [head(m).flatten(1).unflatten(1, (4, -1)) for head, m in zip(self.places, maps, strict=True)]
        labels = [
            head(m).flatten(1).unflatten(1, (self.classes, -1)) for head, m in zip(self.labels, maps, strict=True)
        ]
        return torch.cat(places, 2), torch.cat(labels, 2)


def _detect(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    images, boxes, labels = batch
    places, classes = model(images)
    positive = labels > 0
    of_places = (F.smooth_l1_loss(places, boxes, reduction="none").sum(1) * positive).sum()
    of_labels = F.cross_entropy(classes, labels, reduction="none")
    hard = of_labels.masked_fill(positive, 0.0).sort(1, descending=True)[1].sort(1)[1]
    chosen = positive | (hard < 3 * positive.sum(1, keepdim=True))
    return of_places + (of_labels * chosen).sum(), len(images)


def ssd300() -> Recipe:
    def batch(n: int) -> Any:
        return torch.zeros(n, 3, 300, 300), torch.zeros(n, 4, 8732), torch.zeros(n, 8732, dtype=torch.int64)

    return Recipe(SSD300, _detect, batch)


# -------------------------------------------------------------------------------------------------------------- U-Net


class UNet(nn.Module):
    """nnU-Net in `dims` dimensions: two convolutions with instance normalisation a level, strided ones between them."""

    def __init__(self, dims: int, widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        conv_of = (nn.Conv2d, nn.Conv3d)[dims - 2]
        up_of = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        norm_of = (nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 2]

        def pair(num_in: int, num_out: int, stride: int = 1) -> nn.Sequential:
            layers: list[nn.Module] = []
            for n, s in ((num_in, stride), (num_out, 1)):
                layers += [conv_of(n, num_out, 3, s, 1, bias=False), norm_of(num_out, affine=True)]
                layers.append(nn.LeakyReLU(0.01, inplace=True))
            return nn.Sequential(*layers)

        self.down = nn.ModuleDict()
        num_in = channels
        for i, width in enumerate(widths):
            self.down[f"level{i}"] = pair(num_in, width, 1 if i == 0 else 2)
            num_in = width
        self.up, self.join = nn.ModuleDict(), nn.ModuleDict()
        for i, width in reversed(list(enumerate(widths[:-1]))):
            self.up[f"level{i}"] = up_of(widths[i + 1], width, 2, 2, bias=False)
            self.join[f"level{i}"] = pair(2 * width, width)
        self.head = conv_of(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down.values():
            x = level(x)
            skips.append(x)
        x = skips.pop()
        for up, join in zip(self.up.values(), self.join.values(), strict=True):
            x = join(torch.cat((up(x), skips.pop()), 1))
        return self.head(x)


def _segment(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    images, labels = batch
    logits = model(images)
    chances, wanted = logits.softmax(1), F.one_hot(labels, logits.shape[1]).movedim(-1, 1)
    over = tuple(range(2, logits.ndim))
    dice = 1 - 2 * (chances * wanted).sum(over) / (chances.sum(over) + wanted.sum(over) + 1e-5)
    return F.cross_entropy(logits, labels) * len(images) + dice.mean() * len(images), len(images)


def unet(dims: int) -> Recipe:
    """The Medical Segmentation Decathlon's brain tumours: 5 channels, 4 classes; 192 x 160 pixels, or 128 cubed."""
    size = (192, 160) if dims == 2 else (128, 128, 128)
    widths = (32, 64, 128, 256, 512, 512) if dims == 2 else (32, 64, 128, 256, 320, 320)

    def batch(n: int) -> Any:
        return torch.zeros(n, 5, *size), torch.zeros(n, *size, dtype=torch.int64)

    return Recipe(partial(UNet, dims, widths, 5, 4), _segment, batch)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "resnet50": lambda: classifier(partial(ResNet, (3, 4, 6, 3))),
    "resnet152": lambda: classifier(partial(ResNet, (3, 8, 36, 3))),
    "resnext101_32x4d": lambda: classifier(partial(ResNet, (3, 4, 23, 3), 32, 4)),
    "se_resnext101_32x4d": lambda: classifier(partial(ResNet, (3, 4, 23, 3), 32, 4, True)),
    "alexnet": lambda: classifier(AlexNet),
    "vgg16": lambda: classifier(VGG16),
    "inception_v3": lambda: classifier(InceptionV3, 299),
    "efficientnet_b0": lambda: classifier(EfficientNet),
    "efficientnet_b4": lambda: classifier(partial(EfficientNet, 1.4, 1.8, 0.4), 380),
    "efficientnet_widese_b0": lambda: classifier(partial(EfficientNet, wide_se=True)),
    "efficientnet_widese_b4": lambda: classifier(partial(EfficientNet, 1.4, 1.8, 0.4, True), 380),
    "ssd300": ssd300,
    "unet2d": lambda: unet(2),
    "unet3d": lambda: unet(3),
}
