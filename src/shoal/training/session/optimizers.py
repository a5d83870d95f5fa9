"""Optimizers of a Session: several as one, with their groups and learning rates."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.checkpoint.whole_optimizer import groups as groups_of
from shoal.checkpoint.whole_optimizer import may_draw, parts, rated, step_optimizer
from shoal.jobs.job import Job, Progress
from shoal.numerics.generators import seed_everything
from shoal.plans.grains import random_key
from shoal.training.update.optimizer_step import Stepper, fused

# A group's tensor with more elements is compared by dtype and shape alone.
_FEW = 16


class _States(MutableMapping[Tensor, Any]):
    """The state of several optimizers. Each parameter's state is in its own optimizer."""

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


class Several:
    """Several optimizers with the interface of one. No parameter is in two of them."""

    def __init__(self, optimizers: Sequence[Optimizer], exact: bool) -> None:
        self._optimizers, self._exact = tuple(optimizers), exact

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, one optimizer after the other."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> _States:
        """The state of all optimizers."""
        return _States(self._optimizers)

    def step(self) -> None:
        """Step each optimizer."""
        for optimizer in self._optimizers:
            with contextlib.nullcontext() if self._exact else fused(optimizer):
                step_optimizer(optimizer)


def as_one(optimizers: Sequence[Optimizer], exact: bool) -> Optimizer:
    """Return the single optimizer, or an object for several with the attributes of one."""
    return optimizers[0] if len(optimizers) == 1 else cast(Optimizer, Several(optimizers, exact))


class OwnStepper(Stepper):
    """Stepper that multiplies the groups' current learning rates by the schedule's multiplier during the update.

    The groups have their own rates again after the update, since a scheduler may multiply the rates that it reads.
    `turn`: the number of the pass within its step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], job: Job, *, exact: bool) -> None:
        super().__init__(as_one(optimizers, exact), job, exact=exact)
        self._optimizers = optimizers
        self._now = 1.0
        self.turn = 0

    def foresee(self, progress: Progress) -> None:
        """Store the multiplier of the coming update. Raises: UserCodeError."""
        self._now = self.multiplier(progress)

    def set_rates(self, progress: Progress) -> float:
        """Return the first group's rate, times the stored multiplier."""
        return float(self._optimizer.param_groups[0].get("lr", 1.0)) * self._now

    def seed(self, step: int) -> None:
        """Seed the generators as in a Job, with a different seed in each pass of a step."""
        if any(map(may_draw, self._optimizers)):
            seed_everything(random_key(turned(self._job.seed, self.turn), "optimizer", step))

    def _settle(self, rates: list[Any], trained: list[tuple[int, bool]]) -> None:
        """Accept changed rates and requires_grad: the loop may change both."""

    def step(self, number: int, **options: Any) -> None:
        with multiplied(self._optimizer, self._now):
            super().step(number, **options)


def turned(seed: int, turn: int) -> int:
    """Return the seed of a step's pass: the training's own seed for the first, another seed for each later one."""
    return seed if turn == 0 else random_key(seed, "pass", turn)


@contextlib.contextmanager
def multiplied(optimizer: Optimizer, multiplier: float) -> Iterator[None]:
    """Return a context in which every group's learning rate is multiplied by `multiplier`."""
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
    """Copy of the optimizers' groups that can be restored."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [part for optimizer in optimizers for part in parts(optimizer).values()]
        self._copies = [[(group, _copied(group)) for group in part.param_groups] for part in self._optimizers]

    def put_back(self) -> None:
        """Restore the groups, and remove groups that were added since."""
        for optimizer, copies in zip(self._optimizers, self._copies, strict=True):
            optimizer.param_groups[:] = [group for group, _ in copies]
            for group, values in copies:
                group.clear()
                group.update(_copied(values))

    def put_changes(self, since: Groups) -> None:
        """Apply the changes between the copies `since` and this one to the groups, and leave other values alone."""
        for optimizer, copies, earlier in zip(self._optimizers, self._copies, since._copies, strict=True):
            before = {id(group): values for group, values in earlier}
            optimizer.param_groups[:] = [group for group, _ in copies]
            for group, values in copies:
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
    """Return the groups' values except their parameters, as text that can be compared between ranks."""
    rows = []
    for group in (group for optimizer in optimizers for group in groups_of(optimizer)):
        texts = {}
        for key, value in group.items():
            if isinstance(value, Tensor):
                is_small = value.device.type == "cpu" and value.numel() <= _FEW
                texts[key] = repr(value.tolist()) if is_small else f"{value.dtype} {list(value.shape)}"
            elif key != "params":
                is_plain = value is None or isinstance(value, bool | int | float | str | tuple | list)
                texts[key] = repr(value) if is_plain else type(value).__name__
        texts["trainable elements"] = str(sum(p.numel() for p in group["params"] if p.requires_grad))
        rows.append(texts)
    return rows


def number_of(values: list[dict[str, str]]) -> float:
    """Return a 48-bit hash of the values."""
    return float(int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:6], "little"))
