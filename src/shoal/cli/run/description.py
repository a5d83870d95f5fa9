"""Description of a run in its directory, and the differences of a resumed run from its beginning."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shoal.checkpoint.keeper import RunState
from shoal.distributed.process_setup import versions
from shoal.errors import JobMismatchError
from shoal.installed import is_installed
from shoal.jobs.differences import ABSENT, changed, differences
from shoal.jobs.job import Epochs, Progress, Samples, Steps
from shoal.jobs.job_file import FREE, LENGTHS, JobRequest, LoadedJob, digests_of, file_sha256, load
from shoal.jobs.same_job import differing_fields
from shoal.jobs.secret_settings import is_hidden, without_secrets
from shoal.jobs.settings import is_below, setting_of, source_of
from shoal.numerics.generators import generators_kept
from shoal.runs.options import Course, declared
from shoal.runs.request import RunRequest
from shoal.training.setup.engine import Engine
from shoal.training.setup.preflight import data_digests


def describe(
    loaded: LoadedJob, engine: Engine, request: RunRequest, why_grains: str, saved: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the content of job.json: numbers and names that describe the training.

    `saved`: job.json of the run to resume. Restarted ranks, and all ranks but rank 0, copy the digests of data and
        files from it.
    """
    if request.restarts or engine.mesh.rank != 0:
        digests = {name: (saved or {}).get(name, {}) for name in ("files", "data")}
    else:
        digests = {
            "files": digests_of(loaded.files, request.what.job.module.folders),
            "data": data_digests(
                engine.job.train_data, engine.plan.data.workers, engine.evaluator.sources, (saved or {}).get("data", {})
            ),
        }
    watched = loaded.job.watched
    shapes = "\n".join(f"{name} {list(shape)}" for name, shape in engine.sharded_model.shapes().items())
    return {
        "file": str(request.what.job.path),
        "file_sha256": loaded.file_sha256,
        "module": loaded.module,
        "function": loaded.function,
        "settings": loaded.settings,
        "code": loaded.code,
        **digests,
        "given": without_secrets(dict(request.what.job.settings)),
        "config": [asdict(file) for file in request.what.job.config],
        "by_value": request.what.job.by_value,
        **request.course.saved(),
        **loaded.job.describe(),
        "watch": f"{watched[0]}:{'max' if watched[1] else 'min'}" if watched is not None else None,
        "why_grains": why_grains,
        "train_samples": engine.num_train_samples,
        "parameters": engine.num_parameters,
        "shapes_sha256": hashlib.sha256(shapes.encode()).hexdigest(),
        "versions": versions(),
    }


# Entries that a resume may change, such as the length and the policy for bad steps.
_MAY_CHANGE = (
    *("file", "file_sha256", "module", "by_value", "why_grains", "given", "config", "length", "lengths"),
    *("on_nonfinite", "versions", "certificate", "watch"),
    *(one.saved for one in declared(Course) if one.saved),
)
_LENGTHS: dict[str, type[Epochs | Steps | Samples]] = {"epochs": Epochs, "steps": Steps, "samples": Samples}
_MOST_COMPARED = 1000  # number of steps of a schedule, or entries of a list, to compare
_DEPTH = 4  # to which values in modules are compared


