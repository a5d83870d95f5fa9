"""Construction of a model without its memory: on the meta device, every initial value computed when asked for.

The user's constructor runs with each tensor that it makes on the meta device, while the operations that would have
made and filled the values are logged. A value is had by running those of them that its storage depends on, in order,
on real memory; random ones from the state that the generator had before them. Storages are what is followed, not
tensors: views share one, so a write through any view is a write of all.

The constructor is not to notice: `Tensor.device` says cpu, and where it reads a value it gets the right one. Where it
does something that is not understood here, the model is constructed plainly and its values are kept.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from shoal.randomness import seed_everything

_META = torch.device("meta")
_CPU = torch.device("cpu")

# In place and without a look at what was there, so that what came before need not be computed.
_FILLS = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
_FILLS |= {"geometric_", "bernoulli_"}
# How many numbers these draw depends on the shape alone.
_DRAWN_LIKE = {"rand_like", "randn_like", "randint_like"}
# Operations that change the geometry of a tensor, and nothing in its storage.
_RESHAPES = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "detach_"}
# Arguments that are written although the schema does not say so.
_UNMARKED = {"native_batch_norm": {"running_mean", "running_var"}}
# Whether and where memory is mapped, or what lies outside it, is not in the log.
_REFUSED_OPERATIONS = {"from_file", "set_", "resize_", "resize_as_", "record_stream"}
_REFUSED_METHODS = {"numpy", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_", "pin_memory"}
_REFUSED_METHODS |= {"is_shared", "__array__", "__dlpack__", "__reduce_ex__", "is_pinned"}
# Their kernels are chosen by device above the level of the log, or they hand values out: they run on the values.
_ON_VALUES: set[Any] = {
    Tensor.tolist,
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    torch._weight_norm,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
}
_ANSWERS: dict[Any, Any] = {
    Tensor.device.__get__: _CPU,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


class _NotUnderstoodError(Exception):
    """The constructor did something whose effect on the values is not known."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """Where a tensor lies: the key of its storage, and its geometry therein."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Ref:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise _NotUnderstoodError(f"a tensor that is not plain memory, of shape {tuple(tensor.shape)}")
        return cls(_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    def same_place(self, tensor: Tensor) -> bool:
        here = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return here == (self.dtype, self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Operation:
    """One logged call: `_Ref`s stand for the tensors among the arguments, real tensors are held.

    `writes`: by storage, whether nothing remains of what was there. `generator`: its state before a random operation.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_Ref, ...]
    reads: frozenset[int]
    writes: dict[int, bool]
    generator: Tensor | None

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Runs on real storages and adds those that it makes."""

        def real(ref: _Ref) -> Tensor:
            if ref.key not in storages and self.writes.get(ref.key):
                storages[ref.key] = ref.scratch().untyped_storage()  # what was there does not count
            return ref.on(storages[ref.key])

        args, kwargs = _replace((self.args, self.kwargs), _Ref, real)
        if self.generator is not None and kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator().set_state(self.generator)
        elif self.generator is not None:
            torch.default_generator.set_state(self.generator)
        taken = {storage._cdata for storage in storages.values()}
        results = _tensors(self.func(*args, **kwargs))
        for ref, result in zip(self.outputs, results, strict=True):
            if ref.key in storages:
                continue
            if not ref.same_place(result) or _key(result) in taken:
                raise _NotUnderstoodError(f"{self.func} lays its result out otherwise than on the meta device")
            storages[ref.key] = result.untyped_storage()


class _Log:
    """The operations by the storages that they write."""

    def __init__(self) -> None:
        # The meta storages are held, so that none that is made later gets an earlier one's key.
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._writers: dict[int, list[_Operation]] = {}
        self._count = 0

    def add(self, **values: Any) -> None:
        operation = _Operation(number=self._count, **values)
        self._count += 1
        for key in operation.writes:
            self._writers.setdefault(key, []).append(operation)

    def needed(self, keys: Iterable[int]) -> list[_Operation]:
        """The operations that the storages' contents depend on, in order."""
        found: dict[int, _Operation] = {}
        seen: set[tuple[int, int]] = set()
        wanted = [(key, self._count) for key in keys]
        while wanted:
            key, before = wanted.pop()
            for operation in reversed(self._writers[key]):
                if operation.number >= before:
                    continue
                if (operation.number, key) in seen:
                    break
                seen.add((operation.number, key))
                if operation.number not in found:
                    found[operation.number] = operation
                    wanted += [(read, operation.number) for read in operation.reads]
                    # Of what it only changes, also the part that is not asked for must be there to run it.
                    wanted += [(k, operation.number) for k in operation.writes if not operation.writes[k]]
                if operation.writes[key]:
                    break
        return [found[number] for number in sorted(found)]

    def replay(self, refs: list[_Ref]) -> list[Tensor]:
        """The tensors' values now; those that share a storage still do."""
        operations = self.needed({ref.key for ref in refs})
        last = {key: op.number for op in operations for key in (*op.reads, *op.writes)}
        last |= {ref.key: self._count for ref in refs}
        storages: dict[int, torch.UntypedStorage] = {}
        with _undisturbed():
            for operation in operations:
                operation.run(storages)
                for key in {*operation.reads, *operation.writes}:
                    if last[key] <= operation.number:
                        storages.pop(key, None)
            return [ref.on(storages[ref.key]) for ref in refs]

    def keep(self, keys: set[int]) -> None:
        """Forgets what the storages of these keys do not depend on."""
        kept: dict[int, list[_Operation]] = {}
        for operation in self.needed(keys):
            for key in operation.writes:
                kept.setdefault(key, []).append(operation)
        self._writers = kept


class _Recorder(TorchDispatchMode):
    """Runs every operation on the meta device and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.log = _Log()
        self.failure: str | None = None
        # Storages of real tensors in the log: if one is written, the log is no longer true.
        self._held: dict[int, torch.UntypedStorage] = {}

    def is_tracked(self, value: object) -> bool:
        """Whether this is a tensor of the log."""
        return isinstance(value, Tensor) and value.device == _META and _key(value) in self.log.storages

    def fail(self, reason: str) -> _NotUnderstoodError:
        """Makes the recording void, whatever the constructor does with the exception."""
        self.failure = self.failure or reason
        return _NotUnderstoodError(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # The constructor is told that everything is on the CPU, this is not.
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        device = kwargs.get("device")
        on_host = device is None or device.type in {"cpu", "meta"}
        makes = not tensors and on_host and any(a.name == "device" for a in func._schema.arguments)
        if func is torch.ops.aten.lift_fresh.default and not self._any_meta(tensors) and tensors[0].device == _CPU:
            func, makes = torch.ops.aten.clone.default, True
        if not makes and not self._any_meta(tensors) and device != _META:
            return self._run_real(func, args, kwargs)
        try:
            return self._handle(func, args, kwargs, on_host)
        except Exception as error:
            # The innermost reason counts: this may be an operation inside another.
            raise self.fail(f"{func}: {_line(error)}") from error

    def _any_meta(self, tensors: list[Tensor]) -> bool:
        return any(t.device == _META for t in tensors)

    def _handle(self, func: Any, args: Any, kwargs: Any, on_host: bool) -> Any:
        tensors = _tensors((args, kwargs))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace != "aten" or name in _REFUSED_OPERATIONS:
            raise _NotUnderstoodError("an operation that is not known")
        if any(is_traceable_wrapper_subclass(t) for t in tensors):
            raise _NotUnderstoodError("a tensor that wraps others")
        if any(t.device == _META and not self.is_tracked(t) for t in tensors):
            raise _NotUnderstoodError("a tensor that has no value")
        written, read = _roles(func, name, args, kwargs)
        dynamic = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        reads_out = dynamic or not on_host or any("Tensor" not in str(r.type) for r in func._schema.returns)
        if reads_out or any(not self.is_tracked(t) for t in written):
            if any(self.is_tracked(t) for t in written):
                raise _NotUnderstoodError("it writes what is deferred and what is not")
            return self._run_real(func, *self.on_values(args, kwargs))
        if name == "_to_copy" and kwargs.get("device") == _CPU:
            raise _NotUnderstoodError("a move that may be a copy or not")
        if torch.Tag.inplace_view in func.tags:
            if name not in _RESHAPES:
                raise _NotUnderstoodError("a tensor gets another memory")
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, written, read)

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[Tensor], read: list[Tensor]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        names = {a.name for a in func._schema.arguments}
        before = [_Ref.of(t) for t in written]
        generator = self._draw(func, name, args, kwargs) if _is_random(func, names) else None
        twins: set[int] = set()

        def twin(tensor: Tensor) -> Tensor:
            if self.is_tracked(tensor):
                return tensor
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            twins.add(_key(made))
            return made

        on_meta = {"device": _META} if "device" in names and (not _tensors(args) or kwargs.get("device")) else {}
        meta_args, meta_kwargs = _replace((args, {**kwargs, **on_meta}), Tensor, twin)
        result = func(*meta_args, **meta_kwargs)
        outputs = _tensors(result)
        refs = tuple(_Ref.of(t) for t in outputs)
        fresh = {ref.key: t.untyped_storage() for ref, t in zip(refs, outputs, strict=True)}
        fresh = {key: storage for key, storage in fresh.items() if key not in self.log.storages}
        if fresh.keys() & twins or any(t.device != _META for t in outputs) or before != [_Ref.of(t) for t in written]:
            raise _NotUnderstoodError("its result lies elsewhere than expected")
        if not fresh and not written:
            return result  # a view
        self.log.storages |= fresh
        overwritten = written[0] if name in _FILLS and torch._debug_has_internal_overlap(written[0]) == 0 else None
        held_args, held_kwargs = _replace((args, kwargs), Tensor, self._hold)
        device = {"device": _CPU} if on_meta else {}
        dtype = {"dtype": outputs[0].dtype} if on_meta and "dtype" in names and not kwargs.get("dtype") else {}
        self.log.add(
            func=func,
            args=held_args,
            kwargs={**held_kwargs, **device, **dtype},
            outputs=refs,
            reads=frozenset(_key(t) for t in read if self.is_tracked(t)),
            writes=dict.fromkeys(fresh, True) | {_key(t): t is overwritten and _is_whole(t) for t in written},
            generator=generator,
        )
        return result

    def _draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        """Moves the generator on as the operation does, and returns its state before."""
        own = kwargs.get("generator")
        generator = torch.default_generator if own is None else own
        if generator.device != _CPU:
            raise _NotUnderstoodError("a generator of another device")
        state: Tensor = generator.get_state()
        blank = args[0] if name in _FILLS | _DRAWN_LIKE else None
        if blank is not None:
            args = (_Ref.of(blank).scratch(), *args[1:])
        args, kwargs = self.on_values(args, {**kwargs, "device": _CPU} if kwargs.get("device") else kwargs)
        with torch.no_grad():
            func(*args, **kwargs)
        return state

    def on_values(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with the values of what is deferred."""
        tracked = {id(t): t for t in _tensors((args, kwargs)) if self.is_tracked(t)}
        values = dict(zip(tracked, self.log.replay([_Ref.of(t) for t in tracked.values()]), strict=True))
        replaced: tuple[Any, Any] = _replace((args, kwargs), Tensor, lambda t: values.get(id(t), t))
        return replaced

    def _hold(self, tensor: Tensor) -> Tensor | _Ref:
        if self.is_tracked(tensor):
            return _Ref.of(tensor)
        if not tensor.untyped_storage().resizable():
            return tensor.detach().clone()  # numpy or a file may change it, and nothing would tell
        self._held[_key(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if any(t.layout == torch.strided and _key(t) in self._held for t in _roles(func, name, args, kwargs)[0]):
            raise self.fail(f"{func}: it changes what a value was made from")
        return func(*args, **kwargs)


class _Disguise(TorchFunctionMode):
    """Answers for deferred tensors as they were on the CPU, and hands out values where they are asked for."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "meta":
            raise self._recorder.fail("it uses the meta device itself")
        with torch._C.DisableTorchFunction():
            tracked = any(self._recorder.is_tracked(t) for t in _tensors((args, kwargs)))
        return self._answer(func, args, kwargs) if tracked else func(*args, **kwargs)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        if getattr(func, "__name__", "") in _REFUSED_METHODS:
            raise self._recorder.fail(f"Tensor.{func.__name__}: memory that is not there yet")
        if func in _ON_VALUES:
            with torch._C.DisableTorchFunction():
                args, kwargs = self._recorder.on_values(args, kwargs)
        elif func in {Tensor.to, Tensor.type_as, Tensor.cpu}:
            return self._move(func, args, kwargs)
        elif func == Tensor.type and len(args) == 1 and not kwargs:
            return torch.empty(0, dtype=args[0].dtype, device=_CPU).type()
        elif func is Tensor.__deepcopy__ and not isinstance(args[0], nn.Parameter):
            with torch._C.DisableTorchFunction():
                mark = "shoal.deferred", _key(args[0])
            # torch copies a storage once for all tensors on it, but not on the meta device.
            if args[1].setdefault(mark, args[0]) is not args[0]:
                raise self._recorder.fail("copy.deepcopy: of two tensors that share memory")
        return func(*args, **kwargs)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A move to the CPU or beside another tensor is none; a copy must not come of it where plainly none would."""
        with torch._C.DisableTorchFunction():
            here = args[0].device in {_CPU, _META}

            def target(value: Any) -> Any:
                if isinstance(value, Tensor) and here and value.device in {_CPU, _META}:
                    return value.dtype
                is_device = isinstance(value, str | torch.device) and torch.device(value) == _CPU
                return args[0].device if is_device and here else value

            if func == Tensor.cpu:
                args, kwargs = (args[0], _CPU), {**kwargs}
            args = args[0], *(target(a) for a in args[1:])
            kwargs = {k: target(v) for k, v in kwargs.items()}
        if isinstance(kwargs.get("other"), torch.dtype):
            kwargs["dtype"] = kwargs.pop("other")
        return Tensor.to(*args, **kwargs)


class Values:
    """The initial values of a model's parameters and buffers, by name; `note` says why they are held, None if not."""

    def __init__(self, log: _Log, places: dict[str, _Ref | Tensor], again: Callable[[], Values], note: str | None):
        self.note = note
        self._log = log
        self._places = places
        self._again = again

    @property
    def names(self) -> tuple[str, ...]:
        """All names; a tensor with several is under each."""
        return tuple(self._places)

    def whole(self, name: str) -> Tensor:
        """The value on the CPU, owned by the caller, bit for bit that of plain construction.

        Raises: KeyError where the model has no such parameter or buffer.
        """
        place = self._places[name]
        if isinstance(place, _Ref):
            try:
                (value,) = self._log.replay([place])
            except _NotUnderstoodError as error:
                # Only met when the operation runs. From here on the values are held, and still the right ones.
                with _generators_kept():
                    plain = self._again()
                self._places, self.note = plain._places, str(error)
                return self.whole(name)
            return value if _is_whole(value) else value.clone()
        with torch._C.DisableTorchFunction():
            return place.detach().to(_CPU, copy=True)


def deferred(make: Callable[[], nn.Module], key: int) -> tuple[nn.Module, Values]:
    """The model that `make` constructs under the seed `key`, on the meta device, and its initial values.

    Plain tensor attributes are real. The global generators end as after plain construction. Where `make` cannot be
    followed it is called a second time, and the values are held (`Values.note`). Raises: what `make` raises.
    """
    dtype = torch.get_default_dtype()
    recorder = _Recorder()
    seed_everything(key)
    try:
        with recorder, _Disguise(recorder):
            model = make()
        places = _finish(model, recorder)
    except Exception as error:
        note = recorder.failure or _line(error)
    else:
        return model, Values(recorder.log, places, lambda: _plainly(make, key)[1], None)
    torch.set_default_dtype(dtype)
    model, values = _plainly(make, key)
    values.note = note
    return model, values


def _plainly(make: Callable[[], nn.Module], key: int) -> tuple[nn.Module, Values]:
    seed_everything(key)
    model = make()
    places: dict[str, _Ref | Tensor] = {**_to_meta(_named(model))}
    values = Values(_Log(), places, lambda: values, None)
    return model, values


def _finish(model: nn.Module, recorder: _Recorder) -> dict[str, _Ref | Tensor]:
    """Makes plain tensor attributes real and what is real in the model meta; returns where the values are."""
    log = recorder.log
    if recorder.failure is not None:
        raise _NotUnderstoodError(recorder.failure)
    named = _named(model)
    refs = {name: _Ref.of(t) for name, t in named.items() if recorder.is_tracked(t)}
    real = {name: t for name, t in named.items() if name not in refs}
    if any(isinstance(t, UninitializedTensorMixin) or t.device == _META for t in real.values()):
        raise _NotUnderstoodError("a parameter or buffer without a value")
    keys = {ref.key for ref in refs.values()}
    own = {id(t) for t in named.values()}
    others: dict[int, list[Tensor]] = {}
    # Wherever they are held: in lists, dicts or objects of modules, or outside the model.
    gc.collect()
    for tensor in [o for o in gc.get_objects() if issubclass(type(o), Tensor)]:
        if id(tensor) not in own and recorder.is_tracked(tensor):
            others.setdefault(_key(tensor), []).append(tensor)
    if others.keys() & keys:
        raise _NotUnderstoodError("a tensor beside the parameters and buffers shares memory with one of them")
    for tensors in others.values():
        for tensor, value in zip(tensors, log.replay([_Ref.of(t) for t in tensors]), strict=True):
            torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))
    log.keep(keys)
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
        if id(tensor) not in held and not isinstance(tensor, UninitializedTensorMixin):
            twin = torch.empty_like(tensor, device=_META).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, twin)
            held[id(tensor)] = twin
    return {name: held[id(t)] for name, t in named.items() if id(t) in held}


@contextmanager
def _generators_kept() -> Iterator[None]:
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Operations run on what they are given, whatever modes the caller is in, and leave no trace."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        _generators_kept(),
    ):
        yield


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_random(func: Any, argument_names: set[str]) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or "generator" in argument_names


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _replace(tree: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    return tree_map(lambda leaf: by(leaf) if isinstance(leaf, kind) else leaf, tree)


def _roles(func: Any, name: str, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that the operation writes, and those that it reads."""
    written: list[Tensor] = []
    read: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        writes = (alias is not None and alias.is_write) or argument.name in _UNMARKED.get(name, ())
        (written if writes else read).extend(_tensors(value))
    return written, read


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
