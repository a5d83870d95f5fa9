"""Configuration files with settings of a job: YAML, TOML or JSON."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CommandError, nearest_file

_YAML, _TOML, _JSON = (".yaml", ".yml"), (".toml",), (".json",)
# YAML 1.1, which PyYAML reads, takes 1e-3 for a text.
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_OF_OMEGACONF = re.compile(r"\?\?\?|.*\$\{[^}]*\}.*", re.DOTALL)


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file as it was read."""

    path: str
    sha256: str


def read_config(path: str) -> tuple[dict[str, Any], ConfigFile]:
    """Return the settings in a configuration file, and the file's digest.

    Raises: CommandError if there is no such file, its kind is unknown, or it is damaged; for YAML without PyYAML.
    """
    given, suffix = f"--config {path}", Path(path).suffix.lower()
    if suffix not in (*_YAML, *_TOML, *_JSON):
        raise CommandError(
            given=given,
            conflict="a configuration file is YAML, TOML or JSON, by the end of its name",
            remedy="give a file that ends in .yaml, .yml, .toml or .json",
        )
    try:
        data = Path(path).read_bytes()
        text = data.decode()
        if suffix in _YAML:
            values = _from_yaml(text, given)
        else:
            values = tomllib.loads(text) if suffix in _TOML else json.loads(text, object_pairs_hook=_unique)
    except CommandError:
        raise
    except OSError as error:
        conflict, remedy = f"it cannot be read: {error.strerror or error}", "give the path of a file"
        remedy += nearest_file(path) if isinstance(error, FileNotFoundError) else ""
        raise CommandError(given=given, conflict=conflict, remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        conflict = f"it is no {suffix[1:].upper().replace('YML', 'YAML')}: {' '.join(str(error).split())}"
        raise CommandError(given=given, conflict=conflict, remedy="mend the file there") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        conflict = f"its top level is a {type(values).__name__}, without names of settings"
        raise CommandError(given=given, conflict=conflict, remedy="write NAME: VALUE for each setting")
    return _plain(values, path), ConfigFile(path, hashlib.sha256(data).hexdigest())


def _from_yaml(text: str, given: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise CommandError(
            given=given,
            conflict="the package PyYAML is not installed",
            remedy="pip install 'shoal[yaml]', or write the file as TOML or JSON",
        ) from error

    class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Loader that reads 1e-3 as a number and dates as texts, and refuses a key that is there twice."""

        yaml_implicit_resolvers = {  # noqa: RUF012  (as in the base class)
            first: [(tag, rule) for tag, rule in rules if not tag.endswith((":float", ":timestamp"))]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _unique((key.value, None) for key, _ in node.value if isinstance(key.value, str) and key.value != "<<")
            return node

    _Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$"), list("-+0123456789.")
    )
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises: ValueError for a key that is there twice."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key} is there twice")
        values[key] = value
    return values


def _plain(value: Any, path: str, name: str = "") -> Any:
    """Return a value with dates as texts. Raises: CommandError for what only OmegaConf resolves."""
    if isinstance(value, dict):
        return {key: _plain(inner, path, f"{name}.{key}" if name else str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, path, f"{name}.{index}") for index, inner in enumerate(value)]
    if isinstance(value, str) and _OF_OMEGACONF.fullmatch(value):
        raise CommandError(
            given=f"--config {path}, in which {name} is {value}",
            conflict="OmegaConf fills that in, and --config reads the file alone",
            remedy=f"write the value, or call shoal.run(job, settings=OmegaConf.load({path!r}))",
        )
    return value.isoformat() if hasattr(value, "isoformat") else value
