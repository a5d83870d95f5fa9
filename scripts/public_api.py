"""Writes the signatures of the public names to tests/fixtures/public_api.txt, once fragments name those that changed.

python scripts/public_api.py
"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from types import FunctionType

import shoal

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "fixtures" / "public_api.txt"


def signatures(names: list[str]) -> dict[str, str]:
    """Return public names, and the public methods and properties of classes, with their signatures."""
    found = {}
    for name in sorted(names):
        thing = getattr(shoal, name)
        found[name] = _signature(thing)
        for member, value in sorted(vars(thing).items()) if inspect.isclass(thing) else ():
            if not member.startswith("_") and isinstance(value, property):
                found[f"{name}.{member}"] = "property"
            elif not member.startswith("_") and isinstance(value, classmethod | staticmethod | FunctionType):
                found[f"{name}.{member}"] = _signature(getattr(value, "__func__", value))
    return found


def _signature(thing: object) -> str:
    """Return parameters and defaults without annotations, which each version of Python writes otherwise."""
    if isinstance(thing, type) and issubclass(thing, Enum):
        return ", ".join(f"{member.name}={member.value}" for member in thing)
    if not callable(thing):
        return type(thing).__name__
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(thing).parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(parameters)))


def changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    """Return the public names whose signatures, or those of whose members, are new, other or gone."""
    differing = {name for name in now.keys() | before if now.get(name) != before.get(name)}
    return sorted({name.split(".")[0] for name in differing})


def read() -> dict[str, str]:
    """Return the signatures that the file has."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    pairs = (line.partition(" ") for line in lines)
    return {name: signature for name, _, signature in pairs}


def unnamed(names: list[str], folder: Path = ROOT / "changelog.d") -> list[str]:
    """Return the names that no fragment has: a class as `Job` or `shoal.Job` in backticks, a function as shoal.run."""
    files = [path for path in folder.glob("*.md") if path.name != "README.md"]
    fragments = " ".join(path.read_text(encoding="utf-8") for path in files)
    words = {name: rf"`(shoal\.)?{name}\b" if name[0].isupper() else rf"\bshoal\.{name}\b" for name in names}
    return [name for name, word in words.items() if not re.search(word, fragments)]


def main() -> None:
    """Write the file, unless no fragment names a changed name."""
    now = signatures(shoal.__all__)
    missing = unnamed(changed(now, read()))
    if missing and FILE.exists():
        words = ", ".join(f"`{name}`" if name[0].isupper() else f"`shoal.{name}`" for name in missing)
        raise SystemExit(f"public_api: write a fragment in changelog.d/ that names {words}, and repeat this")
    FILE.write_text("".join(f"{name} {signature}\n" for name, signature in now.items()), encoding="utf-8")


if __name__ == "__main__":
    main()
