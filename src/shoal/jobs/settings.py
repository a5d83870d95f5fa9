"""Settings of job functions: texts of the command, values of files and of Python, converted to the declared types."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from shoal.errors import JobFileError, SettingError, nearest, say_note
from shoal.jobs.differences import differences
from shoal.jobs.secret_settings import is_hidden, without_secrets

# A setting: text from the command line, or {"value": JSON} from Python, which keeps the type. Values of configuration
# files also have {"from": FILE}.
Setting = str | dict[str, Any]

_EMPTY = inspect.Parameter.empty  # stands for a missing type, default or value
_NONE = ("none", "null")  # texts that stand for None


def settings_from(given: Any, source: str | None = None) -> dict[str, Setting]:
    """Return a mapping, such as one of OmegaConf, as settings by dotted name. `source`: file that it is from.

    Raises: SettingError for what is no mapping, or has values that JSON lacks.
    """
    given = _plain(given, "settings")
    if not isinstance(given, Mapping):
        raise SettingError(
            given=f"settings={given!r:.80}",
            conflict=f"settings have names, and a {type(given).__name__} has none",
            remedy='give a dict, as settings={"lr": 0.1}',
        )
    settings: dict[str, Setting] = {}

    def add(name: str, value: Any) -> None:
        value = _plain(value, name)
        if isinstance(value, Mapping) and value and all(isinstance(key, str) and "." not in key for key in value):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
            return
        setting = setting_of(name, value)
        if source is not None:
            setting = {"value": setting} if isinstance(setting, str) else setting
            setting = {**setting, "from": source}
        settings[name] = setting

    for key, value in given.items():
        add(str(key), value)
    return settings


def setting_of(name: str, value: Any) -> Setting:
    """Return a Python value as a setting that keeps its type. Raises: SettingError for values that JSON lacks."""
    value = str(value) if isinstance(value, Path) else value
    if isinstance(value, str) and _is_word(value):
        return value
    try:
        json_value = json.loads(json.dumps(value, default=lambda one: _json_value(one, _no_json)))
    except (TypeError, ValueError):
        json_value = None
    if (json_value is None and value is not None) or not _has_text_keys(value):
        raise SettingError(
            given=f"{name}={value!r:.80}",
            conflict="a setting is a number, a text, a list or a dict with texts as keys, "
            f"and no {'other dict' if isinstance(value, dict) else type(value).__name__}",
            remedy="make that in the job function, or in a function that calls it: shoal.run(lambda: job(...))",
        )
    return {"value": json_value}


def layered(*layers: Iterable[tuple[str, Setting]]) -> tuple[tuple[str, Setting], ...]:
    """Return settings in which those of later layers come last, and replace earlier ones of the same name."""
    settings: dict[str, Setting] = {}
    for name, setting in (pair for layer in layers for pair in layer):
        settings.pop(name, None)
        settings[name] = setting
    return tuple(settings.items())


def is_below(name: str, other: str) -> bool:
    """Return True if a dotted name is another one, or that of a key below it."""
    return name == other or name.startswith(f"{other}.")


def source_of(setting: object) -> str | None:
    """Return the configuration file that a setting is from, or None."""
    return setting.get("from") if isinstance(setting, dict) else None


def written(name: str, setting: Setting) -> str:
    """Return a setting in the form in which the user gave it, without secrets."""
    value = without_secrets({name: setting if isinstance(setting, str) else setting["value"]})[name]
    if isinstance(setting, str):
        return f"--set {name}={value}"
    source = source_of(setting)
    return f"{name}={value!r}" + (f" in {source}" if source else "")


def setting_text(name: str, setting: Setting) -> str:
    """Return a setting in the form that `--set` takes: a word, or JSON."""
    value = setting["value"] if isinstance(setting, dict) else setting
    if isinstance(setting, str) or (isinstance(value, str) and _is_word(value)):
        return str(value)
    return "none" if value is None else json.dumps(value)


def bind(
    function: Callable[..., Any], settings: Mapping[str, Setting], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments that settings give to a job function, and the complete settings as JSON values.

    Dotted names set keys of dicts, dataclasses, pydantic models and lists; other keys keep their defaults. A function
    whose only parameter has no default takes all settings as one mapping.

    Raises: SettingError that lists every mistake; JobFileError for a missing setting.
    """
    parameters = inspect.signature(function).parameters.values()
    hints, scope = _hints(function, {}), getattr(function, "__globals__", {})
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {p.name: (hints.get(p.name, _EMPTY), p.default) for p in parameters if p.kind not in variable}
    whole = _whole_parameter(named, settings, scope)
    root = _Place("", scope, *named[whole]) if whole is not None else _Place("", scope)
    if whole is None:
        root.is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        root.keys = {name: _Place(name, scope, *one, is_parameter=True) for name, one in named.items()}
        missing = [n for n, (_, d) in named.items() if d is _EMPTY and not any(is_below(s, n) for s in settings)]
        if missing:
            raise JobFileError(
                given=f"{where}({', '.join(p.name for p in parameters)})",
                conflict=f"parameter {', '.join(missing)} has no default",
                remedy=f"give it one in the file, or write --set {missing[0]}=VALUE or --config FILE",
            )
    root.where = where
    root.open()
    mistakes: list[tuple[str, str, str]] = []
    for name, setting in settings.items():
        try:
            root.set(name.split("."), setting)
        except _Misfit as misfit:
            mistakes.append((written(name, setting), *misfit.args))
    values: Any = None
    if not mistakes:
        try:
            values = root.result()
        except _Misfit as misfit:
            of, *texts = misfit.args
            of_place = [written(name, setting) for name, setting in settings.items() if not of or is_below(name, of)]
            mistakes.append((", ".join(of_place) or of or where, *texts))
    if mistakes:
        given, conflict, remedy = ("\n".join(m[i] for m in mistakes) for i in range(3))
        raise SettingError(given=given, conflict=conflict, remedy=remedy)
    complete = json.loads(json.dumps(values, default=lambda value: _json_value(value, str)))
    set_ones = {name.partition(".")[0] for name in settings}
    arguments = (
        {name: value for name, value in values.items() if name in set_ones} if whole is None else {whole: values}
    )
    return arguments, complete


