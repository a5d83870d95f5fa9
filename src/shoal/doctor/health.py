"""Judgement of a host's facts: obstacles to training and causes of slow training, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.doctor.host_facts import HostFacts
from shoal.errors import folded
from shoal.hardware.detect import within_quota

_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108  (the mount)
# Data workers pass batches through /dev/shm. Ranks' gradients are in anonymous memory, which does not count there.
_SHM_BYTES = 1 * _GIB
_OPEN_FILES = 4096
_PROCESSES = 1024
_FREE_BYTES = 10 * _GIB
_DISK_RATE = 100e6
_SYNC_SECONDS = 0.1
_CLOCK_SECONDS = 0.5
_LEAST_TORCH = (2, 10)
# The oldest driver for each CUDA major version of torch, from NVIDIA's release notes.
_DRIVERS = {11: 450, 12: 525, 13: 580}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Severity(StrEnum):
    """Severity of a check: no finding, a remark, slow or fragile training, or training cannot work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class HealthCheck:
    """One check: its subject, the observation, and a remedy if one is needed."""

    subject: str
    severity: Severity
    seen: str
    remedy: str = ""


_SIGNS = {Severity.OK: "ok", Severity.NOTE: "note", Severity.WARNING: "SLOW", Severity.ERROR: "FAULT"}
Checks = Iterator[HealthCheck]


def judged(facts: HostFacts) -> tuple[HealthCheck, ...]:
    """Return all checks of a host, grouped by its parts."""
    rules: tuple[Callable[[HostFacts], Checks], ...] = (
        *(_versions, _cores, _threads, _memory, _shared_memory, _limits),
        *(_network, _disk, _clock, _variables, _gpus, _measured),
    )
    return tuple(check for rule in rules for check in rule(facts))


def worst(checks: tuple[HealthCheck, ...]) -> Severity:
    """Return the highest severity among checks."""
    order = list(Severity)
    return max((check.severity for check in checks), key=order.index, default=Severity.OK)


def _of(severity: Severity) -> Callable[..., HealthCheck]:
    return lambda subject, seen, remedy="": HealthCheck(subject, severity, seen, remedy)


_ok, _note, _slow, _fault = map(_of, Severity)


def _versions(facts: HostFacts) -> Checks:
    said = ", ".join(f"{name} {facts.versions.get(name) or 'missing'}" for name in ("shoal", "torch", "python"))
    torch = facts.versions.get("torch")
    if torch is None:
        yield _fault("versions", said, "pip install torch")
        return
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch)[:2])
    if numbers < _LEAST_TORCH:
        yield _fault("versions", said, f"pip install 'torch>={'.'.join(map(str, _LEAST_TORCH))}'")
        return
    yield _ok("versions", said)
    cuda = facts.versions.get("torch_cuda")
    if facts.gpus and cuda is None:
        remedy = "install torch for CUDA, as https://pytorch.org/get-started says"
        yield _fault("torch and GPUs", f"{len(facts.gpus)} GPUs, and torch {torch} is without CUDA", remedy)
    driver = facts.versions.get("driver")
    least = _DRIVERS.get(int(cuda.split(".")[0])) if cuda else None
    if driver and least and int(driver.split(".")[0]) < least:
        seen = f"driver {driver}, and torch is built for CUDA {cuda}"
        yield _fault("driver", seen, f"install a driver of {least} or newer, or a torch for an older CUDA")
    elif driver:
        yield _ok("driver", f"{driver}, torch for CUDA {cuda}")


def usable_cores(facts: HostFacts) -> float:
    """Return the number of cores that this process can use, limited by its affinity and its cgroup's quota."""
    return within_quota(facts.cores, facts.quota_cores)


