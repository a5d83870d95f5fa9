"""Diagnosis of a first divergence in words, by the signatures of known bugs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.training.microbatch.coupling import IN_THE_LOSS, MIXES, REREAD
from shoal.training.observe.trace.traces import StepTrace
from shoal.verification.compare import STRAY, Check, References, parts_within, some
from shoal.verification.reference import Computed

# A fit explains a divergence if its relative residual is less than this.
_LEFT = 0.02
# Description of a model that is the same module at each call of model().
MADE_BEFORE = "a module that was made before model() was called"


@dataclass(frozen=True)
class Diagnosis:
    """First divergence, its place, and its likely causes, the likeliest first."""

    first: Check
    causes: list[str]

    def render(self, others: int) -> str:
        """Render the diagnosis for people. `others`: number of later checks that failed too."""
        check = self.first
        where = f"step {check.step + 1}, {check.phase}: {check.name}"
        lines = [f"first divergence   {where}" + (f", rank {check.rank}" if check.rank is not None else "")]
        if check.said is not None:
            lines.append(f"                   {check.said}")
        else:
            off = f"off by {check.error:.3g}, allowed {check.tolerance:.3g} ({check.ratio:.3g} times)"
            lines.append(f"                   {off}")
        lines += [f"looks like         {cause}" for cause in self.causes or ["nothing that shoal knows"]]
        if others:
            lines.append(f"                   {others} later checks diverge as well, as they would after this one")
        return "\n".join(lines)


def diagnose(
    failed: list[Check], parallel: StepTrace, before: StepTrace, references: References | None, world_size: int
) -> Diagnosis:
    """Return the diagnosis of the first failed check."""
    first = failed[0]
    rules = {
        "data": _data,
        "forward": _forward,
        "loss": _loss,
        "backward": _backward,
        "reduction": _reduction,
        "clipping": _clipping,
        "update": _update,
        "buffers": _buffers,
        "metrics": _metrics,
    }
    if first.said == STRAY:
        causes = [f"replicas drift apart: rank {first.rank} does not do with {first.name} what rank 0 does"]
        return Diagnosis(first, causes)
    if references is None and first.phase not in ("data", "loss", "metrics"):
        return Diagnosis(first, [])
    case = _Case(first, failed, parallel, before, references, world_size)
    return Diagnosis(first, list(rules[first.phase](case)))


@dataclass(frozen=True)
class _Case:
    first: Check
    failed: list[Check]
    parallel: StepTrace
    before: StepTrace
    references: References | None
    world_size: int

    @property
    def base(self) -> Computed:
        assert self.references is not None
        return self.references.ways[0]

    def largest(self, phase: str) -> str:
        """Return the name of the largest diverging tensor of a phase, since a few numbers fit any explanation."""
        names = [c.name for c in self.named(phase) if f"{phase}/{c.name}" in self.parallel.tensors and c.said is None]
        return max(names, key=lambda name: self.parallel.tensors[f"{phase}/{name}"].numel())

    def named(self, phase: str) -> list[Check]:
        return [check for check in self.failed if check.phase == phase]


def _fit(value: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Fit value = c * wanted; return c, and the norm of the residual relative to the norm of `value`."""
    value, wanted = value.double().flatten(), wanted.double().flatten()
    size = float(wanted.dot(wanted))
    factor = float(value.dot(wanted)) / size if size else math.nan
    left = float((value - factor * wanted).norm()) / max(float(value.norm()), 1e-300)
    return factor, left


def _data(case: _Case) -> Iterator[str]:
    said, name = case.first.said or "", case.first.name
    if MADE_BEFORE in said:
        yield (
            "initial values that do not follow from Job(seed): construct the module inside model(), or load or seed "
            "its values in the job file"
        )
    elif name.startswith("initial"):
        yield (
            "model() draws from a generator that the job's seed does not set, or ranks begin with values of their own: "
            "no broadcast, or a seed that contains the rank"
        )
    elif "also computed" in said:
        yield "a sampler without its rank or world size, or padding with samples that are there already"
    elif "by no rank" in said:
        yield "the tail of the batch is dropped: the last samples are trained by nobody"
    elif "instead of" in said:
        sorts = {tuple(sorted(part.ids)) for part in case.parallel.parts}
        wanted = {tuple(sorted(part.ids)) for part in case.base.trace.parts}
        other = "another order than the job's seed and epoch give: a sampler without set_epoch, or seeded by rank"
        yield "the right samples in other grains" if sorts == wanted else other
    else:
        yield "the same sample ids with other content: augmentation drawn per rank or worker, not per sample"
        yield (
            "or from a generator that the dataset or collate function makes itself (np.random.default_rng, "
            "torch.Generator): shoal seeds the global ones for each grain, and no other"
        )


