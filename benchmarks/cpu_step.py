"""Claim: a step of two processes takes 0.79 (MLP), 0.84 (LeNet), 0.89 and 0.95 (ResNet-18, two runs) of plain DDP's.

2 cores of a virtual machine without other programs, torch 2.13.0, 6 to 14 rows; quartiles 0.75 to 0.80, 0.81 to 0.87,
0.84 to 1.11 and 0.70 to 1.01: results/cpu_step.json, with earlier runs (MLP 0.78 to 0.92, LeNet 0.78 to 0.88). The GPT
takes 1.00 (0.94 to 1.10). Two processes that only meet once a step and sum nothing take 0.72, 0.91, 0.80 and 0.94, and
0.94 of DDP's. LeNet with channels last takes 0.58 (0.50 to 0.63), ResNet-18 0.98; on an Intel Xeon LeNet as a run
chooses takes 0.65, the MLP 0.68, the GPT 0.92 and ResNet-18 0.86, where processes that sum
nothing take 0.85. Against Accelerate 1.15.0, Lightning
Fabric 2.6.6 and DeepSpeed 0.19.8: 0.87, 0.89 and 0.57 on the MLP, 0.83, 0.91 and 0.93 on LeNet, 0.96, 1.00 and 1.01 on
the GPT, 0.87, 0.81 and 0.83 on ResNet-18. Exact mode over sockets takes 1.9 times DDP's step on the MLP and 1.05 times
on LeNet. A rank bound to a core takes as long as one that is not (1.01). Beside light work of others, groups of a shard
and of a tensor axis in shared memory take 0.67 and 0.86 of the MLP's step over Gloo (quartiles 0.62 to 0.70 and 0.82 to
0.88, 8 rows; teams shard, shard_shared, tensor and tensor_shared): docs/decisions/0025.

Repeat with `python -m benchmarks.cpu_step`: an MLP of 5.8 M parameters at global batch 256, LeNet at 256, the GPT of
3.3 M at 32 x 128 and ResNet-18 at 32, on made-up data. All teams live side by side and take turns, a few steps each,
while the others wait for a line on their standard input. A row is one segment of each; its figure for a team is the
median step, a ratio is taken within a row, and the median of the rows' ratios is reported with their quartiles. `cpu`
is the processor's time of rank 0 for a step, to which other programs add nothing but cold caches.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.small_jobs import machine
from benchmarks.step_time import ROOT, free_port

# Name: world size, threads, arguments of cpu_step_rank.
TEAMS: dict[str, tuple[int, int, list[str]]] = {
    "shared_memory": (2, 1, ["--tool", "shoal", "--all-reduce", "shared_memory"]),
    "one_copy": (2, 1, ["--tool", "shoal", "--all-reduce", "shared_memory", "--one-copy"]),
    "ddp": (2, 1, ["--tool", "plain"]),
    # Two processes that meet once a step and sum nothing: what is left where sums take no time.
    "meeting": (2, 1, ["--tool", "meeting"]),
    "bound_to_cores": (2, 1, ["--tool", "shoal", "--all-reduce", "shared_memory", "--bind"]),
    "native": (2, 1, ["--tool", "shoal"]),
    # Gradients and parameters cut over two ranks, and layers: over Gloo, and through shared memory.
    "shard": (2, 1, ["--tool", "shoal", "--axis", "shard"]),
    "shard_shared": (2, 1, ["--tool", "shoal", "--axis", "shard", "--all-reduce", "shared_memory"]),
    "tensor": (2, 1, ["--tool", "shoal", "--axis", "tensor"]),
    "tensor_shared": (2, 1, ["--tool", "shoal", "--axis", "tensor", "--all-reduce", "shared_memory"]),
    "one_process": (1, 2, ["--tool", "plain"]),
    "exact": (2, 1, ["--tool", "shoal", "--exact"]),
    "channels_last": (2, 1, ["--tool", "shoal", "--all-reduce", "shared_memory", "--channels-last"]),
    "accelerate": (2, 1, ["--tool", "accelerate"]),
    "fabric": (2, 1, ["--tool", "fabric"]),
    "deepspeed": (2, 1, ["--tool", "deepspeed"]),
    # One process of one thread: what shoal's step costs over a loop, and over one that has no loader either.
    "alone": (1, 1, ["--tool", "shoal"]),
    "bare": (1, 1, ["--tool", "plain"]),
    "lean": (1, 1, ["--tool", "lean"]),
}
# What has to be installed for a team; it is left out where that is not.
PEERS = {"accelerate": "accelerate", "fabric": "lightning_fabric", "deepspeed": "deepspeed"}
RATIOS = {f"{name} / ddp": (name, "ddp") for name in TEAMS if name != "ddp"}
RATIOS |= {f"{name} / one_process": (name, "one_process") for name in ("shared_memory", "channels_last")}
RATIOS |= {"channels_last / shared_memory": ("channels_last", "shared_memory")}
RATIOS |= {f"shared_memory / {peer}": ("shared_memory", peer) for peer in PEERS}
RATIOS |= {f"{axis}_shared / {axis}": (f"{axis}_shared", axis) for axis in ("shard", "tensor")}
RATIOS |= {f"{name} / meeting": (name, "meeting") for name in ("shared_memory", "bound_to_cores")}
RATIOS |= {"one_copy / shared_memory": ("one_copy", "shared_memory")}
RATIOS |= {"bound_to_cores / shared_memory": ("bound_to_cores", "shared_memory")}
RATIOS |= {f"alone / {name}": ("alone", name) for name in ("bare", "lean")}
TARGETS = {"mlp": 0.70, "lenet": 0.60, "gpt": 0.95, "resnet18": 0.75, "resnet18-strided": 0.75}
# Steps of a segment.
STEPS = {"mlp": 12, "lenet": 12, "gpt": 5, "resnet18": 4, "resnet18-strided": 6, "lenet-8": 150}
USUAL = ["shared_memory", "channels_last", "ddp", "meeting", "native", "one_process", "exact", *PEERS]


def answer(rank: subprocess.Popen[str]) -> list[float]:
    """The seconds that a rank tells, among what its library prints. Raises: SystemExit where it ends instead."""
    for line in rank.stdout or ():
        with contextlib.suppress(ValueError):
            told: list[float] = json.loads(line)
            return told
    raise SystemExit(f"a rank failed: {rank.wait()}")


class Team:
    """Ranks that train when asked to."""

    def __init__(self, name: str, job: str) -> None:
        world_size, threads, arguments = TEAMS[name]
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": str(threads),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.cpu_step_rank", "--job", job, *arguments],
                cwd=ROOT,
                env={**os.environ, **variables, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(world_size)
        ]

    def train(self, num_steps: int) -> tuple[float, float]:
        """Median seconds of so many steps on rank 0, and its processor time a step."""
        before = self._cpu_seconds()
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"go {num_steps}\n")
            rank.stdin.flush()
        told = [answer(rank) for rank in self.ranks]
        # A segment's first step meets the caches that the others left.
        return statistics.median(told[0][1:]), (self._cpu_seconds() - before) / num_steps

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.ranks[0].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def dismiss(self) -> None:
        """Ends the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def measure(job: str, names: list[str], num_rows: int) -> list[dict[str, tuple[float, float]]]:
    """Seconds and processor seconds of a step of each team, in each row."""
    teams = {name: Team(name, job) for name in names}
    rows = []
    try:
        for row in range(num_rows + 1):
            order = names[row % len(names) :] + names[: row % len(names)]  # nobody always comes first
            found = {name: teams[name].train(STEPS[job]) for name in order}
            if row:  # the first meets cold caches
                rows.append(found)
                print(
                    job, {name: f"{s * 1e3:.1f} ms ({c * 1e3:.1f} cpu)" for name, (s, c) in found.items()}, flush=True
                )
    finally:
        for team in teams.values():
            team.dismiss()
    return rows


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--trials", type=int, default=2, help="each starts new processes")
    parser.add_argument("--jobs", nargs="+", default=list(TARGETS))
    parser.add_argument("--teams", nargs="+", default=USUAL, choices=list(TEAMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name in set(options.teams) & set(PEERS):
        if importlib.util.find_spec(PEERS[name]) is None:
            print(f"note: {name} is left out: {PEERS[name]} is not installed")
            options.teams.remove(name)
    head: dict[str, object] = dict(machine())
    head |= {name: version(PEERS[name].replace("_", "-")) for name in PEERS if name in options.teams}
    print(json.dumps(head), flush=True)
    results: dict[str, object] = {}
    for job in options.jobs:
        rows = [row for _ in range(options.trials) for row in measure(job, options.teams, options.rows)]
        found: dict[str, Any] = {
            "step_milliseconds": {n: round(statistics.median(r[n][0] for r in rows) * 1e3, 2) for n in options.teams},
            "cpu_milliseconds": {n: round(statistics.median(r[n][1] for r in rows) * 1e3, 2) for n in options.teams},
            "aim of a step / ddp": TARGETS.get(job),
        }
        for name, (a, b) in RATIOS.items():
            if a in options.teams and b in options.teams:
                low, median, high = statistics.quantiles([r[a][0] / r[b][0] for r in rows], n=4)
                found[name] = {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}
        results[job] = found
        print(job, json.dumps(found), flush=True)
        for own in found.keys() & {"shared_memory / ddp", "channels_last / ddp"}:
            low, high = found[own]["quartiles"]
            print(f"{head['hardware']}: {job} {own} {found[own]['median']} ({low} to {high}), aim {TARGETS.get(job)}")
    text = json.dumps(
        {
            **head,
            "threads": {n: TEAMS[n][1] for n in options.teams},
            "trials": options.trials,
            "rows": options.rows,
            "results": results,
        },
        indent=2,
    )
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
