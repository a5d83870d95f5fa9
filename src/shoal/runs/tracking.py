"""Trackers by name, as `--track` and `shoal.track` name them, without their packages."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from shoal.errors import CommandError, nearest

# Name -> the package that it is imported as; each is an extra of shoal under its name.
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True)
class TrackerName:
    """Tracker's name, and the place that it writes to: a folder, an address or a project; None for its own default."""

    name: str
    where: str | None = None

    @classmethod
    def parse(cls, text: str, given: str) -> TrackerName:
        """From `NAME[:WHERE]`; `given` is what the user wrote. Raises: CommandError for an unknown name."""
        name, colon, where = text.partition(":")
        if name not in PACKAGES or (colon and not where):
            raise CommandError(
                given=given,
                conflict=f"trackers are {', '.join(PACKAGES)}, each with a place after a colon where it is not its own",
                remedy=f"write tensorboard or mlflow:sqlite:///runs.db, say{nearest(name, list(PACKAGES))}",
            )
        return cls(name, where or None)

    def refuse_missing(self, given: str) -> None:
        """Raises: CommandError where the package is not installed; nothing is imported."""
        if importlib.util.find_spec(PACKAGES[self.name]) is None:
            raise CommandError(
                given=given,
                conflict=f"the package {PACKAGES[self.name]} is not installed",
                remedy=f'pip install "shoal[{self.name}]"',
            )
