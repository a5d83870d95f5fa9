"""Differences between the ranks of a script, and habits that one process has too, from their records."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from shoal.programs.check import Evidence, Finding, scale_of, trained_calls, unlike_parts
from shoal.programs.observer import same_state
from shoal.programs.replay import distance
from shoal.report.quantities import several

# Cause and remedy of each finding.
_SEEDS = ("some samples are read twice, others never", "give the sampler one seed and one epoch on all ranks")
_PASS = ("each rank reads the whole data in its own order", "use a DistributedSampler, or prepare the loader")
_MODE = ("train(), eval() or autocast is called on some ranks only", "call it on all ranks")
_CHANGED = ("some ranks load, average or clamp weights, or from values of their own", "do it alike on all ranks")
_NOISE = ("all ranks have the same random state", "add the rank to the seed after the model is made")
_BUFFERS = ("nothing broadcasts the running statistics of each rank's own samples", "leave broadcast_buffers=True")
_CLIPPED = ("the limit is as many times too small", "call scaler.unscale_(optimizer) before clipping")
_MEANS = ("a mean over each microbatch or rank", "sum the losses, and divide by what counts in the global batch")
_COUPLED = ("the loss depends on which samples one rank has, or on the number of ranks", "gather them, with gradients")
_APPLIED = ("optimizer.step() is called in place of scaler.step(optimizer)", "call scaler.step, which unscales them")


def differences(evidence: Evidence) -> Iterator[Finding]:
    """Yield what ranks do apart: orders of samples, modes, weights, buffers, random numbers, scaled gradients."""
    yield from _orders(evidence)
    reported: set[str] = set()
    for number, steps in evidence.steps():
        for finding in itertools.chain(_calls(evidence, number, steps), _habits(evidence, number, steps)):
            if f"{finding.phase} {finding.name}" not in reported:
                reported.add(f"{finding.phase} {finding.name}")
                yield finding


def by_sample(evidence: Evidence, record: dict[str, Any]) -> Iterator[Finding]:
    """Compare what each sample weighs in the first update with one process that has the same samples in its batch.

    Whatever computes the loss, the gradients of a forward's outputs are those weights. Forwards that one process does
    not repeat by sample, such as with dropout, batch statistics or another padding, are not compared.
    """
    if not record["steps"] or len(evidence.groups) < len(evidence.records):
        return
    steps, alone = [own["steps"][0] for own in evidence.records], record["steps"][0]
    known = {key: own for call in trained_calls(alone) for key, own in _samples(call, scale_of(alone)).items()}
    unrepeated = functools.partial(
        evidence.coverage.leave_out, "what each sample weighs: one process does not repeat it"
    )
    if not known or any(len(set(call["rows"])) < len(call["rows"]) for call in trained_calls(alone)):
        unrepeated()  # of a sample that is there twice too
        return
    shares = 1 if 0 in evidence.summed else len(steps)
    by_call: dict[tuple[int, int], list[float]] = {}
    coupled, seen = set[int](), set[tuple[int, int, str]]()
    for step in steps:
        for place, call in enumerate(trained_calls(step)):
            own = _samples(call, scale_of(step) * shares)
            if not own or any(key not in known for key in own):
                unrepeated()
                return
            seen |= own.keys()
            mine = [torch.cat([value[side].flatten() for value in own.values()]).double() for side in (0, 1)]
            other = [torch.cat([known[key][side].flatten() for key in own]).double() for side in (0, 1)]
            if mine[0].shape != other[0].shape or distance(mine[0], other[0]) > evidence.tolerance:
                unrepeated()
                return
            times = float(mine[1] @ other[1] / (other[1] @ other[1]).clamp_min(1e-30))
            if sum(bool(known[key][1].any()) for key in own) > 1 and times > 0.0:
                by_call.setdefault((call["module"], place), []).append(times)
                if distance(mine[1], times * other[1]) > 5 * evidence.tolerance:
                    coupled.add(call["module"])
    every = [times for own in by_call.values() for times in own]
    if not every:
        return
    coupled |= {key[0] for key in known.keys() - seen}  # outputs that get gradients in one process alone
    name = evidence.records[0]["modules"][min(coupled, default=min(by_call)[0])]["class"]
    if coupled:
        said = "the gradients of its outputs are not those of one process with the same samples"
        yield Finding(0, "loss", name, said, None, *_COUPLED, fails=False)
    elif max(every) / min(every) > 1.0 + 10 * evidence.tolerance:
        said = f"samples weigh {min(every):.4g} to {max(every):.4g} times as much as in one process with the same ones"
        is_seen = any(loss["gradient"] is not None for step in steps for loss in step["losses"])
        yield Finding(0, "loss", name, said, None, *_MEANS, fails=not is_seen)  # what is seen is judged by its elements


def _samples(call: dict[str, Any], scale: float) -> dict[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return each output of each sample of a forward, and its gradient."""
    own: dict[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]] = {}
    for place, output in enumerate(call["outputs"]):
        received = [of_pass[place] for of_pass in call["passes"].values() if place in of_pass]
        size = received[0].shape[:1] if received else ()  # of a loss: none
        if size != (len(call["rows"]),) or output["values"].numel() != received[0].numel():
            continue
        values, gradient = output["values"].view(received[0].shape), torch.stack(received).sum(0).double() / scale
        keys = ((call["module"], place, row) for row in call["rows"])
        own |= dict(zip(keys, zip(values, gradient, strict=True), strict=True))
    return own


