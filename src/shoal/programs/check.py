"""Verdict on the record of a script's first steps, and on its replay in one process.

Phases are in the order of causes: what differs in the data makes everything after it differ. Every finding is a
divergence, or a note where a right script can look the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shoal.programs.replay import distance, part, summed_gradient
from shoal.report.quantities import several

PHASES = (
    *("processes", "data", "initial weights", "forward", "loss", "backward"),
    *("reduction", "clipping", "schedule", "update", "replicas"),
)
# Relative to the norm. Other orders of sums move a gradient by less than the first, 16-bit products by less than the
# second.
TOLERANCE, WIDE_TOLERANCE = 2e-3, 3e-2
# Cause and remedy of each finding.
_STEPS = ("ranks have unequal numbers of batches", "use drop_last=True or a DistributedSampler, which pads")
_SAMPLES = ("the loader has no DistributedSampler, or is not prepared", "give it one, or prepare the loader")
_DRAWN = ("they are drawn from equal seeds: those of another optimizer differ", "add the rank to the seed of the noise")
_SHARED = ("the data is divided by rank twice: a part is never read", "give every rank the whole dataset")
_EPOCH = ("set_epoch is not called", "call sampler.set_epoch(epoch) before each pass")
_ORDER = ("the sampler's seed stays the same", "call set_epoch, or give the sampler a generator that goes on")
_BEGIN = ("nothing broadcasts rank 0's values", "wrap the model (DDP broadcasts), or set one seed before it is made")
_FROZEN = ("each rank makes it from its own seed, or loads another file", "set one seed before it is made, or load one")
_MEANS = ("a mean over each microbatch or rank", "sum the losses, and divide by the tokens of the global batch")
_WEIGHTS = ("microbatches, ranks or another count divide it", "leave it if that is wanted (several losses, a sum)")
_PARTS = ("the seed follows the rank, not its place among data ranks", "follow the data mesh's get_local_rank()")
_UNSUMMED = ("the output of a part is not summed over them", "give RowwiseParallel its own output layout")
_STATE = "the forward depends on more than inputs, weights and random state, such as the number of ranks"
_EARLY = ("the optimizer was made before the model was wrapped, moved or loaded", "make it afterwards")
_NORMS = ("each rank clips by its own norm", "clip by the wrapper's own clip_grad_norm_, after the last backward")
_ERASED = ("zero_grad between microbatches, such as by a validation", "leave it if another model trains through it")
_PENALTY = "a part of the loss from outside of the forward, such as a penalty on weights, or a hook on gradients"
_SILENT = ("no backward of the update synchronizes gradients", "let that of the last microbatch do it")
_ALONE = ("the model is not wrapped, its .module is called, or no_sync includes the update", "call the wrapper (DDP)")
_OWN_NORM = ("each rank clips by the norm of its part", "clip by torch.nn.utils.clip_grad_norm_, which sums it")
_FACTORS = "gradients are summed instead of averaged, or averaged twice"
_UNREDUCED = "gradients are changed between the backward and the optimizer, or some are not reduced"
_RATES = ("a scheduler steps on some ranks, or by a rank's own number", "step it on all ranks, by reduced numbers")
_OUTSIDE = "they are changed outside of the optimizer: clamped, averaged, loaded"
_STATES = "weights are changed outside of the optimizer, or its state differs"
_LENGTH = ("the schedule's length or rate follows the number of processes", "count optimizer steps of the global batch")
_LINEAR = ("the rate is scaled by the number of processes", "leave it if that is wanted for larger batches")
_FACTOR = ("the loss is multiplied by the number of processes", "divide by the samples of the whole batch alone")
_DIVIDED = ("the loss is divided by the number of processes too", "divide by the samples of a process: a mean follows")
_COUNTED = ("the loss is scaled by a count that follows the number of processes", "divide by the samples of a process")
_CLASSES = ("classes are weighed by their numbers in a microbatch", "weigh them by those in the dataset")
_SMALLER = ("a sum over a process's samples, averaged over processes", "divide by its samples, or scale the rate")
_MIXED = ("zero_grad is missing, or comes too early", "set gradients to zero before the first backward of the update")
_CHANGE = ("the script changes gradients itself, which is not checked further", "leave it if that is wanted")
_NEGATIVES = ("the loss compares samples of one rank, which has fewer on more processes", "gather them, with gradients")
_PLACES = ("targets do not begin at the rank's own rows", "add rank * samples to them, or gather own rows first")
_GATHERED = ("if the loss uses them, gradients lack other ranks' parts", "gather by torch.distributed.nn.functional")
_IDLE = ("the optimizer was made without them", "give them to it, or write requires_grad_(False)")
_UNLIKE = ("losses have weights of their own, such as those of mixup", "leave it if that is wanted")
_PARTIAL = ("each microbatch is clipped by itself", "clip once, after the last backward of the update")
_BY_HAND = ("gradients are clipped or scaled by hand, on all ranks alike", "leave it if that is wanted")


@dataclass(frozen=True)
class Finding:
    """One divergence or note. `step` counts from 0; `rank` is None if it is about all of them."""

    step: int
    phase: str
    name: str
    said: str
    rank: int | None = None
    cause: str = ""
    remedy: str = ""
    fails: bool = True


@dataclass
class Coverage:
    """Counts of what was compared, and what was not checked, with the reason."""

    forwards: int = 0
    gradients: int = 0
    updates: int = 0
    losses: int = 0
    samples: int = 0
    exchanging: int = 0  # forwards that no single process can repeat
    unrepeated: int = 0  # updates that no other process can repeat
    unchecked: list[str] = field(default_factory=list)

    def leave_out(self, what: str) -> None:
        """Note once what was not checked."""
        if what not in self.unchecked:
            self.unchecked.append(what)


class Evidence:
    """Records of all ranks, and their replay, None if there is none; what was compared of them."""

    def __init__(self, records: list[dict[str, Any]], replay: dict[str, Any] | None) -> None:
        self.records, self.replayed = records, replay["steps"] if replay is not None else None
        self.coverage = Coverage()
        self.summed = set[int]()  # steps whose gradients are sums over ranks, of losses divided by the whole batch
        self.num_steps = min(len(record["steps"]) for record in records)
        self.order = [
            f"{number}:{name}" for number, module in enumerate(records[0]["modules"]) for name in module["shapes"]
        ]
        # Ranks that compute parts of the same forward, and those whose forwards have other samples.
        self.groups: list[set[int]] = []
        for rank, record in enumerate(records):
            own = {rank}.union(*(module["beside"] for module in record["modules"]))
            touched = [group for group in self.groups if group & own]
            self.groups = [group for group in self.groups if group not in touched] + [own.union(*touched)]
        self._several = len(records[0]["modules"]) > 1
        forwards = [call for record in records for step in record["steps"] for call in step["calls"]]
        wide = any(call["autocast"] or call["dtypes"] for call in forwards)
        self.tolerance = WIDE_TOLERANCE if wide else TOLERANCE
        self.coverage.exchanging = sum(call["exchanges"] for call in forwards)
        if self.coverage.exchanging:
            self.coverage.leave_out("forwards that exchange values between ranks, such as SyncBatchNorm's")
        for record in records:
            for words in record["unseen"]:
                self.coverage.leave_out(words)
            if record["num_unseen"]:
                self.coverage.leave_out(
                    f"what follows step {len(record['steps'])}: the record of a rank has reached its largest size"
                )
            if alone := record["alone"]:
                self.coverage.leave_out(
                    f"the update of {several(len(alone), 'parameter')}, such as {self.named(alone[0])}: an optimizer "
                    "that is none of torch's makes it"
                )
        joins = [record["joins"] for record in records if record["joins"] is not None]
        self.joins, self.num_steps = bool(joins), int(min([self.num_steps, *joins]))
        if self.joins:
            self.coverage.leave_out("steps after one rank has no more samples (Join)")
        for words in replay["failures"] if replay is not None else ():
            self.coverage.leave_out(words)
        if redirected := sum((Counter(record["redirected"]) for record in records), Counter[str]()):
            calls = ", ".join(f"{name} {count}" for name, count in redirected.most_common())
            self.coverage.leave_out(
                f"kernels, streams, memory: --cpu has redirected {redirected.total()} calls ({calls})"
            )

    def count_gradient(self, gradient: Tensor) -> None:
        """Count a gradient that is compared; what is not finite has no values to compare."""
        if torch.isfinite(gradient).all():
            self.coverage.gradients += 1
        else:
            self.coverage.leave_out("gradients that are not finite")

    def named(self, key: str) -> str:
        """Return a parameter's name, with its module's class if the script has several modules."""
        number, _, name = key.partition(":")
        return f"{self.records[0]['modules'][int(number)]['class']}.{name}" if self._several else name

    def steps(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield each step of all ranks."""
        for number in range(self.num_steps):
            yield number, [record["steps"][number] for record in self.records]


