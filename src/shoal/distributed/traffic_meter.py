"""Communication meter: counts the messages and bytes of this rank's collectives where torch dispatches them.

Every collective ends in an operator of torch's `c10d` library. This holds for torch.distributed, functional
collectives, DTensor, fully_shard and compiled code, in the forward and in hooks of the backward on autograd's thread.
During a count each operator has an extra kernel, which reads the buffer sizes and forwards the call. The kernel takes
20 us a collective; other operators and code outside a count pay nothing. A TorchDispatchMode would also see every other
operator, and under such a mode torch chooses other kernels and does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.numerics.operators import tensors_in
from shoal.plans.accounting.collectives import WORLD, Volumes

# Operators of torch.ops.c10d, and the kind as which each is counted.
KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
# Receives the kind, the group's name, and the tensors of both buffers, before the collective begins.
Listener = Callable[[str, str, list[Tensor], list[Tensor]], None]


@runtime_checkable
class Tells(Protocol):
    """Process group that reports collectives that the dispatcher does not see, under torch's name of the group."""

    listeners: list[Listener]


class Traffic:
    """Counter of this process's collectives between `start` and `stop`, by (group, kind); one count at a time.

    Bytes are those of plans/accounting/collectives.py: the larger of a rank's two buffers, nccl-tests' `size`. A
    collective of several tensors is one message. `names` maps axes to their process groups; the group of all ranks is
    `world`. `stage_groups` carry the messages of a pipeline.
    """

    def __init__(
        self,
        names: Mapping[str, dist.ProcessGroup] | None = None,
        listener: Listener | None = None,
        stage_groups: Iterable[dist.ProcessGroup] = (),
    ) -> None:
        self._names: dict[str, str] = {group.group_name: axis for axis, group in (names or {}).items()}
        self._names |= {group.group_name: "pipeline" for group in stage_groups}
        self._telling = [group for group in (names or {}).values() if isinstance(group, Tells)]
        self._listener = listener
        self._library: torch.library.Library | None = None
        self.volumes = Volumes()

    def start(self) -> None:
        """Begin a count at zero."""
        self.volumes = Volumes()
        if self._library is not None or not dist.is_available():
            return
        # The only key that every call passes: below autograd and dispatch modes, above the backends' own kernels.
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        self._library = torch.library.Library("c10d", "IMPL")
        for group in self._telling:
            group.listeners.append(self._heard)
        for name, kind in KINDS.items():
            if hasattr(torch.ops.c10d, name):
                self._library.impl(name, self._kernel(name, kind, after), "BackendSelect", with_keyset=True)

    def stop(self) -> Volumes:
        """End the count and return its volumes. No effect if no count is in progress."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
            for group in self._telling:
                group.listeners.remove(self._heard)
        return self.volumes

    def __enter__(self) -> Traffic:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _kernel(self, name: str, kind: str, after: Any) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            buffers = [tensors_in(argument) for argument in args[:2]]
            group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            if group.group_name not in self._names:
                is_world = group.size() == dist.get_world_size()
                ranks = [] if is_world else dist.get_process_group_ranks(group)
                self._names[group.group_name] = WORLD if is_world else "ranks " + ",".join(map(str, ranks))
            self._heard(kind, group.group_name, *buffers)
            return operator.redispatch(keys & after, *args, **kwargs)

        return kernel

    def _heard(self, kind: str, group_name: str, *buffers: list[Tensor]) -> None:
        group = self._names[group_name]
        largest = max(sum(t.numel() * t.itemsize for t in tensors) for tensors in buffers)
        self.volumes.add(group, kind, 0 if kind == "barrier" else largest)
        if self._listener is not None:
            self._listener(kind, group, *buffers)
