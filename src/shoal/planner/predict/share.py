"""Share of a body's work on one rank."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planner.profile.values import Body, Operation, TensorCut


class Share(NamedTuple):
    """One rank's share of a body: its microbatch in samples, and the degrees that divide each sample."""

    samples: float
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    all_reduce: str = "native"  # algorithm of the tensor axis

    def of(self, body: Body, divides_ends: bool) -> Share:
        """Return the share of one body. Context and sequence parallelism may divide only blocks."""
        return self if body.repeated or divides_ends else self._replace(context=1, sequence=False)

    @property
    def local_samples(self) -> float:
        """Samples of the rank. A part of the positions of a sample counts as that fraction of the sample."""
        return self.samples / self.context


def divided(operation: Operation, share: Share) -> float:
    """Return the factor by which tensor parallelism divides the work of an operation."""
    if operation.cut is TensorCut.NONE or (operation.cut is TensorCut.SEQUENCE and not share.sequence):
        return 1.0
    return float(share.tensor)
