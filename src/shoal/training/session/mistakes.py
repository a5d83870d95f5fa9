"""Error messages for a user's loop that does not fit a Session."""

from __future__ import annotations

from shoal.errors import JobError, NonFiniteError, UserCodeError
from shoal.parallel.base import StepSums
from shoal.training.optimizer_step import Update


def which_optimizer(count: int) -> JobError:
    """Of a plain pass with several optimizers."""
    return JobError(
        given=f"for batch in step, with {count} optimizers",
        conflict="each update has its own loss, so that it has to be said which of them a pass over the batches is for",
        remedy="write: for batch in step.batches(optimizer): ... step.backward(total, weight), once for each update; "
        "step.batches() where one loss is for all of them",
    )


def not_now(number: int, is_open: bool) -> JobError:
    """Of a pass within another, or after its step."""
    return JobError(
        given=f"the batches of step {number} " + ("within a pass over them" if is_open else "after its update"),
        conflict="a pass over a step's batches ends with an update, and passes follow each other",
        remedy="write step.batches(optimizer) for each of several updates of a step, one after the other",
    )


def other_passes(number: int) -> JobError:
    """Of ranks that update different optimizers."""
    return JobError(
        given=f"step {number}, in which ranks update different optimizers at a time",
        conflict="the gradients of a pass are summed over all ranks",
        remedy="choose optimizers by what is the same on all ranks, as step.number is",
    )


def left_within(number: int, rank: int) -> UserCodeError:
    """Of a rank that has left its loop in the midst of a step's batches."""
    return UserCodeError(
        given=f"rank {rank} left the loop within step {number} (a break, a return or an exception of its own)",
        conflict="the batches of all ranks belong to the step's update, which did not take place",
        remedy="look at what that rank said",
    )


def not_finite(number: int, sums: StepSums, update: Update) -> NonFiniteError:
    """Of an update that is left out where none should be."""
    return NonFiniteError(
        given=f"step {number}: loss {sums.loss}, gradient norm {update.grad_norm}",
        conflict="one of them is not finite; the parameters are those before the step",
        remedy="mend the data, or write Session(skip_nonfinite=True)",
    )


def not_iterated(number: int) -> UserCodeError:
    """Of a step whose batches were not used up."""
    return UserCodeError(
        given=f"step {number} was not iterated to its end",
        conflict="its batches belong to the training",
        remedy="write: for batch in step: ... step.backward(total, weight)",
    )
