"""A module of a job, with a state that functions of other modules change."""

from torch import Tensor

calls = 0


def counted(y: Tensor) -> Tensor:
    """Return the tensor times the number of calls."""
    global calls
    calls += 1
    return y * calls