def _cores(facts: HostFacts) -> Checks:
    seen = f"{facts.cores} of {facts.all_cores} cores, {facts.processor}"
    quota = facts.quota_cores
    if quota is not None and quota < facts.cores:
        few = f"start no more processes and threads than {quota:g} cores carry: OMP_NUM_THREADS={max(1, int(quota))}"
        remedy = f"give the container more, or {few}"
        yield _slow("CPU quota", f"{seen}; the cgroup allows the time of {quota:g}", remedy)
    else:
        yield _ok("processor", seen)
    if facts.load > 0.5 * facts.cores:
        seen = f"a load of {facts.load:.1f} on {facts.cores} cores before anything was started"
        yield _slow("other programs", seen, "end them, or measure and train when they are done")
    if facts.governor == "powersave":
        remedy = "cpupower frequency-set -g performance, where steps vary"
        yield _note("CPU clock", "the frequency governor is powersave", remedy)


def _threads(facts: HostFacts) -> Checks:
    most = usable_cores(facts)
    for name in _THREADS:
        text = facts.variables.get(name, "").split(",")[0]
        if text.isdecimal() and int(text) > most:
            seen = f"{name}={text} for each process, on {most:g} cores"
            yield _slow("threads", seen, f"unset {name}: shoal divides the cores among its processes")


def _memory(facts: HostFacts) -> Checks:
    seen = f"{facts.available_bytes / _GIB:.1f} of {facts.memory_bytes / _GIB:.1f} GiB available"
    limit = facts.memory_limit_bytes
    if limit is not None and limit < facts.memory_bytes:
        seen += f"; the cgroup allows {limit / _GIB:.1f} GiB"
    if facts.available_bytes < 0.1 * facts.memory_bytes:
        yield _slow("memory", seen, "end what holds it: a process that runs out is killed")
    else:
        yield _ok("memory", seen)
    if facts.swap_used_bytes > 0.05 * facts.memory_bytes:
        seen = f"{facts.swap_used_bytes / _GIB:.1f} GiB are swapped out"
        yield _slow("swap", seen, "free memory; a step that waits for pages takes many times as long")


def _shared_memory(facts: HostFacts) -> Checks:
    if facts.shared_memory_error is not None:
        remedy = "nothing, on GPUs; on CPUs sums go over sockets, several times slower"
        yield _note("shared memory", facts.shared_memory_error, remedy)
    if facts.shm_bytes is None:
        yield _slow(_SHM, "it is not there", "mount it (docker run --shm-size 8g): data workers need it")
        return
    seen = f"{(facts.shm_free_bytes or 0) / _GIB:.1f} of {facts.shm_bytes / _GIB:.1f} GiB free"
    if (facts.shm_free_bytes or 0) < _SHM_BYTES:
        remedy = "docker run --shm-size 8g, or remove what lies there; data workers hand batches over in it"
        yield _slow(_SHM, seen, remedy)
    else:
        yield _ok(_SHM, seen)


def _limits(facts: HostFacts) -> Checks:
    files, processes, locked = facts.open_files, facts.processes, facts.locked_bytes
    seen = f"{files or 'any number of'} open files, {processes or 'any number of'} processes"
    if files is not None and files < _OPEN_FILES:
        yield _slow("open files", f"at most {files} for a process", f"ulimit -n {_OPEN_FILES * 16}")
    if processes is not None and processes < _PROCESSES:
        remedy = f"ulimit -u {_PROCESSES * 16}, or a larger pids limit of the container; threads count too"
        yield _slow("processes", f"at most {processes}", remedy)
    if facts.gpus and locked is not None and locked < _GIB:
        remedy = "ulimit -l unlimited: InfiniBand and RDMA lock the memory that they send"
        yield _note("locked memory", f"at most {locked / 1024:.0f} KiB for a process", remedy)
    yield _ok("limits", seen)


