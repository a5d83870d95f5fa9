"""Job files: Python files with a function of typed, defaulted parameters that returns a Job."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import JobFileError, SettingError, ShoalError, nearest
from shoal.jobs.config_file import ConfigFile, read_config
from shoal.jobs.differences import differences
from shoal.jobs.job import Job
from shoal.jobs.job_module import (
    JobModule,
    code,
    files_read,
    imported_from,
    located,
    read_source,
    sources,
    split_target,
)
from shoal.jobs.job_object import HandedJob
from shoal.jobs.secret_settings import is_hidden, without_hidden, without_secrets
from shoal.jobs.settings import Setting, bind, is_below, layered, settings_from, source_of, written
from shoal.jobs.user_errors import NO_PACKAGE, place_of, remedy, traceback_of
from shoal.plans.grains import FEW_GRAINS


@dataclass(frozen=True)
class JobRequest:
    """Source of a job: a file, a function in it, its settings and the configuration files that some are from.

    `handed`: how a job object reaches the ranks. `path` is then only for messages and is not loaded.
    `dotted`: the module's name if the target was a dotted name. Otherwise the file's place in packages gives the name.
    """

    path: Path
    function: str | None = None
    settings: tuple[tuple[str, Setting], ...] = ()
    handed: HandedJob | None = None
    dotted: str | None = None
    config: tuple[ConfigFile, ...] = ()

    @property
    def module(self) -> JobModule:
        """The job's file with its full module name."""
        known = self.handed.module if self.handed is not None else self.dotted
        return JobModule.of_file(self.path) if known is None else JobModule.of_name(self.path, known)

    @property
    def target(self) -> str:
        """The file or module in the form that the command takes."""
        return self.dotted or str(self.path)

    @property
    def name(self) -> str:
        """A short name for the run: the module's, with the function's unless that is `job`."""
        extra = f"-{self.function}" if self.function and self.function != "job" else ""
        return (self.path.stem if self.by_value else self.module.name) + extra

    @property
    def least_grains(self) -> int | None:
        """A lower bound of the job's number of grains; None if only running its code shows it."""
        by_value = self.handed if self.by_value else None
        return by_value.least_grains if by_value is not None else least_grains(self.module)

    @property
    def by_value(self) -> bool:
        """True if the job is an object that cannot be imported from a file, and is passed as a pickle."""
        return self.handed is not None and self.handed.module is None


@dataclass(frozen=True)
class LoadedJob:
    """A Job with the function and the complete settings (JSON values, secrets hidden) that created it."""

    job: Job
    function: str
    settings: dict[str, Any]
    file_sha256: str
    code: dict[str, dict[str, str]] = field(default_factory=dict)  # digests from `job_module.code`
    module: str = ""  # full name of the job's module, or "" if the job came by value
    files: tuple[str, ...] = ()  # paths of files that the job's code read while it was loaded
    draws: bool = True  # whether it may have drawn unseeded random values while it was loaded

    def describe(self) -> dict[str, Any]:
        """Return a JSON description of the training problem: names, numbers and code digests."""
        known = {"file_sha256": self.file_sha256, "function": self.function, "settings": self.settings}
        return {**known, "code": self.code, **self.job.describe()}


def parse_target(
    target: str | JobRequest, settings: Sequence[str | tuple[str, Setting]], config: Sequence[str] = ()
) -> JobRequest:
    """Parse `FILE[:FUNCTION]` or `MODULE[:FUNCTION]`, settings (`name=value` texts or pairs) and configuration files.

    Settings replace values of the files, and later files those of earlier ones. A request is returned as it is.

    Raises: JobFileError for a missing file; SettingError for a text that is not name=value; as `read_config`.
    """
    if isinstance(target, JobRequest):
        return target
    text, function = split_target(target)
    if text == "hf" and not Path(text).is_file():
        raise JobFileError(
            given=target,
            conflict="a configuration can be planned, and has no data to train on",
            remedy="write a job file that builds the model, as examples/hugging_face.py",
        )
    module = located(text)
    module.refuse_hidden_shoal()
    pairs = [setting for setting in settings if not isinstance(setting, str)]
    for text in (setting for setting in settings if isinstance(setting, str)):
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SettingError(
                given=f"--set {text}", conflict="a setting is name=value", remedy=f"write --set {name or 'name'}=VALUE"
            )
        name = name.strip()
        previous = dict(pairs).get(name, value)
        if previous != value:
            both = f"{written(name, previous)} {written(name, value)}"
            raise SettingError(given=both, conflict=f"{name} is set twice", remedy="write one")
        pairs.append((name, value))
    dotted = module.name if module.name != JobModule.of_file(module.path).name else None
    return with_config(JobRequest(module.path, function, tuple(pairs), dotted=dotted), config)