def _forward(case: _Case) -> Iterator[str]:
    call, rank = case.first.name.partition("#")[0], case.first.rank
    ranks = sorted({c.rank for c in case.named("forward") if c.name == case.first.name and c.rank is not None})
    parameters = any(name.startswith(f"{call}.") for name in case.parallel.phase("update"))
    buffers = any(name.startswith(f"{call}.") for name in case.parallel.phase("buffers"))
    if not parameters:
        yield "a module without parameters: randomness by rank or by place in the batch, and not by grain"
        yield "or from a generator that the model makes itself, which shoal does not seed"
        yield "or evaluation mode where training is meant"
    elif buffers:
        yield "batch statistics over other samples than the grain's: those of the rank or of the microbatch"
    if parameters and case.parallel.step > 0:
        yield "a stale or untied copy of a parameter: what the forward uses is not what the last update left"
    elif parameters:
        yield "other parameters than the job's in this module, or randomness that depends on the rank"
    if len(ranks) == 1:
        yield f"only rank {rank} is off"


def _loss(case: _Case) -> Iterator[str]:
    name, said = case.first.name, case.first.said or ""
    if name == "of all grains together":
        _, _, coupled = said.partition(": ")
        if coupled == REREAD:
            yield f"{coupled}: draw from torch's, Python's or numpy's global generators, and count no reads"
            return
        yield "a mean over tokens or samples taken for a sum: return the sum over the valid ones, and their number"
        if coupled == IN_THE_LOSS:
            yield f"{coupled}: for a loss over the whole batch write Job(outputs=...), else Job(fuse=False)"
        elif coupled.startswith(MIXES):
            yield f"{coupled}: a sample's loss depends on the others of its grain; where that is meant: Job(fuse=False)"
        else:
            yield "a loss that compares the samples of a batch; only where that is meant: Job(fuse=False)"
        return
    if name.startswith("weight") or "instead of" in said:
        yield "weights that are not the valid tokens or samples of the grain"
        return
    assert case.references is not None
    for part in case.parallel.parts:
        own = next((parts for way in case.references.ways if (parts := parts_within(way, part.grains))), [])
        wanted = math.fsum(p.total for p in own)
        if case.first.rank == part.rank and name == f"of grains {some(part.grains)}" and wanted:
            yield f"{part.total / wanted:.6g} times the loss of these grains on one process"
    yield "a mean where a sum was meant: the loss of several grains is not the sum of theirs"


def _backward(case: _Case) -> Iterator[str]:
    rank, name = case.first.rank, case.first.name
    assert rank is not None
    mine = case.parallel.gradients.get(rank, {}).get(name)
    wanted = case.base.contributions.get(rank, {}).get(name)
    if mine is None or wanted is None:
        yield f"{name} takes part in the loss on one side only: an untied copy, or a branch that depends on the rank"
        return
    factor, left = _fit(mine, wanted)
    if left < _LEFT:
        yield _factor(factor, case, f"rank {rank}'s own gradient")
    else:
        yield "a backward that does not belong to its forward: another mask, or a stale activation"