def _whole_parameter(named: Mapping[str, tuple[Any, Any]], settings: Mapping[str, Any], scope: Any) -> str | None:
    """Return the parameter that takes all settings as one mapping, or None."""
    if len(named) != 1:
        return None
    ((name, (wanted, default)),) = named.items()
    if default is not _EMPTY or any(is_below(setting, name) for setting in settings):
        return None
    keys = _keys_of(wanted, _EMPTY, scope)
    return name if keys is not None and (keys[0] or settings) else None


class _Misfit(Exception):  # noqa: N818  (becomes a part of a SettingError)
    """A setting that does not fit: what it conflicts with, and a remedy."""


class _Place:
    """A parameter of a job function, or a key below one: its type, its value, and its keys once one of them is set."""

    def __init__(
        self, name: str, scope: Mapping[str, Any], wanted: Any = _EMPTY, value: Any = _EMPTY, is_parameter: bool = False
    ) -> None:
        self.name, self.scope, self.wanted, self.value = name, scope, wanted, value
        self.is_parameter, self.default, self.where = is_parameter, value, ""
        self.keys: dict[str, _Place] | None = None
        self.is_open = False

    def set(self, parts: Sequence[str], setting: Setting) -> None:
        """Set this place, or with `parts` the key below it. Raises: _Misfit."""
        if parts and parts[0]:
            self._key(parts[0]).set(parts[1:], setting)
            return
        value = setting["value"] if isinstance(setting, dict) else _read(setting, dict)
        origin = setting if isinstance(setting, dict) else {}
        if isinstance(value, Mapping) and _is_keyed(self.wanted, self.value, self.scope):
            self.open()
            for key, inner in value.items():
                self._key(key).set((), {**origin, "value": inner})
        elif isinstance(value, list) and _is_keyed(_item(self.wanted, 0), _EMPTY, self.scope):
            self.value, self.keys = tuple(value) if _class_of(self.wanted, _EMPTY) is tuple else value, None
            for index, inner in enumerate(value):
                self._key(str(index)).value = _EMPTY
                self._key(str(index)).set((), {**origin, "value": inner})
        else:
            self.value, self.keys = self._converted(setting), None

    def _key(self, key: str) -> _Place:
        """Return the place of a key. Raises: _Misfit if there is no such key."""
        self.open()
        assert self.keys is not None
        full = f"{self.name}.{key}" if self.name else key
        if key not in self.keys and self.is_open:
            self.keys[key] = _Place(full, self.scope, _item(self.wanted, 1))
        if key not in self.keys:
            holder = f"{self.name} has no key" if self.name else f"{self.where} has no parameter"
            remedy = f"use one of {', '.join(self.keys)}{nearest(key, list(self.keys))}"
            raise _Misfit(
                f"{holder} {key}", remedy if self.keys else f"leave it out, or add {key} there with a default"
            )
        return self.keys[key]

    def open(self) -> None:
        """Make places of the keys. Raises: _Misfit if there are none."""
        if self.keys is not None:
            return
        keys = _keys_of(self.wanted, self.value, self.scope)
        if keys is None:
            raise _Misfit(
                f"{self.name} is of type {_name(self._kind)}, which has no keys", f"write --set {self.name}=VALUE"
            )
        of_keys, self.is_open = keys
        prefix = f"{self.name}." if self.name else ""
        self.keys = {key: _Place(f"{prefix}{key}", self.scope, *one) for key, one in of_keys.items()}

    @property
    def _kind(self) -> Any:
        """The declared type, or that of the default."""
        if self.wanted is not _EMPTY:
            return self.wanted
        return Any if self.default is None or self.default is _EMPTY else type(self.default)

    def _converted(self, setting: Setting) -> Any:
        """Return a setting as a value of the type. Python values change only from int to float, or list to tuple."""
        wanted = self._kind
        try:
            if isinstance(setting, str):
                wanted = str if wanted is Any and self.wanted is _EMPTY and self.is_parameter else wanted
                return TypeAdapter(wanted).validate_python(_read(setting, wanted))
            value = setting["value"]
            if value is None and self.default is None:
                return None
            if isinstance(value, str):
                return TypeAdapter(wanted).validate_python(_literal(value, wanted))
            return TypeAdapter(wanted).validate_json(json.dumps(value), strict=True)
        except PydanticUserError as error:
            raise _Misfit(f"{self.name} is of type {_name(wanted)}", "set it in the job file") from error
        except ValidationError as error:
            if _is_keyed(self.wanted, self.default, self.scope):
                key = next(iter((_keys_of(self.wanted, self.default, self.scope) or ({}, True))[0]), "KEY")
                misfit = f"{self.name} is of type {_name(wanted)}, which has keys"
                raise _Misfit(misfit, f"write --set {self.name}.{key}=VALUE, say") from error
            given = setting if isinstance(setting, str) else setting["value"]
            sample, source = _EXAMPLES.get(_without_none(wanted), "VALUE"), source_of(setting)
            form = f"{self.name}: {sample} in {source}" if source else f"{self.name}={sample}"
            form = f"--set {form}" if isinstance(setting, str) else form
            raise _Misfit(_misfit(self.name, wanted, given, error), f"write {form}, say") from error

    def result(self) -> Any:
        """Return the value, with the values of all keys. Raises: _Misfit, with the name first, for a missing key."""
        if self.keys is None:
            return self.value
        values = {key: one.result() for key, one in self.keys.items()}
        values = {key: value for key, value in values.items() if value is not _EMPTY}
        kind: Any = _class_of(self.wanted, self.value)
        if isinstance(self.value, list | tuple):
            return kind(*values.values()) if hasattr(kind, "_fields") else kind(values.values())
        if isinstance(self.value, dict) and type(self.value) is not dict:  # such as a defaultdict
            whole = copy.copy(self.value)
            whole.update(values)
            return whole
        needed = list(self.keys) if _is_dataclass(kind) else getattr(kind, "__required_keys__", ())
        missing = [f"{self.name}.{key}" if self.name else key for key in needed if key not in values]
        if missing:
            text = f"{', '.join(missing)} has no default"
            raise _Misfit(self.name, text, f"give it one, or write --set {missing[0]}=VALUE")
        try:
            if _is_dataclass(kind):
                return kind(**values)
            if issubclass(kind, BaseModel):
                return kind.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in (self.name, *first["loc"]) if part != "")
            place = self.keys.get(str(first["loc"][0])) if first["loc"] else None
            wanted = place.wanted if place is not None else kind
            raise _Misfit(name, _misfit(name, wanted, first.get("input"), error), f"write another {name}") from error
        except (TypeError, ValueError) as error:
            raise _Misfit(self.name, f"{kind.__name__} refuses them: {error}", "write other values") from error
        return importlib.import_module("omegaconf").OmegaConf.create(values) if _is_of_omegaconf(kind) else values