def _network(facts: HostFacts) -> Checks:
    if facts.loopback_error is not None:
        remedy = "allow connections to 127.0.0.1: ranks of a host meet there"
        yield _fault("loopback", facts.loopback_error, remedy)
    else:
        yield _ok("loopback", "processes of this host reach each other over 127.0.0.1")
    if facts.name_error is not None:
        remedy = "add it to /etc/hosts, where several hosts train together"
        yield _note("host name", f"{facts.name} has no address: {facts.name_error}", remedy)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = facts.variables.get(name, "")
        plain = [part.strip() for part in wanted.split(",") if part.strip() and part[0] not in "^="]
        known = [part for part in plain if any(have.startswith(part) for have in facts.interfaces)]
        if plain and not known:
            seen = f"{name}={wanted}, and this host has {', '.join(facts.interfaces)}"
            yield _fault("network interface", seen, f"unset {name}, or name one of them")


def _disk(facts: HostFacts) -> Checks:
    disk = facts.disk
    if disk.error is not None:
        yield _fault("disk", f"{disk.folder}: {disk.error}", "give --out a folder that can be written")
        return
    rate, sync = disk.bytes_per_second or 0.0, disk.sync_seconds or 0.0
    seen = f"{disk.folder} ({disk.kind or 'unknown'}): {rate / 1e6:.0f} MB/s, {disk.free_bytes / _GIB:.0f} GiB free"
    if disk.free_bytes < _FREE_BYTES:
        yield _slow("disk", seen, "free some: a checkpoint has the model, and twice that for Adam; three are kept")
    elif rate < _DISK_RATE or sync > _SYNC_SECONDS:
        remedy = "write runs to a local disk, or leave --checkpoint-every out: then they take about 1 % of the time"
        yield _slow("disk", f"{seen}; a sync takes {sync * 1e3:.0f} ms", remedy)
    else:
        yield _ok("disk", seen)


def _clock(facts: HostFacts) -> Checks:
    clock = facts.clock
    if clock.source in ("hpet", "acpi_pm", "jiffies"):
        remedy = "boot with clocksource=tsc, where the processor has a steady one: reading this clock is slow"
        yield _note("clock source", clock.source, remedy)
    if clock.synchronized is False:
        remedy = "start chronyd or systemd-timesyncd, where several hosts train together"
        yield _note("time", "the clock is not synchronised", remedy)
    elif clock.error_seconds is not None and clock.error_seconds > _CLOCK_SECONDS:
        seen = f"synchronised within {clock.error_seconds:.1f} s"
        yield _note("time", seen, "look at chronyc tracking")
    elif clock.synchronized:
        yield _ok("time", f"synchronised within {(clock.error_seconds or 0.0) * 1e3:.0f} ms")


