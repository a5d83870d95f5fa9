"""Roles: which process of a served run is what. Ranks count the conductor, then the servers, then the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Role:
    """What a process is, and its number among those that are the same."""

    kind: Literal["conductor", "server", "worker"]
    number: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "conductor" else f"{self.kind} {self.number}"


def role(plan: Plan, rank: int) -> Role:
    """The role of a rank among the plan's `num_processes`."""
    servers = plan.server.num_servers
    if rank == 0:
        return Role("conductor")
    return Role("server", rank - 1) if rank <= servers else Role("worker", rank - 1 - servers)
