"""Part: what a process of a served run does, where it is not the conductor."""

from __future__ import annotations

from shoal.environment import Environment
from shoal.job import Job
from shoal.plan.plan import Plan
from shoal.serving.roles import role
from shoal.serving.server import serve
from shoal.serving.worker import work


def take_part(job: Job, plan: Plan, environment: Environment) -> bool:
    """Serves or works until the run has ended; False for the conductor, which does neither.

    Raises: PeerError where the conductor is gone before; what the job raises.
    """
    mine = role(plan, environment.rank)
    if mine.kind == "conductor":
        return False
    (serve if mine.kind == "server" else work)(job, plan, environment, mine)
    return True
