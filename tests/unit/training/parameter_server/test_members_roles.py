"""Ranks and roles."""

from __future__ import annotations

from shoal.plans.plan import Plan
from shoal.training.parameter_server.members import role


def test_the_conductor_then_servers_then_workers() -> None:
    plan = Plan().with_sections(layout={"data": 3}, server={"mode": "synchronous", "num_servers": 2})
    found = [str(role(plan, rank)) for rank in range(plan.num_processes)]
    assert found == ["conductor", "server 0", "server 1", "worker 0", "worker 1", "worker 2"]
    assert [role(plan, rank).kind for rank in range(3, 6)] == ["worker"] * 3
