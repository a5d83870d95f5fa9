"""Share of a body's work that one rank has."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planner.profile.values import Body, Operation, TensorCut


class Share(NamedTuple):
    """One rank's share of a body: its microbatch in samples, and the degrees that divide each sample."""

    samples: float
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    all_reduce: str = "native"  # by which a tensor axis exchanges

    def of(self, body: Body, divides_ends: bool) -> Share:
        """The share of one body: outside of the blocks a context axis and sequence parallelism may divide nothing."""
        return self if body.repeated or divides_ends else self._replace(context=1, sequence=False)

    @property
    def local_samples(self) -> float:
        """Samples, where a part of a sample's positions counts as that part of it."""
        return self.samples / self.context


def divided(operation: Operation, share: Share) -> float:
    """By how much tensor parallelism divides an operation's work as a whole."""
    if operation.cut is TensorCut.NONE or (operation.cut is TensorCut.SEQUENCE and not share.sequence):
        return 1.0
    return float(share.tensor)