def findings_of(evidence: Evidence) -> list[Finding]:
    """Return all findings, the first in time and cause first."""
    checks = (_processes, _data, _initial, _forwards, _gradients, _losses, _schedule, _updates)
    return in_order(finding for check in checks for finding in check(evidence))


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by time and cause, divergences first."""
    return sorted(findings, key=lambda one: (not one.fails, one.step, PHASES.index(one.phase)))


def _processes(evidence: Evidence) -> Iterator[Finding]:
    counts = [len(record["steps"]) + record["num_unseen"] for record in evidence.records]
    if len(set(counts)) > 1 and not evidence.joins:
        few = counts.index(min(counts))
        said = f"ends after {counts[few]} optimizer steps, rank {counts.index(max(counts))} after {max(counts)}"
        yield Finding(min(counts), "processes", "number of steps", said, few, *_STEPS)
    kinds = {tuple(one["class"] for one in record["modules"] if not one["loose"]) for record in evidence.records}
    if len(kinds) > 1:
        yield Finding(0, "processes", "modules", f"ranks call different modules: {sorted(kinds)}")


def _data(evidence: Evidence) -> Iterator[Finding]:
    rows = [
        [[row for call in trained_calls(step) for row in call["rows"]] for step in record["steps"]]
        for record in evidence.records
    ]
    evidence.coverage.samples = sum(len(own) for of_rank in rows for own in of_rank)
    distinct = {tuple(own) for of_rank in rows for own in of_rank[: evidence.num_steps]}
    if len(evidence.records) > 1 and evidence.num_steps > 1 and len(distinct) == 1:
        evidence.coverage.leave_out("samples: the inputs are the same in every step and on every rank")
        return
    shared: dict[int, list[tuple[int, int]]] = {}  # samples that two ranks share, of how many, by step
    for number in range(evidence.num_steps):
        own = [rows[min(group)][number] for group in evidence.groups]
        pairs = [(len(set(a) & set(b)), min(len(a), len(b))) for a, b in itertools.combinations(own, 2) if a and b]
        shared |= {number: pairs} if pairs else {}
    whole = all(any(one == of for one, of in pairs) for pairs in shared.values())
    most: dict[Any, float] = {}  # by optimizer, the largest share of samples that two ranks have in common in a step
    for number, pairs in shared.items():
        optimizer = evidence.records[0]["steps"][number]["optimizer"]
        most[optimizer] = max(most.get(optimizer, 0.0), *(one / of for one, of in pairs))
    for number, pairs in shared.items():
        optimizer = evidence.records[0]["steps"][number]["optimizer"]
        others = [share for other, share in most.items() if other != optimizer]
        cause = _DRAWN if any(share < 0.5 for share in others) else _SAMPLES
        same, size = max(pairs, key=lambda pair: pair[0] / pair[1])
        if 2 * same < size:
            continue
        said = f"train on the same {size} samples" if same == size else f"share {same} samples of {size}"
        said = f"{'all ranks' if all(one == of for one, of in pairs) else 'two ranks'} {said}"
        fails = same == size and (size > 3 or whole) and cause is _SAMPLES  # chance makes a few samples equal
        yield Finding(number, "data", "samples", said, None, *cause, fails=fails)
        break
    loaders = [record["loaders"][0] for record in evidence.records if record["loaders"]]
    if len({one.get("subset") for one in loaders}) > 1 and all(one["shares"] > 1 for one in loaders):
        said = f"ranks have parts of the data, and the loader divides each of them by {loaders[0]['shares']} once more"
        yield Finding(loaders[0]["step"], "data", "dataset", said, None, *_SHARED)
    yield from _epochs(evidence, rows)


def trained_calls(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the forwards of a step that a backward has followed."""
    return [call for call in step["calls"] if call["passes"] or not call["outputs"]]


