"""One copy of parameters and optimizer state for all ranks of a host, in memory that the ranks share.

Each rank reads all parameters and updates those that it owns, from sums of gradients in shared memory: no value is
sent. No rank updates a parameter before all ranks, after their last backward, have met to compute the gradient's norm.
No rank reads a parameter after its update before all ranks have met again, so no half update is visible between steps.
If a process dies during an update, the shared memory ends with its processes.

The model's parameters are a private copy-on-write view. What a forward, an evaluation or a loaded checkpoint writes to
them stays on its rank, as with one copy per rank, until the next update applies it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.collectives.base import Team
from shoal.distributed.collectives.choose import not_on
from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
from shoal.distributed.collectives.shared_memory.region import exchanged, open_copied, places
from shoal.distributed.collectives.shared_memory.staging import LINE_BYTES
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh, raise_together
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.shard.parameter_pieces import ParameterPieces
from shoal.parallel.shard.update_division import Parts, UpdateDivision, error_of, owners
from shoal.plans.accounting.collectives import shared_part

# Optimizers that compute each element from that element's gradient and state alone. torch has fused kernels for their
# steps on every device.
BY_ELEMENT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def open_shared(mesh: Mesh, timeout: timedelta = COLLECTIVE_TIMEOUT) -> SharedMemory:
    """Return collectives of all ranks. Sums of allocated tensors have one place for all ranks.

    Collective: all ranks. Raises: PlanError on a GPU, LaunchError if the ranks are on several hosts.
    """
    if mesh.device.type != "cpu":
        raise not_on(mesh.device, "shared_memory")
    by_rank = places()
    return SharedMemory(Team(), timeout, by_rank.count(by_rank[dist.get_rank()]), one_sum=True)


class SharedParameters:
    """Parameters of a model in memory that all ranks map; the model sees a private copy-on-write view.

    A rank's writes to a parameter are invisible to other ranks before `publish`. The values are rank 0's. Parameters
    that share memory still share it, and strides do not change. Collective: two all-gathers and a barrier.
    """

    def __init__(self, model: nn.Module, collective: SharedMemory) -> None:
        """Map the memory and copy rank 0's values. Raises: as `open_copied`."""
        starts: dict[int, tuple[int, torch.UntypedStorage]] = {}
        end = 0
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            if storage.data_ptr() not in starts:
                starts[storage.data_ptr()] = end, storage
                end += -(-storage.nbytes() // LINE_BYTES) * LINE_BYTES
        exchange = functools.partial(exchanged, group=collective.group)
        self._memory = open_copied(exchange, collective.rank, collective.world_size, end)
        shared = {pointer: self._memory.shared(start, s.nbytes()) for pointer, (start, s) in starts.items()}
        private = {pointer: self._memory.private(start, s.nbytes()) for pointer, (start, s) in starts.items()}
        if collective.rank == 0:
            for pointer, (_, storage) in starts.items():
                shared[pointer].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        collective.barrier()
        self._views: dict[int, tuple[nn.Parameter, Tensor, Tensor]] = {}
        for parameter in model.parameters():
            pointer = parameter.untyped_storage().data_ptr()
            geometry = parameter.shape, parameter.stride(), parameter.storage_offset()
            own, everybodys = (
                memory[pointer].view(parameter.dtype).as_strided(*geometry) for memory in (private, shared)
            )
            self._views[id(parameter)] = parameter, own, everybodys
        self._put_back()
        self._pointers = self._pointers_now()

    def _pointers_now(self) -> list[int]:
        return [parameter.data_ptr() for parameter, _, _ in self._views.values()]

    def is_written(self) -> bool:
        """Return True if this rank has written to a parameter, or replaced its memory, since the last `renew`."""
        return self._memory.is_written() or self._pointers_now() != self._pointers

    def memory_of(self, parameter: Tensor) -> Tensor:
        """Return a parameter's shared memory, in its shape."""
        return self._views[id(parameter)][2]

    def publish(self, is_owned: Callable[[Tensor], bool]) -> None:
        """Copy this rank's writes to the parameters that it owns into shared memory.

        No rank may read them meanwhile.
        """
        for parameter, _, everybodys in self._views.values():
            if is_owned(parameter):
                everybodys.copy_(parameter.detach())

    @contextlib.contextmanager
    def writable(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Return a context in which the `parameters` are the shared memory itself."""
        views = [self._views[id(parameter)] for parameter in parameters]
        for parameter, _, everybodys in views:
            parameter.data = everybodys
        try:
            yield
        finally:
            for parameter, own, _ in views:
                parameter.data = own

    def renew(self) -> None:
        """Discard this rank's writes to its view: the model has the shared values again."""
        self._memory.drop()
        self._put_back()

    def _put_back(self) -> None:
        for parameter, own, _ in self._views.values():
            parameter.data = own


class OneCopyUpdate(UpdateDivision):
    """Update of shared parameters in place, each by its owner."""

    queues = False

    def __init__(
        self,
        model: ShardedModel,
        parameters: Sequence[Tensor],
        collective: SharedMemory,
        mark: Callable[[str], None],
        *,
        in_pieces: bool = False,
    ) -> None:
        """Set the model's updated `parameters`. `in_pieces`: several ranks may update one parameter.

        Collective: as SharedParameters.
        """
        super().__init__(model)
        self._mesh, self._collective, self._mark, self._parameters = model.mesh, collective, mark, list(parameters)
        self._owners = owners(parameters, range(self._mesh.world_size))
        self._shared = SharedParameters(model.model, collective)
        self._owned = [parameter for parameter in parameters if self.updates(parameter)]
        self._others = [parameter for parameter in parameters if not self.updates(parameter)]
        self._is_written = False  # whether any rank has written to its view of a parameter
        self._is_read = False  # whether other ranks may still read what this rank's next backward writes
        self._in_pieces = in_pieces
        self._pieces: ParameterPieces | None = None
        self._is_replaced = False  # whether any rank's optimizer has received other state

    def divide(self, optimizer: torch.optim.Optimizer) -> Parts:
        if not self._in_pieces or type(optimizer) not in BY_ELEMENT:
            return {}
        trained = [p for p in self._parameters if isinstance(p, nn.Parameter)]
        memory, owner = self._shared.memory_of, self._owner
        self._pieces = ParameterPieces(optimizer, trained, self._collective, self._mesh, memory=memory, owners=owner)
        return self._pieces.parts

    def gradients_settle(self) -> None:
        if self._pieces is not None:
            self._collective.barrier()

    def updates(self, parameter: Tensor) -> bool:
        """Return True if this rank owns the parameter. Rank 0 owns the untrained ones."""
        return self._owner(parameter) == self._mesh.rank

    def _owner(self, parameter: Tensor) -> int:
        return self._owners.get(id(parameter), 0)

    def own_bytes(self, num_bytes: int) -> int:
        return shared_part(num_bytes, self._mesh.world_size, self._mesh.rank)

    def begin(self) -> None:
        """Wait for ranks that still read the last step's sums, if that step had no update. Collective: a barrier."""
        if self._is_read:
            self._collective.barrier()
        self._is_read = True

    def own_gradients(self) -> None:
        if self._pieces is not None:
            self._pieces.take_gradients()
        for parameter in self._others:
            parameter.grad = None

    def norm(self, own: float) -> float:
        """Return the norm over all ranks' own gradients.

        Collective: all ranks, one all-reduce of three numbers, then as UpdateDivision.
        """
        is_replaced = self._pieces is not None and self._pieces.is_replaced()
        summed = torch.tensor([own * own, self._shared.is_written(), is_replaced], dtype=torch.float64)
        self._mark("exposed_communication")
        self._collective.all_reduce(summed)
        self._is_written, self._is_replaced = bool(summed[1]), bool(summed[2])
        self._mark("optimizer")
        return super().norm(math.sqrt(float(summed[0])))

    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Call `step` for this rank's parameters, and return when all ranks have called it.

        If code of the job has written to a parameter (a model that normalises its weights in place), the update uses
        its owner's values. Ranks with a copy each would have the same values.

        Collective: all ranks, one all-reduce of two numbers; more if there is state that other ranks do not see yet.
        Raises: on every rank, if `step` raised on any.
        """
        pieces = self._pieces
        if self._is_written:
            self._shared.publish(self.updates)
            if pieces is not None:  # another rank may step a part of the parameter
                self._collective.barrier()
        if pieces is not None and self._is_replaced:
            pieces.adopt()

        def updated() -> None:
            with self._shared.writable(self._owned), contextlib.nullcontext() if pieces is None else pieces.installed():
                step()

        error = error_of(updated)
        self._mark("exposed_communication")
        status = torch.tensor([error is not None, pieces is not None and pieces.is_new()], dtype=torch.float32)
        self._collective.all_reduce(status)
        failed, is_new = status.tolist()
        if failed:
            raise_together(self._mesh, error)
        if pieces is not None and is_new:
            pieces.share()
        if self._is_written:
            self._shared.renew()
        self._is_read = False
        self._mark("optimizer")