def with_config(request: JobRequest, config: Sequence[str]) -> JobRequest:
    """Return a request with the settings of configuration files below its own. Raises: as `read_config`."""
    files = [read_config(path) for path in config]
    layers = [settings_from(values, file.path).items() for values, file in files]
    return replace(request, settings=layered(*layers, request.settings), config=tuple(file for _, file in files))


def with_settings_of(request: JobRequest, saved: Mapping[str, Any], *, all_known: bool = False) -> JobRequest:
    """Return a request with the settings of a run below its own. Its own configuration files replace the run's.

    Args:
        saved: job.json of the run.
        all_known: refuse secrets of the run, whose values are not recorded, unless the request has them.

    Raises: SettingError.
    """
    own, given = dict(request.settings), saved.get("given") or {}
    unknown = [n for n, setting in given.items() if is_hidden(setting) and not any(is_below(n, one) for one in own)]
    if all_known and unknown:
        raise SettingError(
            given=f"no value of {', '.join(unknown)}",
            conflict="the run was given one, and a run directory has no secrets",
            remedy=f"give it again: {' '.join(f'--set {name}=...' for name in unknown)}, or settings= from Python",
        )
    of_run = ((n, s) for n, s in without_hidden(given).items() if not (request.config and source_of(s)))
    from_files = [(name, setting) for name, setting in own.items() if source_of(setting)]
    others = [(name, setting) for name, setting in own.items() if not source_of(setting)]
    files = request.config or tuple(ConfigFile(**one) for one in saved.get("config") or ())
    return replace(request, settings=layered(from_files, of_run, others), config=files)