def _epochs(evidence: Evidence, rows: list[list[list[str]]]) -> Iterator[Finding]:
    """Find orders that repeat from one pass over the data to the next."""
    record, last = evidence.records[0], evidence.num_steps

    def repeats(first: int, second: int) -> bool:
        length = min(second - first, last - second)
        one, other = rows[0][first : first + length], rows[0][second : second + length]
        return length > 0 and one == other and len({row for own in one for row in own}) > 2

    passes: dict[int, list[dict[str, Any]]] = {}
    for sampler in record["samplers"]:
        passes.setdefault(sampler["sampler"], []).append(sampler)
    shuffled = [pair for own in passes.values() for pair in itertools.pairwise(own) if pair[0]["shuffle"]]
    for earlier, later in shuffled:
        if later["epoch"] == earlier["epoch"] and repeats(earlier["step"], later["step"]):
            said = f"a second pass has the order of the first: the sampler's epoch is {later['epoch']} again"
            yield Finding(later["step"], "data", "order of samples", said, None, *_EPOCH)
            return
    loaders = [one for one in record["loaders"] if one["step"] < last]
    starts = sorted({one["step"] for one in loaders})
    if all("Sequential" in one["sampler"] for one in loaders):
        return
    for first, second in itertools.pairwise(starts):
        if repeats(first, second):
            said = "a second pass over the data has the order of the first"
            yield Finding(second, "data", "order of samples", said, None, *_ORDER)
            return
    if len(starts) < 2:
        evidence.coverage.leave_out("the order of a second pass over the data: --steps ends before it begins")


def _initial(evidence: Evidence) -> Iterator[Finding]:
    first = [record["steps"][0] for record in evidence.records if record["steps"]]
    if len(first) < len(evidence.records) or not all(step["calls"] for step in first):
        return
    unlike = unlike_parts(first, [step["calls"][0]["weights"] for step in first])
    if unlike:
        (key, rank), said = unlike[0], f"ranks begin with different weights; {len(unlike)} parameters"
        yield Finding(0, "initial weights", evidence.named(key), said, rank, *_BEGIN)
    counts = [Counter(one["class"] for one in record["untrained"]) for record in evidence.records]
    for class_name in [name for name in counts[0] if all(count[name] == 1 for count in counts)]:
        models = [next(one for one in r["untrained"] if one["class"] == class_name) for r in evidence.records]
        if len({(one["step"], *one["weights"]) for one in models}) > 1:
            continue
        for name in models[0]["weights"]:
            own = [one["weights"][name].rpartition(" ") for one in models]
            odd = [rank for rank, one in enumerate(own) if any(one[0] == o[0] and one[2] != o[2] for o in own[:rank])]
            if odd:
                said = "ranks call this model with different weights, and no optimizer trains it"
                about = (models[0]["step"], "initial weights", f"{class_name}.{name}", said, odd[0])
                yield Finding(*about, *_FROZEN, fails=False)  # networks that augment inputs may be random on purpose
                break


def unlike_parts(steps: list[dict[str, Any]], digests: list[dict[str, str]]) -> list[tuple[str, int]]:
    """Return the parameters of which two ranks have different values of the same part, and the second rank."""
    unlike = []
    for key in digests[0]:
        first: dict[str, str | None] = {}
        for rank, own in enumerate(digests):
            value = own.get(key)
            if first.setdefault(str(steps[rank]["places"].get(key)), value) != value:
                unlike.append((key, rank))
                break
    return unlike


