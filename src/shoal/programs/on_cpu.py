"""CUDA on processes of the CPU: patched entry points of torch, which is all that this needs.

Every caller outside of torch finds one GPU for each rank. Device names in factories, `.to()`, `.cuda()`, process
groups, meshes, autocast and scalers name the CPU. Copies between host and device stay copies. Streams, events and
queries of memory do nothing. What is redirected is counted, since kernels, streams and memory are not checked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import os
import sys
import sysconfig
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _device
from torch.utils.weak import WeakIdKeyDictionary

# Packages that are kernels for GPUs.
KERNELS = {
    *("triton", "flash_attn", "flash_attn_interface", "flashinfer", "xformers", "apex", "transformer_engine", "cupy"),
    *("bitsandbytes", "deep_gemm", "deep_ep", "mamba_ssm", "causal_conv1d", "liger_kernel", "tilelang", "cutlass"),
}
# Bytes of memory that each device is said to have; nothing of them is ever in use.
_MEMORY = 1 << 36
_HAS_NONE = "and --cpu has none: leave it out by the script's arguments"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHOAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})

redirected: Counter[str] = Counter()  # calls from outside of torch, by name
_on_device: Any = WeakIdKeyDictionary()  # tensors that the script has put on a device
_kinds: dict[str, str] = {}
_chosen: list[int] = []  # the index that the script has set


def caller(depth: int = 2) -> str:
    """Return who calls: "torch" (also shoal), "library" for an installed package, or "script"."""
    file = sys._getframe(depth).f_code.co_filename
    kind = _kinds.get(file)
    if kind is None:
        kind = "torch" if file.startswith((_TORCH, _SHOAL)) else "script"
        if kind == "script" and (file.startswith(("<frozen", *_LIBRARIES)) or f"{os.sep}site-packages{os.sep}" in file):
            kind = "library"
        _kinds[file] = kind
    return kind


def names_gpu(device: Any) -> bool:
    """Return True for a device, a name or an index of a GPU."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, torch.device) and device.type == "cuda"


def put_on_device(tensors: Iterable[Any]) -> None:
    """Note that tensors are on a device, as the script believes."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            _on_device[tensor] = True


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return True if the script has put a tensor, or what it was computed from, on a device."""
    return tensor in _on_device or (tensor.grad_fn is not None and len(_on_device) > 0)


def own_index() -> int:
    """Return the index of this process's device."""
    return _chosen[-1] if _chosen else int(os.environ.get("LOCAL_RANK", "0"))


def install(devices: int) -> None:
    """Patch torch in this process, for a machine with as many GPUs as there are ranks."""
    importlib.import_module("torch._dynamo")  # it keeps tables of functions, which must be torch's own
    _device._device_constructors()  # as this does
    _patch_devices(devices)
    _patch_accelerator(devices)
    _patch_cuda()
    _patch_factories()
    _patch_moves()
    _patch_beliefs()
    _patch_precision()
    _patch_processes()
    _patch_others()
    sys.meta_path.append(KernelFinder())


# ------------------------------------------------------------------------------------------------------- patching


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by `make(function)`."""
    original = getattr(owner, name, None)
    if original is not None:
        new = make(original)
        with contextlib.suppress(TypeError, AttributeError):
            functools.update_wrapper(new, original)
        setattr(owner, name, new)


def answer(owner: Any, name: str, value: Any, *, to_torch: bool = False) -> None:
    """Let a function return `value` to callers outside of torch. Torch itself gets the truth, or `value` as well."""
    label = f"{owner.__name__}.{name}"

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if caller() != "torch":
                redirected[label] += 1
            elif not to_torch:
                return original(*args, **kwargs)
            return value(*args, **kwargs) if callable(value) else value

        return call

    replace(owner, name, make)


def without(owner: Any, name: str, label: str, change: Callable[..., dict[str, Any]]) -> None:
    """Change the keyword arguments of a function or method: `change(kwargs)` returns those that differ."""

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            changes = change(kwargs)
            if changes:
                if caller() != "torch":
                    redirected[label] += 1
                kwargs = kwargs | changes
            return original(*args, **kwargs)

        return call

    replace(owner, name, make)


def refuse(owner: Any, name: str, why: str) -> None:
    """Let a function raise an error that names it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{owner.__name__}.{name}: {why}, {_HAS_NONE}")

    setattr(owner, name, call)


