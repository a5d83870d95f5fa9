"""Memory meter: the peak bytes of this rank by category, measured on the tensors themselves.

Storages are counted, each once, so that a view costs nothing and a parameter cut by fully_shard counts as its shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.whole_optimizer import states
from shoal.numerics.isolation import YieldingHooks
from shoal.parallel.shard.param_groups import param_groups
from shoal.plans.accounting.memory import Footprint


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages under these tensors (of a DTensor: of its part here), each storage once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is not None:
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def _storage(tensor: Any) -> torch.UntypedStorage | None:
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


class _Saved:
    """A tensor that autograd keeps; counted for as long as autograd holds on to this.

    Detached: what an operation keeps of its own output would hold the operation, and where no backward lets go of it,
    as in halves of one, neither would ever be freed. Autograd gives what it unpacks its history again.
    """

    __slots__ = ("_count", "key", "tensor", "version")

    def __init__(self, count: SavedTensors, tensor: Tensor, key: int | None) -> None:
        self._count, self.tensor, self.key, self.version = count, tensor.detach(), key, tensor._version

    def __del__(self) -> None:
        if self.key is not None:
            self._count.release(self.key)


class SavedTensors:
    """Context that counts the bytes that autograd saves for the backward; `peak` is the most at once.

    Each storage once; not those of `excluded` keys, the parameters. Regions that recompute have hooks of
    their own: of them their inputs are counted here, and what they recompute is not.
    """

    def __init__(self) -> None:
        self.excluded: set[int] = set()
        self.peak = 0
        self._now = 0
        self._holders: dict[int, list[int]] = {}  # storage: [holders, bytes]
        self._hooks: YieldingHooks | None = None

    def exclude(self, tensors: Iterable[Any]) -> None:
        """Leaves saved tensors on these storages out of the count."""
        self.excluded |= {s._cdata for t in tensors if (s := _storage(t)) is not None}

    def start(self) -> None:
        """Begins to count."""
        self.peak = self._now
        if self._hooks is None:
            self._hooks = YieldingHooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def stop(self) -> int:
        """Ends the count: the peak. Without effect where none is under way."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        return self.peak

    def _pack(self, tensor: Tensor) -> _Saved:
        with torch._C.DisableTorchFunction():  # of a GrainScope: nothing here is the model's
            storage = _storage(tensor)
            if storage is None or storage._cdata in self.excluded:
                return _Saved(self, tensor, None)
            held = self._holders.setdefault(storage._cdata, [0, storage.nbytes()])
            held[0] += 1
            if held[0] == 1:
                self._now += held[1]
                self.peak = max(self.peak, self._now)
            return _Saved(self, tensor, storage._cdata)

    def _unpack(self, saved: _Saved) -> Tensor:
        with torch._C.DisableTorchFunction():
            version = saved.tensor._version
        if version != saved.version:  # with hooks autograd does not check this itself
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(saved.tensor.shape)} is at version {version}; "
                f"expected version {saved.version} instead"
            )
        return saved.tensor

    def release(self, key: int) -> None:
        """Counts one reference less to a storage."""
        held = self._holders[key]
        held[0] -= 1
        if not held[0]:
            self._now -= held[1]
            del self._holders[key]


class GatheredBytes:
    """Bytes of parameters that fully_shard has gathered, in all units of a model; `peak` is the most seen by `look`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self.groups = [group for m in self.modules for group in param_groups(m)]
        self.peak = 0

    def parameters(self) -> list[Tensor]:
        """The tensors that hold gathered parameters; empty where they are not gathered now."""
        found = [p for group in self.groups for p in group.fsdp_params]
        return [t for p in found for t in getattr(p, "all_gather_outputs", [])]

    def gradients(self) -> list[Tensor]:
        """Gradients of gathered parameters that wait to be scattered, and those of shards."""
        found = [p for group in self.groups for p in group.fsdp_params]
        waiting = [p._unsharded_param.grad for p in found if hasattr(p, "_unsharded_param")]
        scattered = [p.sharded_param.grad for p in found]
        return [g for g in (*waiting, *scattered, *(p.unsharded_accumulated_grad for p in found)) if g is not None]

    def look(self, arriving: Iterable[Tensor] = ()) -> None:
        """Takes note of what is gathered now, and of the buffers in which more arrives."""
        results = [group._all_gather_result for group in self.groups]
        results += [s.all_gather_result for g in self.groups if (s := g.comm_ctx.all_gather_state) is not None]
        buffers = [r.all_gather_output for r in results if r is not None]
        self.peak = max(self.peak, storage_bytes([*self.parameters(), *buffers, *arriving]))


def _call_after(owner: Any, name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` after each call of an object's method; gives what ends that."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        then()
        return found

    setattr(owner, name, call)
    return functools.partial(delattr, owner, name)


# Axes whose collectives carry activations, and no parameters.
_OF_ACTIVATIONS = ("tensor", "context", "pipeline")


class MemoryMeter:
    """Memory meter of one model's step: peak bytes by category between `start` and `stop`.

    Gradients are those that are there when a reduce_scatter begins and at `summed`; state and parameters at `stop`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        own: Callable[[int], int] = int,
    ) -> None:
        """`own`: of the bytes of all parameters those that count here, where ranks share one copy of them."""
        self._model, self._optimizer, self._own = model, optimizer, own
        self._saved = SavedTensors()
        self._gathered = GatheredBytes(model)
        self._gradients = 0
        self._ends: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins a measurement, before the first forward."""
        self.abandon()
        self._gradients, self._gathered.peak = 0, 0
        self._saved.exclude(self._parameters())
        self._saved.exclude(self._gathered.parameters())
        for group in self._gathered.groups:  # not a hook of the module, which pipeline stages gather within
            self._ends.append(_call_after(group, "wait_for_unshard", self._unsharded))
        self._saved.start()

    def _unsharded(self) -> None:
        """After a unit was gathered: what autograd keeps of it is no activation."""
        self._saved.exclude(self._gathered.parameters())
        self._gathered.look()

    def collective(self, kind: str, group: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """A listener of Traffic."""
        if not self._gathered.modules or group in _OF_ACTIVATIONS:
            return
        if kind == "all_gather":
            self._gathered.look(outputs)
        elif kind == "reduce_scatter":
            self.summed([*outputs, *inputs, *self._gathered.gradients()])

    def summed(self, buffers: Iterable[Any] = (), borrowed: Iterable[Any] = ()) -> None:
        """Gradients are summed over the ranks, or about to be; `buffers` hold them beside the parameters' own.

        `borrowed` memory counts elsewhere.
        """
        elsewhere = {s._cdata for t in borrowed if (s := _storage(t)) is not None}
        found = [p.grad for p in self._parameters() if p.grad is not None]
        own = [g for g in found if (s := _storage(g)) is None or s._cdata not in elsewhere]
        self._gradients = max(self._gradients, storage_bytes([*own, *buffers]))

    def stop(self) -> Footprint:
        """Ends the measurement, after the update."""
        self.abandon()
        held = states(self._optimizer) if self._optimizer is not None else ()
        return Footprint(
            parameters=self._own(storage_bytes(self._parameters())),
            gathered=self._gathered.peak,
            gradients=self._gradients,
            optimizer=storage_bytes(v for state in held if isinstance(state, dict) for v in state.values()),
            activations=self._saved.peak,
        )

    def _parameters(self) -> list[nn.Parameter]:
        """Those that are here; what other ranks hold is on the meta device."""
        return [p for p in self._model.parameters() if not p.is_meta]

    def abandon(self) -> None:
        """Takes the hooks off."""
        self._saved.stop()
        while self._ends:
            self._ends.pop()()
