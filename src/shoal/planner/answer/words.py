"""Formatting of a plan's numbers as words and rows, the same in a terminal and on a page."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.hardware.values import Device
from shoal.parallel.shard.torch_release import OLDEST_TEXT
from shoal.planner.answer.answer import SearchResult
from shoal.planner.answer.outlook import GRAPH, STORAGE_BYTES_PER_SECOND
from shoal.planner.answer.utilisation import lost_shares, unaligned_products, wide_products
from shoal.planner.predict.error_bar import ANY, ErrorBar, error_bar, likeness, of_device
from shoal.planner.search.aims import TOLD_APART
from shoal.planner.search.choice import GIB, gib
from shoal.planner.search.search import Candidate
from shoal.plans.plan import described
from shoal.report.quantities import dollars, rate, seconds

Rows = list[list[str]]

# Short descriptions of the terms of a step and of the categories of memory.
TERMS_MEAN = {
    "compute": "the model's operations",
    "launch": "the device waits until the host has started its next operation",
    "recompute": "forwards computed once more, instead of keeping their activations",
    "tensor": "exchanges among the ranks that divide a layer",
    "context": "exchanges among the ranks that divide a sequence",
    "pipeline": "messages from stage to stage",
    "bubble": "a stage waits for the others, at the beginning and the end of a step",
    "gradients": "sums of gradients over the replicas, as far as no computing hides them",
    "parameters": "gathering parameters and scattering gradients, as far as no computing hides it",
    "optimizer": "the update",
    "data": "waiting for samples",
    "host": "what the host does in every step beside that",
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
# Smallest share of a step that is listed next to the share of the peak.
_TOLD = 0.015
# A step that waits for launches for more than this share of its time resembles no published step.
_LAUNCHING = 0.5
# Expected number of failures below which a job's failures are not worth a table.
_SHORT = 0.01


def several(number: int, noun: str) -> str:
    """Return a number with its noun: 1 device, 2 devices."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def batch(candidate: Candidate, answer: SearchResult) -> str:
    """Return the samples of a microbatch and the number of microbatches on a rank, as "8 x 4"."""
    work, layout = answer.question.case.work, candidate.plan.layout
    grains = -(-work.num_grains // (layout.data * layout.shard))
    per = candidate.plan.batch.grains_per_microbatch
    return f"{per * work.grain_size} x {-(-grains // per)}"


def key_rows(answer: SearchResult) -> Rows:
    """Return the chosen plan in a few lines of name and value, the most important first."""
    chosen, case = answer.chosen, answer.question.case
    size, _, number = batch(chosen, answer).partition(" x ")
    rows = [
        ["plan", f"{described(chosen.plan)}, on {chosen.devices:,} of {several(case.cluster.num_devices, 'device')}"],
        ["microbatch", f"{several(int(size), 'sample')}; a rank has {number} of them in a step"],
        ["step", step(answer)],
        ["throughput", throughput(answer)],
        ["of the peak", share_of_peak(answer)],
        ["memory", memory_margin(answer)],
        ["whole job", whole_job(answer)],
        ["price", price(answer)],
        ["energy", energy(answer)],
        ["needs", needs(answer)],
    ]
    return [[name, value] for name, value in rows if value] + [["note", hint] for hint in hints(answer)]


def step(answer: SearchResult) -> str:
    """Return the step time and the range in which similar published steps were."""
    case, chosen = answer.question.case, answer.chosen
    duration = seconds(chosen.seconds)
    if case.cluster.device.kind != "gpu":  # all published rows are from GPUs
        return duration
    parameters = case.work.profile.num_parameters
    like = likeness(case.cluster.device.name, parameters, chosen.plan.layout)
    bar = error_bar(like, parameters)
    unlike = "" if answer.question.sample_tokens is not None else " (its samples are no sequences of tokens)"
    if chosen.prediction.terms.get("launch", 0.0) > _LAUNCHING * chosen.prediction.step_seconds:
        unlike = " (most of it is launches)"
    if bar is None or unlike:
        every = of_device(like)
        known = f"they are of {_models(every)}" if every is not None else f"none is of {like.family}"
        return f"{duration}; no published step is like it{unlike}: {known}"
    beyond = f"; {bar.num_beyond:,} more took over twice what was predicted" if bar.num_beyond else ""
    least, most = seconds(chosen.seconds * bar.low), seconds(chosen.seconds * bar.high)
    # The two factors as shares: "1% to 16% more", "7% less to 60% more".
    (low, one), (high, other) = ((abs(f - 1.0), "more" if f >= 1.0 else "less") for f in (bar.low, bar.high))
    than = f"{low:.0%} {one} to {high:.0%} {other}"
    if one == other:
        than = f"{min(low, high):.0%} to {max(low, high):.0%} {one}"
    layout = f", {bar.like.layout}" if bar.like.layout != ANY else ""
    return (
        f"{duration}; four of five published steps like it took {than} than predicted, {least} to {most} "
        f"({bar.num_rows:,} rows of {_models(bar)}{layout}{beyond})"
    )


def _models(bar: ErrorBar) -> str:
    least, most = (f"{size / 1e9:.2g}" for size in bar.parameters)
    sizes = least if least == most else f"{least} to {most}"
    return f"language models of {sizes} B parameters on {bar.like.family}"


def needs(answer: SearchResult) -> str:
    """Return the release of torch that the chosen plan needs, or "" if any supported release will do."""
    plan = answer.chosen.plan
    return f'torch {OLDEST_TEXT} or newer, for shard.level = "{plan.shard.level}"' if plan.shards_model else ""


def energy(answer: SearchResult) -> str:
    """Return the kilowatt-hours of the whole job at the devices' power limit, or "" if unknown."""
    watts, whole = answer.question.case.cluster.device.watts, answer.job_seconds(answer.chosen.seconds)
    if watts is None or whole is None:
        return ""
    hours = answer.chosen.devices * watts * whole / 3600.0 / 1000.0
    told = f"at most {rate(hours)}" if hours >= 0.001 else "under 0.001"
    return f"{told} kWh of the devices alone, at {watts:,.0f} W each (their power limit)"


def throughput(answer: SearchResult) -> str:
    """Return tokens per second, in total and per device, or samples per second if samples have no tokens."""
    devices, tokens = answer.chosen.devices, answer.question.sample_tokens
    samples = answer.question.case.work.global_batch / answer.chosen.seconds
    in_samples = f"{rate(samples)} samples/s"
    if tokens is None:
        return f"{in_samples}, {rate(samples / devices)} a device"
    return f"{rate(samples * tokens)} tokens/s, {rate(samples * tokens / devices)} a device ({in_samples})"


def _device(answer: SearchResult) -> Device:
    """Return the device of one rank; a CPU device has the rank's share of threads."""
    return answer.question.case.cluster.device_for(answer.ranks_per_host)


def share_of_peak(answer: SearchResult) -> str:
    """Return the share of the device's peak that model FLOPs use, the peak, and where the rest of a step goes."""
    found = answer.chosen.prediction
    if found.mfu is None:
        return "not known"
    dtype, flops = answer.peak
    device = _device(answer).name
    told = f"{found.mfu:.0%} of {flops / 1e12:,.4g} TFLOP/s, the dense {dtype} peak of {device}"
    rest = [f"{name} {share:.0%}" for name, share in lost_shares(answer).items() if share >= _TOLD]
    return f"{told}; the rest: {', '.join(rest)}" if rest else told


def memory_margin(answer: SearchResult) -> str:
    """Return the used and the free bytes of the fullest device."""
    peak = answer.chosen.prediction.peak_bytes
    cluster = answer.question.case.cluster
    device = cluster.device_for(answer.ranks_per_host)
    size, kept = device.memory_bytes, device.memory_bytes - cluster.usable_bytes(device)
    told = f"{peak / GIB:.1f} of {gib(size)}, {(size - peak) / GIB:.1f} free"
    return f"{told}; {kept / GIB:.1f} are kept free (margin={100 * cluster.memory_margin:.3g}%)"


def whole_job(answer: SearchResult) -> str:
    """Return the steps and the samples or tokens of the whole job, and its time without failures."""
    asked, steps = answer.question, answer.question.num_steps
    if steps is None:
        return "its length is not known: write --samples N" + (" or --tokens N" if asked.sample_tokens else "")
    samples = steps * asked.case.work.global_batch
    length = f"{quantity(samples * asked.sample_tokens)} tokens" if asked.sample_tokens else ""
    length = length or f"{quantity(samples)} samples"
    return f"{seconds(answer.job_seconds(answer.chosen.seconds))} for {length} in {several(steps, 'step')}"


def quantity(value: float) -> str:
    """Return a large number with its power of a thousand in words."""
    for name, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def price(answer: SearchResult) -> str:
    """Return the dollars of the whole job, or per hour if its length is unknown, and the source of the price."""
    device, hour = answer.question.case.cluster.device, answer.price
    if hour is None:
        return f"not known: the catalogue has none of {_device(answer).name}; write --price DOLLARS of a device-hour"
    cost, source = answer.cost(answer.chosen), device.sources.get("price_per_hour", "no source is given")
    told = dollars(cost) if cost is not None else f"{dollars(hour * answer.chosen.devices)} an hour"
    return f"{told} at ${hour:.2f} a device-hour ({source})"


BEST_HEAD = ["layout", "samples x microbatches", "step", "of peak", "memory", "whole job", "cost"]


def best_rows(answer: SearchResult) -> Rows:
    """Return rows for the chosen plan and the next best ones on the same number of devices."""
    rows = []
    for candidate in (answer.chosen, *answer.choice.alternatives):
        mfu, cost = candidate.prediction.mfu, answer.cost(candidate)
        rows.append(
            [
                described(candidate.plan),
                batch(candidate, answer),
                seconds(candidate.seconds),
                f"{mfu:.0%}" if mfu is not None else "-",
                gib(candidate.prediction.peak_bytes),
                seconds(answer.job_seconds(candidate.seconds)),
                dollars(cost) if cost is not None else "-",
            ]
        )
    return rows


@dataclass(frozen=True)
class Portion:
    """Portion of a step's seconds or of a rank's bytes."""

    name: str
    share: float
    amount: str
    meaning: str

    @property
    def row(self) -> list[str]:
        """The portion as a table row."""
        return [self.name, self.amount, f"{self.share:.1%}", self.meaning]


def terms(answer: SearchResult) -> list[Portion]:
    """Return the nonzero terms of a step."""
    found = answer.chosen.prediction
    return [Portion(n, v / found.step_seconds, seconds(v), TERMS_MEAN[n]) for n, v in found.terms.items() if v > 0]


def memory(answer: SearchResult) -> list[Portion]:
    """Return the nonzero categories of the fullest rank's memory."""
    found = answer.chosen.prediction
    return [Portion(n, v / found.peak_bytes, gib(v), MEMORY_MEANS[n]) for n, v in found.memory.items() if v > 0]


CURVE_HEAD = ["devices", "step", "efficiency", "each added device brings", "layout"]


def curve_rows(answer: SearchResult) -> Rows:
    """Return rows for the fastest plan on each number of devices."""
    rows = []
    for point in answer.curve.points:
        if point.best is None:
            lacks = f"does not fit by {gib(point.missing_bytes)}" if point.missing_bytes else "no legal layout"
            rows.append([str(point.devices), "-", "-", "-", lacks])
            continue
        marginal = f"{round(point.marginal, 2) + 0.0:.0%} of one" if point.marginal is not None else "-"
        efficiency = f"{point.efficiency:.0%}" if point.efficiency is not None else "-"
        layout = described(point.best.plan)
        rows.append([str(point.devices), seconds(point.best.seconds), efficiency, marginal, layout])
    return rows


def verdict(answer: SearchResult) -> str:
    """Return a sentence on the number of devices beyond which more stop paying, and why."""
    found = answer.curve
    if found.pays_until is None:
        return "Nothing fits."
    devices = several(found.pays_until, "device")
    if found.pays_until == max((p.devices for p in found.points if p.best), default=0):
        return f"More devices pay up to {devices}, the most that were considered."
    return f"More devices pay up to {devices}; what limits then: {found.limit}."


def grains(answer: SearchResult) -> list[str]:
    """Return the number of grains and its reason, preceded by the gain of more grains if they limit the plan."""
    work, found = answer.question.case.work, answer.finer
    each = f"{several(work.grain_size, 'sample')} each"
    first = [f"{found.cause[0].upper()}{found.cause[1:]}.", f"{found.effect}."] if found is not None else []
    return [*first, f"grains: {work.num_grains} ({each}; {answer.question.why_grains})"]


def hints(answer: SearchResult) -> list[str]:
    """Return changes of the job that would use more of the cluster or of its devices."""
    unaligned = unaligned_products(answer)
    first = [str(unaligned)] if unaligned is not None else []
    if answer.finer is not None:  # the grains come first and are reported elsewhere
        return first
    space, pays_until = answer.question.case.space, answer.curve.pays_until
    grains, most = space.facts.num_grains, space.counts[-1]
    gains = [change for change in answer.changes if "-" not in change.effect]
    lines = first + [f"{change.what}: {change.effect}" for change in gains if change.what.startswith("--")]
    lines += [f"{GRAPH}: {c.effect}, where the step can be captured" for c in gains if c.what == GRAPH]
    wide, precision = wide_products(answer), answer.chosen.plan.precision
    if wide is not None and wide[0] >= TOLD_APART and precision.parameters == "float32":
        lines.append(
            f"{wide[0]:.0%} of the model's FLOPs stay in float32, most of them in {wide[1]}, which autocast does not "
            "cast: cast it in the model, or keep parameters in 16 bits (--precision bf16-pure), which changes the run."
        )
    more = min(most, answer.question.case.work.global_batch)
    if pays_until is None or not grains <= pays_until or grains >= more:
        return lines
    return [
        *lines,
        f"The job's {several(grains, 'grain')} are shared by at most as many replicas of the model: "
        f"Job(grains={more}) would let {more} devices share them, which changes the run.",
    ]


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
    illegal = [[i.what, f"illegal: {i.reason}"] for i in answer.choice.illegal]
    return rows[: most if most is not None else len(rows)] + illegal


def goodput_lines(answer: SearchResult) -> list[str]:
    """Return lines on goodput, or none if the devices' failure rate is unknown."""
    found = answer.goodput
    if found is None:
        return []
    whole = answer.job_seconds(answer.chosen.seconds)
    if whole is not None and whole * found.failures_per_day / 86400.0 < _SHORT:
        apart = 86400.0 / found.failures_per_day if found.failures_per_day else float("inf")
        return [f"none to plan for: the whole job takes {seconds(whole)}, and failures are {seconds(apart)} apart"]
    rate = answer.question.case.cluster.storage_bytes_per_second
    assumed = f"{STORAGE_BYTES_PER_SECOND / 1e9:.0f} GB/s a host, assumed: the cluster does not say"
    stored = f"{rate / 1e9:.1f} GB/s a host" if rate else assumed
    lines = [
        f"a checkpoint every {seconds(found.interval_seconds)} (Daly 2006), each {seconds(found.checkpoint_seconds)} "
        f"({stored}); {found.failures_per_day:.3g} failures a day are expected",
        f"goodput {found.share:.1%} of the time",
    ]
    if whole is not None and found.share > 0:
        lines[-1] += f": the whole job takes {seconds(whole / found.share)} instead of {seconds(whole)}"
    return lines


def correction(answer: SearchResult) -> str:
    """Return a line on the correction of predictions by earlier runs."""
    found = answer.question.case.correction
    told = [f"{name} x {factor:.2f}" for name, factor in found.factors.items()]
    told += [f"host + {seconds(found.host_seconds)} a step"] if found.host_seconds else []
    return f"corrected by what runs have shown: {', '.join(told)}"


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