def refuse_other_secrets(settings: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse secrets that are not those which the run was given, by their digests.

    Args:
        settings: complete settings, as `load` returns them.
        saved: job.json of the run.

    Raises: SettingError.
    """
    hidden = [name for name, setting in (saved.get("given") or {}).items() if is_hidden(setting)]
    names = [one.name for one in differences(settings, saved.get("settings") or {}) if is_hidden(one.theirs)]
    names = [name for name in names if any(is_below(name, one) or is_below(one, name) for one in hidden)]
    if names:
        raise SettingError(
            given=f"another value of {', '.join(names)} than the run had",
            conflict="a run directory has no secrets but their digests, and the digests differ",
            remedy=f"give the run's: {' '.join(f'--set {name}=...' for name in names)}, or settings= from Python",
        )


# A job must not depend on the number of devices. With these variables, libraries such as Accelerate (in a
# TrainingArguments) would also join the ranks by themselves, at the address that shoal's ranks use.
_OF_DEVICES = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def load(request: JobRequest) -> LoadedJob:
    """Run the job file and its function, with the number of ranks hidden from its environment.

    Raises: JobFileError, SettingError, JobError.
    """
    name, handed = request.function or "job", request.handed
    hidden = {variable: os.environ.pop(variable) for variable in _OF_DEVICES if variable in os.environ}
    try:
        with files_read() as files:
            given = _fetched(handed, request) if handed is not None else _executed(request)
            job, settings = called(given, request)
    finally:
        os.environ.update(hidden)
    if request.by_value:
        assert handed is not None
        digest = hashlib.sha256(json.dumps(handed.code, sort_keys=True).encode()).hexdigest()
        return LoadedJob(job, name, settings, digest, handed.code, files=tuple(files))
    module = request.module
    digests = code(module, name, imported_from(module.folders))
    return LoadedJob(job, name, settings, file_sha256(request.path), digests, module.name, tuple(files))


def _fetched(handed: HandedJob, request: JobRequest) -> Any:
    try:
        return handed.fetch(request.function)
    except ShoalError:
        raise
    except Exception as error:
        raise _raised(str(request.path), error) from error


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file. Raises: OSError."""
    return hashlib.sha256(read_source(path)).hexdigest()


def called(given: Any, request: JobRequest) -> tuple[Job, dict[str, Any]]:
    """Return the Job from a job function with its complete settings. A given Job is returned with no settings.

    Raises: JobFileError, SettingError, JobError.
    """
    where = f"{request.target}:{request.function or 'job'}"
    if isinstance(given, Job):
        if request.settings:
            raise SettingError(
                given=", ".join(written(name, setting) for name, setting in request.settings),
                conflict="a Job is complete: settings are the parameters of a function that makes one",
                remedy="give the job function, without calling it",
            )
        return given, {}
    values, complete = bind(given, dict(request.settings), where)
    try:
        job = given(**values)
    except ShoalError:
        raise
    except Exception as error:
        raise _raised(where, error) from error
    if not isinstance(job, Job):
        raise JobFileError(
            given=f"{where} returned {type(job).__name__}",
            conflict="a job function returns a shoal.Job",
            remedy="end the function with: return shoal.Job(...)",
        )
    return job, without_secrets(complete)


def _executed(request: JobRequest) -> Any:
    """Run the job's module, and return the requested function. Raises: JobFileError."""
    module, name = request.module, request.function or "job"
    try:
        executed = module.execute()
    except ShoalError:
        raise
    except SystemExit as error:
        place = place_of(error)
        failure = JobFileError(
            given=str(module.path),
            conflict=f"it ended the program while it was imported (SystemExit: {error.code}){place}; a file that "
            "parses its own options at import reads those of `shoal`",
            remedy="make the options parameters of the job function, and give them with --set NAME=VALUE; call "
            'parse_args() and exit() below `if __name__ == "__main__":` only',
        )
        failure.traceback_text = traceback_of(error)
        raise failure from error
    except Exception as error:
        raise _raised(str(module.path), error) from error
    function = getattr(executed, name, None)
    if callable(function):
        return function
    own = [
        n
        for n, f in vars(executed).items()
        if inspect.isfunction(f) and f.__module__ == executed.__name__ and not n.startswith("_")
    ]
    raise JobFileError(
        given=f"{request.target}:{name}",
        conflict=f"the file has no function of that name (it has {', '.join(own) or 'none'})",
        remedy=f"write {request.target}:FUNCTION with one of them{nearest(name, own)}",
    )


def _raised(where: str, error: Exception) -> JobFileError:
    place = place_of(error)
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    what_to_do = remedy(error, has_line=bool(place))
    failure = JobFileError(
        given=where,
        conflict=f"it raised {type(error).__name__}: {error}{place}",
        remedy=what_to_do if NO_PACKAGE in str(error) else f"{what_to_do}; the file must run by itself under `python`",
    )
    failure.traceback_text = traceback_of(error)
    return failure


def least_grains(module: JobModule) -> int | None:
    """Return a lower bound of the number of grains of the file's job, or None if only running the file shows it.

    The file and the modules that it imports from its own folders are parsed. They show the bound if they call Job and
    every `grains` in them is a keyword with a literal number.
    """
    trees = [tree for _, tree in sources(module)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any("Job" in (getattr(call.func, "attr", None), getattr(call.func, "id", None)) for call in calls):
        return None
    numbers = [FEW_GRAINS]  # the default number of grains is never smaller
    for keyword in (keyword for call in calls for keyword in call.keywords if keyword.arg == "grains"):
        if not (isinstance(keyword.value, ast.Constant) and type(keyword.value.value) is int):
            return None
        numbers.append(keyword.value.value)
    # A variable, an attribute, a parameter or a string named `grains` may set another number.
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.Constant: "value"}
    nodes = (node for tree in trees for node in ast.walk(tree) if type(node) in fields)
    return None if any(getattr(node, fields[type(node)]) == "grains" for node in nodes) else min(numbers)


def parameters_of(target: str) -> list[str]:
    """Return the parameter names of a target's function, or [] if the file, module or function is missing."""
    text, function = split_target(target)
    function = function or "job"
    try:
        body = ast.parse(read_source(located(text).path)).body
    except (OSError, SyntaxError, ValueError, JobFileError):
        return []
    definition = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if definition is None:
        return []
    return [
        argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)
    ]
