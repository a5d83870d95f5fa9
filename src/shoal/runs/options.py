"""Options: one declaration of each, from which the parser, the handshake of ranks and a resumed run's values come.

This module imports nothing heavy, since `shoal --help` reads it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.errors import CommandError, nearest

T = TypeVar("T")


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
                conflict="a renaming is OLD=NEW with two different prefixes of names; one of them may be empty",
                remedy="write --init-rename backbone=model.encoder, say",
            )
        pairs.append((old.strip(". "), new.strip(". ")))
    return InitialWeights(Path(source), NameRules(kinds, tuple(pairs)))


class Origin(StrEnum):
    """Origin of a setting's value."""

    DEFAULT = "default"  # nobody has set it
    CHOSEN = "chosen"  # by shoal, for this machine
    FILE = "file"  # a plan file, or a plan given in Python
    OPTION = "option"  # the call, or the engine that started it
    RUN = "run"  # the run that is resumed


@dataclass(frozen=True)
class Option:
    """Declaration of an option. Its name and default are those of a field.

    Attributes:
        flags: names of the option on the command line. Default: the field's name.
        settings: arguments for argparse.
        least: the option is a whole number of at least this value.
        or_all: `all` is also accepted.
        between: LEAST:MOST and auto are also accepted.
        parse: function of a text or number, and of the option's flag, that returns the value.
        saved: name in job.json. A resumed run uses the value there if the call does not set the option.
        unserved: why a run with parameter servers refuses the option, if it does.
        otherwise: the value if neither the call nor a resumed run sets the option.
        compared: function of the value whose results must be equal on all ranks. None: ranks may have their own.
    """

    flags: tuple[str, ...]
    settings: Mapping[str, Any]
    name: str = ""
    default: Any = None
    least: int | None = None
    or_all: bool = False
    between: bool = False
    parse: Callable[[Any, str], Any] | None = None
    saved: str | None = None
    unserved: str = ""
    otherwise: Any = None
    compared: Callable[[Any], Any] | None = str

    @property
    def flag(self) -> str:
        """The option's long name on the command line, or the name of a positional argument."""
        return self.flags[-1] if self.flags else f"--{self.name.replace('_', '-')}"