def _keys_of(wanted: Any, value: Any, scope: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, Any]], bool] | None:
    """Return types and defaults of a place's keys, and whether it takes others too; None if it has no keys."""
    kind = _class_of(wanted, value)
    if _is_dataclass(kind):
        hints = _hints(kind, scope)
        defaults = {
            f.name: _default(f) if not isinstance(value, kind) else getattr(value, f.name)
            for f in dataclasses.fields(kind)
            if f.init
        }
        return {name: (hints.get(name, _EMPTY), default) for name, default in defaults.items()}, False
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        keys = {}
        for name, field in kind.model_fields.items():
            key = field.validation_alias if isinstance(field.validation_alias, str) else name
            keys[key] = field.annotation, getattr(value, name) if isinstance(value, kind) else _default(field)
        return keys, kind.model_config.get("extra") == "allow"
    if is_typeddict(kind):
        given = value if isinstance(value, Mapping) else {}
        return {key: (hint, given.get(key, _EMPTY)) for key, hint in _hints(kind, scope).items()}, False
    if isinstance(kind, type) and issubclass(kind, Mapping):
        given = value if isinstance(value, Mapping) else {}
        known = {key: (_item(wanted, 1), inner) for key, inner in given.items() if isinstance(key, str)}
        return (known, not known) if len(known) == len(given) else None
    if isinstance(value, list | tuple):
        return {str(index): (_item(wanted, index), inner) for index, inner in enumerate(value)}, False
    return ({}, True) if kind is Any and (value is None or value is _EMPTY) else None


