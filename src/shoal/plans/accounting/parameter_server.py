"""Communication volume of a worker with the parameter servers, for a run's account; the search plans no servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.plans.accounting.collectives import Array
from shoal.plans.accounting.partition import pieces


def task_bytes(
    parameters: Iterable[Array], grains: Sequence[int], num_grains: int, *, reduce_itemsize: int, exact: bool
) -> tuple[int, int]:
    """Bytes pushed and pulled for one part of a step, over all servers together, which divide them.

    Pushed: a gradient of every trainable parameter in the reduce dtype, once; in exact mode once for each node of the
    fixed tree that the part's `grains` fill. Pulled: the parameters, once, whenever a newer version is there.
    """
    arrays = list(parameters)
    num_nodes = len(pieces(list(grains), num_grains)) if exact else 1
    pushed = sum(a.numel for a in arrays) * reduce_itemsize * num_nodes
    return pushed, sum(a.numel * a.itemsize for a in arrays)