class _Alias(type):
    """Kind of a class that stands for one of torch's own: instances of that one are instances of it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__dict__["stands_for"])

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, cls.__dict__["stands_for"])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__dict__["make"](*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__dict__["stands_for"]

    def __hash__(cls) -> int:
        return hash(cls.__dict__["stands_for"])

    def __or__(cls, other: Any) -> Any:
        return cls.__dict__["stands_for"] | other

    __ror__ = __or__


def alias(owner: Any, name: str, make: Callable[..., Any]) -> None:
    """Replace a class of torch that cannot be changed by one whose calls are `make(...)`."""
    original = getattr(owner, name)
    members = {"stands_for": original, "make": make, "__module__": original.__module__}
    setattr(owner, name, _Alias(name, (), members))


# --------------------------------------------------------------------------------------------------------- devices


def _patch_devices(devices: int) -> None:
    device, generator = torch.device, torch.Generator

    def make_device(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = ("cuda", *args)
        return device(*args, **kwargs)

    def make_generator(device: Any = "cpu") -> Any:
        if names_gpu(device):
            redirected["torch.Generator"] += 1
            device = "cpu"
        return generator(device)

    alias(torch, "device", make_device)
    alias(torch, "Generator", make_generator)
    context = _device.DeviceContext

    def init(self: Any, device: Any) -> None:
        self.device, self.prev_mode = torch.device("cpu" if names_gpu(device) else device), None

    context.__init__ = init  # type: ignore[method-assign]

    def set_device(index: Any) -> None:
        index = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        if index is None or index < 0:
            return
        if index >= devices:
            raise RuntimeError(f"invalid device ordinal {index}: --cpu has {devices} devices, one for each rank")
        _chosen[:] = [index]

    answer(torch.cuda, "set_device", set_device)
    for name in ("set_device_index", "set_device_idx"):
        answer(torch.accelerator, name, set_device)


def _patch_accelerator(devices: int) -> None:
    own = torch.accelerator
    torch._C._get_accelerator = lambda *check: torch.device("cpu")
    for owner in (torch.cuda, own):
        answer(owner, "is_available", True)
        answer(owner, "device_count", lambda: devices)
    answer(own, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    for name in ("current_device_index", "current_device_idx"):
        answer(own, name, own_index)
    for name in ("synchronize", "empty_cache", "empty_host_cache", "set_stream"):
        answer(own, name, None, to_torch=True)
    answer(own, "current_stream", HostStream, to_torch=True)
    answer(own, "device_index", lambda index: contextlib.nullcontext())
    answer(own, "get_memory_info", (_MEMORY, _MEMORY))
    answer(own, "memory_stats", lambda device=None: Counter())
    for name in vars(own)["__all__"]:
        if "memory" in name and name.startswith(("max_", "memory_", "reset_")) and name != "memory_stats":
            answer(own, name, None if name.startswith("reset_") else 0)


class HostStream:
    """Stream that does nothing: work on the CPU is done when its call returns."""

    stream_id = cuda_stream = device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        redirected["torch.cuda.Stream"] += 1

    @property
    def device(self) -> torch.device:
        """The device that the script believes in."""
        return torch.device("cuda", own_index())

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event of this moment."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self, *args: Any) -> None:
        """Do nothing."""

    wait_event = wait_stream = synchronize

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class HostEvent:
    """Event that only has its time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        redirected["torch.cuda.Event"] += 1
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to another one."""
        return (end._at - self._at) * 1e3

    def synchronize(self, stream: Any = None) -> None:
        """Do nothing."""

    wait = synchronize


class StreamContext:
    """Context of a stream or a device, which does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        redirected["torch.cuda.stream"] += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class CUDAGraph:
    """CUDA graph, which the CPU has not. It stays a class, since annotations use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"torch.cuda.CUDAGraph needs a GPU, {_HAS_NONE}")


def _patch_cuda() -> None:
    cuda = torch.cuda
    answer(cuda, "current_device", own_index)
    answer(cuda, "is_initialized", True)
    answer(cuda, "is_bf16_supported", True)
    answer(cuda, "can_device_access_peer", True)
    answer(cuda, "get_device_name", "CPU process of shoal verify --cpu")
    answer(cuda, "get_device_capability", (8, 0))
    properties = types.SimpleNamespace(name="CPU process of shoal verify --cpu", major=8, minor=0)
    properties.total_memory, properties.multi_processor_count = _MEMORY, 108
    answer(cuda, "get_device_properties", lambda device=None: properties)
    answer(cuda, "mem_get_info", (_MEMORY, _MEMORY))
    for name in ("memory_stats", "memory_stats_as_nested_dict", "host_memory_stats"):
        answer(cuda, name, lambda device=None: Counter())
    answer(cuda, "memory_summary", "")
    answer(cuda, "memory_snapshot", lambda *args, **kwargs: [])
    for name in ("memory_allocated", "memory_reserved", "memory_cached", "memory_usage", "utilization", "temperature"):
        answer(cuda, name, 0)
    for name in ("max_memory_allocated", "max_memory_reserved", "max_memory_cached", "device_memory_used"):
        answer(cuda, name, 0)
    for name in ("init", "synchronize", "empty_cache", "ipc_collect", "set_stream", "set_per_process_memory_fraction"):
        answer(cuda, name, None, to_torch=True)
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"):
        answer(cuda, name, None, to_torch=True)  # the generator of the CPU belongs to the loaders, too
    for name in vars(cuda)["__all__"]:
        if name.startswith("reset_"):
            answer(cuda, name, None)
    answer(cuda, "initial_seed", torch.initial_seed)
    answer(cuda, "get_rng_state", lambda device=None: torch.get_rng_state(), to_torch=True)
    answer(cuda, "get_rng_state_all", lambda: [torch.get_rng_state()])
    for name in ("current_stream", "default_stream"):
        answer(cuda, name, HostStream, to_torch=True)
    answer(cuda, "cudart", lambda: types.SimpleNamespace(cudaProfilerStart=int, cudaProfilerStop=int))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        answer(cuda.nvtx, name, None, to_torch=True)
    replace(cuda.nvtx, "range", lambda original: lambda *args, **kwargs: contextlib.nullcontext())
    for name in ("start", "stop"):
        answer(cuda.profiler, name, None, to_torch=True)
    answer(cuda.nccl, "version", (2, 27, 0))
    setattr(cuda, "Stream", HostStream)  # noqa: B010  (classes in place of classes)
    setattr(cuda, "ExternalStream", HostStream)  # noqa: B010
    setattr(cuda, "Event", HostEvent)  # noqa: B010
    setattr(torch, "Stream", HostStream)  # noqa: B010
    setattr(torch, "Event", HostEvent)  # noqa: B010
    for name in ("StreamContext", "stream", "device", "device_of"):
        setattr(cuda, name, StreamContext)
    for owner in (cuda, cuda.graphs):
        setattr(owner, "CUDAGraph", CUDAGraph)  # noqa: B010
        refuse(owner, "graph", "CUDA graphs need a GPU")
        refuse(owner, "make_graphed_callables", "CUDA graphs need a GPU")
    for name in vars(cuda)["__all__"]:
        if name.endswith("Tensor"):
            setattr(cuda, name, getattr(torch, name))


# --------------------------------------------------------------------------------------------------------- tensors


def _patch_factories() -> None:
    own = _device._device_constructors()
    functions = {n: f for n, f in vars(torch).items() if isinstance(f, (types.FunctionType, types.BuiltinFunctionType))}
    names = [name for name, function in functions.items() if function in own or name.endswith("_like")]
    owners: list[tuple[Any, str]] = [(torch, name) for name in (*names, "normal")]
    owners += [(torch.Tensor, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")]
    owners += [(torch.Tensor, "new_empty_strided")]
    for owner, name in owners:

        def make(original: Any, label: str = f"{owner.__name__}.{name}") -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                on_gpu = names_gpu(kwargs.get("device"))
                if on_gpu:
                    kwargs["device"] = "cpu"
                    if caller() != "torch":
                        redirected[label] += 1
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = False
                result = original(*args, **kwargs)
                if on_gpu:
                    put_on_device([result])
                return result

            return call

        if callable(getattr(owner, name)):
            replace(owner, name, make)


def _patch_moves() -> None:
    tensor = torch.Tensor
    to, cpu, kind = tensor.to, tensor.cpu, tensor.type

    def moved(self: Any, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move a tensor to a device, or to the host, by a copy."""
        on_gpu = names_gpu(device)
        if on_gpu and self in _on_device:
            copy = False
        elif self.is_leaf and self.requires_grad and torch.is_grad_enabled():
            copy = self in _on_device  # a parameter that only the script's wrapper believes elsewhere
        else:
            copy = True
        if copy and len(args) < 3:
            kwargs = {**kwargs, "copy": True}
        result = to(self, "cpu", *args, **kwargs)
        if on_gpu:
            put_on_device([result])
        return result

    @functools.wraps(to)
    def new_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = kwargs["device"] if "device" in kwargs else args[0] if args else kwargs.get("other")
        if isinstance(place, torch.Tensor):
            if place in _on_device and self not in _on_device:
                rest = {**kwargs, "dtype": place.dtype}
                rest.pop("other", None)
                return moved(self, "cuda", args[1:], rest)
            return to(self, *args, **kwargs)
        host = isinstance(place, (str, torch.device)) and torch.device(place).type == "cpu"
        if not (host or names_gpu(place)) or (host and caller() == "torch" and _is_of_shoal()):
            return to(self, *args, **kwargs)
        if caller() != "torch" and not host:
            redirected["Tensor.to"] += 1
        rest = {name: value for name, value in kwargs.items() if name != "device"}
        return moved(self, place, args if "device" in kwargs else args[1:], rest)

    @functools.wraps(tensor.cuda)
    def new_cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if caller() != "torch":
            redirected["Tensor.cuda"] += 1
        kwargs.pop("memory_format", None)
        return moved(self, "cuda", (), {})

    @functools.wraps(cpu)
    def new_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cpu(self, *args, **kwargs) if _is_of_shoal() else moved(self, "cpu", (), kwargs)

    @functools.wraps(kind)
    def new_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            return moved(kind(self, "torch." + dtype.removeprefix("torch.cuda.")), "cuda", (), {})
        return kind(self, *(() if dtype is None else (dtype,)), *args, **kwargs)

    tensor.to, tensor.cuda, tensor.cpu, tensor.type = new_to, new_cuda, new_cpu, new_type  # type: ignore[method-assign]
    answer(tensor, "pin_memory", lambda self, device=None: self.clone(), to_torch=True)
    answer(tensor, "record_stream", None, to_torch=True)