def _losses(evidence: Evidence) -> Iterator[Finding]:
    """Compare what each counted element (token, sample) weighs in the update."""
    ranks = len(evidence.records)
    for number, steps in evidence.steps():
        by_place: dict[tuple[int, str], list[tuple[float, int]]] = {}
        classes: dict[tuple[int, str], set[str]] = {}
        for step in steps:
            counts: Counter[int] = Counter()
            scale = scale_of(step)
            for loss in step["losses"]:
                if loss["gradient"] is None or not loss["count"]:
                    continue
                place = counts[loss["call"]]
                counts[loss["call"]] += 1
                weight = _total(loss) / scale / loss["count"]
                classes.setdefault((place, loss["function"]), set()).add(loss["classes"])
                by_place.setdefault((place, loss["function"]), []).append((weight, loss["count"]))
        if gathered := {name for step in steps for name in step["gathered"]}:
            said = f"{', '.join(sorted(gathered))} brings other ranks' values of a forward without their gradient"
            yield Finding(number, "loss", "gathered values", said, None, *_GATHERED, fails=False)
        pairs = [[(*own["pairs"], own["count"]) for own in step["losses"] if own["pairs"]] for step in steps]
        if len(evidence.groups) == ranks > 1 and all(pairs) and len({own[0][0] for own in pairs}) == 1:
            begin, columns, count = pairs[0][0]
            if columns in (count, count * ranks):
                said = f"on all ranks, row n of {count} has the target n + {begin} of {columns}"
                cause = _NEGATIVES if columns == count else _PLACES
                yield Finding(number, "loss", "targets", said, None, *cause, fails=False)
        for (_, function), digests in classes.items():
            if len(digests) > 1:
                said = f"{len(digests)} forwards of one update weigh the classes differently"
                yield Finding(number, "loss", f"weight of {function}", said, None, *_CLASSES, fails=False)
        parts_of = 1 if number in evidence.summed else ranks
        totals = {place: sum(weight * count for weight, count in own) / parts_of for place, own in by_place.items()}
        for (place, function), weights in by_place.items():
            evidence.coverage.losses += len(weights)
            each = [abs(weight) for weight, _ in weights]
            least, most = min(each), max(each)
            if least > 0.0 and most / least > 1.0 + 5 * evidence.tolerance:
                counted, cause, fails = [count for _, count in weights], _UNLIKE, False
                unlike = f"weigh up to {most / least:.2f} times as much as others"
                said = f"losses of {counted[0]:g} elements each {unlike}"
                if len(set(counted)) > 1:
                    cause, fails = _MEANS, not any(loss["weighted"] for step in steps for loss in step["losses"])
                    said = f"elements {unlike} in one update: its {len(weights)} microbatches of {_listed(counted)} "
                    said += "elements are averaged each by itself"
                yield Finding(number, "loss", function, said, None, *cause, fails=fails)
                continue
            total, whole = totals[place, function], [*totals.values(), sum(totals.values())]
            own = [one for one in steps[0]["losses"] if one["function"] == function and one["reduction"] != "mean"]
            whole += [total * one["rows"] / one["count"] for one in own if one["count"]]  # a sum over each row
            is_close = any(math.isclose(one, 1.0, rel_tol=5 * evidence.tolerance) for one in whole)
            if not is_close and function != "kl_div":  # which is multiplied by the square of a temperature
                said = f"the weights of all elements sum to {total:.4g}, not 1"
                yield Finding(number, "loss", function, said, None, *_WEIGHTS, fails=False)


def _forwards(evidence: Evidence) -> Iterator[Finding]:
    if evidence.replayed is None:
        evidence.coverage.leave_out("forwards, sharded gradients and updates: no replay in one process")
        return
    left_out = dict[str, int]()  # the first step of each reason
    for number, steps in evidence.steps():
        result = evidence.replayed[number]
        for words in result["left_out"]:
            if words not in left_out:
                left_out[words] = number + 1
                evidence.coverage.leave_out(f"forwards from step {number + 1} on: {words}")
        for rank, step in enumerate(steps):
            by_call = {one["call"]: one["outputs"] for one in result["outputs"][rank]}
            for call in step["calls"]:
                replayed = by_call.get(call["number"])
                if replayed is None:
                    continue
                beside = [steps[r]["calls"] for g in evidence.groups if rank in g for r in g]
                peers = [calls[call["number"]] for calls in beside if call["number"] < len(calls)]
                apart = any(peer["rows"] != call["rows"] for peer in peers)
                evidence.coverage.forwards += bool(call["outputs"])
                if not call["outputs"]:
                    evidence.coverage.leave_out("forwards in whose results no tensor was found")
                for place, (mine, other) in enumerate(zip(call["outputs"], replayed, strict=False)):
                    error = distance(mine["values"], other["values"])
                    if error <= evidence.tolerance:
                        continue
                    if apart:
                        if all(distance(p["outputs"][place]["values"], mine["values"]) == 0.0 for p in peers):
                            group = sorted(r for g in evidence.groups if rank in g for r in g)
                            said = f"ranks {_listed(group)} compute parts of one forward, and have different samples"
                            yield Finding(number, "data", "samples", said, rank, *_PARTS)
                        evidence.coverage.forwards -= 1
                        evidence.coverage.leave_out("forwards of which ranks have other parts of the input")
                        break
                    name = evidence.records[0]["modules"][call["module"]]["class"]
                    said = f"its output is {error:.2g} of its size from what one process computes of the same "
                    yield Finding(number, "forward", name, f"{said}inputs and weights", rank, _STATE)
                    break


