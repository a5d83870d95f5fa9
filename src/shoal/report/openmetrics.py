"""OpenMetrics text about a run, for Prometheus' textfile collectors (openmetrics.io, version 1.0.0)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shoal.report.account import Account

_Rows = list[tuple[dict[str, str], float | None]]


def openmetrics(found: Account) -> str:
    """Return all metrics of a run, each with the run's name as the label `run`."""
    return "".join(f"{line}\n" for line in (*_lines(found), "# EOF"))


def _lines(found: Account) -> Iterator[str]:
    rates = found.rates
    families: list[tuple[str, str, str, str, _Rows]] = [
        ("gauge", "running", "", "Whether a process trains it.", [({}, float(found.status == "running"))]),
        ("gauge", "step", "", "The last step that was trained.", [({}, float(found.steps))]),
        ("gauge", "planned_steps", "", "Steps of the run's length.", [({}, _float(found.num_steps))]),
        ("gauge", "ranks", "", "Processes that compute.", [({}, float(found.world_size))]),
        ("gauge", "loss", "", "Training loss of the last step.", [({}, found.loss)]),
        ("gauge", "metric", "", "The last evaluation.", _metrics(found)),
        ("counter", "samples", "", "Samples that were trained on.", [({}, float(found.samples.trained))]),
        ("gauge", "samples_rate", "", "Samples a second in steps.", [({}, rates.step_samples)]),
        ("gauge", "tokens_rate", "", "Tokens a second in steps.", [({}, rates.step_tokens)]),
        ("gauge", "peak_ratio", "ratio", "Share of the devices' peak.", [({}, rates.peak_share)]),
        ("gauge", "step_time_seconds", "seconds", "Median of a step.", [({}, found.step_times.median)]),
        ("gauge", "memory_peak_bytes", "bytes", "Of the fullest rank.", [({}, found.peak_bytes.measured)]),
        ("gauge", "cost_dollars", "", "US dollars so far.", [({}, found.cost.dollars if found.cost else None)]),
        ("gauge", "wall_seconds", "seconds", "The wall clock, by part.", _wall(found)),
        ("gauge", "incidents", "", "Incidents by kind.", _incidents(found)),
    ]
    for kind, name, unit, text, rows in families:
        yield from _family(found, kind, f"shoal_{name}", (unit, text), rows)


def _family(found: Account, kind: str, name: str, about: tuple[str, str], rows: _Rows) -> Iterator[str]:
    known = [(labels, value) for labels, value in rows if value is not None]
    if not known:
        return
    unit, text = about
    yield f"# TYPE {name} {kind}"
    if unit:
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {text}"
    for labels, value in known:
        told = ",".join(f'{key}="{_escaped(word)}"' for key, word in ({"run": found.name} | labels).items())
        yield f"{name}{'_total' if kind == 'counter' else ''}{{{told}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _float(value: int | None) -> float | None:
    return float(value) if value is not None else None


def _metrics(found: Account) -> _Rows:
    return [({"name": n}, float(v)) for n, v in found.evaluations[-1].metrics.items()] if found.evaluations else []


def _wall(found: Account) -> _Rows:
    return [({"part": part.name}, part.seconds) for part in found.wall.parts]


def _incidents(found: Account) -> _Rows:
    return [({"kind": kind}, float(n)) for kind, n in sorted(Counter(i.kind for i in found.incidents).items())]
