"""Loss or metric in a precision, checked to return a pair of total and weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.source import NoSamples
from shoal.distributed.failures import is_lost_peer, user_error
from shoal.errors import JobError, LossError, ShoalError, text_of
from shoal.numerics.grain_randomness import NotFusibleError
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.numerics.precision import Precision


@dataclass(frozen=True)
class LossPair:
    """Loss or metric in a precision, checked to return a (total, weight) pair. Equal functions make equal objects."""

    function: Callable[[Any, Any], Any]
    precision: Precision
    what: str = "loss"
    checks: bool = True  # whether it checks the pair; a `MetricCall` checks its pairs itself

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
        return check_pair(self.what, pair) if self.checks else pair


# Messages of torch about the use of a parameter that is cut over ranks and not gathered.
_PAST_THE_MODEL = (
    "got mixed torch.Tensor and DTensor",
    "requires running forward through the root module first",
    "'FSDPParam' object has no attribute",
    "setStorage",
)


def refuse_past_the_model(what: str, error: Exception) -> None:
    """Raise a JobError if torch's error reports a use that cut parameters or compiled blocks do not allow."""
    if "double backward" in text_of(error):
        raise JobError(
            given=f"a {what} that differentiates the model, with compiled blocks",
            conflict="torch.compile gives no derivative of a derivative",
            remedy='write execution.compile = "none"',
        ) from error
    if any(sign in text_of(error) for sign in _PAST_THE_MODEL):
        raise JobError(
            given=f"a {what} that uses parameters or parts of the model by themselves, or differentiates twice through "
            "it, where parameters are cut over the shard axis",
            conflict="a rank has them whole while model(...) runs and in one backward, each unit while it is called, "
            "and not outside of it",
            remedy='call the whole model, and let its forward do the rest, or use shard.level = "optimizer"',
        ) from error


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