def _is_keyed(wanted: Any, value: Any, scope: Mapping[str, Any]) -> bool:
    """Return True if a place has keys that are texts."""
    kind = _class_of(wanted, value)
    return (
        (wanted is not _EMPTY or value is not _EMPTY)
        and kind not in (list, tuple)
        and _keys_of(wanted, value, scope) is not None
    )


def _class_of(wanted: Any, value: Any) -> Any:
    """Return the class of a place: that of its value if it has keys, else the declared one, without `| None`."""
    if _is_dataclass(type(value)) or isinstance(value, BaseModel | list | tuple):
        return type(value)
    if wanted is _EMPTY:
        return Any if value is None or value is _EMPTY else type(value)
    wanted = _without_none(wanted)
    return get_origin(wanted) or wanted


def _without_none(wanted: Any) -> Any:
    if get_origin(wanted) is Annotated:
        return _without_none(get_args(wanted)[0])
    if get_origin(wanted) in (Union, types.UnionType):
        others = [one for one in get_args(wanted) if one is not type(None)]
        return _without_none(others[0]) if len(others) == 1 else wanted
    return wanted


def _item(wanted: Any, index: int) -> Any:
    """Return the declared type of a list's item or a dict's value (index 1), or _EMPTY."""
    arguments = get_args(_without_none(wanted)) if wanted is not _EMPTY else ()
    kind = get_origin(_without_none(wanted)) if wanted is not _EMPTY else None
    if kind is list or (kind is tuple and arguments[1:] == (...,)):
        return arguments[0]
    if kind is Union or kind is types.UnionType or kind is Literal:
        return _EMPTY
    return arguments[index] if index < len(arguments) else _EMPTY


def _default(field: Any) -> Any:
    """Return the default of a field of a dataclass or a pydantic model, or _EMPTY."""
    if callable(field.default_factory):
        try:
            return field.default_factory()
        except TypeError:  # pydantic's takes the other values
            return _EMPTY
    missing = field.default is dataclasses.MISSING or type(field.default).__name__ == "PydanticUndefinedType"
    return _EMPTY if missing else field.default


