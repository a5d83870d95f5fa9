"""Reader of an engine's environment variables, and checks that all readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.errors import LaunchError
from shoal.launch.environment import Environment

# Below those that systems give out by themselves. A function of the engine's job, so that all ranks know it.
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000


@dataclass(frozen=True)
class EnvironmentReader:
    """An engine's words: `read` gives the environment in them, or None where they say nothing of several processes.

    `rank_name` and `size_name` are the variables to show and to unset. `nests`: whether its processes may be started
    inside of another engine's, one of these on each host.
    """

    title: str  # as people call it: "torchrun", "Slurm's srun"
    rank_name: str
    size_name: str
    read: Callable[[Mapping[str, str]], Environment | None]
    nests: bool = False

    def shown(self, variables: Mapping[str, str]) -> str:
        """The two variables with their values."""
        names = (self.rank_name, self.size_name)
        return ", ".join(f"{name}={variables.get(name, '')}" for name in names)


def numbers_of(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, int]:
    """Variables that are set, as numbers. Raises: LaunchError naming all that are none."""
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
    """Raises: LaunchError naming every variable of `needed` that is not set."""
    names = tuple(needed)
    missing = [name for name in names if name not in variables]
    if missing:
        raise LaunchError(
            given=", ".join(f"{name}={variables[name]}" for name in names if name in variables),
            conflict=f"{', '.join(missing)} is not set",
            remedy=remedy,
        )


def refuse_outside(rank: tuple[str, int], size: tuple[str, int]) -> None:
    """Raises: LaunchError where a rank, with the name of its variable, is not below the size of its world."""
    if not 0 <= rank[1] < size[1]:
        raise LaunchError(
            given=f"{rank[0]}={rank[1]}, {size[0]}={size[1]}",
            conflict=f"ranks are numbered 0 to {size[0]} - 1",
            remedy=f"start {size[0]} processes with ranks from 0",
        )


def port_of(variables: Mapping[str, str], number: int) -> int:
    """MASTER_PORT, or a port that all ranks of the job of this number compute alike."""
    given = numbers_of(variables, ["MASTER_PORT"])
    return given.get("MASTER_PORT", _FIRST_PORT + number % _NUM_PORTS)