def divided_by_hand(records: list[dict[str, Any]]) -> str:
    """Return how the script's own exchanges divide a model among ranks, or nothing: such ranks cannot be compared."""
    calls = ", ".join(sorted({name for record in records for name in record["exchanges"]}))
    first = [record["steps"][0] for record in records if record["steps"]]
    if not calls or len(first) < len(records):
        return ""
    shapes = [[(module["class"], module["shapes"]) for module in record["modules"]] for record in records]
    if any(own != shapes[0] for own in shapes):
        return f"ranks have other modules, and exchange values by {calls}"
    begin = [step["calls"][0]["weights"] if step["calls"] else {} for step in first]
    moved = any(name in calls for name in ("all_to_all", "send", "recv"))
    if unlike_parts(first, begin) or (moved and unlike_parts(first, [step["after_digests"] for step in first])):
        return f"ranks have other weights, and their forwards exchange values by {calls}"
    return ""


def _orders(evidence: Evidence) -> Iterator[Finding]:
    """Compare the seeds of samplers, and find samples that two ranks read in a pass where none reads one twice."""
    records = evidence.records
    seeds = [[(s["seed"], s["epoch"]) for s in record["samplers"] if s["shuffle"]][:1] for record in records]
    if any(own != seeds[0] for own in seeds):
        said = f"ranks shuffle with seed and epoch {' and '.join(str(*own) for own in seeds)}"
        yield Finding(0, "data", "order of samples", said, None, *_SEEDS)
    if any(step["places"] for record in records for step in record["steps"]):
        return  # ranks that divide a model share samples
    starts = [loader["step"] for loader in records[0]["loaders"] if loader["step"]]
    last = min([evidence.num_steps, *(step - 1 for step in starts)])  # the last batches of a pass are padded
    read = [[row for step in r["steps"][:last] for call in step["calls"] for row in call["rows"]] for r in records]
    if all(len(own) == len(set(own)) for own in read):
        pairs = [(len({*one} & {*other}), min(len(one), len(other))) for one, other in itertools.combinations(read, 2)]
        same, size = max(pairs, default=(0, 0))
        if same >= 4 and 10 * same >= size:
            said = f"two ranks share {same} of {size} samples in {several(last, 'step')}, and neither reads one twice"
            yield Finding(last - 1, "data", "samples of a pass", said, None, *_PASS, fails=False)


def _calls(evidence: Evidence, number: int, steps: list[dict[str, Any]]) -> Iterator[Finding]:
    """Compare in which mode, with which weights and random states ranks call their modules in one step."""
    classes = [module["class"] for module in evidence.records[0]["modules"]]
    before = [record["steps"][number - 1] for record in evidence.records] if number else []
    for calls in zip(*(trained_calls(step) for step in steps), strict=False):
        name = classes[calls[0]["module"]]
        if len({call["module"] for call in calls}) > 1:
            continue
        modes = [
            f"{'train' if c['training'] else 'eval'} mode"
            + (f" but {c['unlike'][0]}" if c["unlike"] else "")
            + (f" and autocast {c['autocast']}" if c["autocast"] else "")
            for c in calls
        ]
        odd = next((rank for rank, mode in enumerate(modes) if mode != modes[0]), None)
        if odd is not None:
            said = f"is called in {modes[odd]}, on rank 0 in {modes[0]}"
            yield Finding(number, "forward", name, said, odd, *_MODE)
        same = before and all(step["after_digests"] == before[0]["after_digests"] for step in before)
        if same and not any(step["places"] for step in steps) and len({call["digest"] for call in calls}) > 1:
            said = "ranks have other weights at the next forward, and had the same after this update"
            yield Finding(number - 1, "replicas", name, said, None, *_CHANGED)
    first = [calls[0] for calls in map(trained_calls, steps) if calls and calls[0]["draws"]]
    states = [tuple(call["random"].get(name, ()) for name in call["draws"]) for call in first]
    if (
        number == 0
        and len(first) == len(evidence.groups) > 1
        and all(call["draws"] == first[0]["draws"] for call in first)
        and all(all(map(same_state, state, states[0])) for state in states)
    ):
        said = "all ranks draw the same random numbers in it: equal dropout masks or noise for other samples"
        yield Finding(number, "forward", classes[first[0]["module"]], said, None, *_NOISE, fails=False)


def _habits(evidence: Evidence, number: int, steps: list[dict[str, Any]]) -> Iterator[Finding]:
    """Find buffers that differ, and gradients that a scaler's factor is still in."""
    for key, buffer in steps[0]["buffers"].items():
        others = [step["buffers"].get(key, buffer) for step in steps]
        if any(other.shape == buffer.shape and not torch.equal(other, buffer) for other in others):
            said = "ranks have different values of this buffer"
            yield Finding(number, "replicas", evidence.named(key), said, None, *_BUFFERS, fails=False)
            break
    scale = steps[0]["scales"][-1] if steps[0]["scales"] else 1.0
    if scale != 1.0 and any(clip["raw"] for clip in steps[0]["clips"]):
        said = f"gradients are clipped while they are {scale:.4g} times those of the loss"
        yield Finding(number, "clipping", "scaled gradients", said, None, *_CLIPPED, fails=False)
    if scale != 1.0 and steps[0]["raw"] and not steps[0]["left"]:  # nor divided by the script itself
        optimizer = evidence.records[0]["optimizers"][steps[0]["optimizer"]]
        yield Finding(
            number, "update", optimizer, f"its gradients are {scale:.4g} times those of the loss", None, *_APPLIED
        )
