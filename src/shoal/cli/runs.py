"""The `shoal runs` command: lists, compares, shows, deletes and reproduces runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.cli.options import RunsOptions
from shoal.errors import CommandError, ExitCode, folded, nearest, terminal_width
from shoal.hardware.detect import file_text
from shoal.jobs.secret_settings import HIDDEN, is_hidden
from shoal.jobs.settings import setting_text, source_of
from shoal.report.quantities import seconds, short, size, step_words
from shoal.runs.attempts import read_attempts
from shoal.runs.collection import RunEntry, check_removable, entry_of, is_listed, remove, runs_below
from shoal.runs.directory import SESSION, RunDirectory, read_json
from shoal.runs.source import COMMAND, COMMIT, FOLDER, PACKAGES, PATCH, read_source

ACTIONS = ("list", "compare", "show", "delete", "prune", "reproduce")
# Values of a run by name, for --sort and --filter. All but `began` are columns, from the most to the least wanted:
# those at the end go where a line has no room.
_VALUES: dict[str, Callable[[RunEntry], Any]] = {
    "name": lambda one: one.name,
    "state": lambda one: one.state,
    "steps": lambda one: one.steps,
    "loss": lambda one: one.loss,
    "best": lambda one: one.best[1] if one.best else None,
    "time": lambda one: one.seconds,
    "devices": lambda one: one.devices,
    "job": lambda one: one.job,
    "layout": lambda one: one.layout,
    "size": lambda one: one.size,
    "commit": lambda one: one.commit,
    "kind": lambda one: one.kind,
    "began": lambda one: one.began_at,
}
_COLUMNS = [name for name in _VALUES if name != "began"]
# How a column shows what is not shown as it is.
_TEXTS: dict[str, Callable[[RunEntry], str]] = {
    "steps": lambda one: f"{one.steps}/{one.num_steps}" if one.num_steps not in (None, one.steps) else str(one.steps),
    "loss": lambda one: short(one.loss),
    "best": lambda one: f"{one.best[0]} {short(one.best[1])}" if one.best else "-",
    "time": lambda one: seconds(one.seconds),
    "size": lambda one: size(one.size),
}
_MOST_SETTINGS, _SETTING_WIDTH = 3, 12  # settings that differ between runs and have a column


def runs(options: RunsOptions) -> ExitCode:
    """Do what the first word says. Raises: CommandError; RunDirectoryError; InUseError."""
    action, words = options.words[0] if options.words else "list", list(options.words[1:])
    if action not in ACTIONS and words:
        given, known = f"shoal runs {' '.join(options.words)}", ", ".join(ACTIONS)
        raise _refusal(given, f"{action} is none of {known}{nearest(action, list(ACTIONS))}", "see shoal runs --help")
    if action not in ACTIONS:
        action, words = "list", list(options.words)
    _check(options, action, words)
    if action == "compare":
        return _compare(words, options.json)
    if action == "show":
        return _show(words, options.json)
    if action == "reproduce":
        return _reproduce(words[0], options.json)
    if action == "delete":
        return _delete([_entry(word) for word in words], options)
    entries = _listed(words[0] if words else "runs", options)
    return _prune(entries, options) if action == "prune" else _list(entries, options)


def _check(options: RunsOptions, action: str, words: Sequence[str]) -> None:
    """Refuse a number of words, or options, that the action does not take. Raises: CommandError."""
    least, most, wanted = {
        "compare": (2, math.inf, "two runs or more"),
        "show": (1, math.inf, "runs"),
        "delete": (1, math.inf, "runs"),
        "reproduce": (1, 1, "one run"),
    }.get(action, (0, 1, "a folder of runs"))
    given = f"shoal runs {' '.join((action, *words))}"
    if not least <= len(words) <= most:
        raise _refusal(given, f"{action} takes {wanted}", f"write: shoal runs {action}{' NAME' * max(1, least)}")
    for flag, value, takers in (
        ("--sort", options.sort, ("list", "prune")),
        ("--filter", options.filter, ("list", "prune")),
        ("--keep-best", options.keep_best, ("prune",)),
        ("--metric", options.metric, ("prune",)),
        ("--yes", options.yes, ("delete", "prune")),
    ):
        if value and action not in takers:
            raise _refusal(f"{given} {flag}", f"{flag} is for {' and '.join(takers)}", f"leave {flag} out")
    if action == "prune" and options.keep_best is None:
        raise _refusal(given, "it does not say which runs stay", "write: shoal runs prune --keep-best 3")


def _listed(folder: str, options: RunsOptions) -> list[RunEntry]:
    """Return the runs in a folder, filtered and sorted. Raises: CommandError."""
    path = Path(folder)
    if not path.is_dir():
        remedy = "give the folder that the runs are in: shoal runs DIR"
        raise _refusal(" ".join(("shoal runs", *options.words)), f"there is no folder {folder}", remedy)
    entries = list(runs_below(path))
    for text in options.filter:
        name, equals, value = text.partition("=")
        if not equals:
            raise _refusal(f"--filter {text}", "it is not NAME=VALUE", "write --filter state=failed, say")
        if name in _VALUES:
            entries = [one for one in entries if value in (str(_VALUES[name](one)), _text(one, name))]
        elif entries and not any(name in one.settings for one in entries):
            known = ", ".join((*_VALUES, *dict.fromkeys(key for one in entries for key in one.settings)))
            raise _refusal(f"--filter {text}", f"no run has {name}", f"take one of {known}")
        else:
            entries = [one for one in entries if name in one.settings and _equal(one.settings[name], value)]
    key, descending = (options.sort or "name").removeprefix("-"), (options.sort or "").startswith("-")
    if entries and key not in _VALUES and not any(key in one.settings or key in one.metrics for one in entries):
        columns = [*_VALUES, *dict.fromkeys(name for one in entries for name in (*one.metrics, *one.settings))]
        conflict = f"no column is called {key}{nearest(key, columns)}"
        raise _refusal(f"--sort {options.sort}", conflict, f"take one of {', '.join(columns)}")

    def sorted_by(one: RunEntry) -> Any:
        own = _VALUES[key](one) if key in _VALUES else one.settings.get(key, one.metrics.get(key))
        if isinstance(own, int | float) or own is None:
            return own
        return re.sub(r"\d+", lambda number: number[0].zfill(12), str(own))  # run 10 comes after run 9

    known_values = [one for one in entries if sorted_by(one) is not None]
    known_values.sort(key=lambda one: (isinstance(sorted_by(one), str), sorted_by(one)), reverse=descending)
    return known_values + [one for one in entries if sorted_by(one) is None]


def _list(entries: Sequence[RunEntry], options: RunsOptions) -> ExitCode:
    key = (options.sort or "").removeprefix("-")
    is_metric = key not in _VALUES and not any(key in one.settings for one in entries)
    if is_metric and any(key in one.metrics for one in entries) and not options.json:  # shown as the best
        known = [one.metrics.get(key) for one in entries]
        entries = [
            replace(one, best=(key, value, None) if value is not None else None)
            for one, value in zip(entries, known, strict=True)
        ]
    if options.json:
        print(json.dumps([one.to_json() for one in entries], indent=2))
    elif not entries:
        print("there is no run here that the filters let through")
    else:
        print("\n".join(table(entries, terminal_width())))
        total = sum(one.size for one in entries)
        print(f"{len(entries)} run{'s' if len(entries) > 1 else ''}, {size(total)}")
    return ExitCode.DONE


def table(entries: Sequence[RunEntry], width: int) -> list[str]:
    """Return the lines of a table of at most `width` columns; what all runs have in common is said once, above it."""
    columns = {name: [_text(one, name) for one in entries] for name in _COLUMNS}
    common, after = [], list(columns).index("best") + 1
    differing = {}
    for name in dict.fromkeys(name for one in entries for name in one.settings):
        values = [one.settings.get(name, "-") for one in entries]
        cells = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
        different = len({cell for cell, one in zip(cells, entries, strict=True) if one.settings}) > 1
        if name not in columns and different and max(map(len, cells)) <= _SETTING_WIDTH:
            differing[name] = cells
    wanted = [*list(columns.items())[:after], *list(differing.items())[:_MOST_SETTINGS], *list(columns.items())[after:]]
    columns = dict(wanted)
    if len(entries) > 1:
        for name in ("job", "devices", "layout", "commit", "kind"):
            if len(set(columns[name])) == 1:
                value = columns.pop(name)[0]
                common += [f"{name} {value}"] if value not in ("-", "run") else []
        metrics = {one.best[0] for one in entries if one.best}
        if len(metrics) == 1:
            metric = f"best {metrics.pop()}"
            columns = {metric if name == "best" else name: cells for name, cells in columns.items()}
            columns[metric] = [short(one.best[1]) if one.best else "-" for one in entries]
    while len(columns) > 1 and sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items()) - 2 > width:
        columns.popitem()
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    left = ("name", "state", "best", "job", "layout", "commit", "kind")
    lines = [", ".join(common)] if common else []
    for row in (list(columns), *zip(*columns.values(), strict=True)):
        cells = [
            cell.ljust(widths[name]) if name in left else cell.rjust(widths[name])
            for name, cell in zip(columns, row, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _compare(words: Sequence[str], as_json: bool) -> ExitCode:
    """Print what differs between runs, as `shoal report A B` computes it, and their results."""
    from shoal.planner.calibrate.comparison import account_of
    from shoal.report.several_runs import differing, in_cells, named
    from shoal.runs.address import is_address
    from shoal.runs.run_files import run_reader

    accounts = []
    for word in words:
        place = word if is_address(word) else _entry(word).path
        with run_reader(place) as reader:
            files = reader.read()
        accounts.append((account_of(files), files.records))
    runs = named(accounts)
    names = [one.name for one in runs]
    differences, results = differing([one.account for one in runs]), dict[str, list[Any]]()
    results["state"] = [one.account.status for one in runs]
    results["steps"] = [one.account.steps for one in runs]
    results["training loss"] = [one.account.loss for one in runs]
    for metric in dict.fromkeys(name for one in runs for e in one.account.evaluations for name in e.metrics):
        by_run = ([e.metrics[metric] for e in one.account.evaluations if metric in e.metrics] for one in runs)
        results[f"evaluation {metric}"] = [known[-1] if known else None for known in by_run]
    results["seconds" if as_json else "time"] = [one.account.wall.busy_seconds for one in runs]
    results["weights"] = [one.account.result.get("weights_sha256") for one in runs]
    if as_json:
        print(json.dumps({"runs": names, "differences": differences, "results": results}, indent=2, default=str))
        return ExitCode.DONE
    results["time"] = [seconds(value) for value in results["time"]]
    results["weights"] = [str(value or "-")[:16] for value in results["weights"]]
    for name, values in results.items():
        results[name] = [short(value) if isinstance(value, float) else value for value in values]
    rows = in_cells(differences)
    print("\n".join(_beside(["what differs", *names], rows) if rows else ["job, code, plan and versions are the same"]))
    print("\n" + "\n".join(_beside(["result", *names], in_cells(results))))
    return ExitCode.DONE


def _beside(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines; a row that is too wide for the terminal has a line for each run."""
    width = terminal_width()
    narrow = [row for row in (head, *rows) if sum(map(len, row)) + 2 * len(row) <= width]
    widths = [max(map(len, column)) for column in zip(*narrow, strict=True)] if narrow else []
    while len(narrow) > 1 and sum(widths) + 2 * len(widths) > width:  # the widest row goes to lines of its own
        narrow.remove(max(narrow[1:], key=lambda row: max(map(len, row))))
        widths = [max(map(len, column)) for column in zip(*narrow, strict=True)]
    lines = []
    for row in (head, *rows):
        if row in narrow:
            lines.append("  ".join(cell.ljust(room) for cell, room in zip(row, widths, strict=True)).rstrip())
        else:
            lines.append(row[0])
            longest = max(map(len, head[1:]))
            for name, cell in zip(head[1:], row[1:], strict=True):
                room = max(10, width - longest - 4)
                lines.append(f"  {name.ljust(longest)}  {cell if len(cell) <= room else cell[: room - 1] + '…'}")
    return lines


