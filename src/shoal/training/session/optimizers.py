"""Optimizers of a Session: several as one, their groups and their learning rates."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.checkpoint.whole_optimizer import groups as groups_of
from shoal.checkpoint.whole_optimizer import parts, rated
from shoal.distributed.process_setup import step_optimizer
from shoal.job import Job, Progress
from shoal.numerics.grain_randomness import seed_everything
from shoal.plans.grains import random_key
from shoal.training.fused_step import fused
from shoal.training.optimizer_step import Stepper, may_draw

# A tensor of a group with more elements is told by its shape alone.
_FEW = 16


class _States(MutableMapping[Tensor, Any]):
    """The state of several optimizers, each parameter's in its own one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[id(parameter)].state[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._owners[id(parameter)].state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owners[id(parameter)].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()


class Several:
    """Several optimizers as one; no parameter is in two of them."""

    def __init__(self, optimizers: Sequence[Optimizer], exact: bool) -> None:
        self._optimizers, self._exact = tuple(optimizers), exact

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All their groups, one optimizer's after the other's."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> _States:
        """All their state."""
        return _States(self._optimizers)

    def step(self) -> None:
        """Steps each optimizer."""
        for optimizer in self._optimizers:
            with contextlib.nullcontext() if self._exact else fused(optimizer):
                step_optimizer(optimizer)


def as_one(optimizers: Sequence[Optimizer], exact: bool) -> Optimizer:
    """The optimizer, or several with the attributes of one."""
    return optimizers[0] if len(optimizers) == 1 else cast(Optimizer, Several(optimizers, exact))


class OwnStepper(Stepper):
    """Stepper with the groups' rates at the time of the update, times the schedule's multiplier.

    After it the groups have their own rates again: a scheduler that multiplies what it finds must not find the
    schedule's. `turn` is the number of the pass within its step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], job: Job, *, exact: bool) -> None:
        super().__init__(as_one(optimizers, exact), job, exact=exact)
        self._optimizers = optimizers
        self._now = 1.0
        self.turn = 0

    def foresee(self, progress: Progress) -> None:
        """Notes the multiplier of the update to come. Raises: UserCodeError."""
        self._now = self.multiplier(progress)

    def set_rates(self, progress: Progress) -> float:
        """The rate of the first group, times the multiplier that was foreseen."""
        return float(self._optimizer.param_groups[0].get("lr", 1.0)) * self._now

    def seed(self, step: int) -> None:
        """Seeds the generators as in a Job, otherwise in each pass."""
        if any(map(may_draw, self._optimizers)):
            seed_everything(random_key(turned(self._job.seed, self.turn), "optimizer", step))

    def _settle(self, rates: list[Any], trained: list[tuple[int, bool]]) -> None:
        """Accept rates and requires_grad as they are: the loop may change both."""

    def step(self, number: int, *, refuse_noise: bool = False) -> None:
        with multiplied(self._optimizer, self._now):
            super().step(number, refuse_noise=refuse_noise)


def turned(seed: int, turn: int) -> int:
    """The seed of a step's pass: that of the training in the first, others in those that read its batches again."""
    return seed if turn == 0 else random_key(seed, "pass", turn)


@contextlib.contextmanager
def multiplied(optimizer: Optimizer, multiplier: float) -> Iterator[None]:
    """A context in which every group's learning rate is times so much."""
    if multiplier == 1.0:
        yield
        return
    groups = rated(parts(optimizer).values())
    before = [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    for group, rate in zip(groups, before, strict=True):
        _set(group, rate * multiplier)
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            _set(group, rate)


def _set(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate)  # a captured step reads this very tensor
    else:
        group["lr"] = rate


class Groups:
    """Copy of the optimizers' groups, to be put back."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [part for optimizer in optimizers for part in parts(optimizer).values()]
        self._held = [[(group, _copied(group)) for group in part.param_groups] for part in self._optimizers]

    def put_back(self) -> None:
        """Makes them what they were; of groups added since there is nothing."""
        for optimizer, held in zip(self._optimizers, self._held, strict=True):
            optimizer.param_groups[:] = [group for group, _ in held]
            for group, values in held:
                kept = _copied(values)
                group.clear()
                group.update(kept)

    def put_changes(self, since: Groups) -> None:
        """Makes of the groups what was changed from `since` to this, and leaves the rest as it is."""
        for optimizer, held, earlier in zip(self._optimizers, self._held, since._held, strict=True):
            before = {id(group): values for group, values in earlier}
            optimizer.param_groups[:] = [group for group, _ in held]
            for group, values in held:
                old = before.get(id(group), {})
                group.update({k: v for k, v in _copied(values).items() if k not in old or not _same(v, old[k])})


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    return {**copied, "params": list(group["params"])}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and a and isinstance(a[0], Tensor):
        return [id(x) for x in a] == [id(x) for x in b]
    return type(a) is type(b) and bool(a == b)


def group_values(optimizers: Sequence[Optimizer]) -> list[dict[str, str]]:
    """Values of the groups besides their parameters, as text that is the same on all ranks."""
    found = []
    for optimizer in optimizers:
        for group in groups_of(optimizer):
            rest = {key: _told(value) for key, value in group.items() if key != "params"}
            trained = sum(p.numel() for p in group["params"] if p.requires_grad)
            found.append({**rest, "trainable elements": str(trained)})
    return found


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        small = value.device.type == "cpu" and value.numel() <= _FEW
        return repr(value.tolist()) if small else f"{value.dtype} {list(value.shape)}"
    plain = value is None or isinstance(value, bool | int | float | str | tuple | list)
    return repr(value) if plain else type(value).__name__


def number_of(values: list[dict[str, str]]) -> float:
    """A number of 48 bits that is, as good as certainly, another for other values."""
    return float(int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:6], "little"))
