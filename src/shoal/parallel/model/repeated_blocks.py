"""Repeated blocks of a model, or else its composite parts, by its structure alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A network has up to so many stages (ResNet 4, Swin 4, EfficientNet 7 or 8), each of them with blocks of its own.
_MOST_STAGES = 8
# They are called on some of the rows each, and not one after the other.
_NOT_IN_SEQUENCE = "experts"


@dataclass(frozen=True)
class Block:
    """Module by its name in the model; `children` [start, stop) where it is only some of a Sequential's."""

    name: str
    module: nn.Module
    children: tuple[int, int] | None = None


def repeated_blocks(model: nn.Module) -> list[Block]:
    """The modules that a list, dict or sequence in the model holds at least two of, in order; none within another."""
    return _repeated("", model, _place=None)


def _repeated(name: str, module: nn.Module, _place: str | None) -> list[Block]:
    children = [(f"{name}.{key}" if name else key, key, child) for key, child in module.named_children()]
    kinds: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _CONTAINERS) and _place != _NOT_IN_SEQUENCE:
        kinds.update(type(child) for _, _, child in children if is_composite(child))
    found = []
    for path, key, child in children:
        inner = _repeated(path, child, key)
        count = kinds[type(child)]
        is_stage = isinstance(child, _CONTAINERS) or (count <= _MOST_STAGES and len(inner) > 1)
        found += inner if count < 2 or (inner and is_stage) else [Block(path, child)]
    return found


def is_composite(module: nn.Module) -> bool:
    """Whether a module has parameters and is more than one of torch's own layers."""
    own = bool(list(module.children())) or not type(module).__module__.startswith("torch.nn.")
    return own and any(True for _ in module.parameters())


def is_sequence(module: nn.Module) -> bool:
    """Whether a module's forward calls its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def parts(model: nn.Module) -> list[Block]:
    """Parts of a model without repeated blocks, except for the last.

    What comes last is the first that the backward needs: to compute it again saves nothing. Nor does a part of one
    layer, whose input is kept in any case.
    """
    found = list(_parts("", model))
    return found[:-1]


def _parts(name: str, module: nn.Module) -> Iterator[Block]:
    if is_sequence(module):
        yield from _segments(name, module)
        return
    for key, child in module.named_children():
        if is_composite(child):
            path = f"{name}.{key}" if name else key
            inner = list(_parts(path, child))
            yield from inner if len(inner) > 1 else [Block(path, child)]


def _segments(name: str, sequence: nn.Module) -> Iterator[Block]:
    """About as many segments as each has layers (Chen et al., arXiv 1604.06174), every one beginning with a layer."""
    children = list(sequence.children())
    starts = [i for i, child in enumerate(children) if any(True for _ in child.parameters())]
    count = math.isqrt(len(starts))
    if count < 2 and len(starts) >= 3:
        count = 2
    if count < 2:
        return
    cuts = [0, *(starts[round(i * len(starts) / count)] for i in range(1, count)), len(children)]
    for start, stop in itertools.pairwise(cuts):
        yield Block(f"{name}[{start}:{stop}]", sequence, (start, stop))
