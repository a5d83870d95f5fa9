"""The `shoal bench` command: starts measuring processes and writes the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from shoal.cli.options import BenchOptions
from shoal.errors import CommandError, folded
from shoal.hardware import device as catalogued
from shoal.hardware import dump
from shoal.hardware.catalogue import of_cores
from shoal.hardware.detect import cores, gpus, kind_of, measured_file, memory_bytes, processor
from shoal.hardware.values import DIVIDED, PROCESS_GROUP, Cluster, Device
from shoal.launch.environment import REQUEST_FILE
from shoal.launch.environments.detect import joined
from shoal.planner.measure.assemble import Measured, algorithms_of, device_of, divided_of, link_of, table
from shoal.planner.measure.collectives import bench_collectives, results_of
from shoal.runs.directory import write_file

_SECONDS, _QUICK_SECONDS = 36.0, 6.0  # of computing, for all numbers of ranks together
_FEWEST_SECONDS = 3.0  # minimum of computing for each number of ranks
# Shares of the cores used by others above which a note is printed, and above which measurements of threads are dropped.
_BUSY_SHARE, _USELESS_SHARE = 0.1, 0.3


def bench(options: BenchOptions) -> int:
    """Measure this machine, print and write the result. In a rank, measure and pass the values on.

    Raises: CommandError, or the error of a rank.
    """
    environment = joined(os.environ)
    handed_over = os.environ.pop(REQUEST_FILE, None)
    if handed_over is not None and environment is not None:
        task = json.loads(Path(handed_over).read_text(encoding="utf-8"))
        from shoal.distributed.process_setup import as_rank
        from shoal.planner.measure.worker import MeasureTask, Sampling, measure, measure_collectives

        task = {**task, "folder": Path(task["folder"])}
        if options.what == "collectives":
            return as_rank(environment, lambda: measure_collectives(Sampling(**task), environment))
        return as_rank(environment, lambda: measure(MeasureTask(**task), environment))
    name, why = _UNREAD[options.what]
    if getattr(options, name):
        other = next(what for what in _UNREAD if what != options.what)
        raise CommandError(
            given=f"--{name} with shoal bench {options.what}",
            conflict=why,
            remedy=f"leave --{name} out, or write shoal bench {other}",
        )
    gpu_names = gpus()
    ranks = most_ranks = len(gpu_names) or min(8, cores())
    if options.ranks is not None:
        if not options.ranks.isdecimal() or int(options.ranks) < 1 or (gpu_names and int(options.ranks) > most_ranks):
            raise CommandError(
                given=f"--ranks {options.ranks}",
                conflict="that is no number of processes" + (f" for {most_ranks} GPU(s)" if gpu_names else ""),
                remedy=f"write --ranks {most_ranks}, say",
            )
        ranks = int(options.ranks)
    out = Path(options.out) if options.out else None
    if out is not None and not out.absolute().parent.is_dir():
        raise CommandError(
            given=f"-o {out}", conflict=f"{out.absolute().parent} is no directory", remedy="give a file in one that is"
        )
    busy = Busy()
    if options.what == "collectives":
        code = bench_collectives(ranks, options.sizes, out)
        if busy.share() >= _BUSY_SHARE:
            print(folded(f"note: other programs used {busy.share():.0%} of the cores; run it again when idle"))
        return code
    quick = options.quick
    on_gpus = bool(gpu_names)
    wanted = sorted({1, ranks}) if on_gpus else counts(ranks)
    seconds = _QUICK_SECONDS if quick else _SECONDS
    if not on_gpus:
        seconds = max(_FEWEST_SECONDS / (2 if quick else 1), seconds / len(wanted))
    measured = []
    for count in wanted:
        threads, many = max(1, cores() // (ranks if on_gpus else count)), "process" if count == 1 else "processes"
        print(f"measuring with {count} {many} of {threads} thread{'s' * (threads > 1)} ...", flush=True)
        work = {"seconds": seconds, "quick": quick, "computes": count == 1 or not on_gpus}
        measured.append(Measured.of(results_of("machine", work, count, threads, f"a measurement with {count} {many}")))
    cluster = undisturbed(divided(assembled(measured, gpu_names), options.quick), busy.share())
    tables = {f"{one.ranks} x {_threads(one)}": table(one) for one in measured}
    machine = {"processor": processor(), "cores": cores(), "gpus": gpus(), "memory_bytes": memory_bytes()}
    machine["measured"] = time.strftime("%Y-%m-%d %H:%M:%S")
    machine |= {key: measured[0].facts[key] for key in ("shoal", "torch", "python")}
    text = dump(cluster, beside={"machine": machine, "measurements": tables})
    own_file = measured_file()
    own_file.parent.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (own_file, out)):
        write_file(path, text)
    print(folded(summary(cluster)))
    for note in cluster.notes:
        print(folded(f"note: {note}"))
    print(folded(f"written: {own_file}, which --cluster here reads" + (f", and {out}" if out else "")))
    return 0


# For each measurement, an option that it does not read, and the reason.
_UNREAD = {
    "machine": ("sizes", "the sizes that a machine is measured with are those that shoal plan reads"),
    "collectives": ("quick", "collectives take as long as their sizes do: --sizes 64K,1M is quick"),
}


def counts(ranks: int) -> list[int]:
    """Return the numbers of processes to measure: the powers of 2 below `ranks`, and `ranks`."""
    return sorted({1, ranks, *(1 << power for power in range(ranks.bit_length()) if 1 << power < ranks)})


class Busy:
    """Load by other programs on the cores since construction."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = busy_seconds(), _own_seconds(), time.monotonic()

    def share(self) -> float:
        """Return the share of the cores that other programs used."""
        lasted = max(1e-3, time.monotonic() - self._began)
        others = busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, others / lasted / cores())