def _show(words: Sequence[str], as_json: bool) -> ExitCode:
    """Print all that is known of runs: the entry, its settings, its source and where to read more."""
    documents = []
    for word in words:
        entry = _entry(word)
        source = read_source(Path(entry.path))
        documents.append({**entry.to_json(), "source": source})
        if as_json:
            continue
        commit, command = source.get(COMMIT, {}), source.get(COMMAND, {})
        facts = [(name, _text(entry, name)) for name in _COLUMNS if name not in ("name", "commit", "loss")]
        facts.append(("training loss", short(entry.loss)))
        if entry.began_at is not None:
            facts.append(("began", f"{datetime.fromtimestamp(entry.began_at, UTC):%Y-%m-%d %H:%M:%S} UTC"))
        facts += [(f"evaluation {name}", short(value)) for name, value in entry.metrics.items()]
        facts.append(("step", step_words(read_json(Path(entry.path) / "result.json") or {})))
        facts += [("error", entry.error or ""), ("stopped", entry.stopped or "")]
        facts += [(f"settings.{name}", str(value)) for name, value in entry.settings.items()]
        if commit.get("commit"):
            branch = f" on {commit['branch']}" if commit.get("branch") else ""
            dirty = ", with uncommitted changes" if commit.get("dirty") else ""
            facts.append(("commit", f"{commit['commit']}{branch}{dirty}"))
            facts.append(("remote", commit.get("remote") or "-"))
        elif commit:
            facts.append(
                ("commit", f"none: {str(commit.get('reason')).removeprefix('fatal: ').partition(' (or any')[0]}")
            )
        facts += [("command", shlex.join(command["arguments"]))] if command.get("arguments") else []
        facts += [("host", command["host"])] if command.get("host") else []
        room = max(len(name) for name, text in facts if text)
        print(entry.path)
        for name, text in facts:
            if text:
                line = f"  {name.ljust(room)}  {text}"
                print(line if name == "command" else folded(line, room + 4))
    if as_json:
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    return ExitCode.DONE