def _reduction(case: _Case) -> Iterator[str]:
    if case.first.name in ("weight", "loss"):
        yield "weights or losses that are not summed over all ranks and microbatches"
        return
    if case.first.said is not None:
        yield f"{case.first.name} is left out of the reduction, or a rank without it is not agreed on"
        return
    name = case.largest("reduction")
    mine, wanted = case.parallel.tensors[f"reduction/{name}"], case.base.trace.tensors[f"reduction/{name}"]
    if not bool(torch.isfinite(mine).all()) and bool(torch.isfinite(wanted).all()):
        yield "an overflow in the reduction: summed in a dtype of too few bits, or scaled the wrong way"
        return
    off = float((mine.double() - wanted.double()).norm()) / max(float(wanted.double().norm()), 1e-300)
    if off < 2 * torch.finfo(torch.bfloat16).eps:
        yield "gradients added up or sent in a dtype of fewer bits than the plan's reduce dtype"
        return
    factor, left = _fit(mine, wanted)
    if left < _LEFT:
        yield _factor(factor, case, "the gradient")
        return
    difference = wanted.double() - mine.double()
    for rank, share in case.base.contributions.items():
        if name in share:
            yield from _lacks(difference, share[name], f"the share of rank {rank}", _LEFT)
            if _fit(mine, share[name])[1] < _LEFT:
                yield f"it is rank {rank}'s own gradient: this parameter is not reduced"
    for (rank, grains), gradients in case.base.parts.items():
        if name in gradients:
            what = f"the microbatch of rank {rank} with grains {grains}"
            yield from _lacks(difference, gradients[name], what, 4 * _LEFT)
    shares = case.base.contributions
    weights = {r: math.fsum(p.weight for p in case.base.trace.parts if p.rank == r) for r in shares}
    total = math.fsum(weights.values())
    means = [shares[r][name].double() * (total / weights[r]) for r in shares if name in shares[r] and weights[r]]
    if means and _fit(mine, torch.stack(means).mean(0))[1] < _LEFT / 4 and len(set(weights.values())) > 1:
        yield "a mean of the ranks' means: each rank divides by its own weight, though the weights differ"
    few = len(case.named("reduction"))
    if few < 4:
        yield f"only {few} parameter(s) are off: a shard boundary, a tied copy, or one bucket"
    else:
        yield "a bucket or shard that is sent before it is complete, or an old one that is used again"


def _lacks(difference: Tensor, part: Tensor, what: str, limit: float) -> Iterator[str]:
    for sign, said in ((1.0, "is missing"), (-1.0, "is counted twice")):
        factor, left = _fit(difference * sign, part)
        if left < limit and abs(factor - 1.0) < limit:
            yield f"{what} {said}"


def _factor(factor: float, case: _Case, what: str) -> str:
    """Explain a constant factor by the known quantity of that size."""
    world, scale = case.world_size, case.parallel.factor
    counts = len([p for p in case.parallel.parts if p.rank == 0])
    weight = case.base.trace.weight
    known = {
        float(world): "the world size: summed where it should be averaged",
        1.0 / world: "one over the world size: averaged twice",
        float(counts): "the number of microbatches: not divided by it",
        1.0 / max(1, counts): "one over the number of microbatches: divided by it twice",
        scale: "the loss scale: not taken back",
        1.0 / scale: "one over the loss scale: taken back twice",
        weight: "the weight: a sum where a mean was meant",
        -1.0: "minus one: the sign is wrong",
    }
    for value, words in known.items():
        if value != 1.0 and math.isclose(factor, value, rel_tol=0.02):
            return f"{what} is {factor:.6g} times what it should be, which is {words}"
    if abs(factor) < 1e-9:
        return f"{what} is zero"
    return f"{what} is {factor:.6g} times what it should be: a weight or count of one part used for the whole"


