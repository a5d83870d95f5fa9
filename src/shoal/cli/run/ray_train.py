"""Training in the workers of Ray Train, each of which starts the process of its own rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace

from shoal.cli.options import RunOptions, arguments_of
from shoal.cli.run.start import RunEnd
from shoal.launch.environment import INSIDE, LAUNCHER_PID
from shoal.launch.environments.torchrun import TORCHRUN
from shoal.launch.launchers.engine_rank import EngineRank, RankCommand, RankEnd
from shoal.launch.signals import Signals
from shoal.launch.supervise.recovery import verdict
from shoal.runs.request import RunRequest

_LOOK_SECONDS = 0.3


def is_worker(variables: Mapping[str, str]) -> bool:
    """Check whether this process is a worker of Ray Train in its training function."""
    train = sys.modules.get("ray.train")
    if train is None or "RANK" not in variables or INSIDE in variables or LAUNCHER_PID in variables:
        return False
    try:
        return str(train.get_context().get_world_rank()) == variables["RANK"]
    except Exception:  # outside of such a function; the error depends on Ray's version
        return False


def trained_in_worker(options: RunOptions, request: RunRequest, signals: Signals) -> RunEnd:
    """Train as this worker's rank and show rank 0's output.

    The rank is a separate process, so the worker keeps the process group that Ray created. The rank uses another port,
    since `MASTER_PORT` is in use.
    Collective: all workers.
    """
    import torch.distributed as dist

    environment = TORCHRUN.read(os.environ)
    assert environment is not None, "RANK is set"
    rank, port = EngineRank(), [0]
    try:
        if environment.rank == 0:
            port = [rank.listen(environment.address)]
        dist.broadcast_object_list(port, src=0)
        out = request.where.address or str(request.where.out.absolute())
        words = ("run", *arguments_of(replace(options, out=out), without=("on", "max_restarts")))
        variables = replace(environment, port=port[0], engine="ray").variables()
        logs = str(request.where.out / "logs") if environment.rank else ""
        rank.start(RankCommand(words, os.getcwd(), variables, logs))
        handed_on = 0
        while True:
            look = rank.look(_LOOK_SECONDS)
            if environment.rank == 0 and look.text:
                print(look.text, end="", flush=True)
            if look.code is not None:
                break
            if len(signals.received) > handed_on:
                handed_on = len(signals.received)
                rank.tell(signal.SIGKILL if signals.twice else signals.received[0])
        end = RankEnd(environment.rank, os.uname().nodename, look)
        return RunEnd(*verdict([end], signals), tuple(signals.received))
    finally:
        rank.close()
