"""One copy of parameters and optimizer state for all ranks of a host, in memory that they share.

Each rank reads all parameters and updates those that it owns, from sums of gradients that lie in shared memory too: no
value is sent anywhere. Nobody writes a parameter before all ranks have met over the gradient's norm, after their last
backward, and nobody reads one after it before all have met again: between steps there is no half update to be seen.
What dies in the midst of one leaves a memory that dies with its processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.agreement import raise_together
from shoal.distributed.collectives.base import Team
from shoal.distributed.collectives.choose import not_on
from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
from shoal.distributed.collectives.shared_memory.region import places
from shoal.distributed.collectives.shared_memory.staging import LINE_BYTES
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh
from shoal.errors import JobError
from shoal.parallel.shard.owners import DividedUpdate, error_of
from shoal.plans.accounting.partition import shared_part


def open_shared(mesh: Mesh, timeout: timedelta = COLLECTIVE_TIMEOUT) -> SharedMemory:
    """Collectives of all ranks, whose sums of allocated tensors lie in one place for all.

    Collective: all ranks. Raises: PlanError on a GPU, LaunchError where not all ranks are on one host.
    """
    if mesh.device.type != "cpu":
        raise not_on(mesh.device, "shared_memory")
    by_rank = places()
    return SharedMemory(Team(), timeout, by_rank.count(by_rank[dist.get_rank()]), one_sum=True)


def share_parameters(model: nn.Module, collective: SharedMemory) -> None:
    """Moves the parameters' memory, with rank 0's values, to memory that all ranks map. Collective: two all-gathers.

    Parameters that share memory go on doing so; strides stay.
    """
    places_of: dict[int, tuple[int, torch.UntypedStorage]] = {}
    end = 0
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in places_of:
            places_of[storage.data_ptr()] = end, storage
            end += -(-storage.nbytes() // LINE_BYTES) * LINE_BYTES
    common = collective.allocate_common(end)
    moved = {}
    for pointer, (start, storage) in places_of.items():
        moved[pointer] = common(start, storage.nbytes())
        if collective.rank == 0:
            moved[pointer].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    collective.barrier()
    for parameter in model.parameters():
        shared = moved[parameter.untyped_storage().data_ptr()].view(parameter.dtype)
        parameter.data = shared.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())


class OneCopyUpdate(DividedUpdate):
    """Update in place of parameters that all ranks map, each by its owner."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        trained: Sequence[Tensor],
        mesh: Mesh,
        collective: SharedMemory,
        mark: Callable[[str], None],
    ) -> None:
        """`trained`: all trainable parameters of the model, of which `parameters` may be one of several optimizers'."""
        super().__init__(parameters, trained, range(mesh.world_size), mesh.rank)
        self._mesh, self._collective, self._mark = mesh, collective, mark
        self._trained = list(trained)
        self._versions: list[int] = []  # torch's counts of writes to each, before a step's first forward
        self._is_read = False  # whether other ranks may still read what this one's next backward writes

    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank is its owner; of what is not trained the first is."""
        return self._root.get(id(parameter), 0) == self._rank

    def own_part(self, num_bytes: int) -> int:
        return shared_part(num_bytes, len(self._ranks), self._rank)

    def begin(self) -> None:
        """Waits for ranks that still read the last step's sums, where that had no update. Collective: a barrier."""
        if self._is_read:
            self._collective.barrier()
        self._is_read = True
        self._versions = [parameter._version for parameter in self._trained]

    def own_gradients(self) -> None:
        self._drop_others()

    def norm(self, own: float) -> float:
        """The norm over all ranks' own gradients. Collective: all ranks, one all-reduce of two numbers.

        Raises: JobError, on every rank, where the model has written to its parameters since `begin` on any.
        """
        error = self._written()
        summed = torch.tensor([own * own, float(error is not None)], dtype=torch.float64)
        self._mark("exposed_communication")
        self._collective.all_reduce(summed)
        if summed[1]:
            raise_together(self._mesh, error)
        self._mark("optimizer")
        return math.sqrt(float(summed[0]))

    def _written(self) -> JobError | None:
        """An error where a parameter was written to that the other ranks read, and write to as well."""
        if [parameter._version for parameter in self._trained] == self._versions:
            return None
        return JobError(
            given="a model that writes to its own parameters in its forward, with memory.shared = true",
            conflict="all ranks have the parameters in one memory, and each would write to them while others read",
            remedy="write memory.shared = false, or leave the parameters to the optimizer (max_norm of an Embedding "
            "and weights that are normalised in place are written in the forward)",
        )

    @property
    def queues(self) -> bool:
        return False

    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Calls `step` for this rank's parameters, and returns once all ranks have.

        Collective: all ranks, one all-reduce of a number. Raises: on every rank, where `step` raised on any.
        """
        error = error_of(step)
        self._mark("exposed_communication")
        failed = torch.tensor([float(error is not None)])
        self._collective.all_reduce(failed)
        if failed.item():
            raise_together(self._mesh, error)
        self._is_read = False
        self._mark("optimizer")
