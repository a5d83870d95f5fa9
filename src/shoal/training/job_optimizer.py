"""Optimizer that a job makes over its trainable parameters, and refusals of such as cannot be stepped once a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.distributed.failures import user_error
from shoal.distributed.process_setup import compiler_deferred
from shoal.errors import JobError, ShoalError
from shoal.parallel.model.sharded_model import ShardedModel

# They compute with a matrix as a whole, and on a part of one something else.
_ON_MATRICES = ("Muon", "Adafactor", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")


class Parameters(list[nn.Parameter]):
    """Trainable parameters of a rank, each once, and `named` in that order; none where its stages are frozen."""

    def __init__(self, model: nn.Module) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]
        super().__init__(p for _, p in self._named)
        if not any(p.requires_grad for p in model.parameters()):
            raise JobError(
                given=f"a {type(model).__name__} without trainable parameters",
                conflict="there is nothing to train",
                remedy="check what model() returns, and its requires_grad",
            )

    @property
    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) pairs, in the order of the list."""
        return iter(self._named)


def build_optimizer(make: Callable[[Any], Any], parameters: Parameters) -> torch.optim.Optimizer:
    """The job's optimizer. Raises: JobError or UserCodeError where it is none that can be stepped once a step."""
    try:
        with compiler_deferred():
            optimizer = make(parameters) if parameters else _empty(make)
    except ShoalError:
        raise
    except Exception as error:
        raise user_error("the optimizer function", error) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            given=f"optimizer(parameters) returned {type(optimizer).__name__}",
            conflict="the engine steps a torch.optim.Optimizer",
            remedy="return one, for example torch.optim.SGD(parameters, lr=0.1)",
        )
    refuse_optimizer(optimizer)
    known = set(map(id, parameters))
    strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise JobError(
            given=f"an optimizer with {strangers} tensors that are not trainable parameters of the model",
            conflict="only the model's own parameters get gradients",
            remedy="build it from the list that the optimizer function is given",
        )
    return optimizer


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises: JobError for an optimizer that evaluates the loss itself, or takes sparse gradients only."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise JobError(
            given=f"optimizer {type(optimizer).__name__}",
            conflict="it evaluates the loss several times a step, and a step's samples are read once",
            remedy="use an optimizer whose step() needs no closure: SGD, Adam, AdamW ...",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise JobError(
            given="optimizer SparseAdam",
            conflict="it takes sparse gradients only, and a step's gradient, the sum over all grains, is dense",
            remedy="use torch.optim.Adam or SGD; a model with sparse=True stays as it is",
        )


def _empty(make: Callable[[Any], Any]) -> Any:
    """An optimizer of nothing: torch's refuse to be made without a parameter, so that one is given and taken."""
    optimizer = make(_Nothing())
    for group in getattr(optimizer, "param_groups", ()):
        group["params"].clear()
    return optimizer


class _Nothing(list[nn.Parameter]):
    """A list of one parameter without elements, none of which has a name."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.empty(0))])
        self.named: Iterator[tuple[str, nn.Parameter]] = iter(())


def refuse_on_parts(optimizer: torch.optim.Optimizer, sharded_model: ShardedModel) -> None:
    """Raises: JobError for an optimizer that is known to need whole parameters, where some are cut."""
    cut = next((name for name, p in sharded_model.parameters() if not sharded_model.part(name, p).is_whole), None)
    if cut is not None and type(optimizer).__name__ in _ON_MATRICES:
        raise JobError(
            given=f"optimizer {type(optimizer).__name__}, with {cut} cut over ranks",
            conflict="it computes with a parameter as a whole, and on a part of it something else",
            remedy='use the data axis, shard.level = "optimizer" or pipeline stages, which leave parameters whole',
        )