def _clipping(case: _Case) -> Iterator[str]:
    if case.first.name == "global norm":
        norm, wanted = case.parallel.norm, case.base.trace.norm
        if math.isclose(norm, wanted * case.parallel.factor, rel_tol=0.02) and case.parallel.factor != 1.0:
            yield "the norm of gradients that are still multiplied by the loss scale"
        for rank, own in case.base.contributions.items():
            size = math.sqrt(math.fsum(float(g.double().square().sum()) for g in own.values()))
            if math.isclose(norm, size, rel_tol=0.02):
                yield f"the norm of rank {rank}'s own gradient, not of the sum over all ranks"
        yield f"the norm is {norm / wanted if wanted else math.nan:.6g} times that of all parameters, each counted once"
        gone = [
            n
            for n, g in case.base.trace.phase("reduction").items()
            if math.isclose(math.sqrt(max(0.0, wanted**2 - float(g.double().square().sum()))), norm, rel_tol=1e-4)
        ]
        if gone:
            yield f"it leaves out {gone[0]}"
        return
    mine = case.parallel.tensors[f"clipping/{case.first.name}"]
    reduced = case.parallel.tensors[f"reduction/{case.first.name}"]
    factor, left = _fit(mine, reduced)
    expected, base = (case.base.trace.tensors[f"{phase}/{case.first.name}"] for phase in ("clipping", "reduction"))
    if _fit(expected, base)[1] >= _LEFT:
        yield "its elements are not those of the mean gradient, each clipped to clip_value"
    elif left < _LEFT:
        yield f"this gradient is multiplied by {factor:.6g}; the norm asks for {_fit(expected, base)[0]:.6g}"
    else:
        yield "clipped element by element, or by norms of single parameters, not by one global norm"


def _update(case: _Case) -> Iterator[str]:
    name = case.first.name
    if case.first.said is not None:
        yield "ranks do not agree on leaving a step out, or state that should be there is not"
        return
    if name not in case.parallel.parameters:
        mine, wanted = case.parallel.tensors[f"update/{name}"], case.base.trace.tensors.get(f"update/{name}")
        if wanted is not None:
            factor, left = _fit(mine, wanted)
            times = f" ({factor:.6g} times)" if left < _LEFT else ""
            yield f"the optimizer's own state is not what one process has{times}: a stale shard, or a second step"
        return
    old = case.before.tensors[f"update/{name}"].double()
    change = case.parallel.tensors[f"update/{name}"].double() - old
    wanted = case.base.trace.tensors[f"update/{name}"].double() - old
    number = len([c for c in case.named("update") if c.name in case.parallel.parameters])
    if float(change.norm()) == 0.0 and float(wanted.norm()) > 0.0:
        yield f"{name} was not updated at all: not in the optimizer here, or an untied copy was updated instead"
        return
    factor, left = _fit(change, wanted)
    if left < _LEFT:
        yield (
            f"the change is {factor:.6g} times what it should be: another learning rate, as from a schedule that is "
            "stepped once a process or microbatch, or an optimizer that steps more than once"
        )
        return
    decay, left = _fit(change - wanted, old)
    if left < 5 * _LEFT:
        yield f"it differs by {decay:.3g} times the parameter itself: other weight decay (another group's, or coupled)"
        return
    rows = (change - wanted).reshape(len(change), -1).norm(dim=1) if change.ndim else change.reshape(1)
    bad = (rows > 10 * case.first.tolerance / max(1.0, math.sqrt(len(rows)))).nonzero().flatten().tolist()
    if 0 < len(bad) < 0.75 * len(rows):
        yield f"only rows {bad[0]} to {bad[-1]} of {len(rows)} are off: a shard boundary, or padding"
    elif number == 1:
        yield "one parameter alone: a tied copy that is updated by itself, or another group's settings"
    else:
        yield "an optimizer with other settings or other state than one process's"


def _buffers(case: _Case) -> Iterator[str]:
    name = case.first.name
    mine, wanted = case.parallel.tensors[f"buffers/{name}"], case.base.trace.tensors[f"buffers/{name}"]
    if name in case.base.whole_batch:
        yield (
            "its rule gives another value than one forward of the whole batch leaves: declare another one, "
            f'Job(buffers={{"{name}": "sum"}}), say'
        )
        return
    if torch.equal(mine, case.before.tensors[f"buffers/{name}"]):
        yield f"{name} was not updated"
        return
    factor, left = _fit(mine, wanted)
    if left < _LEFT / 10 and abs(factor - 1.0) > _LEFT:
        yield f"{name} is {factor:.6g} times what it should be: updated once a microbatch instead of once a step"
        return
    yield "statistics of one rank's samples, or of the last microbatch, instead of the mean over all grains"


def _metrics(case: _Case) -> Iterator[str]:
    if case.first.name == "samples":
        yield "samples evaluated twice (padding to equal shares) or left out (a dropped tail)"
    else:
        yield "a mean of the ranks' means, or an evaluation in training mode"
