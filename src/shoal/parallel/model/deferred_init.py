"""Deferred initialization: a model on the meta device, with initial values computed on demand.

The user's constructor runs with each new tensor on the meta device, while a tape logs the operations that would have
created and filled the values. To compute a value, the tape runs the operations on which its storage depends, in order,
on real memory. Random operations start from the generator state that they had in the constructor. The tape follows
storages, not tensors: views share one storage, so a write through any view writes all of them.

The constructor does not notice: `Tensor.device` is cpu, and a value that it reads is the right one. If the constructor
does something that this module does not understand, the model is constructed normally and its values stay in memory.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shoal.distributed.process_setup import one_thread
from shoal.errors import first_line
from shoal.numerics.generators import generators_kept, seed_everything
from shoal.numerics.isolation import undisturbed
from shoal.numerics.operators import (
    is_random,
    is_strided,
    is_whole,
    operation_name,
    raw_bytes,
    replace_leaves,
    roles,
    storage_key,
    tensors_in,
)

_META = torch.device("meta")
_CPU = torch.device("cpu")
_UNSHAPED = UninitializedParameter, UninitializedBuffer
_LARGE_BYTES = 1 << 20
_MANY_OBJECTS = 100_000
_MOST_SAMPLED = 1 << 16
# The remedy for initial values that do not follow from the job's seed.
SEED_IT = (
    "a generator of the job's own (numpy.random.default_rng(), torch.Generator()) has to be seeded inside model(), or "
    "left out: shoal seeds the global ones"
)


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
                self._places, self.note = plain._places, _reason(error)
                return self.whole(name)
            return value if is_whole(value) else value.clone()
        with torch._C.DisableTorchFunction():
            return place.detach().to(_CPU, copy=True)

    def sources_checksum(self) -> str:
        """Return a checksum of all that the values are computed from: numbers, tensors, states of generators."""
        checksum = hashlib.sha256()
        stored = [place for place in self._places.values() if isinstance(place, Tensor)]
        for source in [*stored, *self._tape.sources()]:
            checksum.update(sample_checksum(source) if isinstance(source, Tensor) else source.encode())
        return checksum.hexdigest()


def sample_checksum(tensor: Tensor) -> bytes:
    """Return a checksum of a tensor's shape and of at most 65,536 of its values, spread evenly."""
    checksum = hashlib.sha256(f"{tensor.shape} {tensor.dtype}".encode())
    if is_strided(tensor) and not tensor.is_meta and tensor.numel():
        values = tensor.detach().flatten()[:: -(-tensor.numel() // _MOST_SAMPLED)]
        checksum.update(raw_bytes(values.cpu()).numpy().tobytes())
    return checksum.digest()


def deferred(make: Callable[[], nn.Module], key: int) -> tuple[nn.Module, Values]:
    """Construct a model by `make` under the seed `key`, on the meta device; return the model and its initial values.

    Plain tensor attributes are real. The global generators end in the same state as after normal construction. If
    `make` cannot be traced, it is called a second time, and the values stay in memory (`Values.note`). Raises: what
    `make` raises.
    """
    dtype = torch.get_default_dtype()
    recorder = InitRecorder()
    seed_everything(key)
    # The garbage collector sees only new objects, unless somebody has frozen some. Counting them takes 40 ms in a fork.
    freezes = len(gc.get_objects()) > _MANY_OBJECTS and gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        with recorder, CpuDisguise(recorder):
            model = make()
        places = _finish(model, recorder)
    except Exception as error:
        note = recorder.failure or _reason(error)
    else:
        return model, Values(recorder.tape, places, lambda: _plainly(make, key)[1], None)
    finally:
        if freezes:
            gc.unfreeze()
    torch.set_default_dtype(dtype)
    model, values = _plainly(make, key)
    values.note = note
    return model, values


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
    moved: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in moved and not isinstance(tensor, _UNSHAPED):
            twin = torch.empty_like(tensor, device=_META).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, twin)
            moved[id(tensor)] = twin
    return {name: moved[id(t)] for name, t in named.items() if id(t) in moved}


# ----------------------------------------------------------------------------------------------------------------- tape


class NotUnderstoodError(Exception):
    """Error of a constructor that does something with an unknown effect on the values."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Reference to a tensor: the key of its storage, and its geometry in the storage."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorRef:
        """Return a tensor's reference. Raises: NotUnderstoodError if the tensor is not plain strided memory."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise NotUnderstoodError(f"a tensor that is not plain memory, of shape {tuple(tensor.shape)}")
        return cls(
            storage_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor at this place of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def span_bytes(self) -> int:
        """Number of bytes from the first to the last element."""
        steps = sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        return 0 if 0 in self.size else (steps + 1) * self.dtype.itemsize

    def same_place(self, tensor: Tensor) -> bool:
        """Return True if the tensor has this geometry in its storage."""
        here = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return here == (self.dtype, self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One logged call: a `TensorRef` replaces each tracked tensor among the arguments; real tensors stay.

    `writes`: for each storage, whether the call overwrites all its contents. `generator`: state before a random
    operation.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef, ...]
    reads: frozenset[int]
    writes: dict[int, bool]
    generator: Tensor | None

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run the call on real storages and add those that it creates."""

        def real(ref: TensorRef) -> Tensor:
            if ref.key not in storages and self.writes.get(ref.key):
                fresh = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
                storages[ref.key] = fresh.untyped_storage()  # the old contents do not matter
            return ref.on(storages[ref.key])

        args, kwargs = replace_leaves((self.args, self.kwargs), TensorRef, real)
        if self.generator is not None and kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator().set_state(self.generator)
        elif self.generator is not None:
            torch.default_generator.set_state(self.generator)
        before = {storage._cdata for storage in storages.values()}
        results = tensors_in(self.func(*args, **kwargs))
        for ref, result in zip(self.outputs, results, strict=True):
            if ref.key in storages:
                continue
            if not ref.same_place(result) or storage_key(result) in before:
                raise NotUnderstoodError(f"{self.func} lays its result out otherwise than on the meta device")
            storages[ref.key] = result.untyped_storage()


class Tape:
    """Log of operations by the storages that they write."""

    def __init__(self) -> None:
        # Keeps the meta storages alive, so that no later storage gets an earlier one's key.
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._writers: dict[int, list[LoggedCall]] = {}
        self._count = 0

    def add(self, **values: Any) -> None:
        """Log an operation; `values` are its fields except the number."""
        operation = LoggedCall(number=self._count, **values)
        self._count += 1
        for key in operation.writes:
            self._writers.setdefault(key, []).append(operation)

    def sources(self) -> Iterator[Tensor | str]:
        """Yield what the calls depend on beside storages: tensors, generators' states, and other arguments' values."""
        calls = {call.number: call for written in self._writers.values() for call in written}
        for _, call in sorted(calls.items()):
            leaves = (call.generator, *tree_leaves((call.args, call.kwargs)))
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))
            yield str([call.func, *(leaf for leaf in leaves if isinstance(leaf, bool | int | float | complex | str))])

    def needed(self, keys: Iterable[int]) -> list[LoggedCall]:
        """Return the operations on which the storages' contents depend, in order."""
        operations: dict[int, LoggedCall] = {}
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
                if operation.number not in operations:
                    operations[operation.number] = operation
                    wanted += [(read, operation.number) for read in operation.reads]
                    # If the operation changes a storage only in part, it also needs the rest of that storage.
                    wanted += [(k, operation.number) for k in operation.writes if not operation.writes[k]]
                if operation.writes[key]:
                    break
        return [operations[number] for number in sorted(operations)]

    @one_thread()
    def replay(self, refs: list[TensorRef]) -> list[Tensor]:
        """Compute the tensors' current values; tensors that share a storage still share one."""
        operations = self.needed({ref.key for ref in refs})
        last = {key: op.number for op in operations for key in (*op.reads, *op.writes)}
        last |= {ref.key: self._count for ref in refs}
        storages: dict[int, torch.UntypedStorage] = {}
        if any(ref.span_bytes >= _LARGE_BYTES for operation in operations for ref in operation.outputs):
            # glibc keeps memory between smaller pieces in use, and aligned allocations seldom fit there again: without
            # this call, truncated normal initial values of 400 MB, drawn one tensor at a time, occupied 2.7 GB.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
        with undisturbed():
            for operation in operations:
                operation.run(storages)
                for key in {*operation.reads, *operation.writes}:
                    if last[key] <= operation.number:
                        storages.pop(key, None)
            return [ref.on(storages[ref.key]) for ref in refs]

    def keep(self, keys: set[int]) -> None:
        """Drop the operations on which the storages of these keys do not depend."""
        operations = self.needed(keys)
        self._writers.clear()
        for operation in operations:
            for key in operation.writes:
                self._writers.setdefault(key, []).append(operation)


# ---------------------------------------------------------------------------------------------------------------- modes


# In place and independent of the old contents, which need not be computed.
_FILLS = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
_FILLS |= {"geometric_", "bernoulli_"}
# For new memory, each of these is a fill.
_DRAWN = {"rand": "uniform_", "rand_like": "uniform_", "randn": "normal_", "randn_like": "normal_"}
# Operations that change the geometry of a tensor, and nothing in its storage.
_RESHAPES = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "detach_"}
# The log does not record whether and where memory is mapped, nor data outside of it.
_REFUSED_OPERATIONS = {"from_file", "record_stream"}
_REFUSED_METHODS = {"numpy", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_", "pin_memory"}
_REFUSED_METHODS |= {"is_shared", "__array__", "__dlpack__", "__reduce_ex__", "is_pinned"}
# These run on values: torch selects their kernels by device above the level of the log, or they return values.
_ON_VALUES: set[Any] = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch._weight_norm, Tensor.tolist}
_ON_VALUES |= {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_ANSWERS = {
    getattr(Tensor, name).__get__: said for name, said in [("device", _CPU), ("is_meta", False), ("is_cpu", True)]
}


class InitRecorder(TorchDispatchMode):
    """Mode that runs every operation on the meta device and logs it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.failure: str | None = None
        # Storages of real tensors in the log: a write to one invalidates the log.
        self._real: dict[int, torch.UntypedStorage] = {}
        self._scratch = torch.UntypedStorage(0)

    def is_tracked(self, value: object) -> bool:
        """Return True if the value is a tensor of the log."""
        return isinstance(value, Tensor) and value.device == _META and storage_key(value) in self.tape.storages

    def fail(self, reason: str) -> NotUnderstoodError:
        """Invalidate the recording, even if the constructor catches the returned exception."""
        self.failure = self.failure or reason
        return NotUnderstoodError(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # The constructor sees everything on the CPU; this code must not.
        with torch._C.DisableTorchFunction():
            tensors = tensors_in((args, kwargs))
            on_meta = any(t.device == _META for t in tensors)
            device = kwargs.get("device")
            on_host = device is None or device.type in {"cpu", "meta"}
            makes = not tensors and on_host and any(a.name == "device" for a in func._schema.arguments)
            if func is torch.ops.aten.lift_fresh.default and not on_meta and tensors[0].device == _CPU:
                func, makes = torch.ops.aten.clone.default, True
            if not makes and not on_meta and device != _META:
                return self._run_real(func, args, kwargs)
            try:
                return self._handle(func, args, kwargs, on_host)
            except Exception as error:
                # The innermost reason counts: this operation may be inside another one.
                raise self.fail(f"{func}: {_reason(error)}") from error

    def _handle(self, func: Any, args: Any, kwargs: Any, on_host: bool) -> Any:
        tensors = tensors_in((args, kwargs))
        name = operation_name(func)
        if func.namespace != "aten" or name in _REFUSED_OPERATIONS:
            raise NotUnderstoodError("an operation that is not known")
        if any(is_traceable_wrapper_subclass(t) for t in tensors):
            raise NotUnderstoodError("a tensor that wraps others")
        if any(t.device == _META and not self.is_tracked(t) for t in tensors):
            raise NotUnderstoodError("a tensor that has no value")
        written, read = roles(func, args, kwargs)
        dynamic = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        results = func._schema.returns
        is_check = not results and not written
        reads_out = dynamic or is_check or not on_host or any("Tensor" not in str(r.type) for r in results)
        if reads_out or any(not self.is_tracked(t) for t in written):
            if any(self.is_tracked(t) for t in written):
                raise NotUnderstoodError("it writes what is deferred and what is not")
            return self._run_real(func, *self.on_values(args, kwargs))
        if name == "_to_copy" and kwargs.get("device") == _CPU:
            raise NotUnderstoodError("a move that may be a copy or not")
        if torch.Tag.inplace_view in func.tags:
            takes_over = func is torch.ops.aten.set_.source_Tensor and all(self.is_tracked(t) for t in tensors)
            if name not in _RESHAPES and not takes_over:
                raise NotUnderstoodError("a tensor gets another memory")
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, written, read)

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[Tensor], read: list[Tensor]) -> Any:
        name = operation_name(func)
        names = {a.name for a in func._schema.arguments}
        before = [TensorRef.of(t) for t in written]
        twins: set[int] = set()

        def twin(tensor: Tensor) -> Tensor:
            if self.is_tracked(tensor):
                return tensor
            TensorRef.of(tensor)  # a sparse tensor has no twin
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            twins.add(storage_key(copy))
            return copy

        on_meta = {"device": _META} if "device" in names and (not tensors_in(args) or kwargs.get("device")) else {}
        meta_args, meta_kwargs = replace_leaves((args, {**kwargs, **on_meta}), Tensor, twin)
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError:
            if written:
                raise
            result = replace_leaves(self._run_real(func, *self.on_values(args, kwargs)), Tensor, twin)
            twins.clear()
        outputs = tensors_in(result)
        refs = tuple(TensorRef.of(t) for t in outputs)
        fresh = {ref.key: t.untyped_storage() for ref, t in zip(refs, outputs, strict=True)}
        fresh = {key: storage for key, storage in fresh.items() if key not in self.tape.storages}
        if (
            fresh.keys() & twins
            or any(t.device != _META for t in outputs)
            or before != [TensorRef.of(t) for t in written]
        ):
            raise NotUnderstoodError("its result lies elsewhere than expected")
        if not fresh and not written:
            return result  # a view
        generator = self._draw(func, args, kwargs, outputs[0]) if is_random(func) else None
        self.tape.storages |= fresh
        overwritten = written[0] if name in _FILLS and torch._debug_has_internal_overlap(written[0]) == 0 else None
        held_args, held_kwargs = replace_leaves((args, kwargs), Tensor, self._hold)
        device = {"device": _CPU} if on_meta else {}
        dtype = {"dtype": outputs[0].dtype} if on_meta and "dtype" in names and not kwargs.get("dtype") else {}
        self.tape.add(
            func=func,
            args=held_args,
            kwargs={**held_kwargs, **device, **dtype},
            outputs=refs,
            reads=frozenset(storage_key(t) for t in read if self.is_tracked(t)),
            writes=dict.fromkeys(fresh, True) | {storage_key(t): t is overwritten and is_whole(t) for t in written},
            generator=generator,
        )
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        """Advance the generator as the operation does; return its state before."""
        name, own = operation_name(func), kwargs.get("generator")
        generator = torch.default_generator if own is None else own
        if generator.device != _CPU:
            raise NotUnderstoodError("a generator of another device")
        state: Tensor = generator.get_state()
        if name in _DRAWN:
            getattr(self._scratch_like(result), _DRAWN[name])(generator=own)
            return state
        if name in _FILLS:
            args = (self._scratch_like(result), *args[1:])
        args, kwargs = self.on_values(args, {**kwargs, "device": _CPU} if kwargs.get("device") else kwargs)
        with torch.no_grad():
            func(*args, **kwargs)
        return state

    def _scratch_like(self, tensor: Tensor) -> Tensor:
        # One memory for all: malloc does not return memory between smaller pieces that are still in use.
        place = replace(TensorRef.of(tensor), offset=0)
        if self._scratch.nbytes() < place.span_bytes:
            self._scratch = torch.UntypedStorage(0)
            self._scratch = torch.UntypedStorage(place.span_bytes)
        return place.on(self._scratch)

    def on_values(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with the values of deferred tensors."""
        tracked = {id(t): t for t in tensors_in((args, kwargs)) if self.is_tracked(t)}
        values = dict(zip(tracked, self.tape.replay([TensorRef.of(t) for t in tracked.values()]), strict=True))
        replaced: tuple[Any, Any] = replace_leaves((args, kwargs), Tensor, lambda t: values.get(id(t), t))
        return replaced

    def _hold(self, tensor: Tensor) -> Tensor | TensorRef:
        if self.is_tracked(tensor):
            return TensorRef.of(tensor)
        if not tensor.untyped_storage().resizable():
            return tensor.detach().clone()  # numpy or a file may change it unnoticed
        self._real[storage_key(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(t.layout == torch.strided and storage_key(t) in self._real for t in roles(func, args, kwargs)[0]):
            raise self.fail(f"{func}: it changes what a value was made from")
        return func(*args, **kwargs)


class CpuDisguise(TorchFunctionMode):
    """Mode in which deferred tensors appear to be on the CPU, and provide their values on demand."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "meta":
            raise self._recorder.fail("it uses the meta device itself")
        with torch._C.DisableTorchFunction():
            tracked = any(self._recorder.is_tracked(t) for t in tensors_in((args, kwargs)))
        if not tracked:
            return func(*args, **kwargs)
        try:
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
                with undisturbed():
                    return torch.empty(0, dtype=args[0].dtype).type()
            elif func is Tensor.__deepcopy__ and not isinstance(args[0], nn.Parameter):
                with torch._C.DisableTorchFunction():
                    mark = "shoal.parallel.model.deferred_init", storage_key(args[0])
                # torch copies a storage once for all its tensors, but not on the meta device.
                if args[1].setdefault(mark, args[0]) is not args[0]:
                    raise self._recorder.fail("copy.deepcopy: of two tensors that share memory")
            return func(*args, **kwargs)
        except Exception as error:
            # Even if the constructor catches the error: normally it might have taken another path.
            raise self._recorder.fail(_reason(error)) from error

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Move a tensor without a copy if, on the CPU, the move would make none."""
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


def _reason(error: Exception) -> str:
    return first_line(error, 300) or type(error).__name__