def _reproduce(word: str, as_json: bool) -> ExitCode:
    """Print the commands that train a run again. Raises: CommandError if it has no record of its source."""
    entry = _entry(word)
    folder = Path(entry.path).absolute()
    source = read_source(folder)
    command, commit = source.get(COMMAND), source.get(COMMIT, {})
    if command is None:
        conflict = f"it has no {FOLDER}/{COMMAND}: it ran without it, or with an earlier version of shoal"
        raise _refusal(f"shoal runs reproduce {word}", conflict, "see its job.json and plan.toml")
    job = read_json(folder / "job.json") or {}
    hidden = [name for name, value in (job.get("given") or {}).items() if is_hidden(value)]
    steps: list[tuple[str, list[str]]] = []
    if commit.get("commit"):
        origin = commit.get("remote") or commit.get("checkout") or "CHECKOUT"
        place = Path(origin.rstrip("/").removesuffix(".git").replace(":", "/")).name
        lines = [shlex.join(["git", "clone", origin, place]), shlex.join(["cd", place])]
        lines.append(f"git checkout --quiet {commit['commit']}")
        if (folder / FOLDER / PATCH).exists():
            lines.append(shlex.join(["git", "apply", str(folder / FOLDER / PATCH)]))
        if commit.get("folder") not in (None, "."):
            lines.append(shlex.join(["cd", commit["folder"]]))
        notes = [f"not in the patch: {name}: {reason}" for name, reason in (commit.get("left_out") or {}).items()]
        notes += [f"under no version control, and not kept here: {name}" for name in commit.get("untracked") or ()]
        steps.append(("the code, as it was", [*lines, *(f"# {' '.join(note.splitlines())}" for note in notes)]))
    else:
        steps.append(
            ("the code: there is no commit", [f"# {commit.get('reason')}", shlex.join(["cd", command["folder"]])])
        )
    packages = ["python -m venv .venv", f". .venv/bin/activate  # Python {command['python']}"]
    listed = file_text(folder / FOLDER / PACKAGES) or ""
    if re.search(r"^torch==\S+\+", listed, re.MULTILINE):
        packages.append("# torch's own index has this build: add --extra-index-url to the next line")
    packages.append(shlex.join(["pip", "install", "-r", str(folder / FOLDER / PACKAGES)]))
    packages += [f"{line}: install it by hand" for line in listed.splitlines() if line.startswith("#")]
    steps.append(("the packages", packages))
    arguments = command["arguments"]
    if commit.get("commit") and len(arguments) > 2:  # its job may be named from outside of the checkout
        path, colon, function = arguments[2].partition(":")
        with contextlib.suppress(ValueError, KeyError):
            file = Path(command["folder"], path).relative_to(commit["checkout"])
            if "folder" not in commit or os.path.isabs(path):
                start = commit.get("folder", ".")
                arguments = [*arguments[:2], f"{os.path.relpath(file, start)}{colon}{function}", *arguments[3:]]
    again = _again(arguments, folder, job)
    steps.append((f"the run: {entry.devices or 1} process{'es' if (entry.devices or 1) > 1 else ''}", [again]))
    if hidden:
        steps[-1][1].insert(0, f"# the values of {', '.join(hidden)} are not recorded: write them in place of <hidden>")
    if len(read_attempts(RunDirectory(folder).attempts)) > 1:
        steps[-1][1].insert(
            0, f"# this is the first command: the run was resumed or restarted, and reached step {entry.steps}"
        )
    name = f"{folder.name}-again"
    steps.append(("the same?", [shlex.join(["shoal", "runs", "compare", str(folder), f"runs/{name}"])]))
    if as_json:
        print(json.dumps([{"what": what, "commands": lines} for what, lines in steps], indent=2))
        return ExitCode.DONE
    print("set -e")
    for what, lines in steps:
        print(f"# {what}")
        print("\n".join(lines))
    return ExitCode.DONE


