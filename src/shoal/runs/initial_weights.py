"""Initial weights of a run: their source, allowed differences, and renamed prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import CommandError

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
