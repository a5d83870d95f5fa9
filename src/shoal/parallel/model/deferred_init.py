"""Deferred initialization: a model on the meta device, whose initial values are computed on demand.

The user's constructor runs with each new tensor on the meta device, while the operations that would have made and
filled the values are logged. A value is computed by running those of them that its storage depends on, in order, on
real memory; random ones from the state that the generator had before them. Storages are followed, not tensors: views
share one, so a write through any view is a write of all.

The constructor is not to notice: `Tensor.device` says cpu, and where it reads a value it gets the right one. Where it
does something that is not understood here, the model is constructed plainly and its values are kept.
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
    """Initial values of a model's parameters and buffers, by all names; `note` says why they are in memory, if so."""

    def __init__(
        self, tape: Tape, places: dict[str, TensorRef | Tensor], again: Callable[[], Values], note: str | None
    ):
        self.note = note
        self._tape = tape
        self._places = places
        self._again = again

    def whole(self, name: str) -> Tensor:
        """The value on the CPU, owned by the caller, bit for bit that of plain construction.

        Raises: KeyError where the model has no such parameter or buffer.
        """
        place = self._places[name]
        if isinstance(place, TensorRef):
            try:
                (value,) = self._tape.replay([place])
            except (NotUnderstoodError, RuntimeError) as error:
                # Only met when the operation runs. From here on the values are held, and still the right ones.
                with generators_kept():
                    plain = self._again()
                self._places, self.note = plain._places, first_line(error)
                return self.whole(name)
            return value if is_whole(value) else value.clone()
        with torch._C.DisableTorchFunction():
            return place.detach().to(_CPU, copy=True)


def deferred(make: Callable[[], nn.Module], key: int) -> tuple[nn.Module, Values]:
    """The model that `make` constructs under the seed `key`, on the meta device, and its initial values.

    Plain tensor attributes are real. The global generators end as after plain construction. Where `make` cannot be
    followed it is called a second time, and the values are held (`Values.note`). Raises: what `make` raises.
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
    """A context in which the garbage collector knows of what is made in it alone, unless the process froze objects."""
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
    """Makes plain tensor attributes real and what is real in the model meta; returns where the values are."""
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
    # Wherever they are held: in lists, dicts or objects of modules, or outside the model. The modes do not see all of
    # them: a Parameter is made of a tensor below both.
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
    """Parameters and buffers by all their names."""
    if not isinstance(model, nn.Module):
        return {}
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _to_meta(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Puts the tensors on the meta device, in place, and returns what they held."""
    held: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in held and not isinstance(tensor, _UNSHAPED):
            twin = torch.empty_like(tensor, device=_META).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, twin)
            held[id(tensor)] = twin
    return {name: held[id(t)] for name, t in named.items() if id(t) in held}
