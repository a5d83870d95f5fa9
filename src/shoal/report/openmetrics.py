"""OpenMetrics text about a run, for Prometheus' textfile collectors (openmetrics.io, version 1.0.0)."""

from __future__ import annotations

from collections import Counter

from shoal.report.account import Account

_Rows = list[tuple[dict[str, str], float | None]]


def openmetrics(account: Account) -> str:
    """Return all metrics of a run, each with the run's name as the label `run`."""
    rates = account.rates
    last = account.evaluations[-1].metrics if account.evaluations else {}
    metrics: _Rows = [({"name": name}, float(value)) for name, value in last.items()]
    wall: _Rows = [({"part": part.name}, part.seconds) for part in account.wall.parts]
    kinds = sorted(Counter(incident.kind for incident in account.incidents).items())
    blocks = float(account.blocks.from_step) if account.blocks is not None else None
    median: _Rows = [({}, account.step_times.median)]
    planned = float(account.num_steps) if account.num_steps is not None else None
    families: list[tuple[str, str, str, str, _Rows]] = [
        ("gauge", "running", "", "Whether a process trains it.", [({}, float(account.status == "running"))]),
        ("gauge", "step", "", "The last step that was trained.", [({}, float(account.steps))]),
        ("gauge", "planned_steps", "", "Steps of the run's length.", [({}, planned)]),
        ("gauge", "ranks", "", "Processes that compute.", [({}, float(account.world_size))]),
        ("gauge", "loss", "", "Training loss of the last step.", [({}, account.loss)]),
        ("gauge", "metric", "", "The last evaluation.", metrics),
        ("counter", "samples", "", "Samples that were trained on.", [({}, float(account.samples.trained))]),
        ("gauge", "samples_rate", "", "Samples a second in steps.", [({}, rates.step_samples)]),
        ("gauge", "tokens_rate", "", "Tokens a second in steps.", [({}, rates.step_tokens)]),
        ("gauge", "peak_ratio", "ratio", "Share of the devices' peak.", [({}, rates.peak_share)]),
        ("gauge", "step_time_seconds", "seconds", "Median of a step; of blocks of steps an estimate.", median),
        ("gauge", "blocks_from_step", "", "First step that is recorded in a block of steps.", [({}, blocks)]),
        ("gauge", "memory_peak_bytes", "bytes", "Of the fullest rank.", [({}, account.peak_bytes.measured)]),
        ("gauge", "cost_dollars", "", "US dollars so far.", [({}, account.cost.dollars if account.cost else None)]),
        ("gauge", "wall_seconds", "seconds", "The wall clock, by part.", wall),
        ("gauge", "incidents", "", "Incidents by kind.", [({"kind": kind}, float(n)) for kind, n in kinds]),
    ]
    lines: list[str] = []
    for kind, family, unit, text, rows in families:
        known = [(labels, value) for labels, value in rows if value is not None]
        if not known:
            continue
        name = f"shoal_{family}"
        lines.append(f"# TYPE {name} {kind}")
        if unit:
            lines.append(f"# UNIT {name} {unit}")
        lines.append(f"# HELP {name} {text}")
        for labels, value in known:
            pairs = []
            for key, word in ({"run": account.name} | labels).items():
                escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                pairs.append(f'{key}="{escaped}"')
            lines.append(f"{name}{'_total' if kind == 'counter' else ''}{{{','.join(pairs)}}} {value!r}")
    return "".join(f"{line}\n" for line in (*lines, "# EOF"))
