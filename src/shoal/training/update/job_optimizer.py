"""Optimizer of a job over its trainable parameters, and refusals of optimizers that do not fit shoal's steps."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.state import optimizer_state
from shoal.checkpoint.whole_optimizer import (
    ATTRIBUTES,
    begin,
    compiler_deferred,
    groups,
    is_torchs,
    make_states_dense,
    parts,
    step_optimizer,
    to_train,
    with_modes,
)
from shoal.distributed.failures import user_error
from shoal.errors import JobError, ShoalError, text_of
from shoal.jobs.user_errors import place_of, traceback_of
from shoal.parallel.model.sharded_model import ShardedModel

# Optimizers that compute other values from a part of a parameter than from the whole, by the names of their classes.
_ON_MATRICES = ("Muon", "Adafactor", "Shampoo", "DistributedShampoo", "SOAP", "LAMB", "Lamb", "LARS", "Lars")


class Parameters(list[nn.Parameter]):
    """Trainable parameters of this rank, each once; empty if all parameters of the rank's stages are frozen."""

    def __init__(self, model: nn.Module, named: list[tuple[str, nn.Parameter]] | None = None) -> None:
        """Set the parameters: the model's own, or `named` in their place."""
        own = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]
        self._named = own if named is None else named
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
    """Build the job's optimizer. Raises: JobError or UserCodeError if it cannot be stepped once a step."""
    try:
        with compiler_deferred():
            optimizer = make(parameters or _Nothing())
            if not parameters and isinstance(optimizer, torch.optim.Optimizer):
                for group in groups(optimizer):  # torch's constructors require the parameter that is removed here
                    group["params"].clear()
    except ShoalError:
        raise
    except Exception as error:
        shapes = "the optimizer function gets every parameter that the model trains, biases and norms among them"
        raise user_error("the optimizer function", error, shapes=shapes) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            given=f"optimizer(parameters) returned {type(optimizer).__name__}",
            conflict="the engine steps a torch.optim.Optimizer",
            remedy="return one, for example torch.optim.SGD(parameters, lr=0.1)"
            + (
                "; for several write a class with a step() that steps each, and with the groups of all"
                if isinstance(optimizer, list | tuple | dict)
                else ""
            ),
        )
    known = set(map(id, parameters))
    strangers = sum(id(p) not in known for group in groups(optimizer) for p in group["params"])
    if strangers:
        raise JobError(
            given=f"an optimizer with {strangers} tensors that are not trainable parameters of the model",
            conflict="only the model's own parameters get gradients",
            remedy="build it from the list that the optimizer function is given",
        )
    frozen = [name for name, p in parameters.named if not p.requires_grad]
    if frozen:
        raise JobError(
            given=f"an optimizer function that sets requires_grad of {frozen[0]} to False",
            conflict="shoal fixes the trained parameters before it calls the optimizer function",
            remedy="freeze the parameter in model(); to train it later leave it as it is and give its group a learning "
            "rate of 0 for a while, or use a loop of your own with shoal.Session",
        )
    to_train(optimizer)
    begin(optimizer)
    return optimizer


def refuse_sparse(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    sparse: Mapping[str, Tensor],
    dense_for: str | None = None,
) -> None:
    """Refuse an optimizer of torch that raises for the gradients of its parameters. Raises: JobError.

    Each group steps a stand-in with such a gradient twice. `sparse`: the parameters with sparse gradients by name.
    `dense_for`: the setting of the plan that makes all gradients dense, if any does.
    """
    names = {id(p): name for name, p in named}
    for part in parts(optimizer).values():
        if not (is_torchs(part) and (sparse or isinstance(part, torch.optim.SparseAdam))):
            continue
        arguments = inspect.signature(type(part).__init__).parameters
        for group in part.param_groups:
            kinds = {names[id(p)] in sparse: names[id(p)] for p in reversed(group["params"])}
            for is_sparse, name in kinds.items():
                settings = {key: value for key, value in group.items() if key in arguments and key != "params"}
                stand_in = nn.Parameter(torch.zeros(2, 1))
                gradient = torch.eye(2, 1)
                try:
                    with compiler_deferred():
                        trial = type(part)([stand_in], **settings)
                    for _ in range(2):
                        stand_in.grad = gradient.to_sparse(1) if is_sparse else gradient.clone()
                        step_optimizer(trial)
                        make_states_dense(trial)
                except Exception as error:
                    kind = "sparse" if is_sparse else f"dense with {dense_for}" if dense_for else "dense"
                    raise JobError(
                        given=f"optimizer {type(part).__name__} with {name}, whose gradient is {kind}",
                        conflict=f"torch's step raises {type(error).__name__}: {text_of(error)}",
                        remedy="use SparseAdam, or SGD or Adagrad without weight decay and nesterov, or build the "
                        "embedding with sparse=False"
                        if is_sparse
                        else "use nn.Embedding(sparse=True) on the data axis, whose weight no other module has, and "
                        "another optimizer for other parameters",
                    ) from error


