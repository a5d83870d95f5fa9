"""Numerical comparison of a parallel step with reference steps on one process.

For each tensor x of the parallel run, let r_i be the same tensor of the reference variants in the plan's precision, and
t the tensor from float64. The requirement is

    min_i |x - r_i|  <=  MULTIPLE * max_i |r_i - r_0|  +  PRECISION_SHARE * max_i |r_i - t|  +  UNITS * u * scale

in Euclidean norms: docs/verify.md derives the terms and numbers. Integers (sample ids, weights, which parameters have a
gradient) have to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.numerics.precision import numbers
from shoal.training.observe.trace.traces import PHASES, MicrobatchTrace, StepTrace, identical
from shoal.verification.reference import Computed

# The spread comes from four variants. The chance that a fifth is this many times as far is below 10^-4 for one number
# (four normal draws all below a MULTIPLE-th), and vanishes for a tensor.
MULTIPLE = 8.0
# Two computations that round independently are sqrt(2) apart if each is one away from the true value.
PRECISION_SHARE = 2.0
# Steps after the first are computed in one variant. They inherit the relative rounding of each tensor in the first
# step, times this factor: rounding relative to size hardly changes from one step to the next.
CARRIED = 2.0
# Units in the last place of float32, relative to the sum of sizes, in case the variants agree to the last bit.
UNITS = 16.0
UNIT = 2.0**-24
# Message about a tensor that differs between two ranks.
STRAY = "is not what the first rank that holds it has"

Of = Callable[[Computed], Tensor | None]  # returns a tensor of a reference, or None


@dataclass(frozen=True)
class Check:
    """Error and tolerance of one tensor in one step. `rank`: the rank that the check is about, if there is one."""

    step: int
    phase: str
    name: str
    rank: int | None
    error: float
    tolerance: float
    said: str | None = None  # a message instead of numbers, if the divergence has no size

    @property
    def ratio(self) -> float:
        """Error over tolerance; a ratio above one is a divergence."""
        if self.said is not None:
            return math.inf
        if self.error == 0.0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0.0 and math.isfinite(self.error) else math.inf

    @property
    def passed(self) -> bool:
        """True if the tensor is within its tolerance."""
        return self.ratio <= 1.0


@dataclass(frozen=True)
class References:
    """Reference steps on one process: `ways` in the plan's precision, `exact` in float64 if that was computed.

    `complete`: whether `ways` has all variants. `layers`: relative distance of single layers from float64, if the whole
    model was not computed in it. `updated`: the optimizer step alone, from the parallel run's own clipped gradients.
    Earlier checks cover these gradients, so no order of sums remains in `updated`. `joined`: the samples of all ranks
    share their batch norms, so that a loss of one rank's samples alone has no reference.
    """

    ways: list[Computed]
    exact: Computed | None
    complete: bool
    layers: float = 0.0
    updated: References | None = None
    joined: bool = False

    def tensors(self, of: Of) -> tuple[list[Tensor], Tensor | None]:
        """Return one tensor of every reference, in float64: of all variants, and of the float64 reference."""
        own = [numbers(t) for way in self.ways if (t := of(way)) is not None]
        true = of(self.exact) if self.exact is not None else None
        return own, None if true is None else numbers(true)


def compare(
    parallel: StepTrace, before: StepTrace, references: References, order: list[str], measured: dict[str, float]
) -> list[Check]:
    """Return every check of a step, in dataflow order; `order` names the parameters in model order.

    `measured` stores how far rounding moves each tensor, relative to its size, for later steps with fewer variants.
    """
    comparison = _Comparison(parallel, before, references, order, measured)
    return sorted(comparison.checks(), key=lambda check: PHASES.index(check.phase))


@dataclass
class _Comparison:
    _p: StepTrace
    _before: StepTrace
    _r: References
    _order: list[str]
    _measured: dict[str, float]
    _relative: dict[str, float] = field(default_factory=dict)  # tolerance of each gradient relative to its size
    _norm_tolerance: float = 0.0

    def __post_init__(self) -> None:
        self._base = self._r.ways[0].trace

    def checks(self) -> Iterator[Check]:
        """Yield the checks, one phase after the other; later phases inherit tolerances from earlier ones."""
        yield from self._data()
        parallel, first = self._p, self._r.ways[0]
        weightless = self._base.skipped == parallel.skipped == "weightless"  # no gradient was divided by the weight
        if not weightless:
            yield from self._forward()
        yield from self._loss()
        # Gradients have no known rank in a Session's loop on one process or in a divided model.
        if not weightless and first.contributions and not parallel.divided:
            for rank, gradients in sorted(parallel.gradients.items()):
                yield from self._gradients("backward", rank, gradients, set(first.contributions.get(rank, {})))
        if not weightless:
            wanted = set(self._base.phase("reduction"))
            yield from self._gradients("reduction", None, parallel.phase("reduction"), wanted)
            yield from self._replicas("reduction")
        if self._base.skipped or parallel.skipped:
            if (parallel.skipped is None) != (self._base.skipped is None):
                done = f"was left out ({parallel.skipped})" if parallel.skipped else "was not left out"
                yield self._say("update", "(all)", f"the update {done}; on one process: {self._base.skipped or 'done'}")
                return
            for name, value in {**parallel.phase("update"), **parallel.phase("buffers")}.items():
                key = f"update/{name}" if f"update/{name}" in parallel.tensors else f"buffers/{name}"
                old = self._before.tensors.get(key)
                if old is not None and not identical(value, old):
                    yield self._say("update", name, "has changed in a step that was left out")
            yield from self._replicas("update")
            return
        yield from self._clipping()
        yield from self._update()
        for name, value in parallel.phase("buffers").items():
            if value.is_floating_point() or value.is_complex():
                key = f"buffers/{name}"
                size = float(numbers(value).norm())
                yield self._check("buffers", name, *self._judge(key, value, _tensor(key), size))
            else:
                yield self._equal("buffers", name, value)
        yield from self._replicas("buffers")

    def _check(self, phase: str, name: str, error: float, tolerance: float, rank: int | None = None) -> Check:
        return Check(self._p.step, phase, name, rank, error, tolerance)

    def _say(self, phase: str, name: str, said: str, rank: int | None = None) -> Check:
        return Check(self._p.step, phase, name, rank, math.inf, 0.0, said)

    def _judge(
        self,
        where: str,
        value: Tensor,
        of: Of,
        scale: float,
        size: float | None = None,
        *,
        references: References | None = None,
    ) -> tuple[float, float]:
        """Return (error, tolerance) of one tensor. Its rounding is stored relative to `size`, by default `scale`."""
        runs, true = (references or self._r).tensors(of)
        value = numbers(value)
        if any(r.shape != value.shape for r in runs) or not runs:
            return math.inf, 0.0
        if true is not None and bool((runs[0].isfinite() & ~true.isfinite()).any()):
            true = None  # float64 is not finite here
        error = min(distance(numbers(value), r) for r in runs)
        spread = max(distance(r, runs[0]) for r in runs)
        away = [distance(r, true) if true is not None else self._r.layers * float(r.norm()) for r in runs]
        moves = MULTIPLE * spread + PRECISION_SHARE * max(away)
        if not math.isfinite(moves):
            return error, 0.0
        size = scale if size is None else size
        if self._r.complete:
            self._measured[where] = max(self._measured.get(where, 0.0), moves / size if size else 0.0)
        else:  # rounding moves the tensor at least as far as in the first step
            known = self._measured.get(where)
            if known is None:
                phase = where.partition("/")[0]
                known = max((m for key, m in self._measured.items() if key.startswith(f"{phase}/")), default=0.0)
            moves = max(moves, CARRIED * known * size)
        return error, moves + UNITS * UNIT * scale

    def _data(self) -> Iterator[Check]:
        """Check that every grain is computed once, with its samples."""
        expected = {g: ids for part in self._base.parts for g, ids in zip(part.grains, part.ids, strict=True)}
        seen: dict[int, int] = {}
        for part in self._p.parts:
            for grain, ids in zip(part.grains, part.ids, strict=True):
                if grain in seen:
                    yield self._say("data", f"grain {grain}", f"is also computed by rank {seen[grain]}", part.rank)
                elif expected.get(grain) != ids:
                    wanted = some(expected.get(grain, ()))
                    yield self._say("data", f"grain {grain}", f"has samples {some(ids)} instead of {wanted}", part.rank)
                else:
                    yield self._check("data", f"grain {grain}", 0.0, 0.0, part.rank)
                seen[grain] = part.rank
        for grain in sorted(expected.keys() - seen.keys()):
            yield self._say("data", f"grain {grain}", "is computed by no rank")

    def _forward(self) -> Iterator[Check]:
        owners = {g: part.rank for part in self._p.parts for g in part.grains}
        for call, grains in self._p.forward.items():
            own = self._base.forward.get(call)
            if own is None:
                continue  # only some variants make this call
            common = sorted(grains.keys() & own.keys())
            phase = "data" if call.startswith("(batch)") else "forward"
            worst: Check | None = None
            for rank in sorted({owners[g] for g in common if g in owners}):
                mine = [g for g in common if owners.get(g) == rank]

                def of(way: Computed, call: str = call, mine: list[int] = mine) -> Tensor | None:
                    values = way.trace.forward.get(call, {})
                    return torch.tensor([values[g] for g in mine]) if all(g in values for g in mine) else None

                value = torch.tensor([grains[g] for g in mine], dtype=torch.float64)
                check = self._check(
                    phase, call, *self._judge(f"forward/{call}", value, of, float(value[:, 1].norm())), rank
                )
                worst = check if worst is None or check.ratio > worst.ratio else worst
            if worst is not None:
                yield worst

    def _loss(self) -> Iterator[Check]:
        parts = self._p.parts
        if self._r.joined:
            total, weight = (math.fsum(getattr(part, name) for part in parts) for name in ("total", "weight"))
            parts = [replace(self._base.parts[0], total=total, weight=weight)]
        for part in parts:

            def of(way: Computed, grains: tuple[int, ...] = part.grains) -> Tensor | None:
                own = parts_within(way, grains)
                return torch.tensor([math.fsum(p.total for p in own)], dtype=torch.float64) if own else None

            name = f"of grains {some(part.grains)}"
            own = next((parts for way in self._r.ways if (parts := parts_within(way, part.grains))), [])
            scale = math.fsum(abs(p.total) for p in own)
            yield self._check(
                "loss", name, *self._judge("loss/total", torch.tensor([part.total]), of, scale), part.rank
            )
            weight = math.fsum(p.weight for p in own)
            if weight != part.weight:
                yield self._say("loss", f"weight {name}", f"is {part.weight:g} instead of {weight:g}", part.rank)
        if not math.isclose(self._p.weight, self._base.weight, rel_tol=1e-12):
            yield self._say("reduction", "weight", f"is {self._p.weight:g} instead of {self._base.weight:g}")
        loss = torch.tensor([self._p.loss])
        if math.isfinite(self._base.loss):
            scale = abs(self._base.loss)
            yield self._check(
                "reduction", "loss", *self._judge("loss/mean", loss, lambda way: torch.tensor([way.trace.loss]), scale)
            )

    def _gradients(
        self, phase: str, rank: int | None, gradients: Mapping[str, Tensor], wanted: set[str]
    ) -> Iterator[Check]:
        for name in reversed(self._order):
            if (name in gradients) != (name in wanted):
                said = "has no gradient" if name in wanted else "has a gradient, which no loss depends on"
                yield self._say(phase, name, said, rank)
                continue
            if name not in gradients:
                continue

            def of(way: Computed, name: str = name) -> Tensor | None:
                return (
                    way.contributions.get(rank, {}).get(name)
                    if rank is not None
                    else way.trace.tensors.get(f"reduction/{name}")
                )

            magnitude = self._r.ways[0].magnitudes.get(name, 0.0)
            error, tolerance = self._judge(f"{phase}/{name}", gradients[name], of, magnitude)
            if rank is None:
                size = float(numbers(self._base.tensors[f"reduction/{name}"]).norm())
                self._relative[name] = tolerance / size if size else 0.0
                self._norm_tolerance = math.hypot(self._norm_tolerance, tolerance)
            yield self._check(phase, name, error, tolerance, rank)

    def _clipping(self) -> Iterator[Check]:
        norm = torch.tensor([self._p.norm])
        error, tolerance = self._judge(
            "clipping/(norm)", norm, lambda way: torch.tensor([way.trace.norm]), self._base.norm
        )
        tolerance += self._norm_tolerance
        yield self._check("clipping", "global norm", error, tolerance)
        relative = tolerance / self._base.norm if self._base.norm else 0.0
        for name in reversed(self._order):
            value = self._p.tensors.get(f"clipping/{name}")
            if value is None:
                continue
            key = f"clipping/{name}"
            error, tolerance = self._judge(key, value, _tensor(key), float(numbers(value).norm()))
            size = float(numbers(self._base.tensors[key]).norm()) if key in self._base.tensors else 0.0
            yield self._check("clipping", name, error, tolerance + size * (relative + self._relative.get(name, 0.0)))
        yield from self._replicas("clipping")

    def _update(self) -> Iterator[Check]:
        """Check parameters by their change in this step, which their size would hide, and the optimizer's state.

        The tolerance of the gradients is added if the reference update used other gradients.
        """
        tensors, references = self._p.phase("update"), self._r.updated or self._r
        for name in (*(n for n in self._order if n in tensors), *(n for n in tensors if n not in self._order)):
            value, key, old = tensors[name], f"update/{name}", self._before.tensors.get(f"update/{name}")
            is_whole = not (value.is_floating_point() or value.is_complex())
            of = _tensor(key)
            if name in self._order:
                old = numbers(self._before.tensors[key])
                unit = 1.0 if is_whole else torch.finfo(value.dtype).eps / 2.0 / UNIT
                value = numbers(value) - old

                def of(way: Computed, key: str = key, old: Tensor = old) -> Tensor | None:
                    own = way.trace.tensors.get(key)
                    return None if own is None else numbers(own) - old

                size = float(value.norm())
                scale, inherited = float(old.norm()) * unit + size, size * self._relative.get(name, 0.0)
            elif is_whole:
                yield self._equal("update", name, value)
                continue
            else:
                scale = size = float(numbers(value).norm()) + (0.0 if old is None else float(numbers(old).norm()))
                inherited = 2.0 * size * self._relative.get(name.rpartition("/")[0], 0.0)
            error, tolerance = self._judge(key, value, of, scale, size, references=references)
            # One process steps the same gradient, so an owner's step has the same bits. A tolerance would be useless: a
            # bfloat16 Newton-Schulz iteration moves the update of a rank-deficient gradient by up to 70 %.
            same = self._r.updated is not None and name.partition("/")[0] in self._p.owned
            yield self._check(
                "update", name, error, 0.0 if same else tolerance + (0.0 if self._r.updated else inherited)
            )
        for name in sorted(self._base.phase("update").keys() - tensors.keys()):
            yield self._say("update", name, "is missing")
        yield from self._replicas("update")

    def _equal(self, phase: str, name: str, value: Tensor) -> Check:
        """Check that integers have the same bits as in one of the variants."""
        ways = (way.trace.tensors.get(f"{phase}/{name}", torch.empty(0)) for way in self._r.ways)
        same = any(identical(value, own) for own in ways)
        return self._check(phase, name, 0.0, 0.0) if same else self._say(phase, name, "has another value")

    def _replicas(self, phase: str) -> Iterator[Check]:
        """Check that a tensor on several ranks has the same bits on each."""
        for rank, key in self._p.strays():
            where, _, name = key.partition("/")
            if where == phase:
                yield self._say(phase, name, STRAY, rank)


def parts_within(way: Computed, grains: tuple[int, ...]) -> list[MicrobatchTrace]:
    """Return the parts that make up these grains; empty if the variant computed some of them with other grains."""
    own = [part for part in way.trace.parts if set(part.grains) <= set(grains)]
    return own if sum(len(part.grains) for part in own) == len(grains) else []


def _tensor(key: str) -> Of:
    return lambda way: way.trace.tensors.get(key)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the Euclidean distance; infinite if the tensors are finite at different places."""
    difference = float((a - b).norm())
    if math.isnan(difference):  # places that are not finite on both sides are no difference
        finite = torch.isfinite(a)
        return float((a - b)[finite].norm()) if torch.equal(finite, torch.isfinite(b)) else math.inf
    return difference


def some(values: tuple[int, ...]) -> str:
    """Render the first few values for people."""
    shown = ", ".join(map(str, values[:6]))
    return f"{shown} ... ({len(values)})" if len(values) > 6 else shown
