"""Incidents of a run as values: lost ranks, resumes, skipped steps, and the causes of an early end."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

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
    every: list[Incident] = []
    for number, event in enumerate(files.events):
        kind = event.get("kind")
        if kind is None or kind == GOING_ON:
            continue
        has_rank = event.get("rank") is not None
        who = f"rank {event['rank']} on {event.get('host')}" if has_rank else "a rank"
        what = str(event.get("what", "")).split("\n")[0]
        parts = [f"{who} was lost: {what}" if kind == "lost" else f"{who}: {what}" if has_rank else what]
        if event.get("noticed"):
            parts.append(f"noticed by {event['noticed']}")
        parts.append(str(event.get("done") or ""))
        following = files.events[number + 1] if number + 1 < len(files.events) else {}
        cost = (following if following.get("kind") == GOING_ON else event).get("seconds")
        if isinstance(cost, int | float) and not isinstance(cost, bool):
            parts.append(f"it cost {cost:.1f} s")
        at = None
        with contextlib.suppress(TypeError, ValueError):
            at = datetime.fromisoformat(event.get("at")).timestamp()  # type: ignore[arg-type]
        step = _whole(event.get("step", event.get("after_step")))
        every.append(Incident(str(kind), step, "; ".join(part for part in parts if part), at))
    for number, attempt in enumerate(files.attempts):
        if number or attempt.resumed_from:
            undone = sum(u.steps for u in attempt.undone)
            again = f"; {undone} steps were trained again" if undone else ""
            how = "ranks started again" if attempt.restarts else "resumed"
            step = attempt.resumed_from or 0
            every.append(Incident("resumed", step, f"{how} after step {step}{again}", attempt.began_at))
    in_events = {_whole(event.get("step")) for event in files.events if event.get("kind") == "nonfinite"}
    for record in files.records:
        if record.skipped and record.step not in in_events:
            text, cause = f"no update: {record.skipped}", record.nonfinite or {}
            if samples := cause.get("samples"):
                shown = ", ".join(map(str, samples[:8])) if isinstance(samples, list) else samples
                text += f"; on rank {cause.get('rank')}, samples {shown}"
            every.append(Incident("skipped", record.step, text, record.at))
        if record.compression is not None and record.compression.get("fell_back"):
            every.append(Incident("compression", record.step, "the guard ended the compression of sums", record.at))
    result = files.result
    server = result.get("server")
    for incident in server.get("incidents", []) if isinstance(server, dict) else []:
        text = str(incident.get("said", incident.get("kind")))
        every.append(Incident("server", _whole(incident.get("step")), text))
    if isinstance(result.get("ended_by"), dict):
        ended = result["ended_by"]
        text = f"{ended.get('callback')} ended it: {ended.get('reason')}"
        every.append(Incident("ended", _whole(ended.get("step")), text))
    if isinstance(result.get("ended_early"), dict):
        early = result["ended_early"]
        text = f"the stream gave {early.get('samples')} of {early.get('wanted_samples')} samples"
        every.append(Incident("ended", _whole(early.get("steps")), text))
    if isinstance(result.get("error"), dict):
        every.append(Incident("error", _whole(result.get("steps")), error_line(result["error"])))
    every += [Incident("damaged", None, f"{name}: {damage}") for name, damage in files.damaged.items()]
    first: list[Incident] = []
    counts = Counter[str]()
    for incident in sorted(every, key=lambda i: (i.step is None, i.step or 0)):
        counts[incident.kind] += 1
        if counts[incident.kind] <= _MOST_OF_A_KIND:
            first.append(incident)
    more = {kind: number - _MOST_OF_A_KIND for kind, number in counts.items() if number > _MOST_OF_A_KIND}
    return (*first, *(Incident(kind, None, f"and {number} more of this kind") for kind, number in more.items()))


def error_line(error: Mapping[str, Any]) -> str:
    """Return an error from a result as one line."""
    return ": ".join(str(error[key]).split("\n")[0] for key in ("given", "conflict") if error.get(key))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