def step_error(optimizer: torch.optim.Optimizer, error: Exception) -> ShoalError:
    """Return the error to report for an exception from the optimizer's step."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if "closure" in str(error) or any("closure(" in (frame.line or "") for frame in last):
        return JobError(
            given=f"optimizer {type(optimizer).__name__}, whose step() needs a closure but does not say so",
            conflict="shoal gives a closure to optimizers that state the need: others compute the loss once",
            remedy="write step(self, closure) without a default, or begin step() with: assert closure is not None",
        )
    if "DTensor" in str(error):
        refusal = JobError(
            given=f"optimizer {type(optimizer).__name__}, with parameters that are cut over ranks (ZeRO-2 or ZeRO-3)",
            conflict="it keeps state in a form of its own (8-bit codes with scales, say), which torch does not combine "
            f"with a part of a parameter (a DTensor){place_of(error)}",
            remedy='write needs = "matrix" in its class, so that one rank steps each parameter whole; or use an '
            "optimizer whose state has the shape of the parameter, as torch.zeros_like(parameter)",
        )
        refusal.traceback_text = traceback_of(error)
        return refusal
    return user_error("the optimizer", error)


class _Nothing(list[nn.Parameter]):
    """List of one parameter without elements. `named` is empty."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.empty(0))])
        self.named: Iterator[tuple[str, nn.Parameter]] = iter(())


def on_matrices(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters of those parts of an optimizer that are known to need whole parameters.

    They are known by the class's name or one of its bases' names, or by the class attribute `needs = "matrix"`.
    """
    return [
        p
        for part in parts(optimizer).values()
        if getattr(part, "needs", "") == "matrix"
        or not {k.__name__ for k in type(part).__mro__}.isdisjoint(_ON_MATRICES)
        for group in part.param_groups
        for p in group["params"]
    ]


def unsuited(optimizer: Any, model: nn.Module) -> list[str]:
    """Return a note on parameters that Muon updates though it is not meant for them, or an empty list.

    They are embeddings, the last layer with a matrix, and parameters of one dim.
    """
    every = parts(optimizer)
    inner = [part for where, part in every.items() if where or len(every) == 1]  # the outer one has all groups
    muons = [g for part in inner if "Muon" in type(part).__name__ for g in part.param_groups if g.get("use_muon", True)]
    of_muon = {id(p) for group in muons for p in group["params"]}
    weights = [(m, w) for m in model.modules() if isinstance(w := getattr(m, "weight", None), Tensor) and w.ndim == 2]
    ends = {id(w) for m, w in weights if isinstance(m, nn.Embedding) or m is weights[-1][0]}
    unfit = [name for name, p in model.named_parameters() if id(p) in of_muon and (id(p) in ends or p.ndim < 2)]
    if not unfit:
        return []
    names = ", ".join(unfit[:8]) + (f" and {len(unfit) - 8} others" if len(unfit) > 8 else "")
    return [
        f"Muon updates {names}: it is meant for the matrices between embedding and last layer; AdamW usually trains "
        "embeddings, the last layer, norms and biases better"
    ]


def without_optimizer(optimizers: Iterable[Any], named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return a note on trainable parameters that are in no group of any optimizer, or an empty list."""
    known = {id(p) for optimizer in optimizers for group in groups(optimizer) for p in group["params"]}
    left = [name for name, p in named if p.requires_grad and id(p) not in known]
    if not left:
        return []
    names = ", ".join(left[:8]) + (f" and {len(left) - 8} others" if len(left) > 8 else "")
    return [
        f"no optimizer updates {names}, which require a gradient; if that is meant, requires_grad_(False) spares the "
        "gradient"
    ]


def refuse_served(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with state that cannot be divided among parameter servers. Raises: JobError."""
    within = [type(part).__name__ for where, part in parts(optimizer).items() if where]
    if within or with_modes(optimizer):
        what = f"holds {' and '.join(within)}" if within else "has train() and eval()"
        raise JobError(
            given=f"optimizer {type(optimizer).__name__}, which {what}, with parameter servers",
            conflict="each server has an optimizer of some of the parameters, and returns only their state",
            remedy='write server.mode = "none", or one optimizer with parameter groups',
        )


def refuse_divided(
    optimizer: torch.optim.Optimizer, model: ShardedModel, updates: Callable[[nn.Parameter], bool]
) -> None:
    """Refuse an optimizer with state that cannot be divided as the model or the update is. Raises: JobError.

    `updates`: whether this rank updates a parameter.
    """
    if not model.divides_state or is_torchs(optimizer):
        return
    kind = type(optimizer).__name__
    tensors, _ = optimizer_state(optimizer, model.model, copy=False)
    attribute = next((path for path in tensors if path.startswith(f"{ATTRIBUTES}/")), None)
    if attribute is not None:
        raise JobError(
            given=f"optimizer {kind}, which keeps a tensor in {attribute.partition('/')[2]}, with a model or "
            "an update that is divided",
            conflict="a checkpoint cannot tell which part of it belongs to which parameter",
            remedy="keep it in optimizer.state[parameter], or in the class if it never changes, or use the data axis "
            "alone",
        )
    if with_modes(optimizer) and not all(updates(p) for _, p in model.parameters() if p.requires_grad):
        raise JobError(
            given=f"optimizer {kind}, which has train() and eval(), with an update that is divided by parameters",
            conflict="each rank would get evaluation weights of the parameters that it updates alone",
            remedy="use the data axis alone, or another shard.level",
        )