def _gradients(evidence: Evidence) -> Iterator[Finding]:
    scaled: list[tuple[float, Finding]] = []  # steps whose gradients are all a factor times the mean
    for number, steps in evidence.steps():
        replayed = evidence.replayed[number]["local"] if evidence.replayed is not None else {}
        if number == 0 and any(step["strange"] for step in steps):
            used = sum(len(group["names"]) for group in steps[0]["groups"])
            strange = steps[0]["strange"]
            name = evidence.records[0]["optimizers"][steps[0]["optimizer"]]
            said = f"{strange} of its {strange + used} tensors are in no module that the script calls"
            # Copies of parameters, such as those in float32, from which the script sets the module's own.
            copies = any(record["alone"] for record in evidence.records)
            fails = (used == 0 or strange > used) and not copies
            yield Finding(number, "update", name, said, None, *_EARLY, fails=fails)
        idle = [key for key in evidence.order if key in evidence.records[0]["idle"]]
        if number == 0 and idle and not any(step["strange"] for step in steps):
            said = (
                f"{several(len(idle), 'parameter')} of {len(evidence.order)} get gradients, and no optimizer has them"
            )
            yield Finding(number, "update", evidence.named(idle[0]), said, None, *_IDLE, fails=False)
        for clips in zip(*(step["clips"] for step in steps), strict=False):
            norms = [clip["norm"] for clip in clips if clip["norm"] is not None]
            if norms and max(norms) > clips[0]["limit"] and max(norms) > (1 + 10 * evidence.tolerance) * min(norms):
                said = f"ranks clip by {_listed(norms)}"
                yield Finding(number, "clipping", "norm of all gradients", said, None, *_NORMS)
                break
        last = {key: own[-1] for key, own in steps[0]["passes"].items() if own}
        by_clip = [
            (clip["backwards"], key) for clip in steps[0]["clips"] if "backwards" in clip for key in clip["keys"]
        ]
        if any(then < last.get(key, 0) for then, key in by_clip):
            said = "gradients are clipped, and a later backward of the same update adds to them"
            yield Finding(number, "clipping", "accumulated gradients", said, None, *_PARTIAL, fails=False)
        for rank, step in enumerate(steps):
            erased = [key for key in step["erased"] if key in step["gradients"]]
            if erased:
                many = f"; {len(set(erased))} parameters" if len(set(erased)) > 1 else ""
                said = f"a gradient is set to zero before an optimizer has got it{many}"
                yield Finding(number, "backward", evidence.named(erased[0]), said, rank, *_ERASED, fails=False)
                break
        began, passes = steps[0]["began"], steps[0]["passes"].values()
        carried = number and sum(key in steps[0]["gradients"] for key in steps[0]["carried"])
        if mixed := carried or sum(bool(own) and own[0] <= began < own[-1] for own in passes):
            said = f"the gradients of {several(mixed, 'parameter')} are from before the last update and from after it"
            name = evidence.records[0]["optimizers"][steps[0]["optimizer"]]
            yield Finding(number, "backward", name, said, None, *_MIXED, fails=False)
        yield from _backward(evidence, number, steps, replayed)
        yield from _reduction(evidence, number, steps, replayed, scaled)
    # A mistaken mean is a whole number of times too large or too small.
    times = [factor for factor, _ in scaled]
    by_hand = max(times, default=2.0) < 1.0 and any(abs(1.0 / own - round(1.0 / own)) > 0.02 for own in times)
    for _, one in scaled:
        yield replace(one, phase="clipping", cause=_BY_HAND[0], remedy=_BY_HAND[1], fails=False) if by_hand else one


def _backward(
    evidence: Evidence, number: int, steps: list[dict[str, Any]], replayed: dict[int, Any]
) -> Iterator[Finding]:
    """Compare each rank's own gradients with those of the replay."""
    is_reported = False
    for rank, step in enumerate(steps):
        for key in reversed(evidence.order):  # what is wrong in one layer is wrong in those before it
            mine, other = step["local"].get(key), replayed.get(rank, {}).get(key)
            if mine is None or other is None:
                continue
            evidence.count_gradient(mine)
            error = distance(mine, other)
            if error > evidence.tolerance and not is_reported:
                is_reported = True
                said = f"this rank's own gradient is {error:.2g} of its size from the gradient of its outputs"
                yield Finding(number, "backward", evidence.named(key), said, rank, _PENALTY, fails=False)