def _again(arguments: Sequence[str], folder: Path, job: dict[str, Any]) -> str:
    """Return a run's command with its complete plan, the settings of its configuration files and another directory.

    A program of one's own stays as it was.
    """
    program = os.path.basename(arguments[0]) if arguments else ""
    words = list(arguments)
    if program == "__main__.py" or program == "shoal":
        words = ["shoal", *arguments[1:]]
    if words[:2] != ["shoal", "run"] or job.get("function") == SESSION:
        files = "".join(f"\n# it read {one['path']} (SHA-256 {one['sha256']})" for one in job.get("config") or ())
        return (
            shlex.join(words if words[:1] == ["shoal"] else ["python", *words]) + f"  # with another directory{files}"
        )
    same, skip = words[:2], False
    for name, setting in (job.get("given") or {}).items():
        if source_of(setting) is not None:  # before the command's own
            same += ["--set", f"{name}={HIDDEN if is_hidden(setting) else setting_text(name, setting)}"]
    for word in words[2:]:
        flag = word.partition("=")[0]
        if skip:
            skip = False
        elif flag in ("--plan", "--out", "--devices", "--layout", "--cluster", "--config", "--step"):
            skip = "=" not in word
        elif word not in ("--resume", "--resume-if-exists", "--accept-changes", "--verify", "--dry-run"):
            same.append(word)
    same += ["--plan", str(folder / "plan.toml")]
    if (folder / "trial.json").exists():  # the modes of its steps before the plan's
        same += ["--step", str(folder / "trial.json")]
    return shlex.join([*same, "--out", f"runs/{folder.name}-again"])


