"""Check before the first step whether a rank's parameters, gradients and optimizer state fit in its memory."""

from __future__ import annotations

import os
import resource

import torch

from shoal.errors import OutOfMemoryError
from shoal.hardware.detect import usable_memory_bytes
from shoal.parallel.base import Strategy
from shoal.plans.plan import Plan
from shoal.training.observe.metering import optimizer_shape
from shoal.training.update.job_optimizer import Parameters


def refuse_too_large(
    plan: Plan, strategy: Strategy, parameters: Parameters, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Raise OutOfMemoryError if the states of this rank, a lower bound of what a step needs, exceed its memory.

    Nothing is refused if the states are sharded or stored on servers, since the ranks then do not have all of them.
    """
    if plan.shards_model or plan.serves:
        return
    own = [p for p in parameters if not p.is_meta]
    state = optimizer_shape(optimizer)
    weights = strategy.update_division.own_bytes(sum(p.nbytes for p in own))
    trained = sum(p.nbytes for p in own if p.requires_grad)
    gradients = trained - sum(p.nbytes for p in strategy.sparse)
    # An average over the owners: one with a large parameter has more, and the others then have less.
    states = trained * state.tensors // plan.num_owners if state is not None else 0
    if device.type == "cuda":
        limit, whose = torch.cuda.get_device_properties(device).total_memory, "this GPU"
    else:
        # Stages differ in their parameters, so that a rank may need more than an even share of the host.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if plan.layout.pipeline == 1 else 1
        limit = usable_memory_bytes() // ranks
        whose = f"a rank's share of this host, of {ranks}," if ranks > 1 else "this host"
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY and soft < limit:
            limit, whose = soft, "a process (ulimit -v)"
    need = weights + gradients + states
    if need > limit:
        gib = 1 << 30
        parts = (
            f"{weights / gib:.1f} of weights, {gradients / gib:.1f} of gradients, {states / gib:.1f} of optimizer state"
        )
        raise OutOfMemoryError(
            given=f"a model of {sum(p.numel() for p in own):,} parameters, with {type(optimizer).__name__}",
            conflict=f"a rank needs {need / gib:.1f} GiB without activations ({parts}); "
            f"{whose} has {limit / gib:.1f} GiB",
            remedy="divide the model over more processes (--layout shard=N), or use a smaller model",
        )
