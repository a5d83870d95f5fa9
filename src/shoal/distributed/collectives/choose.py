"""Construction of a collective algorithm by name, for a group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Team
from shoal.distributed.collectives.fixed_tree import SharedTreeSum, TreeSum
from shoal.distributed.collectives.native import Native
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT
from shoal.errors import PlanError


def open_tree(name: str, num_grains: int, like: Tensor, timeout: timedelta = COLLECTIVE_TIMEOUT) -> TreeSum:
    """Return exact mode's tree among all ranks, through shared memory unless `name` is "native".

    Collective: all ranks of the run. Raises: as `open_collective`.
    """
    if name == "native" or not dist.is_initialized():
        return TreeSum(num_grains, like)
    from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory

    collective = open_collective(name, Team(), like.device, timeout)
    assert isinstance(collective, SharedMemory), "a plan says nothing else together with exact mode"
    return SharedTreeSum(num_grains, like, collective)


def not_on(device: torch.device, name: str) -> PlanError:
    """Return the error for an algorithm that does not work on a device."""
    return PlanError(
        given=f'collectives.all_reduce = "{name}" on {device.type}',
        conflict="it sums on CPUs; between GPUs NCCL is faster than what passes through the host's memory",
        remedy='collectives.all_reduce = "native"',
    )


def open_collective(name: str, team: Team, device: torch.device, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Collective:
    """Return the algorithm `name` over the ranks of a team.

    Args:
        name: one of the values of a plan's `collectives.all_reduce`.
        team: the ranks.
        device: device of the tensors.
        timeout: how long a rank waits for others in one collective.

    Raises:
        PlanError: the algorithm does not work on the device.
        LaunchError: the algorithm does not work on these hosts.

    Collective: all ranks of the run.
    """
    if name == "native":
        return Native(team)
    if device.type != "cpu":
        raise not_on(device, name)
    # Imports only the algorithm that the plan names.
    if name == "shared_memory":
        from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
        from shoal.distributed.collectives.shared_memory.region import places

        by_rank = places()
        return SharedMemory(team, timeout, by_rank.count(by_rank[dist.get_rank()]))
    if name == "hierarchical":
        from shoal.distributed.collectives.hierarchical import Hierarchical

        return Hierarchical(team, timeout)
    from shoal.distributed.collectives.messages import RecursiveDoubling, Ring, Tree

    if name == "ring":
        return Ring(team, timeout)
    return Tree(team, timeout) if name == "tree" else RecursiveDoubling(team, timeout)
