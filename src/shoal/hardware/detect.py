"""Detection of this machine's hardware: the file that `shoal bench` wrote, else its devices with catalogue numbers.

The fastest all-reduce algorithm comes from the measurement of `shoal bench collectives`, else from a rule.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import HardwareError
from shoal.hardware.catalogue import devices, joined, load, named_cluster
from shoal.hardware.values import SHARED_MEMORY, Cluster, Curve

_NOT_MEASURED = "not measured: the catalogue's numbers for what is here; `shoal bench` measures this machine"

# NVIDIA's driver has a folder for each GPU. A query through CUDA would prevent forks of the process.
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


def cluster(text: str) -> Cluster:
    """Return the cluster for a name, the path of a TOML file, or "here". Its notes list guessed numbers of its device.

    Texts with "+" between them are kinds of devices on hosts of their own: "4xA100-80+2x8xV100-32".
    Raises: HardwareError if there is no such cluster.
    """
    if text == "here":
        return here()
    if "+" in text and not Path(text).is_file():
        parts = [part.strip() for part in text.split("+")]
        if "" in parts:
            raise HardwareError(
                given=f"cluster {text!r}",
                conflict="a kind of devices is missing beside a +",
                remedy="write a kind on each side, as 4xA100-80+4xV100-32",
            )
        known = joined([cluster(part) for part in parts], text)
    else:
        known = load(text) if text.endswith(".toml") else named_cluster(text)
    for one in known.kinds or (known,):
        guesses = (f"{one.device.name}: a guess: {guess}" for guess in one.device.guesses)
        known = replace(known, notes=tuple(dict.fromkeys((*known.notes, *one.notes, *guesses))))
    return known


def here() -> Cluster:
    """Return this machine as measured, or else as detected, with the catalogue's numbers and a note about that."""
    path = measured_file()
    return load(path) if path.is_file() else detected()


