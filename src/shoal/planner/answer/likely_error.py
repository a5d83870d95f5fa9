"""Likely error of a predicted step time, in words, from published steps that resemble it."""

from __future__ import annotations

from shoal.planner.answer.answer import SearchResult
from shoal.planner.predict.error_bar import ANY, ErrorBar, error_bar, likeness, of_device
from shoal.report.quantities import seconds

# A step that waits for launches for more than this share of its time resembles no published step.
_LAUNCHING = 0.5


def step(answer: SearchResult) -> str:
    """Return the step time and the range in which similar published steps were."""
    case, found = answer.question.case, answer.chosen
    told = seconds(found.seconds)
    if case.cluster.device.kind != "gpu":  # all published rows are from GPUs
        return told
    parameters = case.work.profile.num_parameters
    like = likeness(case.cluster.device.name, parameters, found.plan.layout)
    bar = error_bar(like, parameters)
    if bar is None or _unlike(answer):
        every = of_device(like)
        known = f"they are of {_models(every)}" if every is not None else f"none is of {like.family}"
        return f"{told}; no published step is like it{_unlike(answer)}: {known}"
    beyond = f"; {bar.num_beyond:,} more took over twice what was predicted" if bar.num_beyond else ""
    least, most = seconds(found.seconds * bar.low), seconds(found.seconds * bar.high)
    layout = f", {bar.like.layout}" if bar.like.layout != ANY else ""
    return (
        f"{told}; four of five published steps like it took {_than(bar)} than predicted, {least} to {most} "
        f"({bar.num_rows:,} rows of {_models(bar)}{layout}{beyond})"
    )


def _unlike(answer: SearchResult) -> str:
    """Return what distinguishes the job from all published rows, whatever its size, or ""."""
    found = answer.chosen.prediction
    if found.terms.get("launch", 0.0) > _LAUNCHING * found.step_seconds:
        return " (most of it is launches)"
    return " (its samples are no sequences of tokens)" if answer.question.sample_tokens is None else ""


def _than(bar: ErrorBar) -> str:
    """Return the two factors as shares: "1% to 16% more", "7% less to 60% more"."""
    (low, one), (high, other) = ((abs(f - 1.0), "more" if f >= 1.0 else "less") for f in (bar.low, bar.high))
    if one == other:
        return f"{min(low, high):.0%} to {max(low, high):.0%} {one}"
    return f"{low:.0%} {one} to {high:.0%} {other}"


def _models(bar: ErrorBar) -> str:
    least, most = (f"{size / 1e9:.2g}" for size in bar.parameters)
    sizes = least if least == most else f"{least} to {most}"
    return f"language models of {sizes} B parameters on {bar.like.family}"
