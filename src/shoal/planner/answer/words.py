"""Formatting of a plan's numbers in words and rows, the same in a terminal and on a page."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.planner.answer.answer import Answer, storage_known
from shoal.planner.search.choice import gib
from shoal.planner.search.search import Candidate
from shoal.plans.words import described

Rows = list[list[str]]

# What the terms of a step and the categories of memory are, in a few words each.
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
# Below this share of the time between failures of all devices a job's failures are not worth a table.
_SHORT = 0.01


def several(number: int, noun: str) -> str:
    """A number of things: 1 device, 2 devices."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def seconds(value: float | None) -> str:
    """Seconds as people read them."""
    if value is None:
        return "-"
    if value >= 86400:
        return f"{value / 86400:.1f} d"
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    if value >= 100:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-4 else f"{value * 1e6:.0f} us"


def batch(candidate: Candidate, answer: Answer) -> str:
    """Samples of a microbatch, and how many microbatches a rank has."""
    work, layout = answer.question.case.work, candidate.plan.layout
    grains = -(-work.num_grains // (layout.data * layout.shard))
    per = candidate.plan.batch.grains_per_microbatch
    return f"{per * work.grain_size} x {-(-grains // per)}"


BEST_HEAD = [
    "devices",
    "layout",
    "samples x microbatches",
    "step",
    "samples/s",
    "of peak",
    "memory",
    "whole job",
    "cost",
]


def best_rows(answer: Answer) -> Rows:
    """The chosen plan and the next best ones."""
    return [_row(candidate, answer) for candidate in (answer.chosen, *answer.choice.alternatives)]


def _row(candidate: Candidate, answer: Answer) -> list[str]:
    prediction, cost = candidate.prediction, answer.cost(candidate)
    return [
        str(candidate.devices),
        described(candidate.plan),
        batch(candidate, answer),
        seconds(candidate.seconds),
        f"{answer.question.case.work.global_batch / candidate.seconds:,.0f}",
        f"{prediction.mfu:.0%}" if prediction.mfu is not None else "-",
        gib(prediction.peak_bytes),
        seconds(answer.job_seconds(candidate.seconds)),
        f"${cost:,.2f}" if cost is not None else "-",
    ]


@dataclass(frozen=True)
class Portion:
    """Portion of a step's seconds, or of a rank's bytes."""

    name: str
    share: float
    amount: str
    meaning: str

    @property
    def row(self) -> list[str]:
        """The row of a table."""
        return [self.name, self.amount, f"{self.share:.1%}", self.meaning]


def terms(answer: Answer) -> list[Portion]:
    """The terms of a step, without those that take nothing."""
    found = answer.chosen.prediction
    return [Portion(n, v / found.step_seconds, seconds(v), TERMS_MEAN[n]) for n, v in found.terms.items() if v > 0]


def memory(answer: Answer) -> list[Portion]:
    """The bytes of the fullest rank, without the categories that it has nothing of."""
    found = answer.chosen.prediction
    return [Portion(n, v / found.peak_bytes, gib(v), MEMORY_MEANS[n]) for n, v in found.memory.items() if v > 0]


CURVE_HEAD = ["devices", "step", "efficiency", "each added device brings", "layout"]


def curve_rows(answer: Answer) -> Rows:
    """The fastest plan on each number of devices."""
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


def verdict(answer: Answer) -> str:
    """Sentence on the number of devices beyond which more stop paying, and why."""
    found = answer.curve
    if found.pays_until is None:
        return "Nothing fits."
    devices = several(found.pays_until, "device")
    if found.pays_until == max((p.devices for p in found.points if p.best), default=0):
        return f"More devices pay up to {devices}, the most that were considered."
    return f"More devices pay up to {devices}; what limits then: {found.limit}."


def hints(answer: Answer) -> list[str]:
    """Changes of the job that would use more of the cluster."""
    space, pays_until = answer.question.case.space, answer.curve.pays_until
    grains, most = space.facts.num_grains, space.counts[-1]
    if pays_until is None or not grains <= pays_until or grains >= most:
        return []
    return [
        f"The job's {several(grains, 'grain')} are shared by at most as many replicas of the model: "
        f"Job(grains={most}) would let {most} devices share them, which changes the run."
    ]


def change_rows(answer: Answer) -> Rows:
    """Rows of the changes that would speed up or slow down the step."""
    return [[change.what, seconds(change.seconds), change.effect] for change in answer.changes]


def rejected_rows(answer: Answer, most: int | None = None) -> Rows:
    """Why other layouts were not chosen: on as many devices first, the nearest first."""
    own = answer.chosen.devices
    ordered = sorted(
        answer.choice.rejected, key=lambda r: (r.devices != own, r.seconds if r.seconds is not None else float("inf"))
    )
    rows = [[r.what, r.reason] for r in ordered]
    illegal = [[i.what, f"illegal: {i.reason}"] for i in answer.choice.illegal]
    return rows[: most if most is not None else len(rows)] + illegal


def goodput_lines(answer: Answer) -> list[str]:
    """Lines on goodput, where the devices' failure rate is known."""
    found = answer.goodput
    if found is None:
        return []
    whole = answer.job_seconds(answer.chosen.seconds)
    if whole is not None and whole * found.failures_per_day / 86400.0 < _SHORT:
        apart = 86400.0 / found.failures_per_day if found.failures_per_day else float("inf")
        return [f"none to plan for: the whole job takes {seconds(whole)}, and failures are {seconds(apart)} apart"]
    lines = [
        f"a checkpoint every {seconds(found.interval_seconds)} (Daly 2006), each {seconds(found.checkpoint_seconds)} "
        f"({storage_known(answer)}); {found.failures_per_day:.3g} failures a day are expected",
        f"goodput {found.share:.1%} of the time",
    ]
    if whole is not None and found.share > 0:
        lines[-1] += f": the whole job takes {seconds(whole / found.share)} instead of {seconds(whole)}"
    return lines


def correction(answer: Answer) -> str:
    """Line on the correction of predictions by earlier runs."""
    found = answer.question.correction
    told = [f"{name} x {factor:.2f}" for name, factor in found.factors.items()]
    told += [f"host + {seconds(found.host_seconds)} a step"] if found.host_seconds else []
    return f"corrected by what runs have shown: {', '.join(told)}"


def summary(answer: Answer) -> str:
    """Line on the extent of the search."""
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
