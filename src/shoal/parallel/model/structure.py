"""Structure of a model, without computing anything: repeated blocks, names, classes, shapes and a config.

A model that another trainer has wrapped, or that sums over ranks itself, is refused here by its types.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.parallel.experts.blocks import expert_blocks
from shoal.plans.legal import ModelFacts

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Modules that only contain others, in sequence: a pipeline may cut between their members.
_HOLDERS = (nn.Sequential, nn.ModuleList)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len")
_HEAD_WIDTHS = ("head_dim", "head_width", "attention_head_size")
# Largest number of stages of a network (ResNet 4, Swin 4, EfficientNet 7 or 8). Each stage has its own blocks.
_MOST_STAGES = 8
# Each expert is called on some of the rows, and experts do not follow each other.
_NOT_IN_SEQUENCE = "experts"


@dataclass(frozen=True)
class Block:
    """Module by its name in the model. `children`: range [start, stop) of a Sequential's children, if not all."""

    name: str
    module: nn.Module
    children: tuple[int, int] | None = None


def repeated_blocks(model: nn.Module) -> list[Block]:
    """Return modules of a class that occurs at least twice in a list, dict or sequence, in order, not nested."""
    return _repeated("", model, _place=None)


def _repeated(name: str, module: nn.Module, _place: str | None) -> list[Block]:
    children = [(f"{name}.{key}" if name else key, key, child) for key, child in module.named_children()]
    kinds: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _CONTAINERS) and _place != _NOT_IN_SEQUENCE:
        kinds.update(type(child) for _, _, child in children if is_composite(child))
    blocks = []
    for path, key, child in children:
        inner = _repeated(path, child, key)
        count = kinds[type(child)]
        is_stage = isinstance(child, _CONTAINERS) or (count <= _MOST_STAGES and len(inner) > 1)
        blocks += inner if count < 2 or (inner and is_stage) else [Block(path, child)]
    return blocks


def is_composite(module: nn.Module) -> bool:
    """Return True if a module has parameters and is more than one of torch's own layers."""
    own = bool(list(module.children())) or not type(module).__module__.startswith("torch.nn.")
    return own and any(True for _ in module.parameters())


def parts(model: nn.Module) -> list[Block]:
    """Return the parts of a model without repeated blocks, except for the last.

    The backward needs the last part first, so recomputing it saves nothing. Recomputing a part of one layer saves
    nothing either: its input is stored in any case.
    """
    return list(_parts("", model))[:-1]


def _parts(name: str, module: nn.Module) -> Iterator[Block]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        # About sqrt(n) segments of n layers (Chen et al., arXiv 1604.06174). Each begins with a layer.
        children = list(module.children())
        starts = [i for i, child in enumerate(children) if any(True for _ in child.parameters())]
        count = max(math.isqrt(len(starts)), 2)
        if len(starts) < 3:
            return
        cuts = [0, *(starts[round(i * len(starts) / count)] for i in range(1, count)), len(children)]
        for start, stop in itertools.pairwise(cuts):
            yield Block(f"{name}[{start}:{stop}]", module, (start, stop))
        return
    for key, child in module.named_children():
        if is_composite(child):
            path = f"{name}.{key}" if name else key
            inner = list(_parts(path, child))
            yield from inner if len(inner) > 1 else [Block(path, child)]


def facts_of(model: nn.Module, batch: Any = None, *, num_grains: int, grain_size: int) -> ModelFacts:
    """Return the facts of a model on any device, also meta, for a job with the given grains.

    `batch`: a batch of the job, for the length of its sequences; without it only a config may contain the longest.
    """
    blocks = tuple(blocks_of(model))
    # A stage after the first may begin with a block or a neighbour of one.
    ancestors = {name.rsplit(".", n)[0] for name in blocks for n in range(1, name.count(".") + 1)}
    cuts = [name for name, _ in _flat(model, frozenset(ancestors))][1:]
    heads = math.gcd(*_configured(model, _HEADS)) or _heads_by_width(model)
    return ModelFacts(
        num_experts=tuple(block.count for block in expert_blocks(model)),
        num_grains=num_grains,
        grain_size=grain_size,
        blocks=blocks,
        cuts=tuple(cuts),
        places=tuple(members_of(model)),
        num_heads=heads,
        num_kv_heads=math.gcd(*_configured(model, _KV_HEADS)) or heads,
        widths=tuple(sorted({size for p in model.parameters() if p.ndim >= 2 for size in p.shape[:2]})),
        sequence=sequence_of(batch, model),
    )


def blocks_of(model: nn.Module) -> list[str]:
    """Return the qualified names of the layers that a pipeline divides, in the model's order.

    These are the modules of the class that is most frequent in the model's Sequentials and ModuleLists, over all of
    them together (a ResNet has its blocks in four). Modules inside a repeated module, such as experts in a block, do
    not count. If that class has no submodules (Linear), or there is none, every layer with parameters counts.
    """
    members = [(name, type(module)) for name, module in _outermost(model)]
    kind, count = Counter(kind for _, kind in members).most_common(1)[0] if members else (None, 0)
    composite = count > 1 and any(
        any(True for _ in module.children()) for module in model.modules() if type(module) is kind
    )
    if composite:
        return [name for name, other in members if other is kind]
    return [name for name, module in _flat(model, frozenset()) if any(True for _ in module.parameters())]