def _patch_beliefs() -> None:
    """Let tensors and modules be on a device for the script, and for nobody else: libraries compare them."""
    where = torch.Tensor.device

    def device(self: Any) -> Any:
        if caller() == "script" and is_on_device(self):
            return torch.device("cuda", own_index())
        return where.__get__(self)

    setattr(torch.Tensor, "device", property(device))  # noqa: B010
    setattr(torch.Tensor, "is_cuda", property(lambda self: caller() == "script" and is_on_device(self)))  # noqa: B010

    def whole(original: Any, all_on_gpu: bool) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            place = kwargs.get("device", args[0] if args else None)
            on_gpu = all_on_gpu or names_gpu(place) or (isinstance(place, torch.Tensor) and place in _on_device)
            if on_gpu and caller() != "torch":
                redirected[f"nn.Module.{original.__name__}"] += 1
            if on_gpu and isinstance(place, int):  # torch refuses an index where there is no accelerator
                args, kwargs = ("cuda", *args[1:]), {n: v for n, v in kwargs.items() if n != "device"}
            result = original(self, *args, **kwargs)
            if on_gpu:
                put_on_device([*self.parameters(), *self.buffers()])
            return result

        return call

    replace(nn.Module, "to", functools.partial(whole, all_on_gpu=False))
    replace(nn.Module, "cuda", functools.partial(whole, all_on_gpu=True))


