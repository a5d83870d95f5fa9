"""Loss of a microbatch: the user's function in its context of precision and random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.loader import Microbatch
from shoal.data.source import NoSamples
from shoal.distributed.failures import is_lost_peer, user_error
from shoal.errors import JobError, LossError, ShoalError, text_of
from shoal.jobs.job import Job
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.generators import DrawWatch, seed_everything
from shoal.numerics.grain_randomness import GrainScope, NotFusibleError
from shoal.numerics.isolation import ReentrantContext
from shoal.numerics.no_trace import NoTrace
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import Precision
from shoal.plans.grains import random_key
from shoal.training.microbatch.coupling import meaning
from shoal.training.microbatch.policy import MicrobatchPolicy, RedoError


class _DrawlessScope(contextlib.AbstractContextManager[None]):
    """Context for a forward and backward of a model that draws no random numbers. Raises: RedoError if it has drawn.

    The context is reusable. Without `draws`, a watch over all steps, it reads the generators at both ends of each use.
    """

    def __init__(self, computation: MicrobatchPolicy, draws: DrawWatch | None) -> None:
        self.computation, self.given, self._draws = computation, draws, draws or DrawWatch()

    def __enter__(self) -> None:
        self._draws.begin()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._draws.forget()
        elif self._draws.end():
            self._draws.forget()
            if self._draws.is_unclear:
                raise RedoError(self.computation, "the model, or something before it, has begun to draw")
            raise RedoError(replace(self.computation, randomness="scoped"), "the model has begun to draw")


@dataclass(frozen=True)
class LossPair:
    """Loss or metric in a precision, checked to return a (total, weight) pair. Equal functions make equal objects."""

    function: Callable[[Any, Any], Any]
    precision: Precision
    what: str = "loss"

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        """Return (total, weight) of a batch on the device. Raises: JobError, LossError, UserCodeError."""
        if isinstance(batch, NoSamples):
            return torch.zeros((), device=self.precision.device), 0.0
        try:
            if self.precision.compute == self.precision.parameters:
                pair = self.function(model, batch)
            else:
                with self.precision.autocast():
                    pair = self.function(model, batch)
        except (ShoalError, NotFusibleError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_lost_peer(error):
                raise
            refuse_past_the_model(self.what, error)
            if "support saved tensor hooks" in text_of(error):
                raise JobError(
                    given=f"a {self.what} that transforms the model by torch.func, with recomputed blocks",
                    conflict="torch.func runs no activation checkpoint",
                    remedy='write memory.recompute = "none", or leave out the checkpoints of the model itself',
                ) from error
            raise user_error("the model or loss" if self.what == "loss" else self.what, error, batch) from error
        return check_pair(self.what, pair)


# Messages of torch about the use of a parameter that is cut over ranks and not gathered.
_PAST_THE_MODEL = (
    "got mixed torch.Tensor and DTensor",
    "requires running forward through the root module first",
    "'FSDPParam' object has no attribute",
    "setStorage",
)


def refuse_past_the_model(what: str, error: Exception) -> None:
    """Raise a JobError if torch's error reports a use of cut parameters outside the model's own forward."""
    if any(sign in text_of(error) for sign in _PAST_THE_MODEL):
        raise JobError(
            given=f"a {what} that uses parameters or parts of the model by themselves, or differentiates twice through "
            "it, where parameters are cut over the shard axis",
            conflict="a rank has them whole while model(...) runs and in one backward, each unit while it is called, "
            "and not outside of it",
            remedy='call the whole model, and let its forward do the rest, or use shard.level = "optimizer"',
        ) from error


# (function, batch) -> (total, weight), computed by all ranks of a pipeline.
Evaluate = Callable[[LossPair, Any], tuple[float, float]]


class LossComputer:
    """Loss of one job's microbatches on one device. `evaluate` computes it if the model is a pipeline.

    `cut`: ranks gather each other's parts of the parameters, which have no copy in another dtype. `divided`: no rank
    has the whole model. `compiles`: forwards with gradients are compiled. `gathers`: only the shard axis divides the
    model, so each rank gathers whole parameters. `writing`: receives the modules with a forward that writes parameters.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        precision: Precision,
        computation: MicrobatchPolicy,
        evaluate: Evaluate | None = None,
        *,
        cut: bool = False,
        divided: bool = False,
        exact: bool = False,
        compiles: bool = False,
        gathers: bool = False,
        writing: set[nn.Module] | None = None,
    ) -> None:
        self.writing = set() if writing is None else writing
        self.job, self.model, self.precision, self.evaluate = job, model, precision, evaluate
        self.exact, self.compiles, self.gathers = exact, compiles, gathers
        self.look_seconds = 0.0  # total of all looks
        # Sums of an evaluation's first samples. A look compares them to detect state that training leaves.
        self.evaluation: Callable[[], tuple[float, ...]] | None = None
        self.has_evaluated = False  # since the last look for state; evaluations may leave state too
        self.cut, self.divided = cut, divided or cut or evaluate is not None
        self.pair = LossPair(job.loss, precision)
        self.computation = computation
        self._drawless: _DrawlessScope | None = None
        self._computes_plainly = isinstance(precision.products(), contextlib.nullcontext)

    def no_trace(self) -> NoTrace:
        """Return a context that restores the model, the loss and the samples after a look."""
        source = getattr(self.job.train_data, "source", None)
        functions = {"loss": self.job.loss, "train_data": getattr(source, "data", None)}
        return NoTrace(self.model, functions, gathers=self.cut)

    def in_precision(self, precision: Precision) -> LossComputer:
        """Return a computer of the same losses in another precision."""
        if precision == self.precision:
            return self
        known: dict[str, Any] = {
            "cut": self.cut,
            "divided": self.divided,
            "exact": self.exact,
            "compiles": self.compiles,
        }
        return LossComputer(self.job, self.model, precision, self.computation, self.evaluate, **known)

    def scope(
        self, microbatch: Microbatch, grains: GrainScope | None = None, draws: DrawWatch | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context for a microbatch's forward and backward. It raises RedoError if the policy does not fit.

        `draws`: a watch over the random draws of consecutive steps.
        """
        if self._computes_plainly and self.computation.randomness == "none":
            known = self._drawless
            if known is None or draws is None or known.given is not draws or known.computation is not self.computation:
                known = self._drawless = _DrawlessScope(self.computation, draws)
            return known
        return self._scope(microbatch, grains)

    @contextlib.contextmanager
    def _scope(self, microbatch: Microbatch, grains: GrainScope | None) -> Iterator[None]:
        kind = self.computation.randomness
        with self.precision.products():
            if kind == "opaque":
                seed_everything(random_key(self.job.seed, "model", microbatch.step, microbatch.grains[0].index))
                yield
            elif kind == "none":
                with _DrawlessScope(self.computation, None):
                    yield
            else:
                try:
                    with grains or self.grain_scope(microbatch) as scope:
                        yield
                except NotFusibleError as error:
                    raise RedoError(replace(self.computation, randomness="opaque"), text_of(error)) from error
                if scope.leaked():
                    reason = "randomness outside torch's functions"
                    raise RedoError(replace(self.computation, randomness="opaque"), reason)

    def scope_of_stage(self, microbatch: Microbatch) -> contextlib.AbstractContextManager[None]:
        """Return the context of `scope` for a pipeline stage, which enters it again for the backward."""
        grains = self.grain_scope(microbatch)
        return ReentrantContext(lambda: self.scope(microbatch, grains))

    def grain_scope(self, microbatch: Microbatch) -> GrainScope:
        """Return the scope of a microbatch's random numbers and batch statistics."""
        by_position = self.computation.by_position
        return GrainScope(self.job.seed, microbatch.step, microbatch.grains, by_position=by_position)

    def loss(self, batch: Any) -> tuple[Tensor, Tensor | float]:
        """Return (total, weight) of a batch on the device. Raises: JobError, LossError, UserCodeError."""
        return self.pair(self.model, batch)

    def why_not_fused(self, agreed: MicrobatchPolicy) -> str:
        """Return one line for people: why grains do not share a forward, and the consequence."""
        if agreed.randomness == "opaque":
            return "the model draws at random in ways that cannot be told apart by grain"
        if not agreed.coupled:
            return "the loss of a batch is not the sum of its grains', or could not be seen to be"
        return f"{agreed.coupled}; {meaning(agreed.coupled, self.job.num_grains, self.job.grain_size)}"

    def check_buffers(self, buffers: StepBuffers) -> None:
        """Check that a forward changed no buffers besides those in the policy. Raises: RedoError."""
        unknown = buffers.moved()
        if unknown:
            names = tuple({*buffers.names, *unknown})
            raise RedoError(replace(self.computation, buffers=names), "further buffers change")


def no_gradient(weight: float) -> LossError:
    """Return the error for a batch that has a weight but yields no gradient."""
    return LossError(
        given=f"a loss of weight {weight:g} whose total depends on no trainable parameter",
        conflict="no part of the batch has a gradient",
        remedy="compute it from the model that the loss is given, outside torch.no_grad(); or return the weight 0 "
        "for a batch that adds nothing",
    )


_MOST_BITS = 1023  # maximum bit length of an int that a float64 can represent


def check_pair(what: str, pair: Any) -> tuple[Tensor, Tensor | float]:
    """Return the pair as (total, weight). Raises: LossError, with the remedy, for a bare mean or any other value."""
    if type(pair) is tuple and len(pair) == 2:
        total, weight = pair
        if type(total) is type(weight) is Tensor and total.ndim == weight.ndim == 0 and total.is_floating_point():
            return total, weight
    if isinstance(pair, Tensor) or not (isinstance(pair, tuple | list) and len(pair) == 2):
        conflict = "without its weight a mean cannot be put together over grains: a mean of means is another number"
        raise _no_pair(what, f"a {what} that returned {_kind(pair)}", conflict)
    total, weight = pair
    for name, number in (("total", total), ("weight", weight)):
        if isinstance(number, int) and number.bit_length() > _MOST_BITS:
            given = f"a {what} whose {name} is an integer of {number.bit_length()} bits"
            raise _no_pair(what, given, "sums are float64 numbers, and it is beyond the largest of them")
    if isinstance(total, int | float):
        total = torch.tensor(float(total))
    counted = isinstance(total, Tensor) and total.numel() == 1 and (total.is_floating_point() or what != "loss")
    if not counted:
        raise _no_pair(what, f"a {what} whose total is {_kind(total)}", "the total is one floating-point number")
    if (isinstance(weight, Tensor) and weight.numel() != 1) or not isinstance(weight, Tensor | int | float):
        conflict = "the weight is one number: how many samples or tokens the total sums over"
        raise _no_pair(what, f"a {what} whose weight is {_kind(weight)}", conflict)
    return _number(total), _number(weight) if isinstance(weight, Tensor) else weight


def _kind(value: Any) -> str:
    whole = isinstance(value, Tensor)
    return f"a tensor of shape {list(value.shape)}, {value.dtype}" if whole else type(value).__name__


def _no_pair(what: str, given: str, conflict: str) -> LossError:
    fix = "shoal.cross_entropy(logits, targets), or (loss * n, n) for a mean over n"
    if what != "loss":
        fix = "((logits.argmax(-1) == targets).sum(), len(targets)) for an accuracy, say"
    return LossError(given=given, conflict=conflict, remedy=f"return the sum and what it sums over: {fix}")


def _number(tensor: Tensor) -> Tensor:
    """Return the tensor with shape [], without a needless reshape, which would add a node to the autograd graph."""
    return tensor.reshape(()) if tensor.ndim else tensor
