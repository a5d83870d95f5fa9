"""Loss over the whole batch on one process, for the verifier's reference of a job with outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal.data.loader import Microbatch
from shoal.numerics.generators import seed_everything
from shoal.numerics.outputs import BY_SAMPLE, PARAMETER, SUM, GrainOutputs, OutputsRequest, has_no_tensor, widened_leaf
from shoal.plans.grains import random_key
from shoal.training.microbatch.loss_pair import check_pair
from shoal.training.microbatch.step import LossComputer


def requests(
    computer: LossComputer, microbatches: Sequence[Microbatch], restore: Callable[[], None]
) -> Callable[[Microbatch, Any], OutputsRequest]:
    """Compute the outputs of all grains and the loss of the whole batch. Return the requests of its parts.

    The loss of a part has the gradients by its outputs. The part of the first grain has the whole total and weight,
    or each part those of its rows.
    `restore`: restores the buffers after each forward.
    """
    job, precision = computer.job, computer.precision
    parts: dict[int, tuple[GrainOutputs, Any]] = {}

    def collect(microbatch: Microbatch, batch: Any) -> OutputsRequest:
        def settle(outputs: Any) -> tuple[Tensor, float]:
            parts[microbatch.grains[0].index] = GrainOutputs.of(outputs, microbatch.num_samples), batch
            return torch.zeros(()), 0.0

        return OutputsRequest(batch, settle)

    for microbatch in microbatches:
        with computer.scope(microbatch):
            computer.loss(collect(microbatch, precision.inputs(microbatch.batch)))
        restore()
    first, *_ = in_order = [parts[grain] for grain in sorted(parts)]
    leaves: list[Any] = []
    for place, kind in enumerate(first[0].kinds):
        own = [widened_leaf(outputs.leaves[place]) for outputs, _ in in_order]
        whole = torch.cat(own) if kind == BY_SAMPLE else torch.stack(own).sum(0) if kind == SUM else own[0]
        differs = isinstance(whole, Tensor) and (whole.is_floating_point() or whole.is_complex())
        leaves.append(whole.detach().requires_grad_() if differs else whole)

    def joined(*own: Any) -> Any:
        return torch.cat(own) if isinstance(own[0], Tensor) and own[0].ndim else own[0]

    batch = tree_map(joined, *(own for _, own in in_order), is_leaf=has_no_tensor)
    seed_everything(random_key(job.seed, "loss", microbatches[0].step))
    with precision.products():
        if job.loss_by_rows:
            starts = [(microbatch.grains[0].start, microbatch.num_samples) for microbatch in microbatches]
            tree = first[0].tree(leaves)
            pairs = {start: job.loss(tree, batch, rows=slice(start, start + size)) for start, size in starts}
        else:
            pairs = {0: job.loss(first[0].tree(leaves), batch)}
        pairs = {start: check_pair("loss", pair) for start, pair in pairs.items()}
    total = torch.stack([pair[0] for pair in pairs.values()]).sum()
    sources = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    by_source = iter(torch.autograd.grad(total, sources, allow_unused=True) if total.requires_grad else ())
    by_leaf = [next(by_source, None) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]

    def request(microbatch: Microbatch, batch: Any) -> OutputsRequest:
        begins = microbatch.grains[0].start

        def settle(outputs: Any) -> tuple[Tensor, Tensor | float]:
            own = GrainOutputs.of(outputs, microbatch.num_samples)
            value, weight = pairs.get(begins, (torch.zeros_like(total), 0.0))
            value = value.detach()
            for leaf, kind, gradient in zip(own.leaves, own.kinds, by_leaf, strict=True):
                if gradient is None or not leaf.requires_grad or (kind == PARAMETER and begins):
                    continue
                rows = gradient[begins : begins + microbatch.num_samples] if kind == BY_SAMPLE else gradient
                product = (
                    torch.view_as_real(leaf) * torch.view_as_real(rows) if leaf.is_complex() else leaf * rows
                ).sum()
                value = value + (product - product.detach())
            return value, weight

        return OutputsRequest(batch, settle)

    return request
