"""Process setup before training: threads, determinism, and a deferred import of torch's compiler.

torch.optim.Optimizer imports torch._dynamo (more than a second, as long as torch itself) in its constructor and in
`step`, only to tell a compiler that is not running where not to look. Inside `compiler_deferred` these imports find a
stand-in that does just that. See docs/decisions/0006-start-up.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.runs.version import __version__

_NAME = "torch._dynamo"

# glibc's mallopt: above the first size a free gives pages back, above the second it maps and unmaps them every time. A
# step frees and asks for the same tensors again: GPT's took 16,000 page faults a step, 4 % of its time on one thread.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LOADING_SEED = 5_489
_TRIM_BYTES, _MMAP_BYTES = 1 << 30, 32 << 20  # 32 MiB is the most that glibc takes
_LEAN_BYTES = 1 << 20


def prepare_process(exact: bool, num_threads: int | None) -> None:
    """Threads, determinism and allocator of this process, for the rest of its life.

    Exact: one thread, since kernels divide their sums by threads. Else `num_threads`, where that is a number and
    OMP_NUM_THREADS is not set.
    """
    if exact:
        torch.set_num_threads(1)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _use_deterministic_algorithms()
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    elif num_threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads)
    _set_allocator(_TRIM_BYTES, _MMAP_BYTES)


def seed_loading() -> None:
    """Seed torch's generators, before a job is loaded: a module that it makes at import is then the same in each run.

    Python's and numpy's generators are left alone, from which a job may draw the name of a run.
    """
    torch.manual_seed(_LOADING_SEED)


def has_drawn_since_loading() -> bool:
    """Whether torch's generator was drawn from after `seed_loading`, and not seeded by the job itself."""
    generator, fresh = torch.default_generator, torch.Generator().manual_seed(_LOADING_SEED)
    return generator.initial_seed() == _LOADING_SEED and not torch.equal(generator.get_state(), fresh.get_state())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A context, or a function decorated by it, in which torch's kernels run on one thread.

    For initial values: factorisations (`torch.nn.init.orthogonal_`) give other bits on two threads than on one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() == 1:  # else the job's own code has chosen
            torch.set_num_threads(before)


def return_freed_memory() -> None:
    """From here on what is freed goes back to the system at once, which costs a step page faults."""
    _set_allocator(_LEAN_BYTES, _LEAN_BYTES)


def _use_deterministic_algorithms() -> None:
    """torch.use_deterministic_algorithms, which loads the compiler to set an option of it: here by its environment."""
    setter = getattr(torch._C, "_set_deterministic_algorithms", None)
    if setter is None or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        setter(True, warn_only=False)


def versions() -> dict[str, str]:
    """Versions of shoal, torch and Python in this process."""
    return {"shoal": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _set_allocator(trim_bytes: int, mmap_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # An allocator that was chosen from outside (these variables, or another library) knows better.
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(_M_TRIM_THRESHOLD, trim_bytes)
        mallopt(_M_MMAP_THRESHOLD, mmap_bytes)


def _stand_in() -> ModuleType:
    module = ModuleType(_NAME)

    def disable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return fn

    def load(name: str) -> Any:
        """Anything else is a real use: the real module takes the stand-in's place."""
        sys.modules.pop(_NAME, None)
        torch.__dict__.pop("_dynamo", None)
        return getattr(importlib.import_module(_NAME), name)

    module.__getattr__ = load  # type: ignore[method-assign]
    module.disable = disable  # type: ignore[attr-defined]
    module.graph_break = lambda *args: None  # type: ignore[attr-defined]
    return module


_STAND_IN = _stand_in()


@contextlib.contextmanager
def compiler_deferred() -> Iterator[None]:
    """A context in which `import torch._dynamo` loads nothing; without effect where the compiler is loaded already.

    For calls into torch.optim's own classes only: anything that really compiles needs the real module.
    """
    if _NAME in sys.modules:
        yield
        return
    sys.modules[_NAME] = torch._dynamo = _STAND_IN
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is _STAND_IN:
            del sys.modules[_NAME]
        if torch.__dict__.get("_dynamo") is _STAND_IN:
            del torch._dynamo


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch.optim's own classes."""
    return type(optimizer).__module__.startswith("torch.optim.")


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Its `step`, without the compiler and torch's span around it where it is one of torch.optim's own.

    The span, a call into the profiler, took 20 us of a step of 150, and 100 after a backward.
    """
    if not is_torchs(optimizer):
        optimizer.step()
        return
    step = type(optimizer).step
    plain = getattr(step, "hooked", False) and "step" not in vars(optimizer) and not is_hooked(optimizer)
    with compiler_deferred():
        if plain and not torch._C._autograd._profiler_enabled():
            step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        else:
            optimizer.step()


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's `step` has hooks before or after."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
