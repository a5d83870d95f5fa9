"""A random search over two settings of the digits; a run that is worse than the median of the others is stopped.

python examples/sweep.py; then: shoal runs runs/sweep
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import replace

import digits
import shoal


class MedianPruner(shoal.Callback):
    """Ends a run whose accuracy is below the median of the other runs' at the same step, if there are enough."""

    def __init__(self, metric: str = "accuracy", least: int = 2) -> None:
        self.metric, self.least = metric, least

    def on_evaluation(self, run: shoal.RunControl, metrics: Mapping[str, float]) -> None:
        if run.rank > 0 or run.out is None:
            return
        folders = [
            folder for folder in run.out.parent.iterdir() if folder != run.out and (folder / "job.json").exists()
        ]
        records = [record for folder in folders for record in shoal.Run(folder).records if record.step == run.step]
        others = [record.metrics[self.metric] for record in records if record.metrics]
        if len(others) >= self.least and metrics[self.metric] < (median := statistics.median(others)):
            run.request_end(f"pruned: the median of {len(others)} other runs is {median:.3f}")


def job(lr: float, momentum: float = 0.9, epochs: int = 4) -> shoal.Job:
    """The job of examples/digits.py, with the pruner."""
    return replace(
        digits.job(lr=lr, momentum=momentum, epochs=epochs), callbacks=[MedianPruner()], watch="accuracy:max"
    )


def sweep(trials: int = 6, devices: int = 1, out: str = "runs/sweep") -> dict[str, float]:
    """Train `trials` runs one after the other, and return the accuracy of those that were not pruned."""
    draws, accuracies = random.Random(0), {}
    for number in range(trials):
        lr, momentum = 10 ** draws.uniform(-4, -0.5), draws.uniform(0.0, 0.9)
        run = shoal.run(job, lr=lr, momentum=momentum, devices=devices, out=f"{out}/{number}")
        if not run.result.get("ended_by"):
            accuracies[f"{out}/{number}"] = run.result["metrics"]["accuracy"]
    return accuracies


if __name__ == "__main__":
    accuracies = sweep()
    print("best:", max(accuracies, key=accuracies.__getitem__))