def _entry(word: str) -> RunEntry:
    """Return the entry of a run directory, by its path or by its name in `runs`. Raises: CommandError."""
    for path in (Path(word), Path("runs") / word):
        if is_listed(path):
            return entry_of(path, path.name)
    hint = nearest(word, [one.name for one in runs_below(Path("runs"))] if Path("runs").is_dir() else [])
    raise _refusal(word, f"no run began there (it has no job.json){hint}", "see: shoal runs")


def _prune(entries: Sequence[RunEntry], options: RunsOptions) -> ExitCode:
    """Delete the runs that are not among the best. Raises: CommandError if nothing says which is better."""
    finished = [one for one in entries if one.kind != "verify" and one.state != "running"]
    name, _, best = (options.metric or "").rpartition(":")
    if options.metric and best not in ("min", "max"):
        given, conflict = f"--metric {options.metric}", "it does not say which value is best"
        raise _refusal(given, conflict, f"write --metric {options.metric}:max, say")
    if not options.metric:
        watched = {(one.best[0], one.larger_is_better) for one in finished if one.best}
        name, larger = watched.pop() if len(watched) == 1 else ("", None)
        if larger is None:
            names = sorted({metric for one in finished for metric in one.metrics} | {"loss"})
            raise _refusal(
                "shoal runs prune",
                "the jobs do not watch one metric, so nothing says which run is better",
                f"write --metric {names[0]}:min, say; known are {', '.join(names)}",
            )
        best = "max" if larger else "min"

    def value(one: RunEntry) -> float:
        """Return the metric's value, the smaller the better."""
        is_best = one.best is not None and one.best[0] == name
        number = one.best[1] if one.best and is_best else one.metrics.get(name, one.loss if name == "loss" else None)
        return math.inf if number is None else -number if best == "max" else number

    ranked = sorted((one for one in finished if math.isfinite(value(one))), key=value)
    if finished and not ranked:
        known = ", ".join(sorted({metric for one in finished for metric in one.metrics} | {"loss"}))
        raise _refusal(f"--metric {name}:{best}", f"no run has {name}, and all would go", f"take one of {known}")
    stay = {one.path for one in ranked[: options.keep_best]}
    return _delete([one for one in finished if one.path not in stay], options)


