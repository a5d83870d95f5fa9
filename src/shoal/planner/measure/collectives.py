"""The `shoal bench collectives` command: times all_reduces of every algorithm for a table, a plot and a calibration.

Rounds of shoal's own ranks alternate with rounds of each installed MPI. A figure is the median over all rounds'
samples of the slowest rank. Bus bandwidth is defined as in nccl-tests: 2 (P - 1) / P of the size per second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CommandError, LaunchError
from shoal.hardware.detect import comparison_file, cores, processor
from shoal.launch.supervise.ranks import LocalRun, launch
from shoal.report.html import Series, Spot, chart
from shoal.runs.directory import write_file

_SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KB to 256 MB
_ROUNDS, _SAMPLES = 3, 3
_SAMPLE_SECONDS = 0.03
_MPI_LIMIT_SECONDS = 300.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Compared:
    """Samples of seconds by algorithm and size, on `ranks` ranks."""

    ranks: int
    seconds: Mapping[str, Mapping[int, Sequence[float]]]

    def median(self, name: str, size: int) -> float:
        """Return the median of all samples."""
        return statistics.median(self.seconds[name][size])

    def fastest(self, size: int, names: Iterable[str]) -> str:
        """Return the fastest of these algorithms at a size."""
        return min((n for n in names if size in self.seconds[n]), key=lambda n: self.median(n, size))


def bench_collectives(ranks: int, sizes_text: str | None, out: Path | None) -> int:
    """Measure, print the table, and write the calibration; with `out` (a JSON file) also write it there with a plot.

    Raises: CommandError for invalid sizes or one rank; errors of the ranks.
    """
    sizes = parse_sizes(sizes_text)
    if ranks < 2:
        raise CommandError(
            given=f"shoal bench collectives on {ranks} process",
            conflict="a collective needs at least two processes",
            remedy="write --ranks 2",
        )
    compared = compare(ranks, sizes)
    print(table(compared))
    document = json.dumps(calibration(compared), indent=1) + "\n"
    own_file = comparison_file(ranks)
    own_file.parent.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (own_file, out)):
        write_file(path, document)
    if out is not None:
        write_file(out.with_suffix(".svg"), picture(compared))
    print(f"written: {own_file}" + (f", {out} and {out.with_suffix('.svg')}" if out else ""))
    return 0


def parse_sizes(text: str | None) -> list[int]:
    """Return sizes in bytes from text such as `64K,1M,256M`. Raises: CommandError."""
    if text is None:
        return list(_SIZES)
    sizes = []
    for word in text.lower().replace(",", " ").split():
        number, unit = word.rstrip("kmgb"), word.lstrip("0123456789").removesuffix("b")
        if not number.isdecimal() or unit not in _UNITS or int(number) == 0:
            raise CommandError(
                given=f"--sizes {text}", conflict=f"{word!r} is no number of bytes", remedy="write --sizes 64K,1M,256M"
            )
        sizes.append(int(number) * _UNITS[unit])
    return sizes


def compare(ranks: int, sizes: Sequence[int]) -> Compared:
    """Measure all available algorithms and MPI libraries in rounds. Raises: errors of shoal's own ranks."""
    seconds: dict[str, dict[int, list[float]]] = {}
    libraries = list(_mpi_commands(ranks))
    print(f"measuring {ranks} processes on {cores()} cores, against {len(libraries)} MPI ...", flush=True)
    for _ in range(_ROUNDS):
        task = {"sample_seconds": _SAMPLE_SECONDS, "sizes": list(sizes), "samples": _SAMPLES}
        benchmark = f"a comparison of collectives on {ranks} processes"
        documents = results_of("collectives", task, ranks, max(1, cores() // ranks), benchmark)
        for rows in zip(*(document["rows"] for document in documents), strict=True):
            slowest = [max(sample) for sample in zip(*(row["seconds"] for row in rows), strict=True)]
            seconds.setdefault(rows[0]["name"], {}).setdefault(rows[0]["size"], []).extend(slowest)
        for command, variables in list(libraries):
            document = _mpi_round(command, variables, sizes)
            if document is None:
                libraries.remove((command, variables))
                continue
            for row in document["rows"]:
                seconds.setdefault(document["library"], {}).setdefault(row["size"], []).extend(row["seconds"])
    return Compared(ranks, seconds)


def _mpi_commands(ranks: int) -> Iterable[tuple[list[str], dict[str, str]]]:
    """Yield the command and environment to start `ranks` ranks under each installed MPI, if mpi4py is installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for program, kind in (("mpirun.openmpi", "openmpi"), ("mpirun.mpich", "mpich")):
        if shutil.which(program):
            more = ["--oversubscribe"] if kind == "openmpi" and ranks > cores() else []
            yield [program, *more, "-n", str(ranks)], {**root, "MPI4PY_MPIABI": kind}
    if not shutil.which("mpirun.openmpi") and not shutil.which("mpirun.mpich") and shutil.which("mpirun"):
        yield ["mpirun", "-n", str(ranks)], root


def _mpi_round(command: Sequence[str], variables: Mapping[str, str], sizes: Sequence[int]) -> dict[str, Any] | None:
    """Return the document of MPI's ranks, or None if they failed."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        file = Path(folder) / "mpi.json"
        words = [str(file), str(_SAMPLES), str(_SAMPLE_SECONDS), *map(str, sizes)]
        try:
            subprocess.run(
                [*command, sys.executable, "-W", "ignore", "-m", "shoal.planner.measure.mpi_worker", *words],
                env={**os.environ, **variables},
                check=True,
                capture_output=True,
                timeout=_MPI_LIMIT_SECONDS,
            )
            document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"note: {command[0]} did not run: {str(error)[:200]}")
            return None
        return document


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second: the bytes that a ring moves for this size, per second."""
    return 2 * (ranks - 1) / ranks * size / seconds


def table(compared: Compared) -> str:
    """Return a table of microseconds and GB/s by size; a star marks the fastest of shoal's own algorithms."""
    names = list(compared.seconds)
    own = [n for n in names if "MPI" not in n and "MPICH" not in n]
    sizes = list(compared.seconds[names[0]])
    lines = [f"all-reduce on {compared.ranks} ranks: microseconds (bus GB/s), * fastest"]
    width = max(len(n) for n in names) + 2
    for size in sizes:
        best = compared.fastest(size, own)
        lines.append(f"{_size(size)}")
        for name in (n for n in names if size in compared.seconds[n]):
            median = compared.median(name, size)
            low, high = min(compared.seconds[name][size]), max(compared.seconds[name][size])
            lines.append(
                f"  {name:<{width}}{median * 1e6:>12,.1f}  ({bus_bandwidth(compared.ranks, size, median) / 1e9:6.2f})"
                f"  {low * 1e6:,.1f} to {high * 1e6:,.1f}{' *' if name == best else ''}"
            )
    return "\n".join(lines)


def calibration(compared: Compared) -> dict[str, Any]:
    """Return the median seconds of each algorithm by size, for `fastest_all_reduce.fastest`."""
    medians = {
        name: {str(size): compared.median(name, size) for size in sizes} for name, sizes in compared.seconds.items()
    }
    spreads = {name: {str(s): [min(v), max(v)] for s, v in sizes.items()} for name, sizes in compared.seconds.items()}
    return {
        "schema": 1,
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processor": processor(),
        "cores": cores(),
        "ranks": compared.ranks,
        "all_reduce_seconds": medians,
        "spread_seconds": spreads,
    }


def picture(compared: Compared) -> str:
    """Return a plot of bus bandwidth over size, as SVG."""
    curves = [
        Series(name, [Spot(s, bus_bandwidth(compared.ranks, s, compared.median(name, s)) / 1e9) for s in sizes])
        for name, sizes in compared.seconds.items()
    ]
    title = f"all-reduce on {compared.ranks} ranks of {cores()} cores"
    return chart(title, curves, ("bytes", "bus bandwidth, GB/s"), shown=_size) + "\n"


def _size(size: float) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor:g} {unit}"
    return f"{size:g} B"


# -------------------------------------------------------------------------------------------------- benchmark processes


def results_of(what: str, task: Mapping[str, Any], ranks: int, threads: int, named: str) -> list[dict[str, Any]]:
    """Run `shoal bench WHAT` on `ranks` ranks and return each rank's results, in order.

    `task`: JSON values for the ranks, which also get a folder and their threads. `named`: the benchmark, for errors.
    Raises: the error of a rank; LaunchError if the ranks ended without one.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        request = json.dumps({**task, "folder": folder, "threads": threads})
        logs = Path(folder) / "none" / "logs"
        code, error, _ = launch(LocalRun(["bench", what], ranks, threads, logs, request=request))
        if error is not None:
            raise error
        if code:
            raise LaunchError(
                given=named,
                conflict=f"it ended with code {code}",
                remedy=f"run shoal bench {what} again; nothing was written",
            )
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
