"""Steps of a run that `--trace` profiles, with the numbers of the step records."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import CommandError


@dataclass(frozen=True)
class TraceSteps:
    """First and last step, inclusive. Steps are numbered from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> TraceSteps:
        """Parse `10-12` or `10`. Raises: CommandError."""
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(text))
        first = int(found[1]) if found else 0
        last = int(found[2] or found[1]) if found else 0
        if not 1 <= first <= last:
            raise CommandError(
                given=f"--trace {text}",
                conflict="--trace takes a step, or the first and the last of several; steps are counted from 1",
                remedy="write --trace 10 or --trace 10-12, say",
            )
        return cls(first, last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