def _unlike_mean(
    evidence: Evidence, number: int, steps: list[dict[str, Any]], replayed: dict[int, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the parameters of which an optimizer gets another gradient than the mean over ranks of their own."""
    ranks, scale = len(steps), scale_of(steps[0])
    unseen: list[str] = []
    for key in evidence.order:
        have = [summed_gradient(steps, rank, key) for rank in range(ranks)]
        if all(g is None for g in have):
            continue
        places = [step["places"].get(key) for step in steps]
        own = [step["local"].get(key) for step in steps]
        if any(place is not None for place in places) or any(g is None for g in own):
            own = [replayed.get(rank, {}).get(key, g) for rank, g in enumerate(own)]
        if all(g is None for g in own) or (any(g is None for g in own) and any(places)):
            unseen.append(evidence.named(key))
            continue
        zero = torch.zeros_like(next(g for g in own if g is not None))
        own = [zero if g is None else g for g in own]  # a rank whose samples do not use the parameter
        mean = torch.stack([_of_group(evidence, group, steps, own) for group in evidence.groups]).mean(0) / scale
        failure: dict[str, Any] = {"key": key, "worst": 0.0, "apart": 0.0, "ratios": [], "limits": [], "by_hand": True}
        first: dict[str, Tensor] = {}
        for rank in range(ranks):
            mine = have[rank]
            if mine is None:
                continue
            evidence.count_gradient(mine)
            carried = summed_gradient(steps, rank, key, "carried")  # where the script sets no gradient to zero
            whole = part(mean, places[rank]) + (0.0 if carried is None else carried.double() / scale)
            expected = _clipped(whole, steps[rank], key)
            got = mine.double() / (1.0 if steps[rank]["unscaled"] or scale == 1.0 else scale)
            error = distance(got, expected)
            if evidence.tolerance > TOLERANCE:  # sums in 16 bits round what the ranks have, which may cancel
                size = sum(part(one, places[rank]).double().norm().item() for one in own) / ranks / scale
                size *= expected.norm().item() / max(whole.norm().item(), 1e-30)
                error = min(error, (got - expected).norm().item() / max(size, 1e-30))
            failure["worst"] = max(failure["worst"], error)
            if error > evidence.tolerance:
                limit = got.abs().max().item()
                clamped = distance(got, expected.clamp(-limit, limit)) <= evidence.tolerance
                failure["limits"].append(limit if clamped else math.inf)
            ratio = _ratio(got, expected)
            failure["ratios"].append(ratio)
            if math.isfinite(ratio):
                failure["apart"] = max(failure["apart"], distance(got, ratio * expected))
            # Changed by the script itself: the backward has left the mean, and ranks have equal values afterwards.
            left = summed_gradient(steps, rank, key, "left")
            was = [] if left is None else [left.double() / by for by in (1.0, scale, ranks, scale * ranks)]
            is_mean = any(distance(one, of) <= evidence.tolerance for one in was for of in (whole, expected))
            alike = distance(first.setdefault(str(places[rank]), got), got) <= evidence.tolerance
            failure["by_hand"] &= (is_mean or bool(evidence.records[rank]["hooks"])) and alike
        if failure["worst"] > evidence.tolerance:
            yield failure
    if unseen:
        many = f" and {len(unseen) - 1} other parameters" if len(unseen) > 1 else ""
        evidence.coverage.leave_out(f"the reduction of {unseen[0]}{many}: its local gradients were not seen")


def _reduction(
    evidence: Evidence,
    number: int,
    steps: list[dict[str, Any]],
    replayed: dict[int, Any],
    of_factor: list[tuple[float, Finding]],
) -> Iterator[Finding]:
    """Say how the gradients that the optimizer gets differ from the mean over ranks of their own."""
    ranks = len(steps)
    silent = sum(any(own.get(key) is not None for own in replayed.values()) for key in evidence.order)
    if silent and not any(step["gradients"] or step["strange"] for step in steps):
        said = f"the optimizer gets no gradient, though the backward makes {silent}"
        yield Finding(number, "reduction", evidence.records[0]["modules"][0]["class"], said, None, *_SILENT)
    failed = list(_unlike_mean(evidence, number, steps, replayed))
    by_hand = all(one["by_hand"] for one in failed)
    failed = failed if by_hand else [one for one in failed if not one["by_hand"]]
    if not failed:
        return
    key, worst = failed[0]["key"], failed[0]["worst"]
    own = [step["local"].get(key) for step in steps]
    have = [step["gradients"].get(key) for step in steps]
    name = evidence.named(key)
    many = f"; {len(failed)} parameters" if len(failed) > 1 else ""
    if all(g is not None for g in (*own, *have)) and all(
        distance(h.double(), _clipped(o.double() / scale_of(step), step, key)) <= evidence.tolerance
        for h, o, step in zip(have, own, steps, strict=True)
    ):
        beside = sorted(next((group for group in evidence.groups if len(group) > 1), ()))
        rows = {str([call["rows"] for call in steps[rank]["calls"]]) for rank in beside}
        parts = [own[rank].double() for rank in beside]
        if any(one.shape != parts[0].shape or distance(one, parts[0]) > evidence.tolerance for one in parts[1:]):
            model = evidence.records[0]["modules"][int(key.partition(":")[0])]["class"]
            said = f"ranks {_listed(beside)} compute parts of one forward, and have different "
            phase, what = ("data", "samples") if len(rows) > 1 else ("forward", "gradients of one parameter")
            cause = _PARTS if len(rows) > 1 else _UNSUMMED
            yield Finding(number, phase, "samples" if len(rows) > 1 else model, said + what, None, *cause)
            return
        said = f"each rank's optimizer gets the rank's own gradient{many}"
        yield Finding(number, "reduction", name, said, None, *_ALONE)
        return
    scaled = all(one["apart"] <= 5 * evidence.tolerance for one in failed)  # each is a multiple of the mean
    by_rank = [[one["ratios"][rank] for one in failed if len(one["ratios"]) > rank] for rank in range(ranks)]
    by_rank = [[one for one in r if math.isfinite(one)] for r in by_rank]
    constant = scaled and all(r and min(r) > 0.0 and max(r) / min(r) < 1.0 + 10 * evidence.tolerance for r in by_rank)
    typical = [sum(r) / len(r) if r else math.nan for r in by_rank]
    if constant and max(typical) / min(typical) > 1.0 + evidence.tolerance:
        shown = " and ".join(f"{t:.4g}" for t in typical)
        said = f"ranks' parts are the mean gradient times {shown}: one factor for each rank{many}"
        yield Finding(number, "clipping", name, said, None, *_OWN_NORM)
        return
    times = sum(typical) / ranks
    counts = {ranks, len(steps[0]["calls"]), ranks * len(steps[0]["calls"])} - {0, 1}
    if constant and not (by_hand and all(abs(max(times, 1.0 / times) / n - 1.0) > 0.02 for n in counts)):
        loss = _total_weight(evidence, steps)
        if loss is not None and math.isclose(loss * times, 1.0, rel_tol=5 * evidence.tolerance):
            evidence.summed.add(number)  # the loss is divided by the whole batch
            return
        said = f"the gradient is {times:.4g} times the mean over {ranks} ranks{many}"
        remedy = f"divide by {ranks} once, or let the wrapper do it"
        of_factor.append((times, Finding(number, "reduction", name, said, None, _FACTORS, remedy)))
        return
    limits = [limit for one in failed for limit in one["limits"]]
    if max(limits) < math.inf and max(limits) - min(limits) <= 1e-5 * max(limits):
        said = f"no element of the gradient is above {max(limits):.4g}, and the mean's are{many}"
        yield Finding(number, "clipping", name, said, None, *_BY_HAND, fails=False)
        return
    said = f"the gradient is {worst:.2g} of its size from the mean over {ranks} ranks{many}"
    if by_hand:
        said = f"the gradient is {times:.4g} times the mean over {ranks} ranks{many}" if constant else said
        through = ", ".join(sorted({hook for record in evidence.records for hook in record["hooks"]}))
        cause = _CHANGE if not through else (f"gradients go through the script's own hook of DDP: {through}", "")
        yield Finding(number, "clipping", name, f"{said}, on all of them alike", None, *cause, fails=False)
        return
    yield Finding(number, "reduction", name, said, None, _UNREDUCED)


def _of_group(evidence: Evidence, group: set[int], steps: list[dict[str, Any]], own: list[Any]) -> Tensor:
    """Return the gradient of a group of ranks: the mean if they have the same samples, the sum if each has its own."""
    each = torch.stack([own[rank].double() for rank in group])
    rows = {str([call["rows"] for call in steps[rank]["calls"]]) for rank in group}
    return each.mean(0) if len(rows) == 1 else each.sum(0)


def _total_weight(evidence: Evidence, steps: list[dict[str, Any]]) -> float | None:
    """Return the sum of what all elements weigh, divided by the number of ranks; None if no loss was seen."""
    each = [_total(loss) for step in steps for loss in step["losses"] if loss["gradient"] is not None]
    return sum(each) / scale_of(steps[0]) / len(steps) if each else None


def _total(loss: dict[str, Any]) -> float:
    """Return the sum of what a loss's elements weigh. The gradient of a sum is what each of them weighs."""
    return float(loss["gradient"]) * (loss["count"] if loss["reduction"] == "sum" else 1.0)


def scale_of(step: dict[str, Any]) -> float:
    """Return the factor by which a loss scaler multiplied the losses of a step."""
    return float(step["scales"][-1]) if step["scales"] else 1.0


def _schedule(evidence: Evidence) -> Iterator[Finding]:
    for number, steps in evidence.steps():
        for place in range(min(len(step["groups"]) for step in steps)):
            values = [step["groups"][place]["values"] for step in steps]
            name = next((n for n in ("lr", *values[0]) if any(own.get(n) != values[0].get(n) for own in values)), None)
            if name is not None:
                had = [own.get(name) for own in values]
                name = f"{'learning rate' if name == 'lr' else name} of group {place}"
                yield Finding(number, "schedule", name, f"ranks have {_listed(had)}", None, *_RATES)
                return


def _updates(evidence: Evidence) -> Iterator[Finding]:
    values: dict[str, Tensor] = {}  # of whole parameters, the newest recorded ones
    for number, steps in evidence.steps():
        for key, rank in unlike_parts(steps, [step["after_digests"] for step in steps])[:1]:
            said = "ranks have different weights after the update"
            yield Finding(number, "replicas", evidence.named(key), said, rank)
        changed = [
            key for key in steps[0]["weights"] if number and key in evidence.records[0]["steps"][number - 1]["after"]
        ]
        if changed:
            said = f"weights are not those after the last update; {len(changed)} parameters"
            yield Finding(number, "update", evidence.named(changed[0]), said, 0, _OUTSIDE, fails=False)
        updated = evidence.replayed[number]["updated"] if evidence.replayed is not None else None
        if updated is None and evidence.replayed is not None:
            why = evidence.replayed[number]["unrepeated"]
            evidence.coverage.unrepeated += bool(why)
            why = why or "one process of the script has none like it"
            evidence.coverage.leave_out(f"updates by the script's own optimizer: {why}")
        _store(values, steps, "weights")
        for key, mine in (updated or {}).items():
            before = values.get(key)
            for rank, step in enumerate(steps):
                place = step["places"].get(key)
                after = step["after"].get(key)
                if after is None and before is not None and (rank == 0 or place is not None):
                    after = part(before, place)  # the update did not change it
                if after is None:
                    continue
                evidence.coverage.updates += 1
                moved = after.double() - part(before, place).double() if before is not None else after.double()
                expected = part(mine, place).double() - (part(before, place).double() if before is not None else 0.0)
                error = distance(moved, expected)
                tiny = (moved - expected).norm() <= 1e-6 * after.double().norm()
                if error > evidence.tolerance and not tiny:
                    said = f"the change of its weights is {error:.2g} of its size from what the optimizer makes of "
                    said += "the same gradient"
                    yield Finding(number, "update", evidence.named(key), said, rank, _STATES)
                    return
        _store(values, steps, "after")


def _store(values: dict[str, Tensor], steps: list[dict[str, Any]], name: str) -> None:
    """Set the values of whole parameters from what all ranks recorded as `name` in a step."""
    for step in steps:
        for key, value in step[name].items():
            place = step["places"].get(key)
            if place is None:
                values[key] = value
            else:
                whole = values[key].clone() if key in values else torch.zeros(place["shape"])
                part(whole, place).copy_(value)
                values[key] = whole


def _bases(record: dict[str, Any], number: int) -> list[float | None]:
    """Return each group's rate at the beginning of its schedule, or None if it is not known: the rate may warm up."""
    groups = record["steps"][number]["groups"]
    rates = [[group["values"].get("lr") for group in step["groups"]] for step in record["steps"]]
    constant = all(of_step == rates[0] for of_step in rates)
    return [group["values"].get("initial_lr", group["values"].get("lr") if constant else None) for group in groups]


def compare_rerun(evidence: Evidence, record: dict[str, Any]) -> list[Finding]:
    """Compare rates and gradients with those of one process with the global batch, where its samples agree."""
    findings: list[Finding] = []
    compared, highest = 0, 0.0
    for number, steps in evidence.steps():
        if number >= len(record["steps"]):
            break
        single = record["steps"][number]
        rows = Counter(row for step in steps for call in step["calls"] for row in call["rows"])
        other_rows = Counter(row for call in single["calls"] for row in call["rows"])
        agree = rows == other_rows
        findings += _smaller(evidence, number, steps, single, findings)
        if not agree and (rows.total() != other_rows.total() or record["by_metric"]):
            continue
        compared += 1
        rates = [group["values"].get("lr") for group in steps[0]["groups"]]
        other = [group["values"].get("lr") for group in single["groups"]]
        highest = max([highest, *(rate for rate in (*rates, *other) if isinstance(rate, float))])
        # Where the samples differ, the numbers of steps may differ by rounding.
        slack = 1e-12 if agree else 0.3 * highest
        pairs = [(float(a or 0.0), float(b or 0.0)) for a, b in zip(rates, other, strict=False)]
        close = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=slack) for a, b in pairs)
        if len(rates) == len(other) and not close:
            said = f"is {_listed(rates)}; one process with {'the same' if agree else 'as many'} samples has "
            bases = zip(_bases(evidence.records[0], number), _bases(record, number), strict=False)
            times = {round(a / b, 6) if a and b else math.inf for a, b in [*pairs, *bases] if a != b}
            linear = times <= {ranks := len(steps)} or times <= {round(ranks**0.5, 6)}
            cause = _LINEAR if linear else _LENGTH
            findings.append(
                Finding(number, "schedule", "learning rate", said + _listed(other), None, *cause, not linear)
            )
        if number or not agree:
            continue
        ratios = []
        for key in evidence.order:
            mine, alone = steps[0]["gradients"].get(key), single["gradients"].get(key)
            if mine is not None and alone is not None and mine.shape == alone.shape:
                mine, alone = mine.double() / _norm_factor(steps[0], key), alone.double() / _norm_factor(single, key)
                if alone.norm() > 1e-8:
                    ratios.append((_ratio(mine, alone), distance(mine, alone)))
        factors = [ratio for ratio, _ in ratios]
        if factors and max(e for _, e in ratios) > 5 * evidence.tolerance and min(factors) > 0.0:
            mean = sum(factors) / len(factors)
            if max(factors) / min(factors) < 1.0 + 10 * evidence.tolerance and abs(mean - 1.0) > 0.02:
                said = f"is {mean:.4g} times that of one process with the same samples"
                whole, part_of = (abs(by * mean - 1.0) <= 0.02 for by in (1 / len(steps), len(steps)))
                cause = _FACTOR if whole else _DIVIDED if part_of else _COUNTED
                findings.append(Finding(number, "loss", "gradient", said, None, *cause))
    if not compared:
        evidence.coverage.leave_out(
            "the schedule's length: one process with the global batch reads other numbers of samples"
        )
    return findings


