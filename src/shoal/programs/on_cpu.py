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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _device
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING or "_shoal_hooks" not in sys.modules:
    from shoal.programs.hooks import around as replace
else:  # within a script, whose environment may be without shoal
    replace = sys.modules["_shoal_hooks"].around

# Packages that are kernels for GPUs.
KERNELS = {
    *("triton", "flash_attn", "flash_attn_interface", "flashinfer", "xformers", "apex", "transformer_engine", "cupy"),
    *("bitsandbytes", "deep_gemm", "deep_ep", "mamba_ssm", "causal_conv1d", "liger_kernel", "tilelang", "cutlass"),
}
# Bytes of memory that each device is said to have; nothing of them is ever in use.
_MEMORY, _NAME = 1 << 36, "CPU process of shoal verify --cpu"
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
    _patch_cuda()
    _patch_factories()
    _patch_moves()
    _patch_beliefs()
    _patch_precision()
    _patch_processes()
    _patch_others()
    sys.meta_path.append(KernelFinder())


def answer(owner: Any, names: str, value: Any, *, to_torch: bool = False) -> None:
    """Let functions return `value` to callers outside of torch. Torch itself gets the truth, or `value` as well."""
    for name in names.split():

        def call(run: Any, *args: Any, label: str = f"{owner.__name__}.{name}", **kwargs: Any) -> Any:
            outside = caller(3) != "torch"
            redirected[label] += outside
            if not (outside or to_torch):
                return run(*args, **kwargs)
            return value(*args, **kwargs) if callable(value) else value

        replace(owner, name, call)


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

    own = torch.accelerator
    answer(torch.cuda, "set_device", set_device)
    answer(own, "set_device_index set_device_idx", set_device)
    torch._C._get_accelerator = lambda *check: torch.device("cpu")
    for owner in (torch.cuda, own):
        answer(owner, "is_available", True)
        answer(owner, "device_count", lambda: devices)
    answer(own, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    answer(own, "current_device_index current_device_idx", own_index)
    answer(own, "synchronize empty_cache empty_host_cache set_stream", None, to_torch=True)
    answer(own, "current_stream", HostStream, to_torch=True)
    answer(own, "device_index", lambda index: contextlib.nullcontext())
    answer(own, "get_memory_info", (_MEMORY, _MEMORY))
    answer(own, "memory_stats", lambda device=None: Counter())
    for name in vars(own)["__all__"]:
        if "memory" in name and name.startswith(("max_", "memory_", "reset_")) and name != "memory_stats":
            answer(own, name, None if name.startswith("reset_") else 0)


class HostWork:
    """Stream, event or context of them that does nothing: work on the CPU is done when its call returns."""

    label = "torch.cuda.stream"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        redirected[self.label] += 1

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def synchronize(self, *args: Any) -> None:
        """Do nothing."""

    wait = wait_event = wait_stream = synchronize

    def __enter__(self) -> HostWork:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class HostStream(HostWork):
    """Stream that does nothing."""

    label = "torch.cuda.Stream"
    stream_id = cuda_stream = device_index = 0

    @property
    def device(self) -> torch.device:
        """The device that the script believes in."""
        return torch.device("cuda", own_index())

    def record_event(self, event: Any = None) -> Any:
        """Return an event of this moment."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event


class HostEvent(HostWork):
    """Event that only has its time."""

    label = "torch.cuda.Event"
    _at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to another one."""
        return (end._at - self._at) * 1e3


class CUDAGraph:
    """CUDA graph, which the CPU has not. It stays a class, since annotations use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"torch.cuda.CUDAGraph needs a GPU, {_HAS_NONE}")


def _patch_cuda() -> None:
    cuda = torch.cuda
    answer(cuda, "current_device", own_index)
    answer(cuda, "is_initialized is_bf16_supported can_device_access_peer", True)
    answer(cuda, "get_device_name", _NAME)
    answer(cuda, "get_device_capability", (8, 0))
    properties = types.SimpleNamespace(name=_NAME, major=8, minor=0, total_memory=_MEMORY, multi_processor_count=108)
    answer(cuda, "get_device_properties", lambda device=None: properties)
    answer(cuda, "mem_get_info", (_MEMORY, _MEMORY))
    answer(cuda, "memory_stats memory_stats_as_nested_dict host_memory_stats", lambda device=None: Counter())
    answer(cuda, "memory_summary", "")
    answer(cuda, "memory_snapshot", lambda *args, **kwargs: [])
    answer(cuda, "memory_allocated memory_reserved memory_cached memory_usage utilization temperature", 0)
    answer(cuda, "max_memory_allocated max_memory_reserved max_memory_cached device_memory_used", 0)
    answer(cuda, "init synchronize empty_cache ipc_collect set_stream", None, to_torch=True)
    answer(cuda, "set_per_process_memory_fraction", None, to_torch=True)
    seeds = "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all"
    answer(cuda, seeds, None, to_torch=True)  # the generator of the CPU belongs to the loaders, too
    answer(cuda, " ".join(name for name in vars(cuda)["__all__"] if name.startswith("reset_")), None)
    answer(cuda, "initial_seed", torch.initial_seed)
    answer(cuda, "get_rng_state", lambda device=None: torch.get_rng_state(), to_torch=True)
    answer(cuda, "get_rng_state_all", lambda: [torch.get_rng_state()])
    answer(cuda, "current_stream default_stream", HostStream, to_torch=True)
    answer(cuda, "cudart", lambda: types.SimpleNamespace(cudaProfilerStart=int, cudaProfilerStop=int))
    answer(cuda.nvtx, "range_push range_pop mark range_start range_end", None, to_torch=True)
    replace(cuda.nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext())
    answer(cuda.profiler, "start stop", None, to_torch=True)
    answer(cuda.nccl, "version", (2, 27, 0))
    kinds: dict[str, Any] = {"Stream": HostStream, "Event": HostEvent}
    for owner in (torch, cuda):
        for name, kind in kinds.items():
            setattr(owner, name, kind)
    contexts = dict.fromkeys(("StreamContext", "stream", "device", "device_of"), HostWork)
    tensors = {name: getattr(torch, name) for name in vars(cuda)["__all__"] if name.endswith("Tensor")}
    for name, kind in {"ExternalStream": HostStream, **contexts, **tensors}.items():
        setattr(cuda, name, kind)
    for owner in (cuda, cuda.graphs):
        setattr(owner, "CUDAGraph", CUDAGraph)  # noqa: B010
        refuse(owner, "graph", "CUDA graphs need a GPU")
        refuse(owner, "make_graphed_callables", "CUDA graphs need a GPU")


def _patch_factories() -> None:
    own = _device._device_constructors()
    functions = {n: f for n, f in vars(torch).items() if isinstance(f, (types.FunctionType, types.BuiltinFunctionType))}
    names = [name for name, function in functions.items() if function in own or name.endswith("_like")]

    def create(label: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        on_gpu = names_gpu(kwargs.get("device"))
        if on_gpu:
            kwargs["device"] = "cpu"
            redirected[label] += caller(3) != "torch"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = run(*args, **kwargs)
        if on_gpu:
            put_on_device([result])
        return result

    new = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
    owners: list[tuple[Any, str]] = [(torch, name) for name in (*names, "normal")]
    for owner, name in [*owners, *((torch.Tensor, name) for name in new)]:
        replace(owner, name, functools.partial(create, f"{owner.__name__}.{name}"))


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
        redirected["Tensor.cuda"] += caller() != "torch"
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

    def whole(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        place = kwargs.get("device", args[0] if args else None)
        on_gpu = run.__name__ == "cuda" or names_gpu(place) or (isinstance(place, torch.Tensor) and place in _on_device)
        if on_gpu and caller(3) != "torch":
            redirected[f"nn.Module.{run.__name__}"] += 1
        if on_gpu and isinstance(place, int):  # torch refuses an index where there is no accelerator
            args, kwargs = ("cuda", *args[1:]), {n: v for n, v in kwargs.items() if n != "device"}
        result = run(self, *args, **kwargs)
        if on_gpu:
            put_on_device([*self.parameters(), *self.buffers()])
        return result

    replace(nn.Module, "to", whole)
    replace(nn.Module, "cuda", whole)


def _is_of_shoal() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(_SHOAL)


def _patch_precision() -> None:
    def init_autocast(init: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if names_gpu(device_type):
            redirected["torch.autocast"] += 1
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    def init_scaler(init: Any, self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        redirected["torch.amp.GradScaler"] += names_gpu(device)
        init(self, "cpu" if names_gpu(device) else device, *args, **kwargs)

    def of_cpu(run: Any, kind: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
        return run("cpu" if names_gpu(kind) else kind, *args, **kwargs)

    def custom(run: Any, function: Any = None, *, device_type: str = "cuda", **kwargs: Any) -> Any:
        return run(function, device_type="cpu" if names_gpu(device_type) else device_type, **kwargs)

    def init_optimizer(init: Any, self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("capturable"):
            redirected["capturable=True"] += 1
            defaults = {**defaults, "capturable": False}
        init(self, params, defaults)

    replace(torch.autocast, "__init__", init_autocast)
    replace(torch.amp.GradScaler, "__init__", init_scaler)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        replace(torch, name, of_cpu)
    torch.get_autocast_gpu_dtype = functools.partial(torch.get_autocast_dtype, "cpu")
    for name in ("custom_fwd", "custom_bwd"):
        replace(torch.amp, name, custom)
        setattr(torch.cuda.amp, name, getattr(torch.amp, name))
    replace(torch.optim.Optimizer, "__init__", init_optimizer)


def _patch_processes() -> None:
    from torch import distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.nn.functional import all_reduce

    def on_gloo(run: Any, *args: Any, **kwargs: Any) -> Any:
        place = 2 if run.__name__ == "new_group" else 0
        if "nccl" in str(kwargs.get("backend", args[place] if len(args) > place else None)):
            redirected[f"{run.__name__}: nccl"] += caller(3) != "torch"
            if "backend" in kwargs:
                kwargs["backend"] = "gloo"
            else:
                args = (*args[:place], "gloo", *args[place + 1 :])
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return run(*args, **kwargs)

    def barrier(run: Any, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return run(group=group, async_op=async_op)

    def init_mesh(init: Any, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        redirected["DeviceMesh"] += names_gpu(device_type)
        init(self, "cpu" if names_gpu(device_type) else device_type, *args, **kwargs)

    def init_ddp(
        init: Any, self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        redirected["DistributedDataParallel: device_ids"] += device_ids is not None
        init(self, module, None, None, *args, **kw)

    def init_fsdp(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("device_id", None) is not None and caller(3) != "torch":
            redirected["FullyShardedDataParallel: device_id"] += 1
        init(self, *args, **kwargs)

    def normalized(run: Any, self: Any, x: Any) -> Any:
        """Normalize by the statistics of all ranks, as torch does on GPUs alone."""
        group = self.process_group or dist.group.WORLD
        if not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return nn.modules.batchnorm._BatchNorm.forward(self, x)
        dims, shape, own = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)], x.double()
        sums = torch.stack([torch.ones_like(own).sum(dims), own.sum(dims), own.square().sum(dims)])
        count, mean, square = all_reduce(sums, group=group)
        mean, square = mean / count, square / count
        variance = square - mean.square()
        if self.track_running_stats:
            self.num_batches_tracked += 1
            rate = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean), rate)
                self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var), rate)
        own = (own - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
        own = own * self.weight.view(shape) + self.bias.view(shape) if self.affine else own
        return own.to(x.dtype)

    replace(nn.SyncBatchNorm, "forward", normalized)
    replace(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None)
    replace(c10d, "init_process_group", on_gloo)
    replace(c10d, "new_group", on_gloo)
    replace(c10d, "barrier", barrier)
    answer(c10d, "is_nccl_available", True)
    for name in ("init_process_group", "new_group", "barrier", "is_nccl_available"):
        setattr(dist, name, getattr(c10d, name))
    replace(DeviceMesh, "__init__", init_mesh)
    replace(torch.nn.parallel.DistributedDataParallel, "__init__", init_ddp)
    replace(fsdp.FullyShardedDataParallel, "__init__", init_fsdp)


def _patch_others() -> None:
    def compiled(model: Any = None, **kwargs: Any) -> Any:
        redirected["torch.compile"] += 1
        return model if model is not None else (lambda function: function)

    def load(run: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or names_gpu(map_location) or isinstance(map_location, dict):
            map_location = "cpu"
        return run(f, map_location, *args, **kwargs)

    def init_loader(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("pin_memory"):
            redirected["DataLoader: pin_memory"] += 1
            kwargs |= {"pin_memory": False, "pin_memory_device": ""}
        init(self, *args, **kwargs)

    torch.compile = compiled
    setattr(nn.Module, "compile", lambda self, *args, **kwargs: None)  # noqa: B010
    replace(torch, "load", load)
    replace(torch.utils.data.DataLoader, "__init__", init_loader)
    from torch.nn import attention as of_torch
    from torch.nn import functional

    def on_shards(attention: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute attention of DTensors on each rank's shards: the CPU's kernel has no rule for them."""
        sharded = [getattr(one, "placements", None) for one in (query, key, value)]
        alone = sharded[0] and all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in sharded[0])
        if not alone or any(one != sharded[0] for one in sharded):
            return attention(query, key, value, *args, **kwargs)
        own = attention(query.to_local(), key.to_local(), value.to_local(), *args, **kwargs)
        return type(query).from_local(own, query.device_mesh, query.placements, run_check=False)

    replace(of_torch, "sdpa_kernel", lambda *args, **kwargs: contextlib.nullcontext())
    replace(functional, "scaled_dot_product_attention", on_shards)


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
