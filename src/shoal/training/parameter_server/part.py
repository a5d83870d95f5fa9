"""Entry point of the servers and workers of a parameter-server run."""

from __future__ import annotations

import contextlib

from shoal.job import Job
from shoal.launch.environment import Environment
from shoal.plans.resolve import CompletePlan
from shoal.training.parameter_server.peers import OverError, role
from shoal.training.parameter_server.server import serve
from shoal.training.parameter_server.worker import WorkerObserver, work


def take_part(job: Job, plan: CompletePlan, environment: Environment, watch: WorkerObserver | None = None) -> bool:
    """Serves or works until the run has ended; False for the conductor, which does neither. `watch`: a worker's.

    Raises: PeerError where the conductor is gone before; what the job raises.
    """
    mine = role(plan, environment.rank)
    if mine.kind == "conductor":
        return False
    with contextlib.suppress(OverError):  # started so slowly that the others were done without it
        if mine.kind == "server":
            serve(job, plan, environment, mine)
        else:
            work(job, plan, environment, mine, watch)
    return True
