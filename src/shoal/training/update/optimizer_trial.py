"""Trial of a job's optimizer on small stand-ins of the parameters, to find what its step depends on.

Ranks may divide an update if each rank computes the same values as one process with all parameters. The trial checks
this by execution, not by the optimizer's name. It runs the same few steps with the whole stand-ins, and with the parts
that one rank would have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.checkpoint.whole_optimizer import is_hooked, is_torchs, step_optimizer
from shoal.errors import JobError
from shoal.numerics.generators import all_generators
from shoal.numerics.no_trace import NoTrace
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlice
from shoal.training.update.job_optimizer import Parameters, build_optimizer, on_matrices

# Maximum elements of a stand-in, and minimum size of a dim that was scaled down to get there.
_MOST_ELEMENTS, _LEAST_DIM = 1 << 11, 8
# Scales of the gradients in successive steps: an optimizer may clip them.
_SCALES = (1e-3, 1.0, 1e3)
# Relative to the largest change of a parameter: a step with other numbers differs by percents.
_TOLERANCE, _ROUNDINGS = 1e-3, 16

# The parameters' values by name, before the first step and after each step.
Steps = list[dict[str, Tensor]]


class Own(NamedTuple):
    """A rank's part of a parameter.

    `cut`: dims of which the rank has the first half. `updated`: whether the rank's part gets a gradient.
    """

    cut: tuple[int, ...] = ()
    updated: bool = True

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor."""
        for dim in self.cut:
            whole = whole.narrow(dim, 0, (whole.shape[dim] + 1) // 2)
        return whole.clone()


class OptimizerTrial:
    """Trials of the optimizer that `make` returns for parameters of the given shapes, on `device`."""

    def __init__(
        self,
        make: Callable[[Any], Any],
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._make, self._device = make, device
        self.name = ""  # class name of the optimizer after a trial; empty for torch's own classes
        self._like = {name: (p, _small(shapes[name])) for name, p in parameters if p.requires_grad}

    def differing(self, own: Mapping[str, Own]) -> list[str]:
        """Return the parameters that get other values on a rank with only its `own` parts.

        None of them also means unknown: the optimizer raises on stand-ins, or draws random numbers, which the first
        step detects.
        """
        names: dict[str, None] = {}
        for wide in (True, False):  # not every optimizer computes in float64
            whole, part = self.steps(wide=wide), self.steps(own, wide=wide)
            if not (whole and part):
                continue
            for number in range(1, min(len(whole), len(part))):
                for name, value in part[number].items():
                    before, wanted = (own[name].of(steps[name]) for steps in whole[number - 1 : number + 1])
                    rounding = _ROUNDINGS * torch.finfo(value.dtype).eps * _largest(wanted)
                    far = _TOLERANCE * _largest(wanted - before) + rounding
                    if own[name].updated and _largest((value - wanted)[value != wanted]) > far:
                        names[name] = None
            break
        return list(names)

    def steps(self, own: Mapping[str, Own] | None = None, *, wide: bool = True) -> Steps:
        """Return the values after each trial step, or an empty list if they are unknown.

        `own`: the parts that a rank has; None: whole parameters. `wide`: compute in float64.
        """
        steps: Steps = []
        with contextlib.suppress(Exception), NoTrace(None, {"optimizer": self._make}):
            values = torch.Generator().manual_seed(0)
            states: list[tuple[str, nn.Parameter, list[Tensor]]] = []
            for name, (like, shape) in self._like.items():
                dtype = like.dtype if not wide else torch.complex128 if like.is_complex() else torch.float64
                drawn = [torch.randn(shape, generator=values, dtype=torch.float64) for _ in range(1 + len(_SCALES))]
                part = Own() if own is None else own.get(name)
                if part is not None:
                    value, *gradients = (part.of(one).to(self._device, dtype) for one in drawn)
                    stand_in = nn.Parameter(value)
                    vars(stand_in).update(vars(like) if type(like) is nn.Parameter else {})  # some jobs group by these
                    states.append((name, stand_in, gradients if part.updated else []))
            optimizer = build_optimizer(self._make, Parameters(_StandIns([(name, p) for name, p, _ in states])))
            self.name = "" if is_plain(optimizer) else type(optimizer).__name__
            before = all_generators()
            steps.append({name: parameter.detach().clone() for name, parameter, _ in states})
            for number, scale in enumerate(_SCALES):
                for _, parameter, gradients in states:
                    parameter.grad = gradients[number] * scale if gradients else None
                step_optimizer(optimizer)  # may raise in the second step, since there is no forward between the steps
                if all_generators() != before:
                    return []
                steps.append({name: parameter.detach().clone() for name, parameter, _ in states})
        return steps if len(steps) > 1 else []


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for one of torch's own optimizers without hooks: its dependencies are known."""
    return is_torchs(optimizer) and not is_hooked(optimizer)


class _StandIns(nn.Module):
    """A model without modules that has parameters under the names of another model."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of about the same proportions with a bounded number of elements."""
    small, factor = torch.Size(shape), 1
    while small.numel() > _MOST_ELEMENTS and max(small) > _LEAST_DIM:
        factor *= 2
        small = torch.Size(max(min(dim, _LEAST_DIM), dim // factor) for dim in shape)
    return tuple(small)


def _largest(values: Tensor) -> float:
    """Return the largest finite magnitude."""
    magnitudes = values.abs()
    magnitudes = magnitudes[magnitudes.isfinite()]
    return float(magnitudes.max()) if len(magnitudes) else 0.0


def needing_whole(optimizer: torch.optim.Optimizer, make: Callable[[Any], Any], model: ShardedModel) -> list[str]:
    """Return this rank's parameters that are cut over ranks, of which the optimizer needs the whole.

    The optimizer is known to (see `on_matrices`), or a trial finds it. torch's own optimizers need no trial. Steps that
    need all parameters together are left to torch's DTensors, or refused.
    """
    known = {id(p) for p in on_matrices(optimizer)}
    trained = ((name, p) for name, p in model.parameters() if p.requires_grad)
    cut = {name: p for name, p in trained if any(own.get(name) is not None for own in model.by_rank)}
    needs_whole = {name for name, p in cut.items() if id(p) in known}
    if cut and not is_plain(optimizer):
        trial, own = _trial(make, model), _own(model, lambda p: True)
        own |= {name: Own(tuple(_cut_dims(model.part(name, p)))) for name, p in cut.items() if name not in needs_whole}
        differing = trial.differing(own)
        if differing and not trial.differing({name: Own() for name in list(own)[::2]}):
            needs_whole.update(differing, (name for name, p in cut.items() if 1 in p.shape))  # one row cannot be tried
    return [name for name in cut if name in needs_whole]


def refuse_divided_steps(
    optimizer: torch.optim.Optimizer,
    make: Callable[[Any], Any],
    model: ShardedModel,
    updates: Callable[[nn.Parameter], bool],
) -> None:
    """Raise JobError for an optimizer that needs all parameters together, if this rank updates a part of them.

    `updates`: returns True if this rank updates a parameter. torch's own optimizers are exempt.
    """
    if is_plain(optimizer):
        return
    own, absent = _own(model, updates), model.absent()
    lacks = any(p.requires_grad and name in absent for name, p in model.model.named_parameters())
    if not lacks and all(one == Own() for one in own.values()):
        return
    differing = _trial(make, model).differing(own)
    if differing:
        raise JobError(
            given=f"optimizer {type(optimizer).__name__}, with a layout in which a rank updates a part of the "
            "parameters",
            conflict=f"from that part alone a step computes other values of {differing[0]}: it needs all parameters "
            "together, for example for a norm",
            remedy='use the data axis, one parameter server, or shard.level = "gradients" or "parameters"',
        )


def _trial(make: Callable[[Any], Any], model: ShardedModel) -> OptimizerTrial:
    return OptimizerTrial(make, model.model.named_parameters(), model.shapes(), model.mesh.device)


def _own(model: ShardedModel, updates: Callable[[nn.Parameter], bool]) -> dict[str, Own]:
    """Return this rank's parts of trainable parameters. DTensors, and parameters with an owner, count as whole."""
    parts, owners = model.division.parts, model.division.owners
    return {
        name: Own(tuple(_cut_dims(parts[name])) if name in parts and name not in owners else (), updates(p))
        for name, p in model.parameters()
        if p.requires_grad
    }


def _cut_dims(part: TensorSlice) -> Iterator[int]:
    return (dim for dim, (here, size) in enumerate(zip(part.local_shape, part.shape, strict=True)) if here != size)


def refuse_read(
    trial: OptimizerTrial, no_trace: NoTrace, together: Callable[[bool], bool], names: Collection[str]
) -> None:
    """Raise JobError for an optimizer with a step that depends on a value from a forward of the model.

    `no_trace`: the context of the look, after its forward. `together`: combines a flag over all ranks, as in the look.
    `names`: the values to check.
    """
    first, read, numeric = trial.steps(), "", int | float | Tensor
    changes = no_trace.changes() if first and trial.name else []
    for change in [change for change in changes if change.key in change.home]:
        home, key, value = change.home, change.key, change.home[change.key]
        for factor in (1e-3, 1e3) if change.name in names else ():  # a threshold may lie on either side
            home[key] = tree_map(
                lambda leaf, f=factor: leaf * f if isinstance(leaf, numeric) and type(leaf) is not bool else leaf,
                value,
            )
            steps = trial.steps()
            if steps and not all(
                torch.allclose(one[p], other[p], atol=0.0, equal_nan=True)
                for one, other in zip(first, steps, strict=False)
                for p in one
            ):
                read = change.name
        home[key] = value
    if together(bool(read)):
        read = read or "a part of the model on another rank"
        raise JobError(
            given=f"optimizer {trial.name}, whose step reads {read}, which the model's forward changes",
            conflict="the value depends on the batches that a process has computed, so ranks would update a parameter "
            "differently",
            remedy="compute the value from the parameters, their gradients or the optimizer's state, which are the "
            "same on every layout, or set it in a callback after the step from a sum over all ranks",
        )
