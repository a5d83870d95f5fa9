"""Process setup before training: threads, determinism, and a deferred import of torch's compiler.

torch.optim.Optimizer imports torch._dynamo in its constructor and in `step`, which takes more than a second, as long as
torch itself. It only marks code that a compiler, which does not run, should skip. Inside `compiler_deferred` these
imports get a stand-in with the same effect. See docs/decisions/0006-start-up.md.
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

# glibc's mallopt: above the first size a free returns pages, above the second each allocation maps and unmaps them. A
# step frees and allocates the same tensors again: GPT took 16,000 page faults a step, 4 % of the time on one thread.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LOADING_SEED = 5_489
_TRIM_BYTES, _MMAP_BYTES = 1 << 30, 32 << 20  # 32 MiB is glibc's maximum
_LEAN_BYTES = 1 << 20


def prepare_process(exact: bool, num_threads: int | None) -> None:
    """Set threads, determinism and the allocator of this process, for the rest of its life.

    Exact mode uses one thread, since kernels split their sums by threads. Else the process uses `num_threads`, unless
    that is None or OMP_NUM_THREADS is set.
    """
    if exact:
        torch.set_num_threads(1)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # torch.use_deterministic_algorithms loads the compiler, whose option the environment sets as well.
        setter = getattr(torch._C, "_set_deterministic_algorithms", None)
        if setter is None or "torch._inductor.config" in sys.modules:
            torch.use_deterministic_algorithms(True)
        else:
            os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
            setter(True, warn_only=False)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    elif num_threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads)
    _set_allocator(_TRIM_BYTES, _MMAP_BYTES)


def seed_loading() -> None:
    """Seed torch's generators before a job is loaded, so that a module created at import is the same in each run.

    Python's and numpy's generators stay unseeded: a job may draw the name of a run from them.
    """
    torch.manual_seed(_LOADING_SEED)


def has_drawn_since_loading() -> bool:
    """Return True if code drew from torch's generator after `seed_loading` without seeding it."""
    generator, fresh = torch.default_generator, torch.Generator().manual_seed(_LOADING_SEED)
    return generator.initial_seed() == _LOADING_SEED and not torch.equal(generator.get_state(), fresh.get_state())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's kernels on one thread in this context or decorated function.

    This is for initial values: factorisations (`torch.nn.init.orthogonal_`) give other bits on two threads than on one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() == 1:  # otherwise the job's own code has chosen a number
            torch.set_num_threads(before)


def return_freed_memory() -> None:
    """Return freed memory to the system at once from now on, which costs page faults in each step."""
    _set_allocator(_LEAN_BYTES, _LEAN_BYTES)


def versions() -> dict[str, str]:
    """Return the versions of shoal, torch and Python in this process."""
    return {"shoal": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _set_allocator(trim_bytes: int, mmap_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Keeps the settings of an allocator that the user has chosen by these variables.
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(_M_TRIM_THRESHOLD, trim_bytes)
        mallopt(_M_MMAP_THRESHOLD, mmap_bytes)


def _stand_in() -> ModuleType:
    module = ModuleType(_NAME)

    def disable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return fn

    def load(name: str) -> Any:
        """Replace the stand-in by the real module, since any other attribute is a real use."""
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
    """Make `import torch._dynamo` load nothing in this context. No effect if the compiler is already loaded.

    Only for calls into torch.optim's own classes: code that really compiles needs the real module.
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


# Optimizers that compute each element from that element's gradient and state alone. torch has fused kernels for their
# steps on every device.
BY_ELEMENT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is one of torch.optim's own classes."""
    return type(optimizer).__module__.startswith("torch.optim.")


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's `step`. For torch.optim's own classes, skip the compiler and torch's profiler span.

    The span, a call into the profiler, took 20 us of a step of 150 us, and 100 us after a backward.
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
    """Return True if an optimizer's `step` has hooks before or after it."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
