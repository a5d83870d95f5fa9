"""Settings that may be secrets, by their names; no file of a run and no tracker gets their values."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"
_SECRET_NAMES = ("*token*", "*password*", "*secret*", "*_key")
_NO_SECRETS = ("*tokenizer*",)


def is_secret(name: str, value: object) -> bool:
    """Return True if a part of a setting's dotted name, and its type, suggest a secret. Numbers and flags are none."""

    def matches(part: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(part, one) for one in patterns)

    parts = name.lower().split(".") if isinstance(value, str) else []
    return any(matches(part, _SECRET_NAMES) and not matches(part, _NO_SECRETS) for part in parts)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `<hidden>` and a digest in place of secret texts, at any depth of mappings."""

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):  # all texts below a secret name are secret
            return {key: shown(name if is_secret(name, "") else str(key), one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [shown(name, one) for one in value]
        if is_secret(name, value) and not is_hidden(value):
            return f"{HIDDEN} {hashlib.sha256(value.encode()).hexdigest()[:16]}"
        return _json_without_secrets(name, value) if isinstance(value, str) else value

    return {name: shown(name, value) for name, value in settings.items()}


def command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with `<hidden>` in place of secret values: of `--set NAME=VALUE`, `--NAME VALUE`."""

    def secret(name: str) -> bool:
        return is_secret(name.removeprefix("--set=").lstrip("-").replace("-", "_"), "")

    shown: list[str] = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--set=").partition("=")
        before = shown[-1] if shown else ""
        if equals and value and secret(name):
            shown.append(f"{argument[: -len(value)]}{HIDDEN}")
        elif equals:
            shown.append(f"{argument[: -len(value)]}{_json_without_secrets(name, value)}")
        elif before.startswith("--") and "=" not in before and secret(before) and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(argument)
    return shown


def _json_without_secrets(name: str, text: str) -> str:
    """Return the text of a setting; of JSON, without the secrets in it."""
    if text[:1] not in ("{", "["):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    shown = without_secrets({name: value})[name]
    return text if shown == value else json.dumps(shown)


def is_hidden(value: object) -> bool:
    """Return True if a recorded setting, or a part of it, stands for a secret value."""
    if isinstance(value, Mapping | list):
        return any(is_hidden(one) for one in (value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and (value.startswith(HIDDEN) or f'"{HIDDEN} ' in value)


def without_hidden(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings whose values are known."""
    return {name: value for name, value in settings.items() if not is_hidden(value)}
