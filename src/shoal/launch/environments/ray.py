"""Environment of a Ray actor: torchrun's variables, and the engine's name from shoal's own launcher."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.launch.environment import ENGINE, Environment
from shoal.launch.environments.reader import EnvironmentReader
from shoal.launch.environments.torchrun import read_ranks


def read(variables: Mapping[str, str]) -> Environment | None:
    """Read the rank of a Ray actor that shoal's launcher has started; None elsewhere."""
    if variables.get(ENGINE, "").partition(":")[0] != "ray":
        return None
    return read_ranks(variables, "ray")


RAY = EnvironmentReader("Ray", "RANK", "WORLD_SIZE", read, nests=True)
