"""Incidents of a run as values: lost ranks, resumes, skipped steps, and the causes of an early end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shoal.runs.records import StepRecord
from shoal.runs.run_files import RunFiles

# A run may skip thousands of steps, so only the first incidents of a kind are listed.
_MOST_OF_A_KIND = 50
GOING_ON = "going_on"  # the first step after a loss


@dataclass(frozen=True)
class Incident:
    """Incident after or at `step`; `at` in seconds since the epoch, if known."""

    kind: str  # kind of an event; or resumed | skipped | server | compression | damaged | ended | error
    step: int | None
    text: str
    at: float | None = None


def incidents(files: RunFiles) -> tuple[Incident, ...]:
    """Return all incidents by step; for frequent kinds only the first ones and the number of others."""
    found = [*_events(files), *_resumes(files), *_records(files), *_result(files.result)]
    found += [
        Incident("damaged", None, f"{n} lines of {name}.jsonl could not be read") for name, n in files.damaged.items()
    ]
    kept: list[Incident] = []
    counts: dict[str, int] = {}
    for incident in sorted(found, key=lambda i: (i.step is None, i.step or 0)):
        counts[incident.kind] = counts.get(incident.kind, 0) + 1
        if counts[incident.kind] <= _MOST_OF_A_KIND:
            kept.append(incident)
    more = {kind: number - _MOST_OF_A_KIND for kind, number in counts.items() if number > _MOST_OF_A_KIND}
    return (*kept, *(Incident(kind, None, f"and {number} more of this kind") for kind, number in more.items()))


def _events(files: RunFiles) -> Iterator[Incident]:
    """Yield the event log's incidents; the event of the first step after a loss has the loss's cost."""
    for number, event in enumerate(files.events):
        kind = event.get("kind")
        if kind is None or kind == GOING_ON:
            continue
        following = files.events[number + 1] if number + 1 < len(files.events) else {}
        cost = following if following.get("kind") == GOING_ON else event
        text = "; ".join(part for part in (_what(event), *_said(event), _cost_of(cost)) if part)
        step = _whole(event.get("step", event.get("after_step")))
        yield Incident(str(kind), step, text, _instant(event.get("at")))


def _what(event: Mapping[str, Any]) -> str:
    who = f"rank {event['rank']} on {event.get('host')}" if event.get("rank") is not None else "a rank"
    what = str(event.get("what", "")).split("\n")[0]
    if event.get("kind") == "lost":
        return f"{who} was lost: {what}"
    return f"{who}: {what}" if event.get("rank") is not None else what


def _said(event: Mapping[str, Any]) -> Iterator[str]:
    if event.get("noticed"):
        yield f"noticed by {event['noticed']}"
    if event.get("done"):
        yield str(event["done"])


def _cost_of(event: Mapping[str, Any]) -> str:
    seconds = event.get("seconds")
    return f"it cost {seconds:.1f} s" if isinstance(seconds, int | float) and not isinstance(seconds, bool) else ""


def _resumes(files: RunFiles) -> Iterator[Incident]:
    for number, attempt in enumerate(files.attempts):
        if number or attempt.resumed_from:
            undone = sum(u.steps for u in attempt.undone)
            again = f"; {undone} steps were trained again" if undone else ""
            how = "ranks started again" if attempt.restarts else "resumed"
            yield Incident(
                "resumed",
                attempt.resumed_from or 0,
                f"{how} after step {attempt.resumed_from or 0}{again}",
                attempt.began_at,
            )


def _records(files: RunFiles) -> Iterator[Incident]:
    told = {_whole(event.get("step")) for event in files.events if event.get("kind") == "nonfinite"}
    for record in files.records:
        if record.skipped and record.step not in told:
            yield Incident("skipped", record.step, f"no update: {record.skipped}{_culprit(record)}", record.at)
        if record.compression is not None and record.compression.get("fell_back"):
            yield Incident("compression", record.step, "the guard ended the compression of sums", record.at)


def _culprit(record: StepRecord) -> str:
    found = record.nonfinite or {}
    if not found.get("samples"):
        return ""
    samples = ", ".join(map(str, found["samples"][:8])) if isinstance(found["samples"], list) else found["samples"]
    return f"; on rank {found.get('rank')}, samples {samples}"


def _result(result: Mapping[str, Any]) -> Iterator[Incident]:
    steps = _whole(result.get("steps"))
    server = result.get("server")
    for incident in server.get("incidents", []) if isinstance(server, dict) else []:
        yield Incident("server", _whole(incident.get("step")), str(incident.get("said", incident.get("kind"))))
    if isinstance(result.get("ended_by"), dict):
        ended = result["ended_by"]
        yield Incident("ended", _whole(ended.get("step")), f"{ended.get('callback')} ended it: {ended.get('reason')}")
    if isinstance(result.get("ended_early"), dict):
        early = result["ended_early"]
        text = f"the stream gave {early.get('samples')} of {early.get('wanted_samples')} samples"
        yield Incident("ended", _whole(early.get("steps")), text)
    if isinstance(result.get("error"), dict):
        yield Incident("error", steps, told(result["error"]))


def told(error: Mapping[str, Any]) -> str:
    """Return an error from a result as one line."""
    return ": ".join(str(error[key]).split("\n")[0] for key in ("given", "conflict") if error.get(key))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _instant(text: Any) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None
