"""Names of trackers for `--track` and `shoal.track`, without importing their packages."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from shoal.errors import CommandError, nearest

# Name -> package to import. Each name is also an extra of shoal.
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True)
class TrackerName:
    """A tracker's name, and its target: a folder, an address or a project. None means the tracker's default."""

    name: str
    where: str | None = None

    @classmethod
    def parse(cls, text: str, given: str) -> TrackerName:
        """Parse `NAME[:WHERE]`. `given`: the user's input, for messages. Raises: CommandError for an unknown name."""
        name, colon, where = text.partition(":")
        if name not in PACKAGES or (colon and not where):
            raise CommandError(
                given=given,
                conflict=f"trackers are {', '.join(PACKAGES)}, each with a place after a colon where it is not its own",
                remedy=f"write tensorboard or mlflow:sqlite:///runs.db, say{nearest(name, list(PACKAGES))}",
            )
        return cls(name, where or None)

    def __str__(self) -> str:
        return self.name if self.where is None else f"{self.name}:{self.where}"

    def refuse_missing(self, given: str) -> None:
        """Check that the package is installed, without importing it. Raises: CommandError."""
        if importlib.util.find_spec(PACKAGES[self.name]) is None:
            raise CommandError(
                given=given,
                conflict=f"the package {PACKAGES[self.name]} is not installed",
                remedy=f'pip install "shoal[{self.name}]"',
            )