def _smaller(
    evidence: Evidence, number: int, steps: list[dict[str, Any]], single: dict[str, Any], before: list[Finding]
) -> list[Finding]:
    """Compare what all elements weigh together with one process that has as many of them."""
    losses, other = [loss for step in steps for loss in step["losses"]], single["losses"]
    same = sum(loss["count"] for loss in losses) == sum(loss["count"] for loss in other)
    mine, alone, ranks = _total_weight(evidence, steps), _total_weight(evidence, [single]), len(steps)
    if before or not same or not mine or not alone or any(loss["weighted"] for loss in (*losses, *other)):
        return []
    times = mine / alone
    if not any(math.isclose(times, of, rel_tol=5 * evidence.tolerance) for of in (ranks, 1.0 / ranks)):
        return []
    said = f"{times:.4g} times that of as many elements in one process"
    return [Finding(number, "loss", "weight of all elements", said, None, *_SMALLER, fails=False)]


def _ratio(one: Tensor, other: Tensor) -> float:
    """Return the factor by which `other` comes closest to `one`."""
    below = (other * other).sum().item()
    return (one * other).sum().item() / below if below > 0.0 else math.nan


def _clipped(gradient: Tensor, step: dict[str, Any], key: str) -> Tensor:
    """Return a gradient as the recorded calls of torch's clipping change it."""
    for clip in step["clips"]:
        if key in clip["keys"] and clip["norm"] is not None:
            factor = clip["limit"] / (clip["norm"] + 1e-6)
            gradient = gradient * (1.0 if factor > 1.0 else factor)  # a norm that is no number leaves none
        elif key in clip["keys"] and clip["kind"] == "value":
            gradient = gradient.clamp(-clip["limit"], clip["limit"])
    return gradient


def _norm_factor(step: dict[str, Any], key: str) -> float:
    return float(_clipped(torch.ones((), dtype=torch.float64), {"clips": [c for c in step["clips"] if c["norm"]]}, key))


def _listed(values: Iterable[Any]) -> str:
    shown = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in values]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
