"""Optimizer step from summed gradients: division by weight and loss scale, clipping, schedule and update.

Steps of torch's own optimizers use fused kernels, which a flag on the device can suppress (`masked`). On CPUs a
`DirectStep` calls such a kernel without the overhead of `Optimizer.step`: SGD.step makes about sixty calls around it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.state import optimizer_state
from shoal.checkpoint.whole_optimizer import (
    OWN_RATE,
    groups,
    is_hooked,
    is_torchs,
    make_states_dense,
    may_draw,
    parts,
    rated,
    rates_seen,
    step_optimizer,
)
from shoal.distributed.failures import user_error
from shoal.errors import JobError, ShoalError, UserCodeError
from shoal.jobs.job import Job, Progress
from shoal.numerics import device_reads
from shoal.numerics.generators import all_generators, seed_everything
from shoal.numerics.gradient_norm import (
    clip_values,
    global_norm,
    norm_parts,
    norm_tensor,
    rounded,
    settled,
)
from shoal.numerics.precision import LossScale
from shoal.parallel.base import TOTAL, WEIGHT, QueuedSums, StepSums, Strategy, refuse_weight
from shoal.parallel.model.sharded_model import ShardedModel, laid_out, local, replaced, state_slices
from shoal.parallel.shard.one_copy import BY_ELEMENT
from shoal.plans.grains import random_key
from shoal.training.observer import Observer
from shoal.training.update.closure import Closure, needs_closure
from shoal.training.update.job_optimizer import refuse_divided, step_error
from shoal.training.update.lr_schedule import Schedule
from shoal.training.update.matrix_owners import MatrixOwners

# One kernel over all parameters replaces several passes over each parameter: a step of SGD with momentum on 5.8 M
# parameters reads and writes half as much.
_ON_CUDA = tuple(kind.__name__ for kind in BY_ELEMENT)
_FUSED = (*_ON_CUDA, "Adagrad")
_CPU, _DEVICES = {"cpu"}, {"cpu", "cuda"}
_FUSED_DTYPES = {torch.float32, torch.float64}
_PLAIN = (nn.Parameter, Tensor)


@contextlib.contextmanager
def fused(optimizer: torch.optim.Optimizer, kinds: tuple[type, ...] = _PLAIN) -> Iterator[None]:
    """Use torch's fused kernels for steps within the context, unless the job chose others, on tensors of `kinds`.

    DTensors are replaced by this rank's own memory: torch's kernels cannot mask steps of DTensors, and each operation
    on a DTensor is a dispatch in Python.
    """
    own = is_torchs(optimizer) and type(optimizer).__name__ in _FUSED
    with contextlib.ExitStack() as stack:
        groups = [g for g in optimizer.param_groups if own and _fuses(g, optimizer, kinds, stack)]
        for group in groups:
            group["fused"] = True
        try:
            yield
        finally:
            for group in groups:  # checkpoints store the groups as the job made them
                group["fused"] = None


def _fuses(
    group: dict[str, Any], optimizer: torch.optim.Optimizer, kinds: tuple[type, ...], stack: contextlib.ExitStack
) -> bool:
    """Return True if torch's kernels accept a group. DTensors are replaced by local memory until `stack` closes."""
    if can_fuse(group, optimizer, kinds):
        return True
    if _is_plain(group):
        return False
    with contextlib.ExitStack() as own:
        own.enter_context(_on_local(group, optimizer))
        fuses = can_fuse(group, optimizer, kinds)
        if fuses:
            stack.push(own.pop_all())
    return fuses


def _is_plain(group: dict[str, Any]) -> bool:
    return {*map(type, group["params"])}.issubset(_PLAIN)


