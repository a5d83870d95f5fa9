"""Nets of images, small to large, whose steps memory_format.py measures: as torch's tutorials and papers have them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import small_jobs
from models import GPT, LeNet, ResNet18

MakeNet = Callable[[], nn.Module]


@dataclass(frozen=True)
class ImageNet:
    """Net, and the shape of a batch of its inputs; `pools` where its images are pooled on their way."""

    make: MakeNet
    batch: tuple[int, ...]
    classes: int = 10
    pools: bool = False


def convolved(channels: int, features: int, kernel: int = 3, *, norm: bool = False) -> list[nn.Module]:
    """Convolution of the same size, a norm where it is wanted, and ReLU."""
    convolution = nn.Conv2d(channels, features, kernel, padding=kernel // 2)
    return [convolution, nn.BatchNorm2d(features), nn.ReLU()] if norm else [convolution, nn.ReLU()]


def stacked(
    channels: int, plan: str, head: list[nn.Module], *, norm: bool = False, pool: Any = nn.MaxPool2d
) -> nn.Module:
    """Net of a plan such as "32 32 M 64 M": features of a convolution, or M for a pool of 2 x 2."""
    layers: list[nn.Module] = []
    for word in plan.split():
        if word == "M":
            layers.append(pool(2))
            continue
        features, _, kernel = word.partition("k")
        layers += convolved(channels, int(features), int(kernel or 3), norm=norm)
        channels = int(features)
    return nn.Sequential(*layers, nn.Flatten(), *head)


def dense(*widths: int) -> list[nn.Module]:
    """Linear layers with ReLU between them."""
    found: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        found += [nn.Linear(inputs, outputs), nn.ReLU()]
    return found[:-1]


class Residual(nn.Module):
    """Input plus what a body makes of it."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, images: Tensor) -> Tensor:
        return images + self.body(images)