def _is_of_shoal() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(_SHOAL)


# ------------------------------------------------------------------------------------------- precision, processes


def _patch_precision() -> None:
    def init_autocast(original: Any) -> Any:
        def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if names_gpu(device_type):
                redirected["torch.autocast"] += 1
                device_type, dtype = "cpu", dtype or torch.float16
            original(self, device_type, dtype, *args, **kwargs)

        return init

    def init_scaler(original: Any) -> Any:
        def init(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
            redirected["torch.amp.GradScaler"] += names_gpu(device)
            original(self, "cpu" if names_gpu(device) else device, *args, **kwargs)

        return init

    replace(torch.autocast, "__init__", init_autocast)
    replace(torch.amp.GradScaler, "__init__", init_scaler)

    def of_cpu(original: Any) -> Any:
        def call(kind: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
            return original("cpu" if names_gpu(kind) else kind, *args, **kwargs)

        return call

    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        replace(torch, name, of_cpu)
    torch.get_autocast_gpu_dtype = functools.partial(torch.get_autocast_dtype, "cpu")
    for name in ("custom_fwd", "custom_bwd"):
        original = getattr(torch.amp, name)

        def custom(function: Any = None, *, device_type: str = "cuda", of: Any = original, **kwargs: Any) -> Any:
            return of(function, device_type="cpu" if names_gpu(device_type) else device_type, **kwargs)

        for owner in (torch.amp, torch.cuda.amp):
            setattr(owner, name, custom)

    init = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def init_optimizer(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("capturable"):
            redirected["capturable=True"] += 1
            defaults = {**defaults, "capturable": False}
        init(self, params, defaults)

    torch.optim.Optimizer.__init__ = init_optimizer  # type: ignore[method-assign]


def _patch_processes() -> None:
    from torch import distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh

    def on_gloo(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = 2 if original.__name__ == "new_group" else 0
            backend = kwargs.get("backend", args[place] if len(args) > place else None)
            if backend is not None and "nccl" in str(backend):
                if caller() != "torch":
                    redirected[f"{original.__name__}: nccl"] += 1
                if "backend" in kwargs:
                    kwargs["backend"] = "gloo"
                else:
                    args = (*args[:place], "gloo", *args[place + 1 :])
            for name in ("device_id", "pg_options"):
                kwargs.pop(name, None)
            return original(*args, **kwargs)

        return call

    for name in ("init_process_group", "new_group"):
        replace(c10d, name, on_gloo)
        setattr(dist, name, getattr(c10d, name))

    def barrier(original: Any) -> Any:
        return lambda group=None, async_op=False, device_ids=None: original(group=group, async_op=async_op)

    replace(c10d, "barrier", barrier)
    dist.barrier = c10d.barrier
    answer(c10d, "is_nccl_available", True)
    dist.is_nccl_available = c10d.is_nccl_available

    def init_mesh(original: Any) -> Any:
        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            redirected["DeviceMesh"] += names_gpu(device_type)
            original(self, "cpu" if names_gpu(device_type) else device_type, *args, **kwargs)

        return init

    replace(DeviceMesh, "__init__", init_mesh)
    ddp = torch.nn.parallel.DistributedDataParallel

    def init_ddp(original: Any) -> Any:
        def init(
            self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
        ) -> None:
            redirected["DistributedDataParallel: device_ids"] += device_ids is not None
            original(self, module, None, None, *args, **kw)

        return init

    replace(ddp, "__init__", init_ddp)
    from torch.distributed import fsdp

    without(
        fsdp.FullyShardedDataParallel,
        "__init__",
        "FullyShardedDataParallel: device_id",
        lambda kwargs: {"device_id": None} if kwargs.get("device_id") is not None else {},
    )


def _patch_others() -> None:
    def compiled(model: Any = None, **kwargs: Any) -> Any:
        redirected["torch.compile"] += 1
        return model if model is not None else (lambda function: function)

    torch.compile = compiled
    setattr(nn.Module, "compile", lambda self, *args, **kwargs: None)  # noqa: B010

    def load(original: Any) -> Any:
        def call(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if map_location is None or names_gpu(map_location) or isinstance(map_location, dict):
                map_location = "cpu"
            return original(f, map_location, *args, **kwargs)

        return call

    replace(torch, "load", load)
    without(
        torch.utils.data.DataLoader,
        "__init__",
        "DataLoader: pin_memory",
        lambda kwargs: {"pin_memory": False, "pin_memory_device": ""} if kwargs.get("pin_memory") else {},
    )
    from torch.nn import attention as of_torch
    from torch.nn import functional

    replace(of_torch, "sdpa_kernel", lambda original: lambda *args, **kwargs: contextlib.nullcontext())
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def on_shards(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute attention of DTensors on each rank's shards: the CPU's kernel has no rule for them."""
        sharded = [getattr(one, "placements", None) for one in (query, key, value)]
        alone = sharded[0] and all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in sharded[0])
        if not alone or any(one != sharded[0] for one in sharded):
            return attention(query, key, value, *args, **kwargs)
        own = attention(query.to_local(), key.to_local(), value.to_local(), *args, **kwargs)
        return type(query).from_local(own, query.device_mesh, query.placements, run_check=False)

    functional.scaled_dot_product_attention = on_shards


class KernelFinder(importlib.abc.MetaPathFinder):
    """Last finder of imports: it names packages of GPU kernels that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise: ModuleNotFoundError if the script itself imports such a package."""
        if name.partition(".")[0] not in KERNELS:
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or frame.f_code.co_filename.startswith((_TORCH, *_LIBRARIES)):
            return  # a library that looks whether it is there
        redirected[f"import {name}"] += 1
        raise ModuleNotFoundError(
            f"No module named {name!r}: its kernels need a GPU, and --cpu has none: choose another "
            "implementation by the script's arguments",
            name=name,
        )