@contextlib.contextmanager
def _on_local(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace a group's DTensors and their states by this rank's own memory within the context."""
    whole, state = group["params"], optimizer.state
    if _is_plain(group):
        yield
        return
    with torch.no_grad():  # otherwise autograd records each conversion
        group["params"] = [local(p) for p in whole]
    pairs = [(p, own) for p, own in zip(whole, group["params"], strict=True) if own is not p]
    for parameter, own in pairs:
        own.grad = None if parameter.grad is None else local(parameter.grad)
        if parameter in state:
            state[own] = {key: local(v) if isinstance(v, Tensor) else v for key, v in state[parameter].items()}
    try:
        yield
    finally:
        group["params"] = whole
        for parameter, own in pairs:
            own.grad = None
            # Store new state of the local tensor as the parameter's: scalars unchanged, other tensors as DTensors.
            for key, value in state.pop(own, {}).items():
                earlier, is_tensor = state[parameter].get(key), isinstance(value, Tensor)
                if is_tensor and isinstance(earlier, Tensor) and local(earlier).data_ptr() == value.data_ptr() != 0:
                    continue
                state[parameter][key] = laid_out(value, parameter) if is_tensor and value.ndim > 0 else value


@contextlib.contextmanager
def masked(optimizer: torch.optim.Optimizer, bad: Tensor) -> Iterator[None]:
    """Use fused kernels as `fused` does, for steps that change nothing if `bad`, a float32 [], is 1.0.

    Requires `maskable`.
    """
    scaled: Any = optimizer
    scaled.found_inf = bad
    try:
        with fused(optimizer):
            yield
    finally:
        del scaled.found_inf


@contextlib.contextmanager
def captured(optimizer: torch.optim.Optimizer, bad: Tensor, rates: Sequence[Tensor] | None) -> Iterator[None]:
    """Use fused kernels as `masked` does, for a capture in a CUDA graph.

    `rates`: float32 [] on the device, one for each group.

    torch's kernels read such a rate in each replay. A rate that is a number is a constant of the graph.
    """
    groups = optimizer.param_groups
    own: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
    ]
    with masked(optimizer, bad):
        try:
            for number, group in enumerate(groups):
                if rates is not None:
                    group["lr"] = rates[number]
                if "capturable" in group:  # Adam refuses a capture without it, and its fused kernels ignore it
                    group["capturable"] = True
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)


def maskable(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the next step, of the parameters that have gradients now, may be `masked`.

    torch's fused kernels can mask a step of float32 parameters with complete state. A masked first step of SGD with
    momentum would leave uninitialised momenta.
    """
    if not is_torchs(optimizer) or is_hooked(optimizer) or type(optimizer).__name__ not in _FUSED:
        return False
    for group in optimizer.param_groups:
        with _on_local(group, optimizer):
            if not can_fuse(group, optimizer):
                return False
            trained = [p for p in group["params"] if p.grad is not None]
            is_sgd = type(optimizer).__name__ == "SGD"
            key = "momentum_buffer" if is_sgd else "step"
            has_state = not is_sgd or bool(group.get("momentum"))
            if has_state and any(optimizer.state.get(p, {}).get(key) is None for p in trained):
                return False
            if any(p.dtype != torch.float32 for p in trained):
                return False
    return True


def can_fuse(group: dict[str, Any], optimizer: torch.optim.Optimizer, kinds: tuple[type, ...] = _PLAIN) -> bool:
    """Return True if a step of a group with its current gradients may use a fused kernel."""
    chosen = any(group.get(name) for name in ("fused", "foreach", "differentiable", "capturable", "maximize"))
    if chosen or group.get("fused", False) is not None or group.get("foreach") is not None:
        return False
    if isinstance(group["lr"], Tensor):
        return False
    tensors = [tensor for p in group["params"] for tensor in (p, p.grad) if tensor is not None]
    # This runs in each step. Comprehensions need fewer calls than generators.
    fits = (
        {*map(type, tensors)}.issubset(kinds)
        and {tensor.dtype for tensor in tensors} <= _FUSED_DTYPES
        and {tensor.device.type for tensor in tensors} <= (_DEVICES if type(optimizer).__name__ in _ON_CUDA else _CPU)
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and False not in [tensor.is_contiguous() for tensor in tensors]
    )
    if not fits:
        return False
    if group.get("momentum"):
        # Only some parameters may have one, as after unfreezing. torch's fused SGD cannot handle it.
        trained = [p for p in group["params"] if p.grad is not None]
        begun = [optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in trained]
        if any(begun) and not all(begun):
            return False
    if group["params"] and group["params"][0].is_cuda:
        # Fused kernels require step counters on the parameters' device. A checkpoint loads them on the CPU.
        for p in group["params"]:
            counter = optimizer.state[p].get("step") if p.is_cuda and p in optimizer.state else None
            if isinstance(counter, Tensor) and counter.device != p.device:
                optimizer.state[p]["step"] = counter.to(p.device)
    return True


# ----------------------------------------------------------------------------------------------------- direct steps


# The steps as torch defines them. A class with a replaced `step` uses the replacement.
_STEPS: dict[type[torch.optim.Optimizer], Any] = {
    kind: getattr(kind.step, "__wrapped__", kind.step) if getattr(kind.step, "hooked", False) else kind.step
    for kind in BY_ELEMENT
}
# Instance attributes that change what an optimizer's step does.
_OWN = {"step", "grad_scale", "found_inf"}
_DIRECT_DTYPES = (torch.float32, torch.float64)
# For use with `map`, which avoids a Python loop over the parameters.
_TENSOR, _kind, _is_contiguous = {Tensor}, operator.attrgetter("layout", "dtype"), Tensor.is_contiguous


@dataclass(frozen=True)
class _KernelGroup:
    """Group of an optimizer with its parameters, all of one dtype, and their states."""

    values: dict[str, Any]
    parameters: list[Tensor]
    count: int
    states: list[dict[str, Any]]
    dtype: torch.dtype
    keeps: bool  # momentum, or the maximum squares of amsgrad


class DirectStep:
    """Direct step of an optimizer, valid while groups, states and gradients are as in the last fused step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._groups = optimizer, list[_KernelGroup]()
        self._is_adam = not isinstance(optimizer, torch.optim.SGD)
        self._states: list[dict[str, Any]] = []
        self._counts = 0, 0  # of groups and states
        self._step: Any = None

    def learn(self) -> None:
        """Store groups and states after an ordinary step if the next step would be fused on the CPU."""
        optimizer, self._groups = self._optimizer, []
        step = type(optimizer).step
        original = getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else step
        if original is not _STEPS.get(type(optimizer)):
            return
        groups = []
        for values in optimizer.param_groups:
            parameters, state = values["params"], optimizer.state
            kinds = {p.dtype for p in parameters}
            fits = len(kinds) == 1 and kinds.issubset(_DIRECT_DTYPES) and all(p.is_cpu for p in parameters)
            if not fits or not can_fuse(values, optimizer):
                return
            keeps = bool(values["amsgrad" if self._is_adam else "momentum"])
            needed = ["step", "exp_avg", "exp_avg_sq"] if self._is_adam else []
            if keeps:
                needed.append("max_exp_avg_sq" if self._is_adam else "momentum_buffer")
            states = [state[p] for p in parameters if p in state]
            complete = all(isinstance(own.get(key), Tensor) for own in states for key in needed)
            if needed and not (complete and len(states) == len(parameters)):
                return
            groups.append(_KernelGroup(values, parameters, len(parameters), states, kinds.pop(), keeps))
        self._groups, self._states, self._step = groups, list(optimizer.state.values()), step
        self._counts = len(groups), len(self._states)

    def take(self) -> bool:
        """Step the optimizer. Return False, without any change, if something differs from the stored state."""
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        if not self._groups or (len(groups), len(states)) != self._counts:
            return False
        if type(optimizer).step is not self._step or is_hooked(optimizer) or not _OWN.isdisjoint(vars(optimizer)):
            return False
        if not all(map(operator.is_, states.values(), self._states)) or torch._C._autograd._profiler_enabled():
            return False
        gradients = []
        for now, group in zip(groups, self._groups, strict=True):
            # The group still has its parameters, the default kernels and a learning rate that is a float.
            values, parameters = group.values, group.parameters
            if now is not values or values["params"] is not parameters or len(parameters) != group.count:
                return False
            chosen = values["foreach"] is not None or values["fused"] is not None or values["maximize"]
            if chosen or values["differentiable"] or values.get("capturable") or type(values["lr"]) is not float:
                return False
            if bool(values["amsgrad" if self._is_adam else "momentum"]) is not group.keeps:
                return False
            if self._is_adam and Tensor in map(type, values["betas"]):
                return False
            own: list[Any] = [p.grad for p in parameters]
            if set(map(type, own)) != _TENSOR or set(map(_kind, own)) != {(torch.strided, group.dtype)}:
                return False
            if not (all(map(_is_contiguous, own)) and all(map(_is_contiguous, parameters))):
                return False
            gradients.append(own)
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for group, own in zip(self._groups, gradients, strict=True):
                values, parameters, own_states = group.values, group.parameters, group.states
                if self._is_adam:
                    steps = [state["step"] for state in own_states]
                    torch._foreach_add_(steps, 1)
                    beta1, beta2 = values["betas"]
                    (torch._fused_adamw_ if values["decoupled_weight_decay"] else torch._fused_adam_)(
                        parameters,
                        own,
                        [state["exp_avg"] for state in own_states],
                        [state["exp_avg_sq"] for state in own_states],
                        [state["max_exp_avg_sq"] for state in own_states] if group.keeps else [],
                        steps,
                        amsgrad=group.keeps,
                        lr=values["lr"],
                        beta1=beta1,
                        beta2=beta2,
                        weight_decay=values["weight_decay"],
                        eps=values["eps"],
                        maximize=False,
                    )
                else:
                    torch._fused_sgd_(
                        parameters,
                        own,
                        [state["momentum_buffer"] for state in own_states] if group.keeps else [],
                        weight_decay=values["weight_decay"],
                        momentum=values["momentum"],
                        lr=values["lr"],
                        dampening=values["dampening"],
                        nesterov=values["nesterov"],
                        maximize=False,
                        is_first_step=False,
                    )
        finally:
            torch._C._set_grad_enabled(enabled)
        return True


# Give up on direct steps after this many recordings in a row that no direct step could use.
_MOST_LEARNT = 4
# The guard of torch.nn.utils.clip_grad_norm_ against a division by zero.
_CLIP_EPSILON = 1e-6


@dataclass  # made in every step
class Update:
    """Result of an update: norm of the mean gradient before clipping, learning rate, and the reason for a skip.

    `skipped` is None, or "weightless": no sample had a weight; "overflow": a smaller loss scale may help; "nonfinite":
    the loss or the gradient is not finite.
    """

    grad_norm: float
    learning_rate: float
    skipped: str | None


class Stepper:
    """Optimizer that steps with the learning rates of the job's schedule.

    `exact`: use the kernels of the optimizer's own defaults. `narrow`: round scheduled rates to float32, the dtype of
    a captured step, so that all steps are equal whether they are captured or not (decision 0057).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, job: Job, *, exact: bool = False, narrow: bool = False
    ) -> None:
        self._optimizer, self._job, self._exact = optimizer, job, exact
        self._narrow = narrow and job.schedule is not None
        self._parts = tuple(parts(optimizer).values())
        rates = rated(self._parts)
        self._is_plain = is_torchs(optimizer) and len(rates) == len(optimizer.param_groups)
        self._rates = [float(group["lr"]) for group in rates]
        # The groups of a wrapper may have no learning rate.
        if job.schedule is not None and len(rates) < len(groups(optimizer)) and (len(self._parts) == 1 or not rates):
            raise JobError(
                given=f"a schedule for {type(optimizer).__name__}, which has no lr",
                conflict="a schedule multiplies the learning rates of the optimizer's groups",
                remedy="leave the schedule out, or use an optimizer with a learning rate",
            )

        schedule = job.schedule
        self._scheduled = schedule.rates(optimizer) if isinstance(schedule, Schedule) else None
        self._direct: DirectStep | None = DirectStep(optimizer)
        self._num_learnt = 0

    def multiplier(self, progress: Progress) -> float:
        """Return the schedule's multiplier of the learning rate, 1.0 without a schedule. Raises: UserCodeError."""
        if self._job.schedule is None:
            return 1.0
        try:
            multiplier = float(self._job.schedule(progress))
        except JobError:
            raise
        except Exception as error:
            raise user_error("the schedule", error) from error
        if not math.isfinite(multiplier) or multiplier < 0:
            raise UserCodeError(
                given=f"schedule({float(progress):.4g}) = {multiplier}",
                conflict="a schedule gives the learning rate's multiplier: finite and not negative",
                remedy="correct the schedule, a function of progress in [0, 1]",
            )
        return multiplier

    def rate(self, progress: Progress) -> float:
        """Return the learning rate of the first group. Raises: UserCodeError."""
        return (self._rates[0] if self._rates else 1.0) * self.multiplier(progress)

    def set_rates(self, progress: Progress) -> float:
        """Set the learning rates of all groups and return the first group's.

        Raises: UserCodeError; JobError if groups were added since the start.
        """
        groups = self._optimizer.param_groups if self._is_plain else rated(self._parts)
        if len(groups) != len(self._rates):
            raise JobError(
                given=f"{type(self._optimizer).__name__} with {len(groups)} parameter groups, of {len(self._rates)} at "
                "the start",
                conflict="a job's schedule and checkpoints cover only the groups that its optimizer function makes",
                remedy="make all groups there; a shoal.Session may add groups in its loop",
            )
        if self._scheduled is not None:
            rate = self._scheduled.set(progress)
        else:
            multiplier = self.multiplier(progress)
            for group, own in zip(groups, self._rates, strict=True):
                if OWN_RATE in group:
                    continue
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(own * multiplier)
                else:
                    group["lr"] = own * multiplier
            rate = (self._rates[0] if self._rates else 1.0) * multiplier
            if groups and OWN_RATE in groups[0]:
                rate = float(groups[0]["lr"])
        if not self._narrow:
            return rate
        for group in self._optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = float(np.float32(group["lr"]))
        return float(np.float32(rate))

    def _trained(self) -> list[tuple[int, bool]]:
        """Return which parameters of the groups require a gradient."""
        return [
            (id(p), p.requires_grad) for part in self._parts for group in part.param_groups for p in group["params"]
        ]

    def _settle(self, rates: list[Any], trained: list[tuple[int, bool]]) -> None:
        """Mark groups with a learning rate that the optimizer's step has changed.

        Raises: JobError for such a change in a job with a schedule, and for a changed `requires_grad`.
        """
        before = dict(trained)
        if any(is_trained != before.get(key, is_trained) for key, is_trained in self._trained()):
            raise JobError(
                given=f"optimizer {type(self._optimizer).__name__}, whose step changes requires_grad of a parameter",
                conflict="the trained parameters are divided and summed over ranks as they were before the first step",
                remedy="leave requires_grad alone and give the parameter's group a learning rate of 0 for a while, or "
                "set requires_grad in a loop of your own with shoal.Session",
            )
        for group, was, now in zip(rated(self._parts), rates, rates_seen(self._parts), strict=False):
            if was != now and self._job.schedule is not None:
                raise JobError(
                    given=f"optimizer {type(self._optimizer).__name__}, whose step changes a learning rate, and a "
                    "schedule",
                    conflict="the schedule sets the rates before each step, and the optimizer's change is lost",
                    remedy="keep one of them: the scheduler or hook in the optimizer, or Job(schedule=...)",
                )
            if was != now:
                group[OWN_RATE] = True

    def step(self, number: int, *, refuse_noise: bool = False, closure: Callable[[], Tensor] | None = None) -> None:
        """Step the optimizer with the random numbers of step `number`. `closure`: for an optimizer that needs it.

        Raises: UserCodeError; JobError if `refuse_noise` and the optimizer has drawn random numbers; errors of the
        closure.
        """
        try:
            if not self._exact and self._direct is not None and self._direct.take():  # draws nothing
                self._num_learnt = 0
                return
        except Exception as error:
            raise step_error(self._optimizer, error) from error
        draws = may_draw(self._optimizer)
        if draws:
            self.seed(number)
        before = all_generators() if refuse_noise else None
        seen = (rates_seen(self._parts), self._trained()) if draws else None
        try:
            if self._exact or closure is not None:
                step_optimizer(self._optimizer, closure)
            else:
                with fused(self._optimizer):
                    step_optimizer(self._optimizer)
                if self._direct is not None:
                    self._direct.learn()
                    self._num_learnt += 1
                    if self._num_learnt >= _MOST_LEARNT:
                        self._direct = None
        except ShoalError:
            raise
        except Exception as error:
            raise step_error(self._optimizer, error) from error
        if seen is not None:
            self._settle(*seen)
        if before is not None and all_generators() != before:
            raise JobError(
                given="an optimizer that draws random numbers, where ranks update different parts of a model",
                conflict="the random numbers for a part would depend on the layout",
                remedy="use the data axis alone, or an optimizer without noise",
            )

    def seed(self, step: int) -> None:
        """Seed the generators with a value that is the same on all ranks, for optimizers that may add noise."""
        seed_everything(random_key(self._job.seed, "optimizer", step))

    @property
    def queues(self) -> bool:
        """True if `queue_step` supports the parameters that have gradients now."""
        return not self._exact and maskable(self._optimizer)

    def queue_step(self, bad: Tensor, rates: Sequence[Tensor] | None = None, *, captures: bool = False) -> None:
        """Queue an optimizer step that changes nothing if `bad`, float32 [] on the device, is 1.0.

        `captures`: within a graph capture, with the learning rates `rates` on the device; None if they are constant.
        Raises: UserCodeError.
        """
        try:
            with captured(self._optimizer, bad, rates) if captures else masked(self._optimizer, bad):
                step_optimizer(self._optimizer)
        except Exception as error:
            raise step_error(self._optimizer, error) from error