# Environment variable, a pattern of its harmful values, and their effect. Observed with torch 2.13 unless
# stated otherwise.
_SETTINGS = (
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", _slow, "each collective is checked by another"),
    ("CUDA_LAUNCH_BLOCKING", "1", _slow, "the host waits for each kernel"),
    ("NCCL_P2P_DISABLE", "1", _slow, "GPUs of a host talk through its memory"),
    ("NCCL_IB_DISABLE", "1", _note, "hosts talk over TCP where there is InfiniBand"),
    ("NCCL_SHM_DISABLE", "1", _note, "GPUs without a link talk over sockets"),
    ("NCCL_DEBUG", "TRACE", _note, "each call is printed"),
    ("TORCH_CPP_LOG_LEVEL", "INFO", _note, "much is printed"),
    ("OMP_WAIT_POLICY", "(?i:active)", _slow, "idle threads keep cores busy that other ranks need"),
    ("KMP_BLOCKTIME", r"infinite|\d{4,}", _note, "idle threads keep cores busy that other ranks need"),
    ("PYTHONPROFILEIMPORTTIME", ".+", _note, "each import is printed"),
    ("PYTHONMALLOC", "(?i:.*debug)", _slow, "Python checks its blocks"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", _slow, "each tensor is asked of the driver"),
    ("ATEN_CPU_CAPABILITY", "default|avx2", _note, "kernels use less than the processor has"),
    ("DNNL_MAX_CPU_ISA", ".+", _note, "products and convolutions use less than the processor may have"),
)


def _variables(facts: HostFacts) -> Checks:
    for name, values, check, does in _SETTINGS:
        value = facts.variables.get(name)
        if value is not None and re.fullmatch(values, value):
            yield check("environment", f"{name}={value}: {does}", f"unset {name}")
    allocator = [name for name in facts.variables if name.startswith("MALLOC_")]
    if allocator and not facts.gpus:
        remedy = "unset them, unless they were chosen for this: shoal leaves the allocator as they say"
        yield _note("environment", f"{', '.join(sorted(allocator))} set", remedy)


def _gpus(facts: HostFacts) -> Checks:
    if not facts.gpus:
        yield _ok("devices", "no GPU; ranks are processes on cores")
        return
    kinds = sorted(set(facts.gpus))
    seen = f"{len(facts.gpus)} GPUs: {', '.join(kinds)}"
    if len(kinds) > 1:
        yield _slow("devices", seen, "use GPUs of one kind (CUDA_VISIBLE_DEVICES): the others wait for the slowest")
    else:
        yield _ok("devices", seen)
    for number, row in enumerate(facts.gpu_rows):
        yield from _gpu(number, row)
    if len(facts.gpus) > 1 and facts.gpu_links is not None and not re.search(r"\bNV\d+\b", facts.gpu_links):
        remedy = "shoal plan counts with it; larger batches a rank hide it"
        yield _note("links", "no NVLink between the GPUs: sums go over PCIe", remedy)


def _gpu(number: int, row: Mapping[str, str]) -> Checks:
    def value(name: str) -> float | None:
        match = re.match(r"[\d.]+", row.get(name, ""))
        return float(match[0]) if match else None

    used, total = value("memory.used"), value("memory.total")
    if used is not None and total and used > 0.1 * total:
        seen = f"{used:.0f} of {total:.0f} MiB are in use"
        yield _slow(f"GPU {number}", seen, "end the processes that nvidia-smi lists")
    width, most = value("pcie.link.width.current"), value("pcie.link.width.max")
    if width is not None and most is not None and width < most:
        remedy = "seat the card again, or use another slot: copies to it are so much slower"
        yield _slow(f"GPU {number}", f"PCIe x{width:g} of x{most:g}", remedy)
    errors, heat = value("ecc.errors.uncorrected.volatile.total"), value("temperature.gpu")
    if errors:
        yield _fault(
            f"GPU {number}",
            f"{errors:g} uncorrected memory errors",
            "have it looked at; leave it out (CUDA_VISIBLE_DEVICES)",
        )
    if heat is not None and heat >= 85:
        yield _slow(f"GPU {number}", f"{heat:g} degrees: it lowers its clock", "look at its cooling")


def _measured(facts: HostFacts) -> Checks:
    if facts.is_measured:
        yield _ok("measurements", "shoal bench has measured this machine")
    else:
        remedy = "shoal bench: a minute or two"
        yield _note("measurements", "shoal plan counts with the catalogue's numbers of this machine", remedy)


def lines(host: str, checks: tuple[HealthCheck, ...]) -> list[str]:
    """Format checks for people, with a summary as the last line."""
    width = max(len(check.subject) for check in checks)
    text = [host]
    for check in checks:
        text.append(folded(f"  {_SIGNS[check.severity]:<5} {check.subject:<{width}}  {check.seen}", width + 10))
        if check.remedy:
            text.append(folded(f"        {'':<{width}}  -> {check.remedy}", width + 13))
    faults, slow = (sum(c.severity is s for c in checks) for s in (Severity.ERROR, Severity.WARNING))
    if not faults and not slow:
        return [*text, "nothing stands in the way of training here"]
    return [*text, f"{faults} that keep training from working, {slow} that make it slow or fragile"]