def undisturbed(cluster: Cluster, others: float) -> Cluster:
    """Return the cluster with a note if other programs were active, and with estimates for useless values.

    Threads that wait for each other also wait for busy cores: a product of 0.1 ms took 70 ms on two busy cores. A
    single thread's time remains valid, so n threads are estimated as n times one thread.
    """
    if others < _BUSY_SHARE:
        return cluster
    reason = f"other programs used {others:.0%} of the cores meanwhile"
    again = "run shoal bench again when the machine is idle"
    core, most = cluster.device, cluster.devices_per_host
    if others < _USELESS_SHARE or core.kind == "gpu" or cores() // most > 1 or not cluster.alternatives:
        return replace(
            cluster, notes=(f"{reason}: what several threads or processes do is measured too slow; {again}",)
        )
    estimate = f"not measured, since {reason}: so many times one thread's"
    alternatives = {}
    for ranks, measured in cluster.alternatives.items():
        scaled = of_cores(core, cores(), ranks)
        sources = {**core.sources, **dict.fromkeys(("flops", "matmul", "memory", "memory_bytes_per_second"), estimate)}
        alternatives[ranks] = replace(scaled, name=measured.name, memory_bytes=measured.memory_bytes, sources=sources)
    note = (
        f"{reason}: several threads are estimated from one, and what processes exchange is measured too slow; {again}"
    )
    return replace(cluster, alternatives=alternatives, notes=(note,))


def busy_seconds() -> float:
    """Return the seconds that all cores have worked since the system started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def assembled(measured: Sequence[Measured], gpu_names: Sequence[str]) -> Cluster:
    """Build the cluster from measurements with growing numbers of processes. Storage comes from the first."""
    when = time.strftime("%Y-%m-%d")
    first, last = measured[0], measured[-1]
    torch = first.facts.get("torch")
    model = gpu_names[0] if gpu_names else processor()
    source = f"measured by shoal bench on {when}, torch {torch}, {model}"
    alternatives: dict[int, Device] = {}
    if gpu_names:  # with peaks, tile and price from the catalogue if it has the model
        known = catalogued(kind) if (kind := kind_of(model)) else None
        facts = first.facts
        device = device_of(first, str(facts["model"]), int(facts["memory_bytes"]), source, known=known)
    else:
        alternatives = {
            one.ranks: device_of(one, f"{model}, {_threads(one)}", memory_bytes() // one.ranks, _with(source, one))
            for one in measured
        }
        device = alternatives.pop(last.ranks)
    name = f"{'nccl' if gpu_names else 'gloo'} between {last.ranks} processes of one host"
    storage = first.of_name("storage")
    return Cluster(
        name="here",
        device=device,
        devices_per_host=last.ranks,
        within=link_of(last, name, _with(source, last)),
        storage_bytes_per_second=next((work / seconds for work, seconds in storage.items()), None),
        alternatives=alternatives,
        algorithms=algorithms_of(last, _with(source, last)),
    )


def divided(cluster: Cluster, quick: bool) -> Cluster:
    """Return the cluster with the engine's costs on axes that divide a model, measured with all processes.

    Each axis has its own processes, since each loads its own modules.
    """
    ranks, device = cluster.devices_per_host, cluster.device
    if device.kind == "gpu" or ranks == 1:
        return cluster
    threads, known = max(1, cores() // ranks), {}
    print(f"measuring models divided over {ranks} processes ...", flush=True)
    for axis in DIVIDED:
        task = {"seconds": 0.0, "quick": quick, "axis": axis}
        rows = results_of("machine", task, ranks, threads, f"a measurement of the {axis} axis with {ranks} processes")
        links = cluster.within, cluster.algorithms.get(PROCESS_GROUP, cluster.within)
        known[axis] = divided_of(Measured.of(rows), axis, device.dispatch_seconds, *links)
    sources = {**device.sources, "divided": device.sources["dispatch_seconds"]}
    return replace(cluster, device=replace(device, divided=known, sources=sources))


def _with(source: str, measured: Measured) -> str:
    return f"{source}, {measured.ranks} process{'es' * (measured.ranks > 1)} of {_threads(measured)}"


def _threads(measured: Measured) -> str:
    number = measured.facts["threads"]
    return f"{number} thread{'s' * (number > 1)}"


def summary(cluster: Cluster) -> str:
    """Return a few lines for the terminal."""
    lines = []
    for ranks, device in sorted({**cluster.alternatives, cluster.devices_per_host: cluster.device}.items()):
        peaks = ", ".join(f"{dtype} {value / 1e9:,.0f}" for dtype, value in device.flops.items())
        lines += [
            f"{ranks} process{'es' * (ranks > 1)}: {device.name}",
            f"  matmul GFLOP/s: {peaks}",
            f"  memory: {device.memory_bytes_per_second / 1e9:.1f} GB/s; "
            f"an operator: {device.dispatch_seconds * 1e6:.1f} us",
        ]
    if cluster.within is not None:
        link = cluster.within
        lines.append(
            f"{link.name}: {link.bytes_per_second / 1e9:.2f} GB/s, {link.latency_seconds * 1e6:.0f} us a hop, "
            f"{link.call_seconds * 1e6:.0f} us a call"
        )
    if cluster.storage_bytes_per_second is not None:
        lines.append(f"storage: {cluster.storage_bytes_per_second / 1e6:,.0f} MB/s written")
    return "\n".join(lines)
