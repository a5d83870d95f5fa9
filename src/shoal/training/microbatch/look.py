"""Looks at a job before its first step and before a few later steps.

A look computes the loss of a few grains, fused and one by one, and leaves no trace (`numerics/no_trace.py`). It
determines the microbatch policy. It refuses a job if the result depends on batches that a process computed before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.data.loader import Microbatch
from shoal.distributed.failures import is_lost_peer
from shoal.errors import JobError, PeerError, ShoalError, UserCodeError, text_of
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.buffer_rules import COARSE, FINE, Observed, Rounding, explaining, is_in_order
from shoal.numerics.checksum import bits_checksum
from shoal.numerics.grain_randomness import NotFusibleError
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.operators import is_strided
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import Precision
from shoal.numerics.python_state import same_bits
from shoal.parallel.base import run_backward, run_engine
from shoal.parallel.model.sharded_model import replaced
from shoal.training.microbatch.coupling import compare
from shoal.training.microbatch.policy import BufferLook, GrainLoss, ProbeResult
from shoal.training.update.optimizer_trial import OptimizerTrial, refuse_read

if TYPE_CHECKING:
    from shoal.training.microbatch.step import LossComputer

# Fused and separate computations differ by rounding: at most about one unit in the last place per operation before the
# loss. The sum grows with the square root of the number of operations: 64 units allow some thousand in sequence.
FUSION_TOLERANCE_UNITS = 64
# Messages of torch if parameters without storage have no second derivative.
_NO_SECOND_DERIVATIVE = ("setStorage", "storage of size 0", "second time", "freed")
# Before these steps, counted from 1, a look searches for state that a job creates after its first step.
LATER_STEPS = (2, 10, 100)
# Number of further forwards after which state may matter, and the same for state in a container that grows.
_REPEATS, _MOST_REPEATS = 6, 16
# Added to a counter, to detect a schedule or period that starts later: odd and even, not multiples of one period.
_JUMPS = (7, 10, 93, 1_000, 9_991, 100_000, 1_000_003)

Sums = tuple[float, float]
# The sums of a forward, and the buffers after it.
_Left = tuple[Sums, dict[str, Tensor]]


class LookSums:
    """Sums of a rank's `LossComputer` over microbatches, computed within a look."""

    def __init__(self, computer: LossComputer) -> None:
        self._computer = computer
        self._differentiates = not computer.divided

    @contextlib.contextmanager
    def watching(self) -> Iterator[NoTrace]:
        """Open a context without trace, warnings and TF32, CUDA's default in convolutions, which is too coarse here."""
        computer, began = self._computer, time.perf_counter()
        cuda = computer.precision.device.type == "cuda"
        cudnn: Any = torch.backends.cudnn
        switches = [cudnn.conv, cudnn.rnn] if cuda else []
        before = [one.fp32_precision for one in switches]
        for one in switches:
            one.fp32_precision = "ieee"
        try:
            # The step repeats the model's warnings.
            with (
                computer.regions.disabled(),
                self._computer.no_trace() as no_trace,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                yield no_trace
                no_trace.restore()
                refuse_unrestored(no_trace)
        finally:
            for one, precision in zip(switches, before, strict=True):
                one.fp32_precision = precision
            computer.look_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Disable gradients within the context, so that several grains fit in memory. A loss may enable them again."""
        differentiates, self._differentiates = self._differentiates, False
        try:
            yield
        finally:
            self._differentiates = differentiates

    def scoped(
        self, microbatch: Microbatch, no_trace: NoTrace, precision: Precision, *, gradients: bool = False
    ) -> tuple[Any, int, bool]:
        """Return (total, weight), the number of draws by grain, and whether the model drew in other ways.

        `gradients`: append two numbers of each parameter's gradient to (total, weight).
        """
        computer = self._computer.in_precision(precision)

        def run(*, with_backward: bool = False) -> tuple[Any, int, bool]:
            with computer.grain_scope(microbatch) as scope, torch.set_grad_enabled(self._differentiates):
                batch = precision.inputs(copy_of(microbatch.batch))
                total, weight = computer.evaluate(computer.pair, batch) if computer.evaluate else computer.loss(batch)
                if with_backward and isinstance(total, Tensor) and total.requires_grad:
                    run_backward(total)
                numbers = self._of_gradients(total, no_trace) if gradients else ()
            return (float(total), float(weight), *numbers), scope.calls, scope.leaked()

        try:
            return run()
        except ShoalError:
            if self._differentiates or computer.evaluate:
                raise
            no_trace.restore()
        self._differentiates = True  # the loss itself computes derivatives
        try:
            return run(with_backward=computer.cut)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, UserCodeError) else error
            if cause is None or isinstance(cause, ShoalError) or is_lost_peer(cause) or is_out_of_memory(cause):
                raise
            if not any(sign in text_of(cause) for sign in _NO_SECOND_DERIVATIVE):
                raise
            raise JobError(
                given="a loss that differentiates the model, with parameters that are cut over the shard axis",
                conflict="a rank has each unit's parameters whole only in its forward and in one backward",
                remedy='write shard.level = "optimizer"',
            ) from error

    def _of_gradients(self, total: Any, trace: NoTrace) -> tuple[float, ...]:
        """Return the sum and the norm of each parameter's gradient.

        Hooks on parameters do not run, since a step calls them once. Raises: JobError if the backward writes a buffer.
        """
        parameters = [p for p in self._computer.model.parameters() if p.requires_grad]
        nothing = (0.0, 0.0) * len(parameters)
        if not (isinstance(total, Tensor) and total.requires_grad and parameters):
            return nothing
        gradients: Sequence[Tensor | None] = [None] * len(parameters)
        by_forward = set(trace.changed_buffers())
        with contextlib.suppress(Exception):  # reentrant checkpoints, or too little memory
            gradients = run_engine((total,), (torch.ones_like(total),), parameters, accumulate=False)
        by_backward = set(trace.changed_buffers()) - by_forward
        if by_backward:
            raise JobError(
                given=f"a backward that writes buffer {min(by_backward)}",
                conflict="a step's buffers are put together from what its forwards leave in them, and each microbatch "
                "has a backward of its own",
                remedy="write the buffer in the forward, or from the step's gradients in the optimizer's step "
                "(register_step_post_hook)",
            )
        # A GPU's kernels may add in another order each time, so another gradient there does not indicate state.
        if self._computer.precision.device.type != "cpu" and not self._computer.exact:
            return nothing
        numbers: list[float] = []
        for gradient in gradients:
            if gradient is None:
                numbers += [0.0, 0.0]
                continue
            values = gradient.detach()
            values = values.coalesce().values() if values.is_sparse else values
            values = torch.view_as_real(values) if values.is_complex() else values
            wide = torch.promote_types(values.dtype, torch.float32)
            numbers += [float(values.sum(dtype=wide)), float(torch.linalg.vector_norm(values, dtype=wide))]
        return tuple(numbers)

    def opaque(self, part: Microbatch, precision: Precision, trace: NoTrace | None = None) -> Any:
        """Return the sums with seeded generators instead of a scope, and the gradients' numbers with a `trace`."""
        computer = self._computer
        opaque = computer.in_precision(precision)
        opaque.computation = replace(computer.computation, randomness="opaque")
        with opaque.scope(part), torch.set_grad_enabled(self._differentiates):
            batch = precision.inputs(copy_of(part.batch))
            total, weight = opaque.evaluate(opaque.pair, batch) if opaque.evaluate else opaque.loss(batch)
            numbers = self._of_gradients(total, trace) if trace is not None else ()
        return float(total), float(weight), *numbers


class Look:
    """Look at one microbatch by a rank's `LossComputer`.

    `together`: logical or of a bool over all ranks that compute the model together.
    """

    def __init__(self, computer: LossComputer, together: Callable[[bool], bool] = bool) -> None:
        self._computer, self._together, self._sums = computer, together, LookSums(computer)

    _seen: tuple[Microbatch, Sums] | None = None  # of the first grain, unaffected by other forwards

    def policy(self, microbatch: Microbatch, grains: Microbatch, buffers: StepBuffers) -> ProbeResult:
        """Compute the first microbatch fused and grain by grain, and return the policy that it needs.

        The look uses float32 in any run: bfloat16 is too coarse to distinguish a sum over grains from another loss.
        `grains`: the step's first grains, identical on all ranks if possible.
        Raises: errors of the model; JobError for state that would differ between layouts.
        """
        computer, precision = self._computer, self._computer.precision
        with self._sums.watching() as no_trace:
            result: ProbeResult | None = None
            if precision.is_wide:
                result = self._policy(microbatch, buffers, no_trace, precision)
            elif not computer.cut:
                # Suppressed: some models compute only in their own dtype, others raise in any dtype.
                with (
                    contextlib.suppress(ShoalError),
                    widened(computer.model, torch.float32),
                    self._computer.no_trace() as wide,
                ):
                    seen = self._policy(microbatch, buffers, wide, precision.wide())
                    wide.restore()
                    refuse_unrestored(wide)  # otherwise the look below reports it
                    result = seen
                no_trace.restore()
            if result is None:
                result = self._policy(microbatch, buffers, no_trace, precision)
                result = replace(result, computation=replace(result.computation, fuse=False))
            known = no_trace.names()
            for pattern in self._computer.job.allow_state:
                if not self._together(any(_allows([pattern], name) for name in known)):
                    raise JobError(
                        given=f"Job(allow_state=({pattern!r},))",
                        conflict="no attribute of a module and no variable of the loss has that name",
                        remedy="write the module's name and the attribute's, such as 'encoder.calls'",
                    )
            allowed = self._state(grains, no_trace, gradients=not computer.divided)
            computation = replace(result.computation, kept_state=allowed)
            # A grain's loss to compare with other ranks; None if the model is divided or draws in other ways.
            first_grain, self._seen, grain_loss = self._seen, None, None
            if first_grain is not None and not computer.divided:
                part, (total, weight) = first_grain
                tensors = [leaf for leaf in tree_leaves(part.batch) if isinstance(leaf, Tensor) and is_strided(leaf)]
                grain_loss = GrainLoss(part.grains[0].index, bits_checksum(tensors), total, weight)
            return replace(result, computation=computation, seen=grain_loss)

    def state(self, grains: Microbatch) -> None:
        """Search for state again. Raises: as `policy`."""
        with self._sums.watching() as no_trace:
            self._state(grains, no_trace)

    def buffers(self, grains: Microbatch, names: Sequence[str], *, widens: bool = True) -> BufferLook:
        """Return the rules that explain how forwards of these grains change buffers, from several starting values.

        `widens`: compute in float64 or float32 if the model supports it, instead of the run's own precision, which some
        buffers need. Raises: errors of the model.
        """
        computer, device = self._computer, self._computer.precision.device
        ways = (
            []
            if computer.divided or not widens
            else [(Precision(torch.float64, torch.float64, torch.float64, device), FINE)]
        )
        ways += [] if computer.cut or not widens else [(computer.precision.wide(), COARSE)]
        with self._sums.watching() as no_trace, self._sums.without_gradients():
            for precision, rounding in ways:
                # Suppressed: some models compute only in their own dtype, others raise in any dtype.
                with (
                    contextlib.suppress(Exception),
                    widened(computer.model, precision.parameters),
                    computer.no_trace() as wide,
                ):
                    return self._buffers(grains, names, wide, precision, rounding)
                no_trace.restore()
            return self._buffers(grains, names, no_trace, computer.precision, COARSE)

    def _buffers(
        self, grains: Microbatch, names: Sequence[str], no_trace: NoTrace, precision: Precision, rounding: Rounding
    ) -> BufferLook:
        step_buffers, count = StepBuffers(self._computer.model), len(grains.grains)
        step_buffers.watch(names)

        def left(first: int, last: int, start: Mapping[str, Tensor]) -> _Left:
            part = grains.read(grains.grains[first:last], grains.ids[first:last])
            no_trace.restore()
            step_buffers.model.put(start)
            if self._computer.computation.randomness == "opaque":
                return self._sums.opaque(part, precision), step_buffers.model.values()
            return self._sums.scoped(part, no_trace, precision)[0], step_buffers.model.values()

        start = step_buffers.model.values()
        apart = [left(place, place + 1, start) for place in range(count)]
        # With fewer grains another grain is the last. The next start is the buffers after all grains. Buffers that no
        # grain has changed get other values there, such as an average that starts as a copy of its weight.
        seen = [(start, left(0, number, start), apart[:number]) for number in range(count, 1, -1)]
        start = {n: _shifted(t) if n in names and torch.equal(t, start[n]) else t for n, t in seen[0][1][1].items()}
        again = [left(place, place + 1, start) for place in range(count)]
        fuse = _is_sum(seen[0][1][0], [sums for sums, _ in apart])
        seen.append((start, left(0, count, start), again))
        # Further starts have counts as after more steps: a count may have a bound, or start again.
        before, after = seen[0][0], seen[0][1][1]
        counts = {}  # by buffer of whole numbers that have grown
        for n in (n for n in names if n in before):
            old, new = before[n], after[n]
            comparable = old.shape == new.shape and not old.is_complex() and new.dtype != torch.bool
            if comparable and bool((new >= old).all() and (new > old).any() and (new == new.round()).all()):
                counts[n] = new - old
        for jump in _JUMPS if counts and not self._computer.divided else ():
            start = {n: t + jump * counts[n] if n in counts else t for n, t in after.items()}
            with contextlib.suppress(Exception):  # the model may not support such a count
                again = [left(place, place + 1, start) for place in range(count)]
                seen.append((start, left(0, count, start), again))
        sizes = [grain.size for grain in grains.grains]
        rules: dict[str, tuple[str, ...]] = {}
        ordered: list[str] = []

        def largest(name: str) -> float:
            home = self._computer.model.get_submodule(name.rpartition(".")[0])
            beside = (*home.parameters(recurse=False), *home.buffers(recurse=False))
            return max(
                (
                    float(t.detach().abs().max())
                    for t in beside
                    if t.is_floating_point() and t.numel() and not t.is_meta
                ),
                default=0.0,
            )

        for name in (name for name in names if name in start):
            own = [
                Observed(before[name], whole[1][name], [part[1][name] for part in parts], sizes[: len(parts)])
                for before, whole, parts in seen
            ]
            if any(one.moves for one in own):
                rules[name] = explaining(own, rounding, largest(name))
                ordered += [name] if is_in_order(own[0]) else []
        return BufferLook(rules, tuple(ordered), fuse is False, fuse is not None)

    def _policy(
        self, microbatch: Microbatch, buffers: StepBuffers, no_trace: NoTrace, precision: Precision
    ) -> ProbeResult:
        computation = self._computer.computation
        fuse: bool | None = False
        randomness, coupled = "opaque", ""
        changed: set[str] = set()
        with contextlib.suppress(NotFusibleError):
            fused, calls, leaked = self._sums.scoped(microbatch, no_trace, precision)
            changed |= set(no_trace.changed_buffers())
            if precision == self._computer.precision:
                written = no_trace.changed_parameters()
                frozen = {name for name, p in self._computer.model.named_parameters() if not p.requires_grad}
                changed |= {*written, *no_trace.written_parameters()} & frozen
            split, parts = microbatch.split(), []
            for part in split:
                no_trace.restore()
                parts.append(self._sums.scoped(part, no_trace, precision))
                changed |= set(no_trace.changed_buffers())
            if not (leaked or any(part_leaked for _, _, part_leaked in parts)):
                randomness = "scoped" if calls + sum(c for _, c, _ in parts) else "none"
                self._seen = split[0], parts[0][0]
                fuse = _is_sum(fused, [pair for pair, _, _ in parts])
                if fuse is False and not self._computer.divided:
                    fuse, coupled = self._exactly_fuses(microbatch, split, no_trace)
        # All buffers of opaque models: without a scope, torch's batch_norm writes buffers without a detectable change.
        buffers.watch(None if randomness == "opaque" else changed)
        computation = replace(computation, randomness=randomness, fuse=fuse is not False, buffers=buffers.names)
        return ProbeResult(replace(computation, coupled=coupled), conclusive=fuse is not None)

    def _exactly_fuses(
        self, microbatch: Microbatch, split: list[Microbatch], no_trace: NoTrace
    ) -> tuple[bool | None, str]:
        """Return whether grains may share a forward after all and, if not, where samples are mixed.

        The look uses float64, where small differences of large terms show no rounding. It uses the run's own precision
        if the model does not compute in float64.
        """
        computer = self._computer
        double = Precision(torch.float64, torch.float64, torch.float64, computer.precision.device)
        for precision in (double, computer.precision):
            kind = precision.parameters
            with contextlib.suppress(Exception), widened(computer.model, kind), self._computer.no_trace() as wide:

                def loss(part: Microbatch, no_trace: NoTrace = wide, precision: Precision = precision) -> Sums:
                    no_trace.restore()
                    (total, weight), *_ = self._sums.scoped(part, no_trace, precision)
                    return total, weight

                fused, parts, coupled = compare(computer.model, loss, microbatch, split, kind.itemsize)
                fuse = _is_sum(fused, parts)
                return fuse, "" if fuse else coupled
            no_trace.restore()
        return False, ""

    def _state(self, grains: Microbatch, no_trace: NoTrace, *, gradients: bool = False) -> tuple[str, ...]:
        """Search for state that changes a result. Return the names of existing state that Job(allow_state=...) allows.

        `gradients`: include state that a backward leaves, or that changes only a gradient.
        Raises: JobError for state that changes a loss, or for a trainable parameter that the forward writes.
        """
        computer, precision = self._computer, self._computer.precision
        # The first grain, and another grain of equal size, or the first grain with its samples in another order.
        one, *rest = grains.split()
        same_size = next((part for part in rest if part.num_samples == one.num_samples), None)
        other = same_size or replace(one, batch=turned(one.batch))
        no_trace.restore()

        def run(part: Microbatch) -> Any:
            try:
                return self._sums.scoped(part, no_trace, precision, gradients=gradients)[0]
            except NotFusibleError:  # no scope: the generators start from the same state each time
                return self._sums.opaque(part, precision, no_trace if gradients else None)

        first = run(one)
        self._seen = (one, first[:2]) if self._seen is not None else None
        trained = {name for name, p in computer.model.named_parameters() if p.requires_grad}
        written_names = {*no_trace.changed_parameters(), *no_trace.written_parameters()}
        writes, writes_frozen = self._together(bool(written_names)), self._together(bool(written_names - trained))
        if writes and computer.gathers and not writes_frozen:
            # Ranks that gather each other's parts keep the values that all of them write identically.
            computer.writing.update(computer.model.get_submodule(name.rpartition(".")[0]) for name in written_names)
            written_names = set()
            no_trace.restore()
            first = run(one)
        written = no_trace.changed_parameters()
        writes = self._together(bool(written.keys() & trained))
        if writes:
            no_trace.restore()
            run(other)
            _refuse_written(computer.model, written, no_trace.changed_parameters(), trained, exact=computer.exact)
            run(one)  # a second forward from there must change nothing more
            _refuse_written(computer.model, written, no_trace.changed_parameters(), trained, exact=computer.exact)
        if self._together(bool(written_names and computer.divided)):
            raise JobError(
                given=f"a forward that writes parameter {_own_first(written_names)}, with a layout that "
                "divides the model or its parameters",
                conflict="no rank has a copy of the parameter that it may write alone",
                remedy='use the data axis, shard.level = "optimizer"',
            )
        advanced = any(change.kind == "generator" for change in no_trace.changes())  # reported below
        if computer.exact and not self._together(advanced):
            no_trace.restore()
            if self._together(differ(run(one), first)):
                raise JobError(
                    given="a loss or model whose first batch, computed twice, gives two losses",
                    conflict="it draws from a source of randomness that shoal cannot seed, such as a generator of its "
                    "own, the clock or the operating system, or it keeps state where shoal does not look, such as a "
                    "large numpy array or a file; in exact mode each number has to be the same in each run",
                    remedy="draw from torch's, Python's or numpy's global generators, which shoal seeds for each grain",
                )
        elif writes:  # the forwards above left other state than `one` leaves from the start
            no_trace.restore()
            run(one)
        leaves_state = self._together(bool(no_trace.changes()))
        allowed = find_state(
            no_trace,
            lambda: run(other),
            lambda: run(one),
            first,
            computer.job.allow_state,
            together=self._together,
            divided=computer.divided,
        )
        if leaves_state:
            # Refuse an optimizer that reads state of a forward.
            no_trace.restore()
            run(one)
            names = {change.name for change in no_trace.changes()} - set(allowed)
            if self._together(bool(names)):
                no_trace.keep_state()
                shapes = {name: tuple(p.shape) for name, p in computer.model.named_parameters()}
                trial = OptimizerTrial(
                    computer.job.optimizer, computer.model.named_parameters(), shapes, precision.device
                )
                refuse_read(trial, no_trace, self._together, names)
            if computer.evaluation is not None:  # refuse state that a forward leaves and an evaluation reads
                no_trace.restore()
                first = computer.evaluation()
                no_trace.restore()
                run(one)
                find_state(
                    no_trace,
                    lambda: run(other),
                    computer.evaluation,
                    first,
                    computer.job.allow_state,
                    together=self._together,
                    divided=computer.divided,
                    evaluates=True,
                )
        return allowed


def refuse_unrestored(no_trace: NoTrace) -> None:
    """Refuse a forward that replaces, hooks, or writes a parameter past torch's operators. Raises: JobError."""
    if no_trace.replaced:
        raise replaced(min(no_trace.replaced))
    if no_trace.hooked:
        raise JobError(
            given=f"a model or loss that registers a hook on parameter {min(no_trace.hooked)} while it computes",
            conflict="each forward adds another hook, and each process computes as many forwards as it has "
            "microbatches",
            remedy="register the hook once, in model(): shoal calls it once a step with the mean gradient",
        )
    lost = no_trace.unrestored()
    if lost:
        raise JobError(
            given=f"a model or loss that writes parameter {lost[0]} in its forward, past torch's operators",
            conflict="shoal cannot put the parameter back after it has looked at the first batch",
            remedy="write it with torch's operators under torch.no_grad(), or in a step of the optimizer",
        )


def _refuse_written(
    model: nn.Module, first: dict[str, Tensor], second: dict[str, Tensor], trained: set[str], *, exact: bool
) -> None:
    """Refuse trainable parameters if forwards of other samples write other values there. Raises: JobError."""
    for name in sorted((first.keys() | second.keys()) & trained):
        one, other = first.get(name), second.get(name)
        agree = one is not None and other is not None
        if one is not None and other is not None:  # equal bit for bit in exact mode, otherwise within rounding
            agree = same_bits(one, other) if exact else torch.allclose(one, other, rtol=1e-5, equal_nan=True)
        if not agree:
            module = name.rpartition(".")[0] or "the model"
            renormalises = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
            raise JobError(
                given=f"a forward that writes the trainable parameter {name}"
                + (f": {module} has max_norm" if renormalises else ""),
                conflict="what it writes depends on the samples of the grain, or on how many forwards a step has: "
                "ranks would train different values",
                remedy="renormalise the rows that the forward has looked up instead, such as "
                "torch.renorm(embedding(x), 2, -1, max_norm)"
                if renormalises
                else "write the parameter in the optimizer's step (a subclass, or register_step_post_hook), where "
                "its value is the same on every rank",
            )


def find_state(
    no_trace: NoTrace,
    other: Callable[[], Any],
    one: Callable[[], Any],
    first: Any,
    allow_state: Sequence[str],
    *,
    together: Callable[[bool], bool] = bool,
    divided: bool = False,
    evaluates: bool = False,
) -> tuple[str, ...]:
    """Search for state that a forward leaves and that changes a result. Return the names of the allowed state.

    Args:
        no_trace: The context of the look, after a call of `one` from the initial state.
        other: Computes other samples. The next call of `one` starts from the state that this leaves.
        one: Computes some samples. Its result shows whether the state matters.
        first: The result of `one` from the initial state.
        allow_state: Patterns of state names that the user declares harmless.
        together: Logical or of a bool over the ranks that compute the model together.
        divided: Whether several ranks compute the model together. State is then tested as a whole, without counters.
        evaluates: Whether `one` is an evaluation after the training of `other`, which leaves no further state.

    Raises:
        JobError: State changes the result of `one`.
    """

    def matters(sums: Any) -> bool:
        if not together(differ(sums, first)):
            return False
        no_trace.restore()  # excludes the noise of kernels that add in varying order
        again = one()
        return together(differ(sums, first, 4 * distance(again, first)))

    changes = no_trace.changes()
    allowed = {change.name for change in changes if _allows(allow_state, change.name)}
    names = [change.name for change in changes if change.name not in allowed]
    if not together(bool(names)):
        return tuple(sorted(allowed))
    kinds = {change.name: change.kind for change in changes}
    advanced = [name for name in names if kinds[name] == "generator"]
    if together(bool(advanced)):
        raise JobError(
            given=f"a forward that advances the generator {_own_first(advanced)}",
            conflict="a generator cannot be set back: each process, and a resumed run, would have advanced its own",
            remedy="compute the value from a buffer that counts the steps, "
            f"or write allow_state=({min(advanced)!r},) if it does not matter",
        )
    no_trace.restore()
    other()
    no_trace.keep_state(but=allowed)
    values: dict[str, list[float]] = {}
    grows = any(kinds[name] == "container" for name in names)
    repeats = 0 if evaluates else _MOST_REPEATS if together(grows) else _REPEATS
    for turn in range(1 + repeats):
        sums = None
        with contextlib.suppress(Exception):  # the training may never reach this forward
            sums = one()
        if together(sums is None):
            break
        for number in no_trace.numbers():
            values.setdefault(number.path, []).append(number.read())
        if matters(sums):
            culprits = []
            for name in names if not divided and len(names) > 1 else ():
                no_trace.restore()
                other()
                no_trace.keep_state(only=name)
                with contextlib.suppress(Exception):
                    if differ(one(), first):
                        culprits.append(name)
            when = " in an evaluation" if evaluates else " after some more forwards" if turn else ""
            raise _state_error(culprits or names, kinds, when)
        no_trace.keep_state(but=allowed)
    if evaluates or divided:
        return tuple(sorted(allowed))
    no_trace.restore()
    one()
    seen = {number.path: number.read() for number in no_trace.numbers()}
    no_trace.restore()
    other()
    for number, now in [(number, number.read()) for number in no_trace.numbers()]:
        # Counters may matter later. Numbers that depend on the samples may matter once they are large or small.
        tried = {f" after {jump} more forwards": _later(values.get(number.path, ()), jump) for jump in _JUMPS}
        if seen.get(number.path, now) != now:
            tried |= {" when it is larger": now + 10 * (abs(now) + 1), " when it is smaller": now - 10 * (abs(now) + 1)}
        tried = {when: value for when, value in tried.items() if number.name not in allowed}
        if any(value is not None for value in tried.values()):
            no_trace.restore()
            other()
        for when, value in tried.items():
            if value is None:
                continue
            no_trace.keep_state(only=number.name)
            result = first
            with contextlib.suppress(Exception):  # the model may not support such a number
                number.write(value)
                result = one()
            if matters(result):
                raise _state_error([number.name], {number.name: "number"}, when)
    return tuple(sorted(allowed))


def _later(seen: Sequence[float], jump: int) -> float | None:
    """Return a counter's value after `jump` more forwards, or None without a constant step or constant factor."""
    pairs = list(itertools.pairwise(seen))
    if len({b - a for a, b in pairs}) == 1:
        step = pairs[0][1] - pairs[0][0]
        return seen[-1] + jump * step if step else None
    factors = [b / a for a, b in pairs if a]
    if len(factors) == len(pairs) > 1 and max(factors) - min(factors) < 1e-6 * abs(factors[0]):
        with contextlib.suppress(OverflowError):
            return seen[-1] * factors[0] ** jump
    return None


def differ(result: Any, first: Any, noise: float = 0.0) -> bool:
    """Return True if two results differ by more than `noise`. NaN equals NaN."""
    pairs = zip(result, first, strict=True)
    return any(a != b and not (a != a and b != b) and not abs(a - b) <= noise for a, b in pairs)


def distance(result: Any, first: Any) -> float:
    """Return the largest finite difference of two results."""
    return max((abs(a - b) for a, b in zip(result, first, strict=True) if math.isfinite(a - b)), default=0.0)


def _own_first(names: Collection[str]) -> str:
    """Return the first of this rank's names. Raises: PeerError if only other ranks have names."""
    if not names:
        raise PeerError(
            given="this rank's part of the model",
            conflict="another rank refuses its own part, and this rank has found nothing",
            remedy="read the message of that rank",
        )
    return min(names)


def _state_error(names: Sequence[str], kinds: Mapping[str, str], when: str) -> JobError:
    """Return the error for state that changes a result."""
    _own_first(names)
    said = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    if all(kinds.get(name) == "number" for name in names):
        remedy = "count in a buffer (register_buffer), which shoal advances once a step,"
    elif any(name.endswith(("._buffers", "._parameters")) for name in names):
        remedy = "make the module that has it a part of the model (self.criterion = ... in the model),"
    else:
        remedy = "keep it in a buffer (register_buffer) whose value does not depend on how the batch is divided,"
    return JobError(
        given=f"state that a forward leaves in {said}",
        conflict=f"the same samples give another result{when}: it depends on which batches a process has computed "
        "before, and so on the number of devices",
        remedy=f"{remedy} or write allow_state=({', '.join(map(repr, names[:4]))},) if it does not matter",
    )


def _shifted(buffer: Tensor) -> Tensor:
    """Move the elements of a floating-point buffer by a tenth, up and down in turn. Return other buffers unchanged."""
    if not buffer.is_floating_point():
        return buffer
    signs = torch.arange(buffer.numel(), device=buffer.device).reshape(buffer.shape) % 2 * 2 - 1
    return buffer + (signs * 0.1 * (buffer.abs() + 0.1)).nan_to_num(0.0, 0.0, 0.0).to(buffer.dtype)


def turned(batch: Any) -> Any:
    """Return a batch with the rows of its tensors rotated by one."""

    def moved(leaf: Any) -> Any:
        is_rows = isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.ndim and len(leaf) > 1
        return leaf.detach().roll(1, 0).requires_grad_(leaf.requires_grad) if is_rows else leaf

    return tree_map(moved, batch)


def _allows(allowed: Sequence[str], name: str) -> bool:
    """Return True if any pattern matches the name. `*` matches one part of a dotted name."""
    parts = name.split(".")
    return any(
        len(parts) == len(pattern) and all(p in ("*", part) for p, part in zip(pattern, parts, strict=True))
        for pattern in (one.split(".") for one in allowed)
    )


def _is_sum(fused: Sums, parts: list[Sums]) -> bool | None:
    """Return True if the fused total is the parts' sum within rounding, and the weight exactly. None if not finite."""
    totals, scale = sum(t for t, _ in parts), sum(abs(t) for t, _ in parts)
    if fused[1] != sum(w for _, w in parts):
        return False
    if not math.isfinite(scale) or not math.isfinite(fused[0]):
        return None
    return abs(fused[0] - totals) <= FUSION_TOLERANCE_UNITS * torch.finfo(torch.float32).eps * scale


@contextlib.contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert parameters and buffers of fewer bits than `dtype` to it within the context. Restore them at the end."""
    # A forward may put another tensor in a buffer's place.
    homes = [(m._buffers, key, buffer) for m in model.modules() for key, buffer in m._buffers.items()]
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    tensors = [t for t in tensors if t.itemsize < dtype.itemsize]
    narrow = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for home, key, buffer in homes:
            home[key] = buffer
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data
