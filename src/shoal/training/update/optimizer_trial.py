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
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.update.job_optimizer import Parameters, build_optimizer

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

    def differing(self, own: Mapping[str, Own]) -> str | None:
        """Return the first parameter that gets other values on a rank with only its `own` parts, or None.

        None also means unknown: the optimizer raises on stand-ins, or draws random numbers, which the first step
        detects.
        """
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
                        return name
            return None
        return None

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


def refuse_divided_steps(
    optimizer: torch.optim.Optimizer,
    make: Callable[[Any], Any],
    model: ShardedModel,
    updates: Callable[[nn.Parameter], bool],
) -> None:
    """Raise JobError for an optimizer that computes other values from this rank's parts than from all parameters.

    `updates`: returns True if this rank updates a parameter. torch's own optimizers are exempt: see `refuse_on_parts`.
    """
    if is_plain(optimizer):
        return
    parts, absent = model.division.parts, model.absent()
    named = [(name, p) for name, p in model.model.named_parameters() if p.requires_grad]
    own = {}
    for name, p in named:
        if name not in absent:
            part = parts.get(name)
            sizes = zip(part.local_shape, part.shape, strict=True) if part is not None else ()
            own[name] = Own(tuple(dim for dim, (here, size) in enumerate(sizes) if here != size), updates(p))
    if len(own) == len(named) and all(one == Own() for one in own.values()):
        return
    trial = OptimizerTrial(make, named, model.shapes(), model.mesh.device)
    differing = trial.differing(own)
    if differing is None:
        return
    one_by_one = trial.differing({name: Own() for name in list(own)[::2]}) is None
    raise JobError(
        given=f"optimizer {type(optimizer).__name__}, with a layout in which "
        + (f"a rank has a part of {differing}" if one_by_one else "a rank updates a part of the parameters"),
        conflict=f"from that part alone a step computes other values of {differing}: it needs "
        + ("the whole parameter" if one_by_one else "all parameters together")
        + ", for example for a norm or a product of matrices",
        remedy='use the data axis, shard.level = "optimizer" or pipeline stages, which leave parameters whole'
        if one_by_one
        else 'use the data axis, one parameter server, or shard.level = "gradients" or "parameters"',
    )


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