def accepted_changes(
    saved: dict[str, Any], now: dict[str, Any], fields_changed: list[str] | None, accepted: bool
) -> list[str]:
    """Return sentences about differences from the trained job, without entries that its version did not write.

    `fields_changed`: result of the function of that name. Different tensor shapes are refused when the checkpoint is
        read.
    Raises: JobMismatchError for differences, unless `accepted`.
    """
    # Runs without these settings have no such entries; a new run has nothing saved.
    defaults = {"batch_norm": "grain", "sampler": None} if saved else {}
    saved, now = {**defaults, **saved}, {**defaults, **json.loads(json.dumps(now))}
    if saved.get("by_value", now["by_value"]) != now["by_value"] and not accepted:
        ways = f"the job function of {now['file']}, by name", f"a job object of {saved['file']}, by shoal.run"
        raise JobMismatchError(
            given=f"--resume with {ways[0] if saved['by_value'] else ways[1]}",
            conflict=f"the run has begun with {ways[1] if saved['by_value'] else ways[0]}: their code and settings are "
            "recorded in different forms, which cannot be compared",
            remedy="resume in the way in which the run began; add --accept-changes to go on without a comparison; or "
            "start anew with another --out",
        )
    given, previous, free = [], [], []
    for name in (n for n in now if n in saved and n not in _MAY_CHANGE and saved[n] != now[n]):
        if name == "code":
            given += [f"other code in {place}" for place in changed(saved[name], now[name])]
        elif name == "files":  # a file in only one of the two may be a cache
            both = sorted(saved[name].keys() & now[name].keys())
            given += [f"another {file}, which the job reads" for file in both if saved[name][file] != now[name][file]]
        elif name == "data":
            sets = ((own, saved[name].get(own) or [], read) for own, read in now[name].items())
            given += [f"other samples in {own}" for own, old, new in sets if old[: len(new)] != new[: len(old)]]
        elif name == "settings":
            other = differences(now[name], _as_recorded_now(saved[name], now[name]))
            texts = [
                f"{one.name}: {'none' if one.theirs is ABSENT else one.theirs} -> "
                f"{'none' if one.mine is ABSENT else one.mine}{_origin(one.name, now)}"
                for one in other
            ]
            if any(is_hidden(one.mine) or is_hidden(one.theirs) for one in other):
                texts.append("(values of secrets are not recorded: give them again with --set)")
            if fields_changed == []:
                free = [f"settings: {text}; of the job they change nothing but how long" for text in texts]
            else:
                given += [f"the setting {text}" for text in texts]
                previous += [
                    f"{'other' if field.endswith('s') else 'another'} {field}" for field in fields_changed or ()
                ]
        else:
            given.append(f"{name} = {now[name]}")
            previous.append(f"{name} = {saved[name]}")
    if not given or accepted:
        return [*free, *(f"the job was changed, as accepted: {text}" for text in given)]
    raise JobMismatchError(
        given="\n".join(given),
        conflict="the run to resume has " + ", ".join(previous or ["begun with other code, settings, data or files"]),
        remedy="resume with the job and settings that the run began with, or others, given with --set, of "
        "its length alone; add "
        "--accept-changes where the steps from here on are to be computed by the job as it is now; or start anew with "
        "another --out",
    )