class Joined(nn.Module):
    """Branches beside each other, their features joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in self.branches], 1)


class UNet(nn.Module):
    """Two pools down and two transposed convolutions up, with the features of the way down joined (2015)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            nn.Sequential(*convolved(c, f), *convolved(f, f)) for c, f in ((3, width), (width, 2 * width))
        )
        self.middle = nn.Sequential(*convolved(2 * width, 4 * width), *convolved(4 * width, 4 * width))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * f, f, 2, 2) for f in (2 * width, width))
        self.joins = nn.ModuleList(nn.Sequential(*convolved(2 * f, f)) for f in (2 * width, width))
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(width, 10, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept = []
        for down in self.downs:
            images = down(images)
            kept.append(images)
            images = self.pool(images)
        images = self.middle(images)
        for up, join, beside in zip(self.ups, self.joins, reversed(kept), strict=True):
            images = join(torch.cat([up(images), beside], 1))
        return self.last(images).mean((2, 3))


class Logits(nn.Module):
    """Logits of a model of the transformers package."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.model(images).logits
        return found


def of_transformers(name: str, **sizes: Any) -> MakeNet:
    """Classifier of the transformers package with random weights."""

    def make() -> nn.Module:
        import transformers

        configuration = getattr(transformers, f"{name}Config")(num_labels=10, **sizes)
        return Logits(getattr(transformers, f"{name}ForImageClassification")(configuration))

    return make


def resnet9() -> nn.Module:
    """DAWNBench's ResNet-9 at half its width."""
    first = [*convolved(3, 32, norm=True), *convolved(32, 64, norm=True), nn.MaxPool2d(2)]
    second = [Residual(*convolved(64, 64, norm=True), *convolved(64, 64, norm=True)), *convolved(64, 128, norm=True)]
    third = [nn.MaxPool2d(2), *convolved(128, 256, norm=True), nn.MaxPool2d(2)]
    last = [Residual(*convolved(256, 256, norm=True), *convolved(256, 256, norm=True)), nn.MaxPool2d(4)]
    return nn.Sequential(*first, *second, *third, *last, nn.Flatten(), nn.Linear(256, 10))


def inception() -> nn.Module:
    """Two blocks of branches with a pool in one of them, as in GoogLeNet."""

    def block(channels: int, features: int) -> nn.Module:
        return Joined(
            nn.Sequential(*convolved(channels, features, 1)),
            nn.Sequential(*convolved(channels, features, 1), *convolved(features, features)),
            nn.Sequential(*convolved(channels, features, 1), *convolved(features, features, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *convolved(channels, features, 1)),
        )

    stem = [*convolved(3, 32), nn.MaxPool2d(2)]
    return nn.Sequential(
        *stem, block(32, 16), nn.MaxPool2d(2), block(64, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    )


def squeezenet() -> nn.Module:
    """Fire modules of SqueezeNet, for 32 x 32."""

    def fire(channels: int, few: int, many: int) -> nn.Module:
        squeezed = nn.Sequential(*convolved(channels, few, 1))
        return nn.Sequential(
            squeezed, Joined(nn.Sequential(*convolved(few, many, 1)), nn.Sequential(*convolved(few, many)))
        )

    return nn.Sequential(
        *convolved(3, 32), nn.MaxPool2d(2), fire(32, 8, 32), fire(64, 8, 32), nn.MaxPool2d(2), fire(64, 16, 64),
        nn.Conv2d(128, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def densenet() -> nn.Module:
    """Three dense layers, an average pool, three more."""

    class Dense(nn.Module):
        def __init__(self, channels: int, growth: int) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.BatchNorm2d(channels), *convolved(channels, growth))

        def forward(self, images: Tensor) -> Tensor:
            return torch.cat([images, self.body(images)], 1)

    layers: list[nn.Module] = [*convolved(3, 24)]
    for channels in (24, 36, 48):
        layers.append(Dense(channels, 12))
    layers += [nn.Conv2d(60, 30, 1), nn.AvgPool2d(2)]
    for channels in (30, 42, 54):
        layers.append(Dense(channels, 12))
    return nn.Sequential(*layers, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(66, 10))


VGG11 = "64 M 128 M 256 256 M 512 512 M 512 512 M"
VGG16 = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"


def vgg(plan: str, pixels: int = 1, *, norm: bool = False) -> MakeNet:
    """VGG with a small head, as for CIFAR-10."""
    return lambda: stacked(3, plan, dense(512 * pixels, 512, 10), norm=norm)


def of_stack(channels: int, plan: str, *widths: int, **how: Any) -> MakeNet:
    """`stacked` with a dense head."""
    return lambda: stacked(channels, plan, dense(*widths), **how)


def pooled(make: MakeNet, *batch: int) -> ImageNet:
    """Net that pools its images."""
    return ImageNet(make, batch, pools=True)


WIDTHS = [32, 64, 128, 256]
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
small_resnet = of_transformers("ResNet", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
GRAY, CIFAR = (1, 28, 28), (3, 32, 32)
NETS: Mapping[str, ImageNet] = {
    "LeNet": pooled(LeNet, 256, *GRAY),
    "LeNet, 32": pooled(LeNet, 32, *GRAY),
    "LeNet, 8": pooled(LeNet, 8, *GRAY),
    "LeNet-5, average pools": pooled(of_stack(1, "6k5 M 16k5 M", 784, 120, 84, 10, pool=nn.AvgPool2d), 128, *GRAY),
    "Keras' MNIST": pooled(of_stack(1, "32 M 64 M", 3136, 10), 128, *GRAY),
    "torch's MNIST": pooled(of_stack(1, "32 64 M", 12544, 128, 10), 64, *GRAY),
    "torch's CIFAR-10": pooled(of_stack(3, "6k5 M 16k5 M", 1024, 120, 84, 10), 64, *CIFAR),
    "cuda-convnet": pooled(of_stack(3, "32k5 M 32k5 M 64k5 M", 1024, 64, 10), 128, *CIFAR),
    "three blocks, norms": pooled(of_stack(3, "32 M 64 M 128 M", 2048, 10, norm=True), 128, *CIFAR),
    "two pairs": pooled(of_stack(3, "32 32 M 64 64 M", 4096, 128, 10), 64, *CIFAR),
    "three pairs, norms": pooled(of_stack(3, "32 32 M 64 64 M 128 128 M", 2048, 128, 10, norm=True), 64, *CIFAR),
    "wide": pooled(of_stack(3, "64 M 128 M 256 M", 4096, 256, 10), 64, *CIFAR),
    "wide, 16": pooled(of_stack(3, "64 M 128 M 256 M", 4096, 256, 10), 16, *CIFAR),
    "photographs": pooled(of_stack(3, "16 M 32 M 64 M 64 M", 4096, 10), 16, 3, 128, 128),
    "ResNet-9": pooled(resnet9, 32, *CIFAR),
    "ResNet-9, 8": pooled(resnet9, 8, *CIFAR),
    "Inception": pooled(inception, 64, *CIFAR),
    "SqueezeNet": pooled(squeezenet, 64, *CIFAR),
    "DenseNet": pooled(densenet, 32, *CIFAR),
    "U-Net": pooled(UNet, 8, 3, 64, 64),
    "VGG-11, 16": pooled(vgg(VGG11), 16, *CIFAR),
    "VGG-11, 128": pooled(vgg(VGG11), 128, *CIFAR),
    "VGG-16, 16": pooled(vgg(VGG16), 16, *CIFAR),
    "VGG-16 with norms, 64": pooled(vgg(VGG16, norm=True), 64, *CIFAR),
    "VGG-11, 64 x 64": pooled(vgg(VGG11, 4), 16, 3, 64, 64),
    "ResNet-18": ImageNet(ResNet18, (32, *GRAY)),
    "ResNet-18, strided": pooled(small_jobs.StridedResNet18, 32, *GRAY),
    "ResNet-18, 8": ImageNet(ResNet18, (8, *GRAY)),
    "all convolutions": ImageNet(of_stack(3, "32 32 32 32", 32768, 10), (32, *CIFAR)),
    "ResNet, photographs": pooled(small_resnet, 8, 3, 128, 128),
    "MobileNetV2": ImageNet(of_transformers("MobileNetV2", image_size=64), (16, 3, 64, 64)),
    "ConvNeXt": ImageNet(of_transformers("ConvNext", depths=[2, 2, 2, 2], hidden_sizes=WIDTHS), (16, 3, 64, 64)),
    "RegNet": ImageNet(
        of_transformers("RegNet", depths=[1, 1, 2, 1], hidden_sizes=WIDTHS, groups_width=16), (16, 3, 64, 64)
    ),
    "EfficientNet": ImageNet(
        of_transformers("EfficientNet", image_size=64, width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640),
        (16, 3, 64, 64),
    ),
    "PoolFormer": pooled(of_transformers("PoolFormer", depths=[2, 2, 2, 2], hidden_sizes=WIDTHS), 16, 3, 64, 64),
    "ViT": ImageNet(of_transformers("ViT", image_size=32, patch_size=4, **SMALL), (32, *CIFAR)),
    "Swin": ImageNet(
        of_transformers("Swin", image_size=64, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4),
        (16, 3, 64, 64),
    ),
    "MLP": ImageNet(lambda: small_jobs.MLP(1024), (256, *GRAY)),
    "GPT": ImageNet(lambda: GPT(2, 128, 4, 64, 0.0), (16, 64), classes=256),
}
