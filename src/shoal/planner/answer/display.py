"""Result of `shoal plan` in the same words and rows in a terminal, on an HTML page and in a notebook."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from shoal.hardware.values import Device
from shoal.parallel.shard.torch_release import OLDEST_TEXT
from shoal.planner.answer.outlook import (
    FLOAT8_PAYS,
    STORAGE_BYTES_PER_SECOND,
    SearchResult,
    mode,
    operators,
    unaligned_products,
)
from shoal.planner.predict.mixed import devices_of
from shoal.planner.predict.workload import ANY, ITEMSIZE, ErrorBar, error_bar, likeness, of_device
from shoal.planner.profile.values import OperationKind
from shoal.planner.search.search import DISTINCT, GIB, Candidate, gib
from shoal.plans.grains import UNEVEN, enough_grains, excess_of_shares, share_sizes
from shoal.plans.plan import described, layout_name, plan_text
from shoal.report.html import Bar, Page, Section, Series, Spot, Table, chart, render, waterfall
from shoal.report.quantities import dollars, rate, seconds, several
from shoal.runs.directory import write_file

Rows = list[list[str]]

WIDTH = 80  # columns of the first lines, and of all output that does not go to a terminal
_NAMES = 10  # columns of the first lines' names
_DATE = re.compile(r"(?:[A-Z][a-z]+ )?20\d\d(?:-\d\d-\d\d)?")
# A step that waits for launches for more than this share of its time resembles no published step.
_LAUNCHING = 0.5
# Short descriptions of the terms of a step and of the categories of memory.
TERMS_MEAN = {
    "compute": "the model's operations",
    "launch": "the device waits for the host's next operation",
    "recompute": "forwards computed again, to store less",
    "tensor": "exchanges of the ranks that divide a layer",
    "context": "exchanges of the ranks that divide a sequence",
    "experts": "rows that travel to experts and back",
    "pipeline": "messages from stage to stage",
    "bubble": "a stage waits for the other stages",
    "gradients": "sums of gradients that no computing hides",
    "parameters": "gathers and scatters that no computing hides",
    "optimizer": "the update",
    "data": "waiting for samples",
    "host": "other work of the host in every step",
}
MEMORY_MEANS = {
    "parameters": "as the layout divides them",
    "gathered": "parameters of others that are in use",
    "gradients": "as the layout divides them",
    "optimizer": "its state",
    "activations": "kept for the backward",
    "communication": "buffers of sums",
    "allocator": "held between tensors, and free",
    "reserved": "the driver, the context and libraries",
}
BEST_HEAD = ["layout", "step", "of peak", "memory", "batch", "cost"]
CURVE_HEAD = ["devices", "layout", "step", "efficiency", "added brings"]
# Causes of a step below the peak that are no terms: parts of the term `compute`.
MEMORY_BOUND = "operators that move memory"
BELOW_PEAK = "products and attention below the peak"
_LISTED = 0.015  # smallest share of a step that is listed next to the share of the peak
_SHORT = 0.01  # expected number of failures below which a job's failures are not worth a table
_NUM_REJECTED = 8


@dataclass(frozen=True, repr=False)
class Answer(SearchResult):
    """Result of a search with its outlook; prints like `shoal plan`, and shows tables in a notebook."""

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with the curve, the waterfalls and every reason, and return the file's path."""
        write_file(Path(path), page(self))
        return Path(path)

    def __str__(self) -> str:
        """Return the first lines of `shoal plan`; `write_html` has the rest."""
        return text_of(front(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return an HTML summary for a notebook cell: the key figures, the best plans, and the verdict."""

        def row(cells: Sequence[str], *, is_head: bool = False) -> Markup:
            cell = Markup("<th>{}</th>") if is_head else Markup("<td>{}</td>")
            return Markup("<tr>{}</tr>").format(Markup("").join(cell.format(text) for text in cells))

        rows = Markup("").join(
            Markup("<tr><th>{}</th><td>{}</td></tr>").format(name, value) for name, value in key_rows(self)
        )
        best = Markup("").join([row(BEST_HEAD, is_head=True), *map(row, best_rows(self))])
        title = f"{self.job} on {self.question.case.cluster.name}"
        return str(
            Markup("<div><p><b>{}</b></p><table>{}</table><p>{}</p><table>{}</table><p>{}</p></div>").format(
                title, rows, _best_title(self), best, verdict(self)
            )
        )


# --------------------------------------------------------------------------------------------------- the first lines


def quantity(value: float) -> str:
    """Return a large number with its power of a thousand in words."""
    for name, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def batch(candidate: Candidate, answer: SearchResult) -> tuple[int, int]:
    """Return the samples of a microbatch and the number of microbatches on a rank."""
    work, layout = answer.question.case.work, candidate.plan.layout
    grains = max(share_sizes(work.num_grains, layout.divides_grains, layout.shares))
    per = candidate.plan.batch.grains_per_microbatch
    return per * work.grain_size, -(-grains // per)


def fullest_device(answer: SearchResult) -> Device:
    """Return the device of the fullest rank. A CPU device has the rank's share of threads."""
    cluster = answer.question.case.cluster
    if cluster.kinds:
        return cluster.kinds[answer.chosen.prediction.fullest_kind].device
    return cluster.device_for(answer.ranks_per_host)


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
    """Return the answer in at most thirteen rows of name and value, each of which fits a line of `WIDTH` columns.

    `typed`: what starts the run. `see`: what shows the rest.
    """

    def fitting(*parts: str) -> str:
        line = ""
        for part in parts:  # the most important first
            line += part if len(line) + len(part) <= WIDTH - _NAMES else ""
        return line

    question, chosen, step = answer.question, answer.chosen, answer.chosen.seconds
    work, cluster, tokens, hour = question.case.work, question.case.cluster, question.sample_tokens, answer.price
    device, peak = fullest_device(answer), chosen.prediction.peak_bytes
    speed = f"{rate(work.global_batch / step * (tokens or 1))} {'tokens' if tokens else 'samples'}/s"
    bar, _ = similar(answer)
    likely = "no published step is like it" if cluster.device.kind == "gpu" else ""
    if bar is not None:
        likely = f"likely {seconds(step * bar.low)} to {seconds(step * bar.high)}"

    waits = chosen.prediction.terms.get("data", 0.0) / step
    data = f"; {waits:.0%} waits for samples (--workers)" if waits >= DISTINCT else ""
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
        day = _DATE.search(measured)
        origin = f"; measured on {day[0]}" if day else "; measured, on a day that the file does not have"
    elif cluster.device.guesses:
        origin += ", some assumed"
    hosts = f"{several(cluster.num_hosts, 'host')} of {cluster.devices_per_host} {cluster.device.name}"
    uneven: list[str] = []
    if cluster.kinds:
        each = zip(cluster.kinds, devices_of(cluster, chosen.plan.layout), strict=True)
        hosts = f"ranks in this order: {', '.join(f'{number} {kind.device.name}' for kind, number in each if number)}"
        shares, facts = chosen.plan.layout.shares, question.case.space.facts
        runs = groupby(share_sizes(work.num_grains, max(1, len(shares)), shares))
        if shares and (excess := excess_of_shares(work.num_grains, shares)) > UNEVEN:
            enough = enough_grains(shares, facts.num_grains, facts.grain_size)
            finer = f", Job(grains={enough}) suits them" if enough is not None else ""
            uneven = [f"{excess:.0%} longer than with ideal shares{finer}; "]
        if shares:
            uneven += [", ".join(f"{several(sum(1 for _ in ranks), 'replica')} x {size}" for size, ranks in runs)]
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
            f", {gib(other.prediction.peak_bytes)}"
        )  # fmt: skip
    of_all = f" on {chosen.devices:,} of {several(cluster.num_devices, 'device')}"
    rows = [
        ["layout", fitting(layout_name(chosen.plan), of_all, f", {batch(chosen, answer)[0]} samples a microbatch")],
        ["run", typed],
        ["step", fitting(seconds(step), f", {speed}", data, likely and f"; {likely}")],
        ["mode", fitting(*modes(answer))],
        ["training", length(answer)],
        ["memory", fitting(
            f"{peak / GIB:.1f} of {gib(device.memory_bytes)} on the fullest device",
            f"; a plan may use {cluster.usable_bytes(device) / GIB:.1f}"
        )],
        ["cost", cost],
        ["hosts", fitting(hosts, origin)],
        ["grains", fitting(*uneven)],
        ["links", fitting(*links)],
        ["more", fitting(*more)],
        ["fewer", fewer],
        *(["kinds", fitting(*words)] for words in kinds_in_words(answer)[:3]),
        ["next best", following],
        ["see", fitting(see, ": other layouts, parts of a step, memory, assumptions")]
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def kinds_in_words(answer: SearchResult) -> list[list[str]]:
    """Return for each choice of the cluster's kinds its best plan, against the chosen one, in parts of a line."""
    lines, chosen = [], tuple(kind.name for kind in answer.question.case.kinds)
    for one in sorted(answer.kinds, key=lambda one: one.best.seconds if one.best is not None else float("inf")):
        words = [" and ".join(one.names)]
        if one.over is not None:
            words.append(f": more than {seconds(one.over)} a step")
        elif one.best is None:
            words += [": no plan", f", {one.reason}"]
        else:
            change = one.best.seconds / answer.chosen.seconds - 1.0
            how = "chosen" if one.names == chosen else f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'}"
            if how != "chosen" and change < 0 and answer.choice.aim.name == "fastest":
                how += " (within the error)"
            words += [f": {seconds(one.best.seconds)} a step", f", {how}", f", {layout_name(one.best.plan)}"]
        lines.append(words)
    return lines


def modes(answer: SearchResult) -> list[str]:
    """Return in which mode the price assumes that a GPU runs its steps, and the prices of the other modes, in words."""
    if answer.question.case.cluster.device.kind != "gpu":
        return []
    own, others = mode(answer.chosen.plan), answer.modes
    if not others:
        return [own]
    words = [f"{name} {seconds(step)}" for name, step in sorted(others.items(), key=lambda item: item[1])]
    return [own, f"; predicted: {words[0]}", *(f", {text}" for text in words[1:])]


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


# --------------------------------------------------------------------------------------------------- the key figures


def key_rows(answer: SearchResult) -> Rows:
    """Return the chosen plan in a few lines of name and value, the most important first."""
    question, chosen = answer.question, answer.chosen
    case, prediction, devices, step = question.case, chosen.prediction, chosen.devices, chosen.seconds
    cluster, tokens, whole = case.cluster, question.sample_tokens, answer.job_seconds(step)
    device = fullest_device(answer)
    size, number = batch(chosen, answer)

    samples = case.work.global_batch / step
    throughput = f"{rate(samples)} samples/s"
    if tokens is None:
        throughput += f", {rate(samples / devices)} a device"
    else:
        throughput = f"{rate(samples * tokens)} tokens/s, {rate(samples * tokens / devices)} a device ({throughput})"

    of_peak = "not known"
    if prediction.mfu is not None:
        dtype, flops = answer.peak
        of_device = f"the dense {dtype} peak of {device.name}"
        if cluster.kinds:
            of_device = "the mean of the devices' dense peaks"
        of_peak = f"{prediction.mfu:.0%} of {flops / 1e12:,.4g} TFLOP/s, {of_device}"
        rest = [f"{name} {share:.0%}" for name, share in lost_shares(answer).items() if share >= _LISTED]
        of_peak += f"; the rest: {', '.join(rest)}" if rest else ""

    peak, usable = prediction.peak_bytes, cluster.usable_bytes(device)
    memory = (
        f"{peak / GIB:.1f} of {gib(device.memory_bytes)}, {(device.memory_bytes - peak) / GIB:.1f} free; "
        f"{(device.memory_bytes - usable) / GIB:.1f} are kept free (margin={100 * cluster.memory_margin:.3g}%)"
    )

    hour, cost = answer.price, answer.cost(chosen)
    if hour is None:
        price = f"not known: the catalogue has none of {device.name}; write --price DOLLARS of a device-hour"
    else:
        source = cluster.device.sources.get("price_per_hour", "no source is given")
        amount = dollars(cost) if cost is not None else f"{dollars(hour * devices)} an hour"
        price = f"{amount} at ${hour:.2f} a device-hour ({source})"

    energy, watts = "", [kind.device.watts for kind in case.kinds]
    used = devices_of(cluster, chosen.plan.layout) if cluster.kinds else [devices]
    known = [of for of in watts if of is not None]
    if len(known) == len(watts) and whole is not None:
        hours = sum(n * of for n, of in zip(used, known, strict=True)) * whole / 3600.0 / 1000.0
        amount = f"at most {rate(hours)}" if hours >= 0.001 else "under 0.001"
        each = " and ".join(f"{of:,.0f}" for of in dict.fromkeys(known))
        energy = f"{amount} kWh of the devices alone, at {each} W each (their power limit)"

    needs = ""
    if chosen.plan.shards_model:
        needs = f'torch {OLDEST_TEXT} or newer, for shard.level = "{chosen.plan.shard.level}"'
    rows = [
        ["plan", f"{described(chosen.plan)}; a rank has {number} x {several(size, 'sample')} in a step"],
        ["step", seconds(step) + (published(answer) if cluster.device.kind == "gpu" else "")],
        ["mode", "".join(modes(answer))],
        ["throughput", throughput],
        ["of the peak", of_peak],
        ["memory", memory],
        ["whole job", length(answer)],
        ["price", price],
        ["energy", energy],
        ["needs", needs],
    ]
    return [[name, value] for name, value in rows if value] + [["note", hint] for hint in hints(answer)]


def published(answer: SearchResult) -> str:
    """Return the range in which similar published steps were; all of them are from GPUs."""

    def models(bar: ErrorBar) -> str:
        least, most = (f"{size / 1e9:.2g}" for size in bar.parameters)
        sizes = least if least == most else f"{least} to {most}"
        return f"language models of {sizes} B parameters on {bar.like.family}"

    step, parameters = answer.chosen.seconds, answer.question.case.work.profile.num_parameters
    bar, unlike = similar(answer)
    if bar is None:
        like = likeness(answer.question.case.cluster.device.name, parameters, answer.chosen.plan.layout)
        every = of_device(like)
        known = f"they are of {models(every)}" if every is not None else f"none is of {like.family}"
        return f"; no published step is like it{unlike}: {known}"
    beyond = f"; {bar.num_beyond:,} more took over twice what was predicted" if bar.num_beyond else ""
    # The two factors as shares: "1% to 16% more", "7% less to 60% more".
    (low, one), (high, other) = ((abs(f - 1.0), "more" if f >= 1.0 else "less") for f in (bar.low, bar.high))
    than = f"{low:.0%} {one} to {high:.0%} {other}"
    if one == other:
        than = f"{min(low, high):.0%} to {max(low, high):.0%} {one}"
    kind = f", {bar.like.layout}" if bar.like.layout != ANY else ""
    return (
        f"; four of five published steps like it took {than} than predicted, {seconds(step * bar.low)} to "
        f"{seconds(step * bar.high)} ({bar.num_rows:,} rows of {models(bar)}{kind}{beyond})"
    )


def hints(answer: SearchResult) -> list[str]:
    """Return changes of the job that would use more of the cluster or of its devices."""
    case, chosen = answer.question.case, answer.chosen
    unaligned = unaligned_products(case, chosen)
    lines = [str(unaligned)] if unaligned is not None else []
    if answer.finer is not None:  # the grains come first and are reported elsewhere
        return lines
    gains = [change for change in answer.changes if "-" not in change.effect]
    lines += [f"{change.what}: {change.effect}" for change in gains if change.what.startswith("--")]
    # Float32 products in a 16-bit plan. Autocast casts a fixed list of operators and no others:
    # docs.pytorch.org/docs/stable/amp.html.
    precision = chosen.plan.precision
    if precision.products != "same":
        size = case.work.profile.num_parameters
        if precision.products != "float8_rows" or any("float8" not in kind.device.flops for kind in case.kinds):
            lines.append(f'precision.products = "{precision.products}" saves no time here: no kernel multiplies it')
        elif size < FLOAT8_PAYS:
            lines.append(f"float8 pays from about 1 B parameters, and this model has {size / 1e6:,.0f} M")
    if ITEMSIZE[precision.compute] == ITEMSIZE["bfloat16"] and precision.parameters == "float32":
        wide, whole = defaultdict[str, float](float), 0.0
        for operation in (o for unit in case.work.profile.units for o in unit.body.operations):
            flops = operation.flops.at(1.0)
            whole += flops
            if ITEMSIZE.get(operation.dtype) == ITEMSIZE["float32"]:
                wide[operation.name] += flops
        share = sum(wide.values()) / whole if whole else 0.0
        if share >= DISTINCT:
            lines.append(
                f"{share:.0%} of the model's FLOPs stay in float32, most of them in "
                f"{max(wide, key=lambda name: wide[name])}, which autocast does not "
                "cast: cast it in the model, or keep parameters in 16 bits (--precision bf16-pure), which changes the "
                "run."
            )
    num_grains, pays_until = case.space.facts.num_grains, answer.curve.pays_until
    more = min(case.space.counts[-1], case.work.global_batch)
    if pays_until is not None and num_grains <= pays_until and num_grains < more:
        lines.append(
            f"The job's {several(num_grains, 'grain')} are shared by at most as many replicas of the model: "
            f"Job(grains={more}) would let {more} devices share them, which changes the run."
        )
    return lines


# ------------------------------------------------------------------------------- utilisation of the device's peak


def lost_shares(answer: SearchResult) -> dict[str, float]:
    """Return the shares of a step by cause, the largest first; with the share of the peak they sum to 1.

    The term `compute` is split by kind of operator, in the proportions of the whole model.
    """
    prediction = answer.chosen.prediction
    if prediction.mfu is None:
        return {}
    shares = {name: spent / prediction.step_seconds for name, spent in prediction.terms.items()}
    computing = shares.pop("compute")
    computer, every = operators(answer.question.case, answer.chosen.plan)
    total: dict[OperationKind, float] = defaultdict(float)
    for operation, share, count in every:
        total[operation.kind] += count * computer.operation(operation, share).seconds
    whole = sum(total.values())
    moving = computing * (total[OperationKind.MEMORY] / whole if whole else 0.0)
    shares[MEMORY_BOUND] = min(moving, computing - prediction.mfu)
    shares[BELOW_PEAK] = computing - prediction.mfu - shares[MEMORY_BOUND]
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


# ------------------------------------------------------------------------------------------------------------ tables


def best_rows(answer: SearchResult) -> Rows:
    """Return rows for the chosen plan and the next best ones on the same number of devices."""
    rows = []
    for candidate in (answer.chosen, *answer.choice.alternatives):
        mfu, cost = candidate.prediction.mfu, answer.cost(candidate)
        rows.append(
            [
                layout_name(candidate.plan),
                seconds(candidate.seconds),
                f"{mfu:.0%}" if mfu is not None else "-",
                gib(candidate.prediction.peak_bytes),
                "{} x {}".format(*batch(candidate, answer)),
                dollars(cost) if cost is not None else "-",
            ]
        )
    return rows


def curve_rows(answer: SearchResult) -> Rows:
    """Return rows for the fastest plan on each number of devices."""
    rows = []
    for point in answer.curve.points:
        if point.best is None:
            lacks = f"does not fit by {gib(point.missing_bytes)}" if point.missing_bytes else "no legal layout"
            rows.append([str(point.devices), lacks, "-", "-", "-"])
            continue
        marginal = f"{round(point.marginal, 2) + 0.0:.0%} of one" if point.marginal is not None else "-"
        efficiency = f"{point.efficiency:.0%}" if point.efficiency is not None else "-"
        layout = layout_name(point.best.plan)
        rows.append([str(point.devices), layout, seconds(point.best.seconds), efficiency, marginal])
    return rows


def verdict(answer: SearchResult) -> str:
    """Return a sentence on the number of devices beyond which more stop paying, and why."""
    curve = answer.curve
    if curve.pays_until is None:
        return "Nothing fits."
    devices = several(curve.pays_until, "device")
    if curve.pays_until == max((p.devices for p in curve.points if p.best), default=0):
        return f"More devices pay up to {devices}, the most that were considered."
    return f"More devices pay up to {devices}; what limits then: {curve.limit}."


def grains(answer: SearchResult) -> list[str]:
    """Return the number of grains and its reason, preceded by the gain of more grains if they limit the plan."""
    work, finer = answer.question.case.work, answer.finer
    each = f"{several(work.grain_size, 'sample')} each"
    lines = [f"{finer.cause[0].upper()}{finer.cause[1:]}.", f"{finer.effect}."] if finer is not None else []
    return [*lines, f"grains: {work.num_grains} ({each}; {answer.question.why_grains})"]


def change_rows(answer: SearchResult) -> Rows:
    """Return rows of the changes that would speed up or slow down the step."""
    return [[change.what, seconds(change.seconds), change.effect] for change in answer.changes]


def rejected_rows(answer: SearchResult, most: int | None = None) -> Rows:
    """Return rows of rejected layouts with reasons, those on the same number of devices first, then by step time."""
    own = answer.chosen.devices
    ordered = sorted(
        answer.choice.rejected, key=lambda r: (r.devices != own, r.seconds if r.seconds is not None else float("inf"))
    )
    rows = [[r.what, r.reason] for r in ordered]
    return rows[:most] + [[i.what, f"illegal: {i.reason}"] for i in answer.choice.illegal]


def goodput_lines(answer: SearchResult) -> list[str]:
    """Return lines on goodput, or none if the devices' failure rate is unknown."""
    goodput = answer.goodput
    if goodput is None:
        return []
    whole = answer.job_seconds(answer.chosen.seconds)
    if whole is not None and whole * goodput.failures_per_day / 86400.0 < _SHORT:
        apart = 86400.0 / goodput.failures_per_day if goodput.failures_per_day else float("inf")
        return [f"none to plan for: the whole job takes {seconds(whole)}, and failures are {seconds(apart)} apart"]
    storage = answer.question.case.cluster.storage_bytes_per_second
    assumed = f"{STORAGE_BYTES_PER_SECOND / 1e9:.0f} GB/s a host, assumed: the cluster does not say"
    stored = f"{storage / 1e9:.1f} GB/s a host" if storage else assumed
    left = f"goodput {goodput.share:.1%} of the time"
    if whole is not None and goodput.share > 0:
        left += f": the whole job takes {seconds(whole / goodput.share)} instead of {seconds(whole)}"
    return [
        f"a checkpoint every {seconds(goodput.interval_seconds)} (Daly 2006), each "
        f"{seconds(goodput.checkpoint_seconds)} ({stored}); {goodput.failures_per_day:.3g} failures a day are expected",
        left,
    ]


def summary(answer: SearchResult) -> str:
    """Return a line on the extent of the search."""
    choice = answer.choice
    tied = (
        f"; {choice.num_tied} more were as fast within 1 %, of which the simplest was taken" if choice.num_tied else ""
    )
    if choice.faster is not None:
        gain = answer.chosen.seconds / choice.faster.seconds - 1.0
        tied += (
            f"; {several(choice.faster.devices, 'device')} would be {gain:.1%} faster, which is less than a prediction "
            "can tell"
        )
    return (
        f"aim {choice.aim}: {choice.num_places} layouts, {choice.num_predicted} plans predicted, all others excluded "
        f"by bounds, in {seconds(answer.search_seconds)}{tied}"
    )


@dataclass(frozen=True)
class Portion:
    """Portion of a step's seconds or of a rank's bytes, as a table row: name, amount, share and meaning."""

    share: float
    row: list[str]


def terms(answer: SearchResult) -> list[Portion]:
    """Return the nonzero terms of a step."""
    prediction = answer.chosen.prediction
    parts = [(n, v, v / prediction.step_seconds) for n, v in prediction.terms.items() if v > 0]
    return [Portion(share, [n, seconds(v), f"{share:.1%}", TERMS_MEAN[n]]) for n, v, share in parts]


def memory(answer: SearchResult) -> list[Portion]:
    """Return the nonzero categories of the fullest rank's memory."""
    prediction = answer.chosen.prediction
    parts = [(n, v, v / prediction.peak_bytes) for n, v in prediction.memory.items() if v > 0]
    return [Portion(share, [n, gib(v), f"{share:.1%}", MEMORY_MEANS[n]]) for n, v, share in parts]


def _best_title(answer: SearchResult) -> str:
    return f"The best on {several(answer.chosen.devices, 'device')}"


# ---------------------------------------------------------------------------------------------- terminal and page


def console_of_width() -> Console:
    """Return a console of the terminal's width, or of 80 columns without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def show(answer: SearchResult, console: Console, first: Rows | None = None, *, more: bool = False) -> None:
    """Print the first lines (default: `front`), and the rest of the result in the console's width if `more`."""

    def add_lines(title: str, *lines: str) -> None:
        if lines:
            console.print(Text(f"\n{title}", "bold"), *map(Text, lines), sep="\n", highlight=False)

    def add_table(title: str, head: list[str], rows: Rows) -> None:
        """Print rows in columns; the last columns are left out if the console has no room for them."""
        widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
        while len(widths) > 3 and sum(widths) + 2 * len(widths) > console.width + 2:
            widths.pop()
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in [head, *rows]
        ]
        add_lines(title, *(lines if any(head) else lines[1:]))

    # Commands are printed whole, for a copy.
    console.print(Text(text_of(first or front(answer))), highlight=False, soft_wrap=True)
    if not more:
        return
    case = answer.question.case
    add_lines(
        "In short",
        f"job: {answer.job} on {case.cluster.name}, {case.work.profile.num_parameters:,} parameters, "
        f"{case.work.profile.flops(case.work.global_batch):.3g} FLOPs a step of {case.work.global_batch} samples",
        *grains(answer),
        *(f"{name}: {value}" for name, value in key_rows(answer)),
        summary(answer),
    )
    notes = [f"note: {note}" for note in (*case.cluster.notes, *case.work.profile.notes)]
    if correction := case.correction:
        terms_of = [f"{name} x {factor:.2f}" for name, factor in correction.factors.items()]
        terms_of += [f"host + {seconds(correction.host_seconds)} a step"] if correction.host_seconds else []
        notes.insert(0, f"corrected by what runs have shown: {', '.join(terms_of)}")
    add_lines("Assumptions", *notes)
    add_table(_best_title(answer), BEST_HEAD, best_rows(answer))
    add_table("A step of the first", [""] * 4, [portion.row for portion in terms(answer)])
    add_table("Memory of its fullest device", [""] * 4, [portion.row for portion in memory(answer)])
    add_lines("By kinds of devices", *("".join(words) for words in kinds_in_words(answer)))
    add_table("By number of devices", CURVE_HEAD, curve_rows(answer))
    console.print(Text(verdict(answer)), highlight=False)
    add_lines("What would change it", *(f"{what}: {step}, {effect}" for what, step, effect in change_rows(answer)))
    add_lines("Failures", *goodput_lines(answer))
    reasons = [f"{what}: {reason}" for what, reason in rejected_rows(answer, _NUM_REJECTED)]
    left = len(answer.choice.rejected) - _NUM_REJECTED
    add_lines("Why not", *reasons, *([f"... and {left} more: --html FILE has them all"] if left > 0 else []))


def page(answer: SearchResult) -> str:
    """Return the result as an HTML page."""

    def waterfall_section(title: str, drawing: str, head: list[str], portions: Sequence[Portion]) -> Section:
        bars = [Bar(portion.row[0], portion.share, portion.row[1]) for portion in portions]
        table = Table([*head, "share", "what it is"], [portion.row for portion in portions])
        return Section(title, drawing=waterfall(drawing, bars), table=table)

    case, chosen = answer.question.case, answer.chosen
    lead = [
        *grains(answer),
        f"Chosen: {described(chosen.plan)} on {chosen.devices} of {several(case.cluster.num_devices, 'device')}, "
        f"{seconds(chosen.seconds)} a step. {verdict(answer)}",
        f"{case.work.profile.num_parameters:,} parameters; {case.work.global_batch} samples a step. {summary(answer)}.",
        *case.cluster.notes,
        *case.work.profile.notes,
    ]
    spots = [
        Spot(
            point.devices,
            case.work.global_batch / point.best.seconds,
            f"{several(point.devices, 'device')}: {seconds(point.best.seconds)} a step, {described(point.best.plan)}",
            point.devices == chosen.devices,
        )
        for point in answer.curve.points
        if point.best is not None
    ]
    throughput = chart("Samples a second by devices", [Series("", spots)], ("devices", "samples a second"), ideal=True)
    category = "Memory of the fullest device", "Bytes of the fullest device by category", ["category", "bytes"]
    parts = [
        Section("In short", table=Table(["", ""], key_rows(answer))),
        Section(_best_title(answer), table=Table(BEST_HEAD, best_rows(answer))),
        waterfall_section("A step", "Seconds of a step by term", ["term", "time"], terms(answer)),
        waterfall_section(*category, memory(answer)),
        Section(
            "By number of devices",
            [verdict(answer), *hints(answer), "Dashed: throughput growing as the devices."],
            drawing=throughput,
            table=Table(CURVE_HEAD, curve_rows(answer)),
        ),
        Section("What would change it", table=Table(["change", "step", "effect"], change_rows(answer))),
    ]
    if failures := goodput_lines(answer):
        parts.append(Section("Failures", failures))
    rejected = Table(["layout", "reason"], rejected_rows(answer))
    if answer.kinds:
        parts.append(Section("By kinds of devices", ["".join(words) for words in kinds_in_words(answer)]))
    parts += [Section("Why not", table=rejected, folded=True), Section("The plan", code=plan_text(answer.plan))]
    return render(Page(f"Plan of {answer.job} on {case.cluster.name}", lead, parts))