def _hints(owner: Any, scope: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return get_type_hints(owner, localns=dict(scope) or None)
    except Exception:  # an annotation that does not resolve: use the default's type instead
        return {}


def _plain(value: Any, name: str) -> Any:
    """Return containers of OmegaConf, dataclasses and pydantic models as dicts and lists.

    Raises: SettingError for a missing value or an interpolation that fails.
    """
    if _is_of_omegaconf(type(value)):
        omegaconf = importlib.import_module("omegaconf")
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or name
            is_missing = isinstance(error, omegaconf.errors.MissingMandatoryValue)
            raise SettingError(
                given=f"{key}: ???" if is_missing else f"{key} of the configuration",
                conflict=f"{key} must have a value" if is_missing else str(error).splitlines()[0],
                remedy=f"give it one: {key}=VALUE" if is_missing else f"mend {key} where the configuration is made",
            ) from error
    if _is_dataclass(type(value)):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return dict(value) if isinstance(value, BaseModel) else value


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_of_omegaconf(kind: Any) -> bool:
    return getattr(kind, "__module__", "").startswith("omegaconf.") and kind.__name__ in ("DictConfig", "ListConfig")


def _json_value(value: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Return what stands for a value that JSON lacks: its keys, or the result of `otherwise`."""
    plain = _plain(value, "")
    return dict(plain) if isinstance(plain, Mapping) else otherwise(value) if plain is value else plain


def _no_json(value: Any) -> Any:
    raise TypeError(f"JSON has no {type(value).__name__}")


def _is_word(text: str) -> bool:
    """Return True if `--set` reads a text as it is, whatever the type."""
    if text[:1] in ("[", "{", '"') or text.lower() in _NONE:
        return False
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def _has_text_keys(value: Any) -> bool:
    """Check whether all dicts in a value have strings as keys, since JSON would convert other keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return not isinstance(value, list | tuple) or all(_has_text_keys(inner) for inner in value)


def _read(text: str, wanted: Any) -> Any:
    """Parse a text: JSON for lists, tuples, dicts and texts in quotes, `none` for None. The type reads other texts."""
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    if (wanted in (int, float, str, bool) and not is_quoted) or get_origin(wanted) is Literal:
        return _literal(text, wanted)
    if text.lower() in _NONE:
        return None
    if text[:1] in ("[", "{") or is_quoted or wanted is Any:
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _literal(text: str, wanted: Any) -> Any:
    options = get_args(wanted) if get_origin(wanted) is Literal else ()
    return next((option for option in options if str(option) == text), text)


_EXAMPLES = {int: "2", float: "0.1", bool: "true", str: '"abc"'}
_PHRASES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _misfit(name: str, wanted: Any, value: Any, error: ValidationError) -> str:
    """Return why a value does not fit a type."""
    first = error.errors(include_url=False)[0]
    kind, bare = first["type"], _without_none(wanted)
    value = without_secrets({name: value})[name]
    if kind == "missing":
        return f"{name} has no default"
    if kind.endswith(("_parsing", "_type", "_from_float", "_size")) and bare in _PHRASES:
        return f"{name} is of type {_name(wanted)}, and {value!r:.60} is not {_PHRASES[bare]}"
    rule = f"{first['msg'][:1].lower()}{first['msg'][1:]}".replace("input should", "it must")
    return f"{name} is of type {_name(wanted)}, and {value!r:.60} does not fit: {rule}"


def _name(wanted: Any) -> str:
    return (
        getattr(wanted, "__name__", None) or str(wanted)
        if get_origin(wanted) is None
        else str(wanted).replace("typing.", "")
    )


def note_other_secrets(settings: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Print a note about secrets that are not those which the run was given, by their digests.

    They may have been renewed, so they are not refused.

    Args:
        settings: complete settings, as `job_file.load` returns them.
        saved: job.json of the run.
    """
    hidden = [name for name, setting in (saved.get("given") or {}).items() if is_hidden(setting)]
    names = [one.name for one in differences(settings, saved.get("settings") or {}) if is_hidden(one.theirs)]
    names = [name for name in names if any(is_below(name, one) or is_below(one, name) for one in hidden)]
    if names:
        say_note(f"another value of {', '.join(names)} than the run had, which is right if it was renewed")