def _as_recorded_now(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run. Equal values that older versions recorded as text are in their present form."""
    values = {name: value for name, value in saved.items() if name in now or value != "<class 'inspect._empty'>"}
    for name, value in values.items():
        if isinstance(value, str) and isinstance(now.get(name), dict):  # a dataclass or a pydantic model
            parts = [f"{key}={inner!r}" for key, inner in now[name].items()]
            if value.endswith(f"({', '.join(parts)})") or value == " ".join(parts):
                values[name] = now[name]
    return values


def _origin(name: str, now: dict[str, Any]) -> str:
    """Return the configuration file that a setting is from, in words, or an empty text."""
    sources = [source_of(setting) for given, setting in now.get("given", {}).items() if is_below(name, given)]
    return f", from {sources[-1]}" if sources and sources[-1] else ""


def same_settings(job: JobRequest, saved: dict[str, Any]) -> bool:
    """Check whether the job's settings must be the same: given equally, with defaults from an unchanged file."""
    if without_secrets(dict(job.settings)) != saved.get("given") or job.handed is not None:
        return False
    try:
        return file_sha256(job.path) == saved.get("file_sha256")
    except OSError:
        return False


def fields_changed(request: JobRequest, saved: dict[str, Any]) -> list[str] | None:
    """Return the fields of the job, except its length, that change with the new settings.

    The job function is called with the old and the new settings, from the same random state. Call this in a separate
    process, since such calls may have side effects.
    Returns None if the settings are equal, if the old ones cannot be set any more, or if the calls left different
    values behind that a job may read later.
    """
    with generators_kept():
        now = load(request)
    behind = _left_behind()
    old: dict[str, Any] = saved.get("settings", {})
    apart = [name for name in old if name in now.settings and old[name] != now.settings[name]]
    if not apart or set(old) != set(now.settings) or any(is_hidden(old[name]) for name in apart):
        return None
    others = [(name, setting) for name, setting in request.settings if not any(is_below(name, one) for one in apart)]
    given = (*others, *((name, setting_of(name, old[name])) for name in apart))
    with generators_kept():
        before = load(replace(request, settings=given))
    if before.settings != old or _left_behind() != behind:
        return None
    jobs = []
    for one in (before, now):
        callbacks = [copy.copy(callback) for callback in one.job.callbacks]
        for callback in callbacks:  # a resume may change lengths
            for name in LENGTHS.get(type(callback).__name__, ()):
                setattr(callback, name, None)
        jobs.append(replace(one.job, callbacks=callbacks))
    return [field for field in differing_fields(*jobs) if field not in FREE]


def _left_behind() -> list[Any]:
    """Return values that a job's code may set outside of the job: in the environment, torch and its own modules."""
    values: list[Any] = [dict(os.environ), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
    for name, module in sorted(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if place and not is_installed(place):
            values.append((name, _plain(module, _DEPTH)))
    return values


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    if depth == 0:
        return None
    if isinstance(value, list | tuple):
        return [len(value), *(_plain(one, depth - 1) for one in value[:_MOST_COMPARED])]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return {repr(key): _plain(one, depth - 1) for key, one in list(value.items())[:_MOST_COMPARED]}
    if isinstance(value, types.ModuleType) and depth < _DEPTH:
        return value.__name__
    attributes = getattr(value, "__dict__", {})
    return {name: _plain(one, depth - 1) for name, one in attributes.items() if not name.startswith("__")}


@dataclass(frozen=True)
class Lengths:
    """The previous lengths of a run and the current one. `checked`: whether the current one must fit the trained steps.

    Raises: JobMismatchError if the checkpoint is beyond the new end, or after a short step that was the old end.
    """

    saved: dict[str, Any]
    engine: Engine
    state: RunState | None
    checked: bool = True

    def __post_init__(self) -> None:
        order, state = self.engine.order, self.state
        if state is None or not self.checked:
            return
        if state.step > order.num_steps and self._changed:
            raise JobMismatchError(
                given=f"a length of {_said(self._now, order.num_steps)}",
                conflict=f"the run has trained {state.step} steps already",
                remedy=f"give a length of more than {state.step} steps, or that of the run; or start anew with "
                "another --out",
            )
        missed = order.samples_before(state.step) - state.samples
        if self._changed and missed and self.engine.num_train_samples is not None and state.step < order.num_steps:
            raise JobMismatchError(
                given=f"a length of {_said(self._now)}",
                conflict=f"the run ended with a short step: {missed} samples of step {state.step} were left out, as "
                f"{_said(self._before)} wanted, and no step would train them now",
                remedy="begin a new run with these weights: --init-from, and another --out",
            )

    @property
    def _now(self) -> dict[str, Any]:
        length: dict[str, Any] = self.engine.job.describe()["length"]
        return length

    @property
    def _before(self) -> dict[str, Any]:
        length: dict[str, Any] = self.saved.get("length") or self._now
        return length

    @property
    def _changed(self) -> bool:
        return self.state is not None and self._before != self._now

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entry for job.json: each length with the first step, from 1, that was trained under it."""
        step = self.state.step if self.state is not None else 0
        known = self.saved.get("lengths") or [{"from_step": 1, **self._before}]
        known = [entry for entry in known if isinstance(first := entry.get("from_step"), int) and first <= step]
        last = {name: value for name, value in known[-1].items() if name != "from_step"} if known else None
        return known if last == self._now else [*known, {"from_step": step + 1, **self._now}]

    def lines(self) -> Iterator[str]:
        """Yield lines about the change: the lengths, and the effect on the learning rate of the next step."""
        if not self._changed or self.state is None:
            return
        step, engine = self.state.step, self.engine
        before = replace(engine.order, length=_LENGTHS[self._before["kind"]](self._before["count"])).num_steps
        now = engine.order.num_steps
        yield f"length: {_said(self._before, before)}, {_said(self._now, now)} from here on"
        if engine.job.schedule is None:
            yield f"learning rate of step {step + 1}: {self._rate(step, now):.6g}; there is no schedule"
            return
        rates = f"{self._rate(step, before):.6g} by the old length, {self._rate(step, now):.6g} from here on"
        every = max(1, step // _MOST_COMPARED)
        same = all(self._rate(k, before) == self._rate(k, now) for k in range(0, step, every))
        what = (
            "the schedule has not depended on the length so far"
            if same
            else f"not as {_said(self._now)} at once: the steps so far had the rates of {_said(self._before)}"
        )
        yield f"learning rate of step {step + 1}: {rates}; {what}"

    def _rate(self, step: int, num_steps: int) -> float:
        """Return the first group's learning rate before `step` (from 0) of `num_steps`."""
        progress = Progress(step, num_steps, self.engine.order.samples_before(step))
        return self.engine.updater.stepper.rate(progress)


def _said(length: dict[str, Any], steps: int | None = None) -> str:
    """Describe a length, with its number of steps if known."""
    count, kind = length["count"], length["kind"]
    text = f"{count:.10g} {kind.removesuffix('s') if count == 1 else kind}"
    return text if steps is None or kind == "steps" else f"{text} ({steps} steps)"
