"""A rank's process: its setup before training (threads, determinism, allocator), and its exit to the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.errors import ExitCode, InUseError, LaunchError, PeerError, ShoalError
from shoal.launch.environment import REPORT_FILE, Environment
from shoal.launch.supervise.child import die_with_launcher, name_process
from shoal.runs.address import RunAddress, is_address
from shoal.runs.directory import write_file
from shoal.runs.version import __version__

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


def as_rank(environment: Environment, work: Callable[[], ExitCode | None], *, may_end_at_once: bool = True) -> ExitCode:
    """Run `work` as a rank and return its exit code. Report the end to the launcher; without one, print an error.

    `may_end_at_once`: whether a rank that lost a peer ends here, without the rest of its callers and atexit.
    """
    die_with_launcher()
    if environment.world_size > 1:
        name_process(f"shoal-rank-{environment.rank}")
    error: ShoalError | None = None
    try:
        code = work() or ExitCode.DONE
    except (Exception, SystemExit) as caught:
        error = as_shoal_error(caught)
        if error.rank is None and environment.world_size > 1:
            error.rank, error.host = environment.rank, platform.node()
        code = error.exit_code
        # Pods start and end one by one: a pod that missed the others, or a lost pod's end, must be restarted.
        if environment.engine == "kubernetes" and isinstance(error, LaunchError | InUseError):
            code = ExitCode.RANK_LOST
    report = os.environ.get(REPORT_FILE)
    if report:
        document = to_json(error, environment.rank, platform.node()) if error else None
        path = report.replace("%r", str(environment.rank))  # an engine's ranks share one variable
        try:
            text = json.dumps({"exit_code": int(code), "error": document})
            if is_address(path):
                folder, _, name = path.rpartition("/")
                RunAddress(folder).write(name, text.encode())
            else:
                write_file(Path(path), text)
        except OSError:  # the launcher's folder is not on this host
            if error is not None:
                print(error.render(), file=sys.stderr)
        else:
            if may_end_at_once and isinstance(error, PeerError) and not error.everywhere:
                # A new rank replaces this one. torch's own shutdown takes half a second, and a function that user code
                # has registered with atexit may wait for the lost peer. Killed ranks do not call theirs either.
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code)
    elif error is not None and not (isinstance(error, PeerError) and error.everywhere):  # then the culprit prints it
        print(error.render(), file=sys.stderr)
    return code