def cache_folder() -> Path:
    """Return the directory of shoal's files that belong to this host."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")) / "shoal"


def measured_file() -> Path:
    """Return the path of `shoal bench`'s measurements here, keyed by host name, processor, cores and GPUs."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()) or "host"
    kind = f"{processor()} {cores()} {' '.join(gpus())}"
    return cache_folder() / "hardware" / f"{host}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}.toml"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of cores that this process's cgroup and its parents allow at a time; None: all."""
    text = file_text(root / "proc/self/cgroup") or ""
    own: dict[str, str] = dict(re.findall(r"^\d+:([^:]*):(.*)$", text, re.MULTILINE))
    quotas: list[float] = []
    for folder in upwards(root / "sys/fs/cgroup", own.get("", "/")):
        quota, _, period = (file_text(folder / "cpu.max") or "max 1").partition(" ")
        if quota.isdecimal():
            quotas.append(int(quota) / int(period or 100_000))
    for folder in upwards(root / "sys/fs/cgroup/cpu", own.get("cpu", own.get("cpu,cpuacct", "/"))):
        quota, period = file_text(folder / "cpu.cfs_quota_us") or "", file_text(folder / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def within_quota(number: int, quota: float | None) -> float:
    """Return how many of `number` cores a process can use under its cgroup's quota."""
    return min(number, quota or number)


def upwards(top: Path, place: str) -> list[Path]:
    """Return the folder `place` below `top`, and its parents up to `top`."""
    parts = [part for part in place.split("/") if part and part != ".."]
    return [top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def file_text(path: Path) -> str | None:
    """Return a file's text without surrounding blanks; None if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return None


def processor() -> str:
    """Return the system's name of the processor's model."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the host's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process's cgroup and its parents allow, all processes together; None: all."""
    own = re.search(r"^0::(.*)$", file_text(root / "proc/self/cgroup") or "", re.MULTILINE)
    texts = [file_text(folder / "memory.max") for folder in upwards(root / "sys/fs/cgroup", own[1] if own else "/")]
    return min((int(text) for text in texts if text is not None and text.isdecimal()), default=None)


def usable_memory_bytes() -> int:
    """Return the host's memory in bytes, or the limit of this process's cgroup if that is less."""
    limit = memory_limit()
    return memory_bytes() if limit is None else min(limit, memory_bytes())


def killed_for_memory(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for memory since the host started; 0 if it does not say."""
    killed = re.search(r"^oom_kill (\d+)$", file_text(root / "proc/vmstat") or "", re.MULTILINE)
    return int(killed[1]) if killed else 0


def gpus() -> list[str]:
    """Return the models of the GPUs that the driver shows."""
    shown = sorted(GPU_FOLDER.iterdir()) if GPU_FOLDER.is_dir() else []
    texts = [(gpu / "information").read_text() for gpu in shown]
    return [model[1].strip() for text in texts if (model := re.search(r"^Model:(.*)$", text, re.MULTILINE))]


def network_gigabits(root: Path = Path("/")) -> float | None:
    """Return the Gbit/s of all InfiniBand ports, or else of the fastest network card; None if the system knows none."""
    rates = [file_text(path) or "" for path in (root / "sys/class/infiniband").glob("*/ports/*/rate")]
    ports = sum(float(rate.split()[0]) for rate in rates if re.match(r"[\d.]+ Gb/sec", rate))
    cards = [path.parent for path in (root / "sys/class/net").glob("*/device")]  # virtual ones have no device
    speeds = [file_text(card / "speed") or "" for card in cards]
    return ports or max((int(speed) / 1000 for speed in speeds if speed.isdecimal()), default=None)


def visible_gpus() -> int:
    """Return the number of GPUs that the driver shows, at most as many as CUDA_VISIBLE_DEVICES names."""
    number = len(list(GPU_FOLDER.iterdir())) if GPU_FOLDER.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        number = min(number, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
    return number


def detected() -> Cluster:
    """Detect this machine's hardware without measurements: GPUs that the catalogue knows, or else the cores."""
    models = gpus()
    kinds = {kind_of(model) for model in models}
    if len(kinds) == 1 and (kind := kinds.pop()):
        return replace(named_cluster(f"1x{len(models)}x{kind}"), name="here", notes=(f"{models[0]}: {_NOT_MEASURED}",))
    notes = [f"{processor()}: {_NOT_MEASURED}"]
    if models:
        notes.append(f"GPUs that the catalogue does not know, or of several kinds: {', '.join(sorted(set(models)))}")
    one = "cpu-avx512" if "avx512f" in _cpu_info("flags").split() else "cpu"
    guess = named_cluster(f"{cores()}x{one}")
    share = usable_memory_bytes() // cores()
    alternatives = {
        ranks: replace(device, memory_bytes=share * cores() // ranks) for ranks, device in guess.alternatives.items()
    }
    device = replace(guess.device, memory_bytes=share, sources={**guess.device.sources, "memory_bytes": "this host's"})
    return replace(guess, name="here", device=device, alternatives=alternatives, notes=tuple(notes))


def kind_of(model: str) -> str | None:
    """Return the catalogue's name for a GPU that the driver calls `model`, by its longest matching text."""
    known = [(text, name) for name, entry in devices().items() for text in entry.get("match", ())]
    matching = [(len(text), name) for text, name in known if re.search(rf"\b{re.escape(text)}\b", model)]
    return max(matching)[1] if matching else None


def _cpu_info(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


# The algorithms that a plan can name.
ALGORITHMS = ("native", "ring", "tree", "recursive_doubling", "hierarchical", SHARED_MEMORY)
# A typical bucket of gradients on CPUs.
BUCKET_BYTES = 4 << 20
# Machines on which shared memory's counters were tested: see distributed/collectives/shared_memory/region.py.
_ORDERED = ("x86_64", "AMD64")
# A smaller measured gain may be noise.
_WORTH = 0.95


def comparison_file(ranks: int) -> Path:
    """Return the path of `shoal bench collectives`' measurements on this machine with `ranks` ranks."""
    known = measured_file()
    return known.with_name(f"{known.stem}-collectives-{ranks}.json")


def shares_memory(ranks: int) -> bool:
    """Return True if `ranks` processes of this machine can sum through shared memory."""
    return ranks > 1 and why_not_shared() is None


def all_reduce_here(ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """Return the algorithm's name for a plan of `ranks` ranks, all on this machine.

    The default without measurements is shared memory, which was faster than Gloo in every measurement, at every size.
    """
    if gpus() or ranks < 2 or why_not_shared() is not None:
        return "native"
    try:
        comparison = json.loads(comparison_file(ranks).read_text(encoding="utf-8"))
        return fastest(comparison, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not measured, or measured by another version
    try:
        machine = load(measured_file())
    except HardwareError:
        return SHARED_MEMORY
    known = SHARED_MEMORY in machine.algorithms and 1 < ranks <= machine.devices_per_host
    return fastest_on(machine, ranks, num_bytes) if known else SHARED_MEMORY


def why_not_shared() -> str | None:
    """Return why processes of this machine cannot share memory, from a trial; None if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memory without a name"
    if platform.machine() not in _ORDERED:
        return f"on {platform.machine()} the order of writes was not tried"
    try:
        with open(os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb") as memory:
            os.ftruncate(memory.fileno(), mmap.PAGESIZE)
            other = os.open(f"/proc/{os.getpid()}/fd/{memory.fileno()}", os.O_RDWR | os.O_CLOEXEC)
            try:
                with mmap.mmap(memory.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ) as seen:
                    os.pwrite(other, b"\1", 0)
                    return None if seen[0] == 1 else "a page that two descriptors share is not the same page"
            finally:
                os.close(other)
    except (OSError, ValueError) as error:
        return f"memory cannot be opened through /proc: {error}"


def fastest_on(cluster: Cluster, ranks: int, num_bytes: int = BUCKET_BYTES) -> str:
    """Return the fastest measured algorithm among `ranks` ranks on one host of the cluster."""
    if cluster.within is None or not 1 < ranks <= cluster.devices_per_host:
        return "native"
    links = {"native": cluster.within, **cluster.algorithms}
    return _least({name: link.sum_seconds(num_bytes, ranks) for name, link in links.items()})


def fastest(comparison: Mapping[str, Any], num_bytes: int) -> str:
    """Return the fastest algorithm at a size, with log-log interpolation between the measured sizes."""
    seconds = {}
    for name, by_size in comparison["all_reduce_seconds"].items():
        points = sorted((float(size), math.log(measured)) for size, measured in by_size.items())
        seconds[name] = math.exp(Curve(tuple(points)).at(num_bytes))
    return _least(seconds)


def _least(seconds: Mapping[str, float]) -> str:
    """Return the fastest algorithm, or native unless another is faster by more than a twentieth."""
    known = {name: seconds[name] for name in ALGORITHMS if name in seconds}
    best = min(known, key=lambda name: known[name])
    return best if known[best] < _WORTH * known.get("native", math.inf) else "native"