def members_of(model: nn.Module) -> list[str]:
    """Return the members of the model's lists and sequences: the only automatic cuts of a pipeline."""
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, _HOLDERS) or getattr(module, "holds_steps", False)
        for key, _ in module.named_children()
    ]


def _flat(module: nn.Module, opened: frozenset[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's parts in order, with containers and `opened` modules replaced by their members."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, _HOLDERS) or path in opened:
            yield from _flat(child, opened, f"{path}.")
        else:
            yield path, child


def _outermost(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return container members with parameters that are no containers, without those inside a repeated member."""
    members = [
        (name, module)
        for name, module in model.named_modules()
        if name
        and isinstance(model.get_submodule(name.rpartition(".")[0]), _HOLDERS)
        and not isinstance(module, _HOLDERS)
        and any(True for _ in module.parameters())
    ]
    times = Counter(type(module) for _, module in members)
    outer: list[tuple[str, nn.Module]] = []
    last = ""
    for name, module in members:  # in the order of named_modules, in which a module's members follow it directly
        if last and name.startswith(last):
            continue
        outer.append((name, module))
        if times[type(module)] > 1:
            last = f"{name}."
    return outer


def _configured(model: nn.Module, names: Iterable[str]) -> list[int]:
    """Return the numbers of these names in the model's configs, or else in its modules' attributes.

    Layers may differ (as Swin's heads do): a degree that divides all the numbers divides their gcd.
    """
    config = getattr(model, "config", None)
    # Models of several parts (vision and text) have a config for each.
    nested = vars(config).values() if hasattr(config, "__dict__") else ()
    configs = [] if config is None else [config, *(value for value in nested if hasattr(value, "hidden_size"))]
    for holders in (configs, model.modules()):
        numbers = [
            value
            for holder in holders
            for value in (getattr(holder, name, None) for name in names)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0
        ]
        if numbers:
            return numbers
    return []


def _heads_by_width(model: nn.Module) -> int | None:
    """Return the number of heads of attention with a known head width: the first matrix's rows over the width."""
    for module in model.modules():
        width = next((w for name in _HEAD_WIDTHS if isinstance(w := getattr(module, name, None), int) and w > 0), None)
        rows = next((c.out_features for c in module.children() if isinstance(c, nn.Linear)), None)
        if width and rows and rows % width == 0:
            return rows // width
    return None


def sequence_of(batch: Any, model: nn.Module) -> int | None:
    """Return a batch's sequence length: dim 1 of its first integer tensor [B, T], or else the config's maximum."""
    for tensor in _tensors(batch):
        if tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return int(tensor.shape[1])
    return max(_configured(model, _LONGEST), default=None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


# By class names: an import would load unused packages.
_WRAPPERS = {
    "DistributedDataParallel": "sums the gradients",
    "DataParallel": "divides the batches over devices",
    "FullyShardedDataParallel": "divides the parameters and sums the gradients",
    "FSDPModule": "divides the parameters and sums the gradients",
    "DeepSpeedEngine": "sums the gradients and steps an optimizer",
    "PipelineEngine": "sums the gradients and steps an optimizer",
    "_FabricModule": "sums the gradients",
}
# The call that gives a module the class.
_CALLED = {"FSDPModule": "fully_shard"}
# Modules and classes with constructors that may wait for all ranks, or end the process if the ranks differ.
_COLLECTIVE = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


def refuse_wrapped(model: nn.Module, place: str = "model()") -> None:
    """Raise JobError if a module of the model is a wrapper, or normalises over a process group."""
    for name, module in model.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        where = f" as {name}" if name else ""
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper is not None:
            raise _wrapped(f"{place} with {_CALLED.get(wrapper, wrapper)}{where}", wrapper)
        if module.__dict__.get("_is_accelerate_prepared"):
            raise _wrapped(f"{place} with a module that Accelerate has prepared{where}", "an Accelerator")
        if isinstance(module, nn.SyncBatchNorm):
            raise JobError(
                given=f"{place} with SyncBatchNorm{where}",
                conflict="it normalises over the ranks of a process group, so that the number of devices changes the "
                "result, and it runs on GPUs alone",
                remedy='write Job(batch_norm="batch"), which normalises over the global batch on any layout; or '
                "leave out convert_sync_batchnorm: shoal computes torch.nn.BatchNorm1d, BatchNorm2d and BatchNorm3d "
                "by grain",
            )


def _wrapped(given: str, wrapper: str) -> JobError:
    does = _WRAPPERS.get(wrapper, "sums the gradients")
    return JobError(
        given=given,
        conflict=f"{wrapper} {does}, which shoal does itself",
        remedy="give the bare module: what it was before it was wrapped",
    )


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Return a context in which a wrapper's constructor raises a JobError instead of communicating with other ranks."""
    with contextlib.ExitStack() as stack:
        for module, name in _COLLECTIVE:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None:

                def refuse(self: Any, *args: Any, name: str = name, **kwargs: Any) -> None:
                    raise _wrapped(f"model() that wraps a module in {name}", name)

                stack.callback(setattr, kind, "__init__", kind.__init__)
                kind.__init__ = refuse
        yield