def option(text: str, metavar: str | None = None, *flags: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field for an option. `more`: attributes of `Option`, and arguments for argparse."""
    own = {name: more.pop(name) for name in Option.__dataclass_fields__ if name in more}
    settings = {"help": text, **({"metavar": metavar} if metavar else {}), **more}
    return field(default=default, metadata={"option": Option(flags, settings, **own)})


def switch(text: str, default: bool | None = False, **more: Any) -> Any:
    """Return a dataclass field for an option without a value."""
    return option(text, default=default, action="store_true", **more)


def declared(kind: Any) -> tuple[Option, ...]:
    """Return the options that a class declares, in order."""
    return tuple(
        replace(one.metadata["option"], name=one.name, default=None if one.default is MISSING else one.default)
        for one in fields(kind)
        if one.metadata
    )


def whole_number(flag: str, text: Any, least: int, more: str = "") -> int | None:
    """Parse a whole number of at least `least` for an option. `more`: what it also takes. Raises: CommandError."""
    if text is None:
        return None
    try:
        value = least - 1 if isinstance(text, bool | float) else int(text)
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        raise CommandError(
            given=f"{flag} {text}",
            conflict=f"{flag} takes a whole number of at least {least}{more}",
            remedy=f"write {flag} 2, say",
        )
    return value


def checked_value(one: Option, value: Any) -> Any:
    """Return an option's value from a text, number or value of its type. Raises: CommandError."""
    if (one.between and (":" in str(value) or value == "auto")) or (one.or_all and value == "all"):
        return value
    if one.least is not None:
        return whole_number(one.flag, value, one.least, ", or all" if one.or_all else "")
    if value is None or one.parse is None:
        return value
    if isinstance(value, tuple):
        return tuple(one.parse(part, one.flag) for part in value)
    return one.parse(value, one.flag)


def _steps(text: Any, flag: str) -> TraceSteps:
    return text if isinstance(text, TraceSteps) else TraceSteps.parse(str(text))


def _tracker(text: Any, flag: str) -> TrackerName:
    return text if isinstance(text, TrackerName) else TrackerName.parse(text, f"{flag} {text}")


def _blocks_or_all(text: Any, flag: str) -> str:
    if text in ("blocks", "all"):
        return str(text)
    raise CommandError(given=f"{flag} {text}", conflict=f"{flag} takes blocks or all", remedy=f"write {flag} all")


def _shares(text: Any, flag: str) -> str:
    name = str(text)
    if name in ("equal", "by-speed") or re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", name):
        return name
    raise CommandError(
        given=f"{flag} {name}",
        conflict=f"{flag} takes equal, by-speed, or a whole number of at least 1 for each rank that divides grains",
        remedy=f"write {flag} by-speed, or {flag} 2,1, say",
    )


# Values of --step: who computes a step's operations. `auto`: the fastest of the others, by a trial.
STEP_MODES = ("auto", "eager", "graph", "compiled", "compiled-graph")


def _step_mode(text: Any, flag: str) -> str:
    name = str(text)
    if name in STEP_MODES or name.endswith(".json"):
        return name
    meant = f", or --steps {name}" if name.isdecimal() else nearest(name, list(STEP_MODES))
    raise CommandError(
        given=f"{flag} {name}",
        conflict=f"{flag} takes {', '.join(STEP_MODES)}, or the trial.json of a run",
        remedy=f"write {flag} eager, say{meant}",
    )


@dataclass(frozen=True, kw_only=True)
class Course:
    """Options on how long a run trains, and what it reads, writes and checks on the way."""

    steps: int | None = option(
        "end after step N of the same schedule (default: the job's length)", "N", least=1, saved="stop_after"
    )
    resume: bool = switch("continue from the newest good checkpoint in the run directory")
    resume_if_exists: bool = switch("resume if the run directory has a run, else start one", compared=None)
    accept_changes: bool = switch("continue with --resume although the job was changed", compared=None)
    checkpoint_every: int | None = option(
        "write a checkpoint every N steps (default: as often as costs 1 %% of the time)", "N", least=1, compared=str
    )
    evaluate_every: int | None = option(
        "evaluate every N steps (default: after each epoch)", "N", least=1, saved="evaluate_every", compared=str
    )
    keep_checkpoints: int | Literal["all"] | None = option(
        "keep the N newest checkpoints, or all (default: 3, or as the resumed run)",
        "N|all",
        least=1,
        or_all=True,
        saved="keep_checkpoints",
        otherwise=3,
    )
    require_certificate: str | None = option(
        "train only what this certificate of shoal verify covers", "FILE", compared=bool
    )
    no_source: bool = switch(
        "do not record the git commit, uncommitted changes, packages and command line", compared=None
    )
    private: bool = switch("let only you read the run directory (mode 0700)", compared=None)
    records: Literal["blocks", "all"] | None = option(
        "write a record of each step (all), or of blocks of steps beyond step 10,000 (default: blocks)",
        "blocks|all",
        parse=_blocks_or_all,
        saved="records",
        otherwise="blocks",
    )
    no_telemetry: bool = switch("write no spans and no step records")
    track: tuple[TrackerName, ...] = option(
        "also log to tensorboard, mlflow, wandb or trackio, with a place after a colon; may be repeated",
        "T[:WHERE]",
        default=(),
        action="append",
        parse=_tracker,
        compared=None,
    )
    trace: TraceSteps | None = option(
        "write torch's profile of these steps on all ranks, for Perfetto, such as 10-12",
        "STEPS",
        parse=_steps,
        unserved="a step has no beginning of its own",
    )
    bad_samples: int | None = option(
        "skip up to N samples that cannot be read, and name them (default: 0, or as the resumed run)",
        "N",
        least=0,
        saved="bad_samples",
        unserved="there is no step before which all learn of a bad sample",
        otherwise=0,
    )
    check_replicas: int | None = option(
        "compare the model's replicas every N steps, and roll back after a flipped bit (default: never)",
        "N",
        least=1,
        saved="check_replicas",
    )
    max_restarts: int = option(
        "start lost ranks up to N times in a row without a new step; 0 ends the run at a lost rank (default: 5)",
        "N",
        default=5,
        least=0,
        compared=None,
    )
    init_from: str | None = option(
        "begin with weights of a run, a checkpoint, a .safetensors or .pt file, or a Hugging Face folder", "PATH"
    )
    init_allow: str | None = option(
        "let tensors of --init-from be missing, unexpected or mismatched (default: none)", "KINDS", compared=str
    )
    init_rename: tuple[str, ...] = option(
        "rename a prefix of names of --init-from", "OLD=NEW", default=(), action="append", compared=list
    )

    step: str | None = option(
        "compute steps as eager, graph, compiled or compiled-graph, or as the trial.json of a run says (default: auto, "
        "the fastest by a trial)",
        "MODE",
        parse=_step_mode,
        saved="step",
        otherwise="auto",
    )

    shares: str | None = option(
        "give ranks grains by their measured speed, or by numbers such as 2,1 (default: equal)",
        "equal|by-speed|N,N",
        parse=_shares,
        saved="shares",
        unserved="a worker that is done takes the next grains already",
    )

    def compared(self) -> dict[str, Any]:
        """Return the values, by flag, that must be equal on all ranks."""
        known = ((one, getattr(self, one.name)) for one in declared(Course))
        return {one.flag: one.compared(value) for one, value in known if one.compared is not None}

    def saved(self) -> dict[str, Any]:
        """Return the entries of job.json that a resumed run uses as defaults."""
        return {one.saved: getattr(self, one.name) for one in declared(Course) if one.saved}


def course_of(options: Course, saved: Mapping[str, Any] | None) -> tuple[Course, dict[str, Origin]]:
    """Return the course that a call's options ask for, and the origins of its values that are not defaults.

    Args:
        saved: job.json of the run to resume, or None for a new run.

    Raises: CommandError for a value in job.json that the option refuses.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for one in declared(Course):
        value, previous = getattr(options, one.name), (saved or {}).get(one.saved or "")
        if value != one.default:
            origins[one.name] = Origin.OPTION
        elif isinstance(previous, int | str):
            value, origins[one.name] = checked_value(one, previous), Origin.RUN
        elif one.otherwise is not None:
            value = one.otherwise
        values[one.name] = value
    return Course(**values), origins


def add_options(parser: argparse.ArgumentParser, kind: Any, groups: Mapping[str, Sequence[str]]) -> None:
    """Add the options of a kind to a parser, in groups. `groups`: the names of a group's options by its title.

    Options that are in no group are in the last one.
    """
    options = {one.name: one for one in declared(kind)}
    *_, last = groups
    rest = [name for name in options if not any(name in names for names in groups.values())]
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for one in (options[name] for name in (*names, *(rest if title == last else ()))):
            default = list(one.default) if isinstance(one.default, tuple) else one.default  # argparse appends to it
            group.add_argument(*(one.flags or (one.flag,)), default=default, **one.settings)


def options_of(kind: type[T], parsed: argparse.Namespace) -> T:
    """Convert parsed arguments to options. Raises: CommandError for an invalid value."""
    values = {name: getattr(parsed, name) for name in option_names(kind)}
    return options_from(kind, {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()})


def arguments_of(options: Any, without: Container[str] = ()) -> list[str]:
    """Convert options to command-line words from which `options_of` makes the same options. Defaults are omitted.

    `without`: names to skip. Raises: CommandError for a value that cannot be written as a word.
    """
    words: list[str] = []
    if "job" in option_names(type(options)) and not isinstance(options.job, str):
        from shoal.jobs.settings import source_of  # imported late: pydantic

        job = options.job
        if job.by_value or (job.handed is not None and job.module != job.module.of_file(job.path)):
            raise CommandError(
                given="a job that is an object of this program",
                conflict="the ranks are started by an engine, on other hosts too, which do not have it",
                remedy="write the job function into a file of its own, and give its path: "
                'shoal.run("file.py:job", ...)',
            )
        own = tuple(pair for pair in job.settings if source_of(pair[1]) is None)
        options = replace(options, job=job.argument, set=own, config=tuple(file.path for file in job.config))
    for one in declared(type(options)):
        value = getattr(options, one.name)
        if one.name in without or value == one.default:
            continue
        if one.settings.get("action") == "store_true":
            words += [one.flag] if value else []
            continue
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, tuple):  # a job's setting
                from shoal.jobs.settings import setting_text  # imported late: pydantic

                part = f"{part[0]}={setting_text(*part)}"
            if not isinstance(part, str | int | float | TraceSteps | TrackerName):
                raise CommandError(
                    given=f"{one.name}={part!r:.60}",
                    conflict="it is an object of this process, and the command of another process has to name it",
                    remedy="give the path of a file",
                )
            words += [f"{part}"] if not one.flag.startswith("-") else [one.flag, f"{part}"]
    return words


def option_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a kind's options, in order."""
    return tuple(one.name for one in declared(kind))


def options_from(kind: type[T], values: Mapping[str, Any]) -> T:
    """Create options from values by name. Raises: CommandError for an invalid value."""
    checked = {one.name: checked_value(one, values[one.name]) for one in declared(kind) if one.name in values}
    return kind(**{**values, **checked})
