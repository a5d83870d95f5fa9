"""Settings that may be secrets, by their names; no file of a run and no tracker gets their values."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"
_SECRET_NAMES = ("*token*", "*password*", "*secret*", "*_key")
_NO_SECRETS = ("*tokenizer*",)


def is_secret(name: str, value: object) -> bool:
    """Return True if a setting's name and type suggest a secret. Numbers and flags are none."""
    lower = name.lower()
    if not isinstance(value, str) or any(fnmatch.fnmatch(lower, one) for one in _NO_SECRETS):
        return False
    return any(fnmatch.fnmatch(lower, one) for one in _SECRET_NAMES)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `<hidden>` and a digest in place of secret texts, at any depth of mappings."""

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):  # all texts below a secret name are secret
            return {key: shown(name if is_secret(name, "") else str(key), one) for key, one in value.items()}
        if is_secret(name, value) and not is_hidden(value):
            return f"{HIDDEN} {hashlib.sha256(value.encode()).hexdigest()[:16]}"
        return value

    return {name: shown(name, value) for name, value in settings.items()}


def command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with `<hidden>` in place of secret values: of `--set NAME=VALUE`, `--NAME VALUE`."""

    def secret(name: str) -> bool:
        parts = name.removeprefix("--set=").lstrip("-").replace("-", "_").split(".")
        return any(is_secret(part, "") for part in parts)

    shown: list[str] = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--set=").partition("=")
        before = shown[-1] if shown else ""
        if equals and value and secret(name):
            shown.append(f"{argument[: -len(value)]}{HIDDEN}")
        elif before.startswith("--") and "=" not in before and secret(before) and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(argument)
    return shown


def is_hidden(value: object) -> bool:
    """Return True if a recorded setting, or a part of it, stands for a secret value."""
    if isinstance(value, Mapping):
        return any(is_hidden(one) for one in value.values())
    return isinstance(value, str) and value.startswith(HIDDEN)


def without_hidden(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings whose values are known."""
    return {name: value for name, value in settings.items() if not is_hidden(value)}
