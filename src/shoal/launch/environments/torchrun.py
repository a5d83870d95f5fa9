"""Environment of torchrun, shoal's launchers, and others that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

A rank that shoal's own launcher has started in a Ray actor or a Spark task has the engine's name in its variables too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from shoal.errors import LaunchError
from shoal.launch.environment import ENGINE, LISTEN_FD, OWN_GPU, RESTARTS, RUN_KEY, Environment
from shoal.launch.environments.reader import START_RANKS, EnvironmentReader, numbers_of, refuse_missing, refuse_outside

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", RESTARTS)


def _read(variables: Mapping[str, str], engines: Collection[str] = ()) -> Environment | None:
    """Read the rank from RANK and WORLD_SIZE; None if neither is set.

    `engines`: those whose ranks are read; none: all but Ray and Spark. Raises: LaunchError that names all missing or
    invalid variables.
    """
    engine = variables.get(ENGINE, "torchrun").partition(":")[0]
    if engine not in engines if engines else engine in ("ray", "spark"):
        return None
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        alone = {name: variables[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in variables}
        if any(text not in ("0", "1") for text in alone.values()) or alone.get("LOCAL_RANK") == "1":
            raise LaunchError(
                given=", ".join(f"{name}={text}" for name, text in alone.items()),
                conflict="this is one of several processes, but RANK and WORLD_SIZE are not set",
                remedy=START_RANKS,
            )
        return None
    left = " ".join(name for name in _NEEDED if name in variables)
    refuse_missing(
        variables,
        _NEEDED,
        f"where no launcher has started this process they are left over from another program: unset {left}; "
        "else set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does",
    )
    numbers = numbers_of(variables, (*_NUMBERS, *_RESTARTS))
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    refuse_outside(("RANK", rank), ("WORLD_SIZE", world_size))
    fd = variables.get(LISTEN_FD)
    says_local, local = "LOCAL_WORLD_SIZE" in numbers, numbers.get("LOCAL_WORLD_SIZE", 1)
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get("LOCAL_RANK", 0),
        local_world_size=local,
        address=variables["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        listen_fd=int(fd) if fd else None,
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        key=variables.get(RUN_KEY),
        own_gpu=OWN_GPU in variables,
        restarts=max(numbers.get(name, 0) for name in _RESTARTS),
        host=numbers.get("GROUP_RANK", rank // max(1, local) if says_local else 0),
        num_hosts=numbers.get("GROUP_WORLD_SIZE", -(-world_size // max(1, local)) if says_local else 0),
        engine=engine,
        job=variables.get(ENGINE, "").partition(":")[2] or variables.get("TORCHELASTIC_RUN_ID", ""),
    )


_MARKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = EnvironmentReader("torchrun", "RANK", "WORLD_SIZE", _read, nests=True, marks=_MARKS)
RAY = EnvironmentReader("Ray", "RANK", "WORLD_SIZE", partial(_read, engines=("ray",)), nests=True, marks=_MARKS)
SPARK = EnvironmentReader("Spark", "RANK", "WORLD_SIZE", partial(_read, engines=("spark",)), nests=True, marks=_MARKS)
