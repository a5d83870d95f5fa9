"""Modes of deferred initialization: a log of the constructor's operations, and answers as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shoal.errors import text_of
from shoal.numerics.isolation import undisturbed
from shoal.numerics.operators import (
    is_random,
    is_whole,
    operation_name,
    replace_leaves,
    roles,
    storage_key,
    tensors_in,
)
from shoal.parallel.model.init_tape import NotUnderstoodError, Tape, TensorRef

_META = torch.device("meta")
_CPU = torch.device("cpu")

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
        self._held: dict[int, torch.UntypedStorage] = {}
        self._scratch = torch.UntypedStorage(0)

    def is_tracked(self, value: object) -> bool:
        """Check whether the value is a tensor of the log."""
        return isinstance(value, Tensor) and value.device == _META and storage_key(value) in self.tape.storages

    def fail(self, reason: str) -> NotUnderstoodError:
        """Invalidate the recording, even if the constructor catches the returned exception."""
        self.failure = self.failure or reason
        return NotUnderstoodError(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # The constructor sees everything on the CPU; this code must not.
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
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
            raise self.fail(f"{func}: {first_line(error)}") from error

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
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            twins.add(storage_key(made))
            return made

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
        self._held[storage_key(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(t.layout == torch.strided and storage_key(t) in self._held for t in roles(func, args, kwargs)[0]):
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
            return self._answer(func, args, kwargs)
        except Exception as error:
            # Even if the constructor catches the error: normally it might have taken another path.
            raise self._recorder.fail(first_line(error)) from error

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
            with undisturbed():
                return torch.empty(0, dtype=args[0].dtype).type()
        elif func is Tensor.__deepcopy__ and not isinstance(args[0], nn.Parameter):
            with torch._C.DisableTorchFunction():
                mark = "shoal.parallel.model.deferred_init", storage_key(args[0])
            # torch copies a storage once for all its tensors, but not on the meta device.
            if args[1].setdefault(mark, args[0]) is not args[0]:
                raise self._recorder.fail("copy.deepcopy: of two tensors that share memory")
        return func(*args, **kwargs)

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


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's class."""
    return (text_of(error) or type(error).__name__).splitlines()[0]
