"""Claim: on an H200 a graph takes a step of LeNet of batch 64 to 0.22 of its time, with dropout to 0.33, in one turn.

On a CPU (`--dry`) the plan is refused, and the steps without a graph run.

Repeat with `python -m benchmarks.gpu_captured` on a machine with a GPU. LeNet, without dropout and with it, trains with
`execution.cuda_graph` and without, by turns of whole runs in one process. A step's milliseconds are the median over the
blocks of a run (`benchmarks.gpu_step` says how a block is timed), and a ratio is taken within a turn. A run whose step
was not captured says why, and its figures count as of no graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks import small_jobs
from benchmarks.gpu_step import measure
from shoal.errors import PlanError


class LeNetWithDropout(nn.Module):
    """LeNet, and dropout before its output's classes are told apart."""

    def __init__(self, lenet: nn.Module) -> None:
        super().__init__()
        self.dropout, self.lenet = nn.Dropout(0.25), lenet

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lenet(self.dropout(images))
        return found


def jobs(batch: int) -> dict[str, shoal.Job]:
    """The jobs by name."""
    lenet = small_jobs.lenet(batch)
    return {"lenet": lenet, "lenet with dropout": replace(lenet, model=lambda: LeNetWithDropout(lenet.model()))}


def course(job: shoal.Job, captured: bool, turns: int, counts: tuple[int, int]) -> tuple[float, list[str]]:
    """Seconds of a step, and the notes of the run."""
    notes: list[str] = []
    found = measure(job, False, turns, counts, others=(), execution={"cuda_graph": captured}, notes=notes)
    return statistics.median(found["shoal"]), notes


def compared(job: shoal.Job, turns: int, counts: tuple[int, int], dry: bool) -> dict[str, Any]:
    """Milliseconds of a step both ways, their ratio, and what the runs have said of the graph."""
    seconds: dict[str, list[float]] = {"queued": [], "captured": []}
    said: list[str] = []
    for _ in range(turns):
        seconds["queued"].append(course(job, False, 3, counts)[0])
        try:
            found, said = course(job, True, 3, counts)
        except PlanError as error:
            if not dry:
                raise
            return {"milliseconds": {"queued": seconds["queued"][0] * 1e3}, "refused": str(error.conflict)}
        seconds["captured"].append(found)
    ratios = [a / b for a, b in zip(seconds["captured"], seconds["queued"], strict=True)]
    return {
        "milliseconds": {name: round(statistics.median(own) * 1e3, 4) for name, own in seconds.items()},
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "said": said,
    }


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="counted steps of a block")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dry", action="store_true", help="two steps, on whatever device there is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    turns, steps = (1, 2) if options.dry else (options.turns, options.steps)
    batch = 8 if options.dry else options.batch
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    answer: dict[str, Any] = {"device": name, "torch": torch.__version__, "batch": batch, "dry": options.dry}
    for kind, job in jobs(batch).items():
        answer[kind] = compared(job, turns, (max(2, steps // 5), steps), options.dry)
    text = json.dumps(answer, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
