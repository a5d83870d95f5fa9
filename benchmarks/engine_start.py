"""Claim: a run begins no later with shoal's launchers than with the engine's own, but for half a second on Slurm.

Seconds to the first step, medians of 3 on 2 cores without other work, torch 2.13.0:
benchmarks/results/engines_first_step.md.

Repeat on an idle machine with `scripts/engines slurm mpi ray spark`, then as root
`python -m benchmarks.engine_start [NAME ...]`. The same run, two ranks of tests/jobs/tiny.py on this host, is started
by shoal's launcher and by the engine's own, in turns; the time is from the command to the end of the first step, by
the record of that step. Clusters of Slurm (one node) and Ray are up before; Spark's session is made by either.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.engines import ray_cluster, slurm_cluster

TRIALS, LIMIT_SECONDS = 3, 120.0
ROOT = Path(__file__).parents[1]
JOB = ROOT / "tests" / "jobs" / "tiny.py"
PAGE = ROOT / "benchmarks" / "results" / "engines_first_step.md"
SHOAL = [sys.executable, "-m", "shoal"]
RUN = ["run", str(JOB), "--steps", "2"]
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RAY_TRAIN = """\
import sys
import shoal
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

job, out = sys.argv[1:]
run = RunConfig(name="run", storage_path=out + "-ray")
work = lambda: shoal.run(job, steps=2, devices=2, out=out)
TorchTrainer(work, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
"""
TORCH_DISTRIBUTOR = """\
import sys
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Pair:
    """Two commands of the same run: shoal's launcher and the engine's own, each for a run directory."""

    name: str
    shoal: Callable[[Path], list[str]]
    own: Callable[[Path], list[str]]
    own_is: str
    variables: dict[str, str]


def ranks(out: Path) -> list[str]:
    return [*SHOAL, *RUN, "--devices", "2", "--out", str(out)]


def on(engine: str) -> Callable[[Path], list[str]]:
    return lambda out: [*ranks(out), "--on", engine]


def scripted(text: str) -> Callable[[Path], Path]:
    """A file beside a run directory with a program."""

    def write(out: Path) -> Path:
        path = out.with_suffix(".py")
        path.write_text(text.replace("COMMAND", shlex.join(ranks(out))), encoding="utf-8")
        return path

    return write


@contextlib.contextmanager
def pairs(folder: Path) -> Iterator[list[Pair]]:
    """All pairs, with the clusters that they need."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shoal", *RUN]
    submit = ["sbatch", "--parsable", "--ntasks=2"]
    batch = scripted("#!/bin/bash\nsrun --mpi=none COMMAND\n")
    train, distribute = scripted(RAY_TRAIN), scripted(TORCH_DISTRIBUTOR)
    spark = [shutil.which("spark-submit", path=str(Path(sys.executable).parent)) or "spark-submit"]
    spark += [
        "--master",
        "local[2]",
        "--conf",
        "spark.ui.enabled=false",
        "--conf",
        "spark.driver.bindAddress=127.0.0.1",
    ]
    spark += ["--conf", "spark.driver.host=127.0.0.1"]
    quiet = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    main = str(ROOT / "src" / "shoal" / "__main__.py")
    found = [
        Pair("this host", ranks, lambda out: [*torchrun, "--out", str(out)], "torchrun", {}),
        *(
            Pair(f"MPI, {name}", on(f"mpi:{path}"), lambda out, p=path: [p, "-n", "2", *ranks(out)], "mpirun", MPI)
            for name, path in (("Open MPI", "mpirun.openmpi"), ("MPICH", "mpirun.mpich"))
        ),
        Pair(
            "Spark",
            on("spark:master=local[2]"),
            lambda out: [*spark, str(distribute(out)), main, *RUN, "--out", str(out)],
            "spark-submit, TorchDistributor",
            quiet,
        ),
    ]
    with slurm_cluster.started(folder / "slurm", "n1") as slurm, ray_cluster.started(folder) as ray:
        found.append(
            Pair("Slurm", on("slurm"), lambda out: [*submit, str(batch(out))], "sbatch, srun", slurm.variables)
        )
        found.append(
            Pair(
                "Ray",
                on(f"ray:address={ray.address}"),
                lambda out: [sys.executable, str(train(out)), str(JOB), str(out)],
                "Ray Train's TorchTrainer",
                {**ray.variables, "RAY_ADDRESS": ray.address},
            )
        )
        yield found


def seconds(command: list[str], variables: dict[str, str], out: Path) -> float:
    """From the command to the end of the first step. Raises: RuntimeError where there is none."""
    began, log = time.time(), out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(JOB.parent), **variables},
            cwd=out.parent,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
        if process.wait(LIMIT_SECONDS):
            raise RuntimeError(f"{shlex.join(command)}: {log.read_text(errors='replace')[-2000:]}")
    records = out / "records.jsonl"
    deadline = time.time() + LIMIT_SECONDS  # sbatch returns at once
    while not (out / "result.json").exists():
        if time.time() > deadline:
            raise RuntimeError(f"{shlex.join(command)}: no run\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return float(json.loads(records.read_text(encoding="utf-8").splitlines()[0])["at"]) - began


def measured(pair: Pair, folder: Path) -> dict[str, list[float]]:
    """Seconds of both commands of a pair, in turns."""
    times: dict[str, list[float]] = {"shoal": [], "own": []}
    for trial in range(TRIALS):
        for kind, command in (("shoal", pair.shoal), ("own", pair.own)):
            out = folder / f"{pair.name.replace(' ', '-').replace(',', '')}-{kind}-{trial}"
            times[kind].append(seconds(command(out), pair.variables, out))
    return times


def main(names: list[str]) -> None:
    """Measures, and writes the page."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="shoal-start-") as name, pairs(Path(name)) as found:
        for pair in (pair for pair in found if not names or pair.name in names):
            try:
                times = measured(pair, Path(name))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{pair.name}: {error}", file=sys.stderr, flush=True)
                continue
            said = {kind: f"{statistics.median(t):.1f} ({min(t):.1f} to {max(t):.1f})" for kind, t in times.items()}
            rows.append(f"| {pair.name} | {said['shoal']} | {said['own']} | {pair.own_is} |")
            print(rows[-1], flush=True)
    if not names:
        PAGE.write_text(f"{HEAD}{chr(10).join(rows)}\n{FOOT}", encoding="utf-8")


HEAD = f"""\
# Time to the first step

Seconds from the command to the end of the first step, of the same run of two ranks on one host of two cores: started
by `shoal run`, and by the engine's own launcher, in turns. Medians of {TRIALS}, with the least and the most. Clusters
of Slurm and Ray were up; Spark's session is made by either command. `python -m benchmarks.engine_start` repeats it.

| Engine | `shoal run --on ...` | its own launcher | which is |
|---|---|---|---|
"""
FOOT = """
`--on mpi` starts mpirun once more before the ranks where no option names a host, to learn where rank 0 will be.
"""

if __name__ == "__main__":
    main(sys.argv[1:])
