"""The first lines of `shoal plan`: layout, what to type, time, memory, cost, hosts, and other numbers of devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shoal.planner.predict.workload import ErrorBar, error_bar, likeness
from shoal.planner.search.search import GIB, Candidate, gib
from shoal.plans.plan import layout_name
from shoal.report.quantities import dollars, rate, seconds, several

if TYPE_CHECKING:
    from shoal.planner.answer.display import SearchResult

Rows = list[list[str]]

WIDTH = 80  # columns of these lines, and of all output that does not go to a terminal
_NAMES = 10  # columns of these lines' names
_DATE = re.compile(r"(?:[A-Z][a-z]+ )?20\d\d(?:-\d\d-\d\d)?")
# A step that waits for launches for more than this share of its time resembles no published step.
_LAUNCHING = 0.5


def quantity(value: float) -> str:
    """Return a large number with its power of a thousand in words."""
    for name, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def batch(candidate: Candidate, answer: SearchResult) -> tuple[int, int]:
    """Return the samples of a microbatch and the number of microbatches on a rank."""
    work, layout = answer.question.case.work, candidate.plan.layout
    grains = -(-work.num_grains // (layout.data * layout.shard))
    per = candidate.plan.batch.grains_per_microbatch
    return per * work.grain_size, -(-grains // per)


def length(answer: SearchResult) -> str:
    """Return the time of the whole job and its amount, or what to write if its length is unknown."""
    tokens, num_steps = answer.question.sample_tokens, answer.question.num_steps
    if num_steps is None:
        return "its length is not known: write --samples N" + (" or --tokens N" if tokens else "")
    all_samples = num_steps * answer.question.case.work.global_batch
    amount = f"{quantity(all_samples * tokens)} tokens" if tokens else f"{quantity(all_samples)} samples"
    return f"{seconds(answer.job_seconds(answer.chosen.seconds))} for {amount} in {several(num_steps, 'step')}"


def front(
    answer: SearchResult, typed: str = "shoal.run(job, plan=answer)", see: str = "answer.write_html(FILE)"
) -> Rows:
    """Return the answer in at most twelve rows of name and value, each of which fits a line of `WIDTH` columns.

    `typed`: what starts the run. `see`: what shows the rest.
    """

    def fitting(*parts: str) -> str:
        line = ""
        for part in parts:  # the most important first
            line += part if len(line) + len(part) <= WIDTH - _NAMES else ""
        return line

    question, chosen, step = answer.question, answer.chosen, answer.chosen.seconds
    work, cluster, tokens, hour = question.case.work, question.case.cluster, question.sample_tokens, answer.price
    device, peak = cluster.device_for(answer.ranks_per_host), chosen.prediction.peak_bytes
    speed = f"{rate(work.global_batch / step * (tokens or 1))} {'tokens' if tokens else 'samples'}/s"
    bar, _ = similar(answer)
    likely = "no published step is like it" if cluster.device.kind == "gpu" else ""
    if bar is not None:
        likely = f"likely {seconds(step * bar.low)} to {seconds(step * bar.high)}"

    cost = "not known: write --price DOLLARS of a device-hour"
    if hour is not None:
        source, whole = cluster.device.sources.get("price_per_hour", ""), answer.cost(chosen)
        date = _DATE.search(source)
        amount = dollars(whole) if whole is not None else f"{dollars(hour * chosen.devices)} an hour"
        cost = fitting(
            f"{amount} at ${hour:.2f} a device-hour", f" (list price of {date[0]})" if date else f" ({source})"
        )

    measured = next((text for text in cluster.device.sources.values() if "shoal bench on" in text), None)
    origin = "; numbers of the catalogue" if not cluster.name.endswith(".toml") else "; numbers of the file"
    if measured is not None:
        origin = f"; measured on {_DATE.findall(measured)[0]}"
    elif cluster.device.guesses:
        origin += ", some assumed"
    hosts = f"{several(cluster.num_hosts, 'host')} of {cluster.devices_per_host} {cluster.device.name}"
    links: list[str] = []
    for link, where in ((cluster.within, ""), (cluster.between if cluster.num_hosts > 1 else None, "between hosts ")):
        if link is not None and cluster.num_devices > 1:
            assumed = " (assumed)" if link.sources.get("bytes_per_second", "").startswith("assumed") else ""
            links.append(f"{'; ' if links else ''}{where}{link.name} {link.bytes_per_second / 1e9:.3g} GB/s{assumed}")

    curve, pays = answer.curve, answer.curve.pays_until
    more = ["nothing fits"]
    if answer.finer is not None:
        best = answer.finer.candidate
        more = [f"{several(work.num_grains, 'grain')} limit it: Job(grains={answer.finer.num_grains}) allows "]
        more += [f"{layout_name(best.plan)}", f", {seconds(best.seconds)} a step"]
    elif pays is not None:
        most = max((p.devices for p in curve.points if p.best), default=0)
        limit, _, share = curve.limit.partition(",")
        why = [", the most that were considered"] if pays == most else [f"; then {limit} limits", f",{share}"]
        more = [f"devices pay up to {pays}", *why]
    smaller, fewer = [point for point in curve.points if point.devices < chosen.devices], ""
    if smaller and (fewest := smaller[-1]).best is not None:
        other, times = fewest.best, fewest.best.seconds / step
        fewer = fitting(
            layout_name(other.plan),
            f" on {fewest.devices}: {seconds(other.seconds)} a step",
            f", {times:.2g} times as long",
        )
    elif smaller:
        lacks = f"does not fit by {gib(fewest.missing_bytes)}" if fewest.missing_bytes else "has no legal layout"
        fewer = f"{several(fewest.devices, 'device')}: {lacks}"
    following = ""
    if answer.choice.alternatives:
        other = answer.choice.alternatives[0]
        slower = other.seconds / step - 1.0
        following = fitting(
            layout_name(other.plan), f": {seconds(other.seconds)} a step, {slower:.0%} slower",
            f", {gib(other.prediction.peak_bytes)}",
        )  # fmt: skip
    of_all = f" on {chosen.devices:,} of {several(cluster.num_devices, 'device')}"
    rows = [
        ["layout", fitting(layout_name(chosen.plan), of_all, f", {batch(chosen, answer)[0]} samples a microbatch")],
        ["run", typed],
        ["step", fitting(seconds(step), f", {speed}", likely and f"; {likely}")],
        ["training", length(answer)],
        ["memory", fitting(
            f"{peak / GIB:.1f} of {gib(device.memory_bytes)} on the fullest device",
            f"; a plan may use {cluster.usable_bytes(device) / GIB:.1f}",
        )],
        ["cost", cost],
        ["hosts", fitting(hosts, origin)],
        ["links", fitting(*links)],
        ["more", fitting(*more)],
        ["fewer", fewer],
        ["next best", following],
        ["see", fitting(see, ": other layouts, parts of a step, memory, assumptions")],
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def text_of(rows: Rows) -> str:
    """Return rows of name and value as lines."""
    return "\n".join(f"{name:{_NAMES}}{value}" for name, value in rows)


def similar(answer: SearchResult) -> tuple[ErrorBar | None, str]:
    """Return the errors of published steps like this one, or None and in what this step differs from all of them."""
    case, prediction = answer.question.case, answer.chosen.prediction
    if case.cluster.device.kind != "gpu":
        return None, ""
    if prediction.terms.get("launch", 0.0) > _LAUNCHING * prediction.step_seconds:
        return None, " (most of it is launches)"
    if answer.question.sample_tokens is None:
        return None, " (its samples are no sequences of tokens)"
    parameters = case.work.profile.num_parameters
    return error_bar(likeness(case.cluster.device.name, parameters, answer.chosen.plan.layout), parameters), ""
