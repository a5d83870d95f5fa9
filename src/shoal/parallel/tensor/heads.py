"""Output heads with vocabulary-parallel loss, selected by a run of the loss and a proof.

In the run a candidate returns `Logits`, on the meta device if possible, that record which functions need the whole. A
head with only cross entropies as consumers stays cut, if each cross entropy, with its options, is proven in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.model.trial import SEED, ModelTrial, is_same, on_copies
from shoal.parallel.tensor.layers import give_role, kind, num_features, product
from shoal.parallel.tensor.logits import Classes, Entropy, Head, Rows, divided, gradient, highest, losses, row_sums
from shoal.parallel.tensor.plan import TensorPlan
from shoal.parallel.tensor.trace import TensorTrace
from shoal.plans.accounting.collectives import cuts

SLICED = "cut along its outputs, of which a cross entropy takes slices"
_ROWS = 16


def sizes(size: int, degree: int) -> tuple[int, ...]:
    """Return how many of `size` features each of `degree` ranks has."""
    return tuple(stop - start for start, stop in pairwise(cuts(size, degree)))


def with_sliced(plan: TensorPlan, subject: ModelTrial, trace: TensorTrace, degree: int) -> TensorPlan:
    """Return the plan with `sliced` heads, those that only cross entropies consume, and with notes on others."""
    heads = [name for name in plan.gathered if is_lost(name, subject.model, trace)]
    if not heads:
        return plan
    consumers = {name: _Uses() for name in heads}
    values = subject.values if trace.has_values else None
    with on_copies(subject.model, subject.loss, subject.batch, values) as (model, batch):
        for name, uses in consumers.items():
            module = model.get_submodule(name)
            head = _Noting(TensorAxis(degree, 0), sizes(num_features(module)[1], degree), uses)
            give_role(module, partial(_shown, head))
        try:
            subject.loss(model, batch)
        except Exception as error:
            for uses in consumers.values():
                uses.obstacle = f"the loss raises {type(error).__name__} on slices"
    notes, lasting, targets_of_losses = dict(plan.notes), [], list[tuple[int, bool]]()
    for name, uses in consumers.items():
        size = num_features(subject.model.get_submodule(name))[1]
        why = uses.obstacle or next((f"{e} differs" for e in set(uses.entropies) if not is_proven(e, size, degree)), "")
        if not why and uses.entropies:
            lasting.append(name)
            targets_of_losses += [
                (targets, e.smoothing > 0) for targets, e in zip(uses.targets, uses.entropies, strict=True)
            ]
        notes[name] = SLICED if name in lasting else f"cut along its outputs, gathered ({why})" if why else notes[name]
    return replace(plan, sliced=tuple(lasting), notes=notes, losses=tuple(targets_of_losses))


def is_lost(name: str, model: nn.Module, trace: TensorTrace) -> bool:
    """Return True if a linear module's output reaches a cross entropy, and no other linear module."""
    output = trace.outputs.get(name)
    is_linear = kind(model.get_submodule(name)) in ("linear", "transposed")
    return is_linear and output is not None and not output.feeds and any("cross_entropy" in w for w in output.leaks)


@dataclass
class _Uses:
    """Consumers of the logits of one head."""

    entropies: list[Entropy] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # number of targets of each cross entropy
    obstacle: str = ""  # the first function that needs the whole


@dataclass(frozen=True)
class _Noting(Head):
    """Head without other ranks that records its consumers; its whole has no numbers."""

    uses: _Uses = field(default_factory=_Uses)

    def whole(self, local: Tensor, dim: int, why: str) -> Tensor:
        """Return zeros that depend on the slice, and record the consumer."""
        self.uses.obstacle = self.uses.obstacle or f"{why.strip('_')}() takes all of them"
        shape = list(local.shape)
        shape[dim] = self.classes.size
        return (local.sum() * 0.0).expand(shape)

    def lost(self, local: Tensor, rows: Rows, entropy: Entropy) -> Tensor:
        """Return zeros that depend on the slice, and record the cross entropy."""
        self.uses.entropies.append(entropy)
        self.uses.targets.append(len(local))
        nothing = local.sum(1) * 0.0
        return nothing if entropy.reduction == "none" else nothing.sum()


def _shown(head: _Noting, module: nn.Module, input: Tensor) -> Tensor:
    """Compute a whole layer and return a slice of its outputs as logits."""
    whole = product(module, input, module.weight, module.bias)  # type: ignore[arg-type]
    return divided(whole.narrow(-1, 0, head.sizes[0]), whole.ndim - 1, head)


def is_proven(entropy: Entropy, size: int, degree: int) -> bool:
    """Check that a divided cross entropy of `size` classes agrees with torch's, in value and gradient, on each rank."""
    generator = torch.Generator().manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    logits = (3 * random(_ROWS, size)).requires_grad_()
    targets = torch.randint(size, (_ROWS,), generator=generator)
    targets[-1] = entropy.ignored
    weights = random(size).abs() if entropy.weighted else None
    options: dict[str, Any] = {"ignore_index": entropy.ignored, "label_smoothing": entropy.smoothing}
    wanted = F.cross_entropy(logits, targets, weights, reduction="none", **options)
    given = random(_ROWS)
    (whole,) = torch.autograd.grad(wanted, logits, given)
    rows, parts = Rows(targets, entropy.ignored, entropy.smoothing, weights), sizes(size, degree)
    own = list(logits.detach().split(parts, 1))
    places = [Classes(sum(parts[:i]), sum(parts[: i + 1]), size) for i in range(degree)]
    largest = torch.stack([highest(part) for part in own]).amax(0)
    pairs = list(zip(own, places, strict=True))
    sums = torch.stack([row_sums(part, largest, rows, place) for part, place in pairs]).sum(0)
    loss, logarithm = losses(sums, largest, rows, places[0])
    cut = torch.cat([gradient(part, logarithm, given, rows, place) for part, place in pairs], 1)
    means = F.cross_entropy(logits, targets, weights, **options)
    mean = loss.sum() / rows.row_weights(loss.dtype).sum()
    return is_same(loss, wanted.detach()) and is_same(cut, whole) and is_same(mean, means.detach())
