"""Reader of an engine's environment variables, and checks that all readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.errors import LaunchError
from shoal.launch.environment import Environment

# Below the system's ephemeral ports. Computed from the engine's job, so that all ranks agree.
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000
START_RANKS = (
    "start one process, with --devices for the ranks of a host, or start the ranks with torchrun, srun or mpirun; or "
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
)


@dataclass(frozen=True)
class EnvironmentReader:
    """Variables of an engine: `read` returns the environment, or None if they do not describe several processes.

    `rank_name` and `size_name` are the variables that messages show. `nests`: whether another engine's processes, one
    on each host, may start this engine's processes. `marks`: variables of which at least one is set in each process
    that `read` does not pass over.
    """

    title: str  # the usual name: "torchrun", "Slurm's srun"
    rank_name: str
    size_name: str
    read: Callable[[Mapping[str, str]], Environment | None]
    nests: bool = False
    marks: tuple[str, ...] = ()

    def shown(self, variables: Mapping[str, str]) -> str:
        """Return the two variables with their values."""
        names = (self.rank_name, self.size_name)
        return ", ".join(f"{name}={variables.get(name, '')}" for name in names)


def numbers_of(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, int]:
    """Return the variables that are set, as numbers. Raises: LaunchError that names all invalid ones."""
    texts = {name: variables[name] for name in names if name in variables}
    wrong = {name: text for name, text in texts.items() if not text.isdecimal()}
    if wrong:
        raise LaunchError(
            given=", ".join(f"{name}={text}" for name, text in wrong.items()),
            conflict="these are whole numbers of at least 0",
            remedy=f"set {', '.join(wrong)} to integers",
        )
    return {name: int(text) for name, text in texts.items()}


def refuse_missing(variables: Mapping[str, str], needed: Iterable[str], remedy: str) -> None:
    """Raise LaunchError that names every variable of `needed` that is not set."""
    names = tuple(needed)
    missing = [name for name in names if name not in variables]
    if missing:
        raise LaunchError(
            given=", ".join(f"{name}={variables[name]}" for name in names if name in variables),
            conflict=f"{', '.join(missing)} is not set",
            remedy=remedy,
        )


def refuse_outside(rank: tuple[str, int], size: tuple[str, int]) -> None:
    """Raise LaunchError if a rank is not below the world size; each argument is a variable's name and value."""
    if not 0 <= rank[1] < size[1]:
        raise LaunchError(
            given=f"{rank[0]}={rank[1]}, {size[0]}={size[1]}",
            conflict=f"ranks are numbered 0 to {size[0]} - 1",
            remedy=f"start {size[0]} processes with ranks from 0",
        )


def port_of(variables: Mapping[str, str], number: int) -> int:
    """Return MASTER_PORT or, if it is not set, a port that all ranks compute from the job's number."""
    given = numbers_of(variables, ["MASTER_PORT"])
    return given.get("MASTER_PORT", _FIRST_PORT + number % _NUM_PORTS)
