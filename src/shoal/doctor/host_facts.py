"""Facts of this host that decide whether and how fast training runs: limits, memory, network, disk, GPUs, versions.

This module only reads what the system reports, tries loopback, and writes one small file. It judges nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.hardware.detect import (
    cores,
    cpu_quota,
    file_text,
    gpus,
    measured_file,
    memory_bytes,
    memory_limit,
    processor,
    why_not_shared,
)

_WRITTEN_BYTES = 32 << 20
_PATIENCE_SECONDS = 10.0
# The fields that nvidia-smi reports for each GPU, in this order.
GPU_FIELDS = (
    *("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm"),
    *("pcie.link.width.current", "pcie.link.width.max", "temperature.gpu", "ecc.errors.uncorrected.volatile.total"),
)
_UNSYNCHRONIZED, _TIME_ERROR = 0x40, 5


@dataclass(frozen=True)
class DiskFacts:
    """Folder for runs: its file system, free bytes, and a trial write; `error` if the trial failed."""

    folder: str
    kind: str = ""
    free_bytes: int = 0
    bytes_per_second: float | None = None
    sync_seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class ClockFacts:
    """Clock: its source, and its synchronisation with other hosts; None if unknown."""

    source: str | None = None
    synchronized: bool | None = None
    error_seconds: float | None = None


@dataclass(frozen=True)
class HostFacts:
    """Current state of a host. A limit is None if there is none; `quota_cores` is the cgroup's limit."""

    name: str
    system: str
    processor: str
    cores: int
    all_cores: int
    quota_cores: float | None
    load: float
    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    swap_used_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None
    locked_bytes: int | None
    processes: int | None
    variables: Mapping[str, str]
    versions: Mapping[str, str | None]
    interfaces: tuple[str, ...]
    loopback_error: str | None
    name_error: str | None
    shared_memory_error: str | None
    governor: str | None
    clock: ClockFacts
    disk: DiskFacts
    is_measured: bool
    gpus: tuple[str, ...] = ()
    gpu_rows: tuple[Mapping[str, str], ...] = ()
    gpu_links: str | None = None


def host_facts(folder: Path, root: Path = Path("/")) -> HostFacts:
    """Collect the facts of this host.

    Args:
        folder: the folder for runs, whose disk is tried.
        root: the folder of /proc and /sys.
    """
    lines = re.findall(r"^(\w+):\s+(\d+) kB", file_text(root / "proc/meminfo") or "", re.MULTILINE)
    memory = {name: int(kibibytes) * 1024 for name, kibibytes in lines}
    most = file_text(root / "sys/fs/cgroup/pids.max") or ""
    processes = [_limit(resource.RLIMIT_NPROC), int(most) if most.isdecimal() else None]
    shm = None
    with contextlib.suppress(OSError):
        shm = os.statvfs(root / "dev/shm")
    models = gpus()
    rows = links = None
    if models:
        rows = _nvidia_smi("--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits")
        links = _nvidia_smi("topo", "-m")
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("shoal", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    spec = importlib.util.find_spec("torch")  # an import of torch takes seconds
    text = file_text(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else None
    match = re.search(r"^cuda[^=\n]*=\s*'([\d.]+)'", text or "", re.MULTILINE)
    versions["torch_cuda"] = match[1] if match else None
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", file_text(root / "proc/driver/nvidia/version") or "")
    versions["driver"] = driver[1] if driver else None
    return HostFacts(
        name=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        processor=processor(),
        cores=cores(),
        all_cores=os.cpu_count() or 1,
        quota_cores=cpu_quota(root),
        load=os.getloadavg()[0],
        memory_bytes=memory_bytes(),
        available_bytes=memory.get("MemAvailable", memory_bytes()),
        memory_limit_bytes=memory_limit(root),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm is not None else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm is not None else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        processes=min((limit for limit in processes if limit is not None), default=None),
        variables=dict(os.environ),
        versions=versions,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        loopback_error=_error_of(_send_to_itself),
        name_error=_error_of(lambda: socket.getaddrinfo(socket.gethostname(), None)),
        shared_memory_error=why_not_shared(),
        governor=file_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        clock=_clock(root),
        disk=_disk(folder, root),
        is_measured=measured_file().is_file(),
        gpus=tuple(models),
        gpu_rows=parsed_gpu_rows(rows or ""),
        gpu_links=links,
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _error_of(attempt: Callable[[], object]) -> str | None:
    """Return why the system refuses what a function attempts; None if it does not."""
    try:
        attempt()
    except OSError as error:
        return str(error)
    return None


def _send_to_itself() -> None:
    """Send a few bytes over 127.0.0.1, as ranks of a host do. Raises: OSError."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = opened.enter_context(socket.create_connection(server.getsockname(), timeout=_PATIENCE_SECONDS))
        accepted = opened.enter_context(server.accept()[0])
        client.sendall(b"shoal")
        accepted.settimeout(_PATIENCE_SECONDS)
        if accepted.recv(5, socket.MSG_WAITALL) != b"shoal":
            raise OSError("other bytes came than were sent")


def _clock(root: Path) -> ClockFacts:
    source = file_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return ClockFacts(source)
    buffer = ctypes.create_string_buffer(512)  # struct timex; modes = 0 only reads
    state = libc.adjtimex(buffer)
    if state < 0:
        return ClockFacts(source)
    _, _, _, worst, _, status = struct.unpack_from("@iqqqqi", buffer)
    synchronized = state != _TIME_ERROR and not status & _UNSYNCHRONIZED
    return ClockFacts(source, synchronized, worst / 1e6 if synchronized else None)


def _disk(folder: Path, root: Path) -> DiskFacts:
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    kind = _file_system(place, root)
    try:
        free = shutil.disk_usage(place).free
        with tempfile.NamedTemporaryFile(dir=place, prefix=".shoal-doctor-") as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            file.write(b"1")
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            synced = time.perf_counter() - began
    except OSError as error:
        return DiskFacts(str(place), kind, error=str(error))
    return DiskFacts(str(place), kind, free, _WRITTEN_BYTES / written, synced)


def _file_system(folder: Path, root: Path) -> str:
    """Return the kind of file system of the folder: that of the longest mount path above the folder."""
    mounts = [line.split()[1:3] for line in (file_text(root / "proc/mounts") or "").splitlines() if line.count(" ") > 2]
    above = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(above, default=(0, ""))[1]


def parsed_gpu_rows(text: str) -> tuple[Mapping[str, str], ...]:
    """Parse nvidia-smi's rows into mappings of `GPU_FIELDS`."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(dict(zip(GPU_FIELDS, cells, strict=True)) for cells in lines if len(cells) == len(GPU_FIELDS))


def _nvidia_smi(*arguments: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words, limit = ["nvidia-smi", *arguments], _PATIENCE_SECONDS
        return subprocess.run(words, capture_output=True, text=True, timeout=limit, check=True).stdout
    return None