class Updater:
    """Update of the parameters by one optimizer. Inputs and decisions are the same on all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        job: Job,
        observer: Observer,
        strategy: Strategy,
        sharded_model: ShardedModel,
        *,
        exact: bool = False,
        stepper: Stepper | None = None,
        matrix_owners: MatrixOwners | None = None,
    ) -> None:
        """Prepare the update, and divide the optimizer's parameters by the strategy's division of the update.

        `exact`: use the kernels of the optimizer's own defaults. `stepper`: replaces the default Stepper.
        `matrix_owners`: step whole the parameters that they own.
        """
        self.optimizer, self._sharded_model = optimizer, sharded_model
        self._matrix_owners = matrix_owners
        self._division, self._compression = strategy.update_division, strategy.compression
        self._hooks, self._expert_grains = sharded_model.hooks, strategy.expert_grains
        for part in parts(optimizer).values():
            for parameter in [p for p in part.state if isinstance(p, Tensor) and not self._division.updates(p)]:
                del part.state[parameter]  # made for a parameter of another rank
        divided = self._division.divide(optimizer)
        whole = [(name, p) for name, p in sharded_model.parameters() if p.requires_grad and p not in divided]
        complex_one = next((name for name, p in whole if p.is_complex()), None)
        if complex_one is not None and job.clip_value is not None:
            raise JobError(
                given=f"clip_value={job.clip_value:g} with the complex parameter {complex_one}",
                conflict="complex numbers have no order, by which torch could clip them",
                remedy="use clip_norm",
            )
        apart = self._expert_grains.is_apart if self._expert_grains is not None else lambda _: False
        self._parameters = [(p, sharded_model.counts(name) and not apart(p)) for name, p in whole]
        # Name, home, key and value of each parameter that is not gathered from other ranks.
        self._places = [
            (name, sharded_model.model.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2], p)
            for name, p in sharded_model.parameters()
            if not hasattr(p, "to_local")
        ]
        self._num_gradients = -1
        self._constants = device_reads.Constants(sharded_model.mesh.device)
        self._parameters += [(part, True) for part in divided.values() if part is not None]
        refuse_divided(optimizer, sharded_model, self._division.updates)
        # The fast path avoids a function call for each parameter in every step.
        self._whole = all(counts and not hasattr(p, "to_local") for p, counts in self._parameters)
        self._divides_state = sharded_model.divides_state
        self._job, self._observer, self._judged = job, observer, False
        self.num_begun = 0  # updates, including one that has raised before its end
        self.stepper = stepper or Stepper(optimizer, job, exact=exact)
        self.needs_closure, self._has_sparse = needs_closure(optimizer), bool(strategy.sparse)

    def step(
        self,
        loss: float,
        weight: float,
        loss_scale: LossScale,
        progress: Progress,
        norm: float | None = None,
        *,
        again: Callable[[], StepSums] | None = None,
    ) -> Update:
        """Divide the summed gradients by `weight` and the loss factor, clip them, and step the optimizer.

        A skipped update changes nothing. `loss`: the mean loss over the global batch. `norm`: the value of
        `norm_tensor` for all gradients if it is known, which counts each trainable parameter once. `again`: computes
        loss and summed gradients at the parameters' present values, for an optimizer that needs a closure.
        Raises: LossError for a weight that is not valid; errors of `again`.
        Collective: as `norm` and `update` of the division, and as `again`.
        """
        rate = self.stepper.set_rates(progress)
        if not 0.0 < weight < math.inf and refuse_weight(weight) == 0.0:  # only the sum: no wait in each microbatch
            return Update(0.0, rate, "weightless")
        is_observed = self._observer.looks
        if is_observed:
            self._observer.reduced(loss, weight, 1.0 / loss_scale.factor(self._job.global_batch) / weight)
        norm, skipped = self._mean_gradient(loss, weight, loss_scale, progress, norm)
        if skipped is not None:
            return Update(norm, rate, skipped)
        if is_observed:
            self._division.gradients_settle()
            self._observer.clipped(norm)
        self.num_begun += 1
        closure = None
        if self.needs_closure:
            assert again is not None, "only the trainer steps such an optimizer"
            closure = Closure(
                [p for p, _ in self._parameters],
                loss,
                again,
                lambda loss, weight: self._mean_gradient(loss, weight, loss_scale, progress, skips=False),
            )
        step = functools.partial(self.stepper.step, progress.step, refuse_noise=self._divides_state, closure=closure)
        owners = self._matrix_owners
        self._division.update(step if owners is None else lambda: owners.step(self.optimizer, step))
        if self._has_sparse:
            make_states_dense(self.optimizer)
        if self._compression is not None:  # the withheld part of the gradients changes only now
            self._compression.commit()
        if not self._judged:
            refuse_divided(self.optimizer, self._sharded_model, self._division.updates)
            tensors, _ = optimizer_state(self.optimizer, self._sharded_model.model, copy=False)
            state_slices(self._sharded_model, tensors)
            self._judged = True
        return Update(norm, rate, None)

    def _mean_gradient(
        self,
        loss: float,
        weight: float,
        loss_scale: LossScale,
        progress: Progress,
        norm: float | None = None,
        *,
        skips: bool = True,
    ) -> tuple[float, str | None]:
        """Turn the summed gradients into the clipped mean. Return its norm before clipping, and why it is `judged` bad.

        `skips`: leave a bad gradient as it is. Collective: as `norm` of the division.
        """
        self._division.own_gradients()
        gradients, counted = self._gradients()
        rest = scale = 1.0 / loss_scale.factor(self._job.global_batch) / weight if weight else 0.0
        if self._hooks.by_name:  # hooks see the mean, as on one process with the whole batch
            if gradients:
                torch._foreach_mul_(gradients, scale)
            key = random_key(self._job.seed, "hooks", progress.step)
            self._hooks.call(dict(self._sharded_model.parameters()), key)
            (gradients, counted), rest, norm = self._gradients(), 1.0, None
        own = global_norm(counted) if norm is None else settled(counted, norm)
        if self._expert_grains is not None:
            own = self._expert_grains.norm(own)
        norm = self._division.norm(own) * abs(rest)
        skipped = judged(loss, norm, scale, loss_scale)
        if skipped is not None and skips:
            return norm, skipped
        rest *= clipping(self._job.clip_norm, norm)
        if gradients and rest != 1.0:  # exactly 1 if each of 2^n samples has weight 1
            torch._foreach_mul_(gradients, rest)
        if self._job.clip_value is not None:
            clip_values(gradients, self._job.clip_value)
        return norm, None

    @property
    def queues(self) -> bool:
        """True if `queue` supports the parameters that have gradients on this rank now."""
        return self._judged and self.stepper.queues and not self._hooks.by_name

    def queue(
        self, sums: QueuedSums, bad: Tensor, factor: float | Tensor, step: Callable[[Tensor], None]
    ) -> list[Tensor]:
        """Queue the work of `step` on the device without a wait. Return numbers with the norm of the summed gradients.

        torch's kernel for loss scales multiplies the gradients and looks for numbers that are not finite: among them,
        and among numbers that are finite only in a step that `step` would not skip.

        Args:
            sums: the step's sums.
            bad: float32 [], 1.0 to change nothing. It becomes 1.0 if `step` would skip the update or a
                rank has failed.
            factor: of the loss totals.
            step: queues the optimizer's step, which changes nothing if its argument is 1.0.

        Collective: as `queued_norm` and `update` of the division.
        """
        gradients, counted = self._gradients()
        divided, clip_norm = self._sharded_model.divided, self._job.clip_norm
        if divided or clip_norm is not None:
            norms = [self._division.queued_norm(norm_tensor(counted))]
        else:  # the host adds them up
            norms = norm_parts(counted)
        total, weight = sums.loss or (sums.sums[TOTAL], sums.sums[WEIGHT])
        inverse = factor.reciprocal() if isinstance(factor, Tensor) else self._constants[1.0 / factor,][0]
        mean, log, scale = bad.new_empty(3).unbind()
        torch.div(total, weight, out=mean)
        torch.log(weight, out=log)  # finite for a weight that is positive and finite
        torch.div(inverse, weight, out=scale)
        checks = [mean, log]
        if sums.fails:
            checks.append((1.0 - sums.failures).log().float())
        if divided or clip_norm is not None:  # gradients of other ranks, and squares out of range
            checks.append(norms[0].float())
        if clip_norm is not None:
            wide = inverse / weight
            norm = checks[-1].double() * wide.abs()
            scale = wide * (torch.full_like(norm, clip_norm) / (norm + _CLIP_EPSILON)).clamp(max=1.0)
            scale = scale.float()
        torch._amp_foreach_non_finite_check_and_unscale_([*gradients, *checks], bad, scale)
        clip_values(gradients, self._job.clip_value)
        self._division.update(lambda: step(bad), queued=True)
        return norms

    def queued(self, weight: float, loss_scale: LossScale, norm: float, rate: float) -> Update:
        """Return the result of a good queued update. `norm`: of the summed gradients."""
        scale = 1.0 / loss_scale.factor(self._job.global_batch) / weight
        return Update(rounded(norm, ()) * abs(scale), rate, None)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's detached gradients, and the gradients that count in its norm.

        Raises: JobError if the job's code has replaced a parameter, which then has no gradient.
        """
        if self._whole:
            gradients = [g.detach() if g.requires_grad else g for p, _ in self._parameters if (g := p.grad) is not None]
            counted = gradients
        else:
            pairs = [(local(p.grad), counts) for p, counts in self._parameters if p.grad is not None]
            gradients = [gradient for gradient, _ in pairs]
            counted = [g for g, counts in pairs if counts and g.numel()]
        if self._has_sparse:  # their rows, which sparse gradients share with these tensors
            gradients = [g._values() if g.is_sparse else g for g in gradients]
            counted = gradients
        if len(gradients) != self._num_gradients:
            self._num_gradients = len(gradients)
            for name, home, key, parameter in self._places:
                if home.get(key) is not parameter:
                    raise replaced(name)
        return gradients, counted


def judged(loss: float, norm: float, scale: float, loss_scale: LossScale) -> str | None:
    """Return the reason to skip an update, as in Update, or None."""
    if not math.isfinite(loss) or not math.isfinite(scale):
        return "nonfinite"
    if not math.isfinite(norm):
        return "overflow" if loss_scale.can_fall else "nonfinite"
    return None


def clipping(limit: float | None, norm: float) -> float:
    """Return the factor that clips a gradient of norm `norm` to `limit`."""
    return 1.0 if limit is None else min(1.0, limit / (norm + _CLIP_EPSILON))
