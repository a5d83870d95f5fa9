"""Values of a run's options that are more than a number or a text: traced steps, trackers, initial weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import CommandError, nearest


@dataclass(frozen=True)
class TraceSteps:
    """First and last step, inclusive. Steps are numbered from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> TraceSteps:
        """Parse `10-12` or `10`. Raises: CommandError."""
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(text))
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if not 1 <= first <= last:
            raise CommandError(
                given=f"--trace {text}",
                conflict="--trace takes a step, or the first and the last of several; steps are counted from 1",
                remedy="write --trace 10 or --trace 10-12, say",
            )
        return cls(first, last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


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


# Terms of torch's load_state_dict and Transformers' from_pretrained.
DIFFERENCES = ("missing", "unexpected", "mismatched")


@dataclass(frozen=True)
class NameRules:
    """Rules for matching the names of two state dicts.

    `allow`: allowed kinds of difference, from DIFFERENCES.
    `rename`: pairs (old, new) of prefixes of dotted names. The first pair that fits a name applies. An empty `old` fits
        every name; an empty `new` removes the prefix.
    """

    allow: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()

    def renamed(self, key: str) -> tuple[str, str | None]:
        """Return the model's name for a key of the source, and the `old` of the pair that applied, or None."""
        for old, new in self.rename:
            if not old or key == old or key.startswith(f"{old}."):
                rest = key[len(old) :].removeprefix(".") if old else key
                return ".".join(part for part in (new, rest) if part), old
        return key, None


@dataclass(frozen=True)
class InitialWeights:
    """Source of a run's initial weights (a run, a checkpoint, a file or a folder) and the rules for names."""

    source: Path
    rules: NameRules = NameRules()


def initial_weights(source: str | None, allow: str | None, rename: Sequence[str]) -> InitialWeights | None:
    """Parse the options --init-from, --init-allow and --init-rename. Raises: CommandError."""
    if source is None:
        given = f"--init-allow {allow}" if allow is not None else f"--init-rename {rename[0]}" if rename else None
        if given is not None:
            raise CommandError(
                given=given, conflict="no weights are loaded", remedy="add --init-from with a run, a file or a folder"
            )
        return None
    if not Path(source).exists():
        raise CommandError(
            given=f"--init-from {source}",
            conflict="there is no such file or folder",
            remedy="give a run, a checkpoint, a .safetensors or .pt file, or a folder with model.safetensors; nothing "
            "is fetched",
        )
    kinds = tuple(sorted({word.strip() for word in (allow or "").split(",") if word.strip()}))
    if set(kinds) - set(DIFFERENCES) or (allow is not None and not kinds):
        raise CommandError(
            given=f"--init-allow {allow}",
            conflict=f"differences are {', '.join(DIFFERENCES)}",
            remedy="write --init-allow missing,unexpected, say",
        )
    pairs = []
    for text in rename:
        old, equals, new = text.partition("=")
        if not equals or old.strip(". ") == new.strip(". "):
            raise CommandError(
                given=f"--init-rename {text}",
                conflict="a renaming is OLD=NEW, two different prefixes of names of which one may be empty",
                remedy="write --init-rename backbone=model.encoder, say",
            )
        pairs.append((old.strip(". "), new.strip(". ")))
    return InitialWeights(Path(source), NameRules(kinds, tuple(pairs)))
