"""Deferred initialization: a model on the meta device, with initial values computed on demand.

The user's constructor runs with each new tensor on the meta device, while a tape logs the operations that would have
created and filled the values. To compute a value, the tape runs the operations on which its storage depends, in order,
on real memory. Random operations start from the generator state that they had in the constructor. The tape follows
storages, not tensors: views share one storage, so a write through any view writes all of them.

The constructor does not notice: `Tensor.device` is cpu, and a value that it reads is the right one. If the constructor
does something that this module does not understand, the model is constructed normally and its values stay in memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shoal.numerics.grain_randomness import seed_everything
from shoal.numerics.isolation import generators_kept
from shoal.numerics.operators import is_whole, storage_key
from shoal.parallel.model.init_recorder import CpuDisguise, InitRecorder, first_line
from shoal.parallel.model.init_tape import NotUnderstoodError, Tape, TensorRef

_META = torch.device("meta")
_CPU = torch.device("cpu")
_UNSHAPED = UninitializedParameter, UninitializedBuffer


class Values:
    """Initial values of a model's parameters and buffers, by all names. `note`: why they are in memory, or None."""

    def __init__(
        self, tape: Tape, places: dict[str, TensorRef | Tensor], again: Callable[[], Values], note: str | None
    ):
        self.note = note
        self._tape = tape
        self._places = places
        self._again = again

    def whole(self, name: str) -> Tensor:
        """Return the value on the CPU, owned by the caller, bit for bit that of normal construction.

        Raises: KeyError if the model has no such parameter or buffer.
        """
        place = self._places[name]
        if isinstance(place, TensorRef):
            try:
                (value,) = self._tape.replay([place])
            except (NotUnderstoodError, RuntimeError) as error:
                # The problem appears only when the operation runs. From here on the right values are in memory.
                with generators_kept():
                    plain = self._again()
                self._places, self.note = plain._places, first_line(error)
                return self.whole(name)
            return value if is_whole(value) else value.clone()
        with torch._C.DisableTorchFunction():
            return place.detach().to(_CPU, copy=True)


def deferred(make: Callable[[], nn.Module], key: int) -> tuple[nn.Module, Values]:
    """Construct a model by `make` under the seed `key`, on the meta device; return the model and its initial values.

    Plain tensor attributes are real. The global generators end in the same state as after normal construction. If
    `make` cannot be traced, it is called a second time, and the values stay in memory (`Values.note`). Raises: what
    `make` raises.
    """
    dtype = torch.get_default_dtype()
    recorder = InitRecorder()
    seed_everything(key)
    try:
        with _elders_frozen():
            with recorder, CpuDisguise(recorder):
                model = make()
            places = _finish(model, recorder)
    except Exception as error:
        note = recorder.failure or first_line(error)
    else:
        return model, Values(recorder.tape, places, lambda: _plainly(make, key)[1], None)
    torch.set_default_dtype(dtype)
    model, values = _plainly(make, key)
    values.note = note
    return model, values


@contextlib.contextmanager
def _elders_frozen() -> Iterator[None]:
    """Return a context in which the garbage collector sees only new objects, unless the process had frozen objects."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _plainly(make: Callable[[], nn.Module], key: int) -> tuple[nn.Module, Values]:
    seed_everything(key)
    model = make()
    places: dict[str, TensorRef | Tensor] = {**_to_meta(_named(model))}
    values = Values(Tape(), places, lambda: values, None)
    return model, values


def _finish(model: nn.Module, recorder: InitRecorder) -> dict[str, TensorRef | Tensor]:
    """Make plain tensor attributes real and the model's real tensors meta; return the places of the values."""
    tape = recorder.tape
    if recorder.failure is not None:
        raise NotUnderstoodError(recorder.failure)
    named = _named(model)
    refs = {name: TensorRef.of(t) for name, t in named.items() if recorder.is_tracked(t)}
    real = {name: t for name, t in named.items() if name not in refs}
    if any(isinstance(t, _UNSHAPED) or t.device == _META for t in real.values()):
        raise NotUnderstoodError("a parameter or buffer without a value")
    keys = {ref.key for ref in refs.values()}
    own = {id(t) for t in named.values()}
    others: dict[int, list[Tensor]] = {}
    # Wherever the references are: in lists, dicts or objects of modules, or outside the model. The modes do not see all
    # tensors: a Parameter is made of a tensor below both modes.
    gc.collect()
    for tensor in [o for o in gc.get_objects() if issubclass(type(o), Tensor)]:
        if id(tensor) not in own and recorder.is_tracked(tensor):
            others.setdefault(storage_key(tensor), []).append(tensor)
    if others.keys() & keys:
        raise NotUnderstoodError("a tensor beside the parameters and buffers shares memory with one of them")
    for tensors in others.values():
        for tensor, value in zip(tensors, tape.replay([TensorRef.of(t) for t in tensors]), strict=True):
            torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))
    tape.keep(keys)
    return {**refs, **_to_meta(real)}


def _named(model: object) -> dict[str, Tensor]:
    """Return parameters and buffers by all their names."""
    if not isinstance(model, nn.Module):
        return {}
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _to_meta(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the tensors to the meta device, in place; return tensors with their former data."""
    held: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in held and not isinstance(tensor, _UNSHAPED):
            twin = torch.empty_like(tensor, device=_META).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, twin)
            held[id(tensor)] = twin
    return {name: held[id(t)] for name, t in named.items() if id(t) in held}