def _delete(entries: Sequence[RunEntry], options: RunsOptions) -> ExitCode:
    """Delete runs after a question. Raises: RunDirectoryError; InUseError; CommandError without a terminal."""
    for one in entries:
        check_removable(Path(one.path))
    if not options.json:
        for one in entries:
            print(folded(f"{one.path}  {one.state}, step {one.steps}, {size(one.size)}", 2))
    if entries and not options.yes:
        total = size(sum(one.size for one in entries))
        question = f"delete {len(entries)} run{'s' if len(entries) > 1 else ''}, {total}? [y/N] "
        if not sys.stdin.isatty():
            given = "shoal runs without a terminal"
            raise _refusal(given, "nobody can answer whether these runs are to be deleted", "add --yes")
        if input(question).strip().lower() not in ("y", "yes"):
            print("nothing is deleted")
            return ExitCode.DONE
    deleted = []
    for one in entries:
        try:
            remove(Path(one.path))
        except OSError as error:
            raise _refusal(f"deleting {one.path}", f"{error.strerror or error}", "see what holds it") from error
        deleted.append(one.path)
    if options.json:
        print(json.dumps({"deleted": deleted, "bytes": sum(one.size for one in entries)}, indent=2))
    else:
        print(f"deleted {len(deleted)} run{'s' if len(deleted) != 1 else ''}" if deleted else "nothing to delete")
    return ExitCode.DONE


def _text(one: RunEntry, name: str) -> str:
    """Return a value of a run as the list shows it."""
    return _TEXTS[name](one) if name in _TEXTS else str(_VALUES[name](one) or "-")


def _equal(setting: Any, text: str) -> bool:
    """Return True if a setting is what a text says; numbers count as numbers."""
    try:
        return float(setting) == float(text)
    except (TypeError, ValueError):
        return str(setting) == text


def _refusal(given: str, conflict: str, remedy: str) -> CommandError:
    return CommandError(given=given, conflict=conflict, remedy=remedy)
