"""Memory meter: this rank's peak bytes by category, measured on the tensors.

Each storage counts once, so that a view costs nothing and a parameter cut by fully_shard counts as its shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.whole_optimizer import states
from shoal.numerics.isolation import YieldingHooks
from shoal.parallel.shard.torch_release import param_groups
from shoal.plans.accounting.memory import Footprint


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, each storage once. A DTensor counts with its local part."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is not None:
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _storage(tensor: Any) -> torch.UntypedStorage | None:
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


class _Saved:
    """Tensor that autograd saves. It counts for as long as autograd references this object.

    The tensor is detached: a saved output would reference its own operation. Without a backward that releases it, as in
    a backward in two halves, both would stay in memory. Autograd restores the history of an unpacked tensor.
    """

    __slots__ = ("_count", "key", "tensor", "version")

    def __init__(self, count: SavedTensors, tensor: Tensor, key: int | None) -> None:
        self._count, self.tensor, self.key, self.version = count, tensor.detach(), key, tensor._version

    def __del__(self) -> None:
        if self.key is not None:
            self._count.release(self.key)


class SavedTensors:
    """Counter of the bytes that autograd saves for the backward. `peak`: the maximum at one time.

    Each storage counts once. Storages in `excluded`, those of parameters, do not count. Recomputed regions have hooks
    of their own: their inputs count here, and recomputed tensors do not.
    """

    def __init__(self) -> None:
        self.excluded: set[int] = set()
        self.peak = 0
        self._now = 0
        self._holders: dict[int, list[int]] = {}  # storage: [holders, bytes]
        self._hooks: YieldingHooks | None = None

    def exclude(self, tensors: Iterable[Any]) -> None:
        """Exclude the storages of these tensors from the count."""
        self.excluded |= {s._cdata for t in tensors if (s := _storage(t)) is not None}

    def start(self) -> None:
        """Start to count."""
        self.peak = self._now
        if self._hooks is None:
            self._hooks = YieldingHooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def stop(self) -> int:
        """End the count, if it runs, and return the peak in bytes."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        return self.peak

    def _pack(self, tensor: Tensor) -> _Saved:
        with torch._C.DisableTorchFunction():  # of a GrainScope: these calls are not the model's
            storage = _storage(tensor)
            if storage is None or storage._cdata in self.excluded:
                return _Saved(self, tensor, None)
            holder = self._holders.setdefault(storage._cdata, [0, storage.nbytes()])
            holder[0] += 1
            if holder[0] == 1:
                self._now += holder[1]
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
        """Remove one reference to a storage from the count."""
        holder = self._holders[key]
        holder[0] -= 1
        if not holder[0]:
            self._now -= holder[1]
            del self._holders[key]


class GatheredBytes:
    """Bytes of parameters that fully_shard has gathered, in all units of a model. `peak`: the maximum in `look`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self.groups = [group for m in self.modules for group in param_groups(m)]
        self.peak = 0

    def parameters(self) -> list[Tensor]:
        """Return the tensors with gathered parameters; their storages are empty while nothing is gathered."""
        gathered = [p for group in self.groups for p in group.fsdp_params]
        return [t for p in gathered for t in getattr(p, "all_gather_outputs", [])]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of gathered parameters that wait for the scatter, and the gradients of shards."""
        gathered = [p for group in self.groups for p in group.fsdp_params]
        waiting = [p._unsharded_param.grad for p in gathered if hasattr(p, "_unsharded_param")]
        scattered = [p.sharded_param.grad for p in gathered]
        return [g for g in (*waiting, *scattered, *(p.unsharded_accumulated_grad for p in gathered)) if g is not None]

    def look(self, arriving: Iterable[Tensor] = ()) -> None:
        """Update the peak with the gathered parameters and the buffers that receive more."""
        results = [group._all_gather_result for group in self.groups]
        results += [s.all_gather_result for g in self.groups if (s := g.comm_ctx.all_gather_state) is not None]
        buffers = [r.all_gather_output for r in results if r is not None]
        self.peak = max(self.peak, storage_bytes([*self.parameters(), *buffers, *arriving]))


def _call_after(owner: Any, name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` after each call of an object's method. Return a function that ends this."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(owner, name, call)
    return functools.partial(delattr, owner, name)


# Axes with collectives of activations, not of parameters.
_OF_ACTIVATIONS = ("tensor", "context", "pipeline")


class MemoryMeter:
    """Memory meter of one model's step: peak bytes by category between `start` and `stop`.

    Gradients are measured when a reduce_scatter starts and at `summed`, state and parameters at `stop`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        own: Callable[[int], int] = int,
    ) -> None:
        """Create the meter. `own`: this rank's part of all parameter bytes, if ranks share one copy of them."""
        self._model, self._optimizer, self._own = model, optimizer, own
        self._saved = SavedTensors()
        self._gathered = GatheredBytes(model)
        self._gradients = 0
        self._ends: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start a measurement, before the first forward."""
        self.abandon()
        self._gradients, self._gathered.peak = 0, 0
        self._saved.exclude(self._parameters())
        self._saved.exclude(self._gathered.parameters())
        for group in self._gathered.groups:  # no module hook: pipeline stages gather within a module
            self._ends.append(_call_after(group, "wait_for_unshard", self._unsharded))
        self._saved.start()

    def _unsharded(self) -> None:
        """Record a gathered unit. Its tensors do not count as activations if autograd saves them."""
        self._saved.exclude(self._gathered.parameters())
        self._gathered.look()

    def collective(self, kind: str, group: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Record the gathered parameters or gradients of a collective, as a listener of Traffic."""
        if not self._gathered.modules or group in _OF_ACTIVATIONS:
            return
        if kind == "all_gather":
            self._gathered.look(outputs)
        elif kind == "reduce_scatter":
            self.summed([*outputs, *inputs, *self._gathered.gradients()])

    def summed(self, buffers: Iterable[Any] = (), borrowed: Iterable[Any] = ()) -> None:
        """Record the gradients before or after their sum over ranks. `buffers`: gradients outside `parameter.grad`.

        `borrowed`: memory that counts elsewhere.
        """
        elsewhere = {s._cdata for t in borrowed if (s := _storage(t)) is not None}
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        own = [g for g in gradients if (s := _storage(g)) is None or s._cdata not in elsewhere]
        self._gradients = max(self._gradients, storage_bytes([*own, *buffers]))

    def stop(self) -> Footprint:
        """End the measurement after the update, and return the bytes by category."""
        self.abandon()
        optimizer_states = states(self._optimizer) if self._optimizer is not None else ()
        return Footprint(
            parameters=self._own(storage_bytes(self._parameters())),
            gathered=self._gathered.peak,
            gradients=self._gradients,
            optimizer=storage_bytes(v for state in optimizer_states if isinstance(state, dict) for v in state.values()),
            activations=self._saved.peak,
        )

    def _parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters. Parameters of other ranks are on the meta device."""
        return [p for p in self._model.parameters() if not p.is_meta]

    def abandon(self) -> None:
        """Remove the hooks."""
        self._saved.stop()
        while self._ends:
            self._ends.pop()()
