"""Claim: metrics over all predictions have one value on 1 to 4 ranks; the customary program of DDP gives others.

2 CPU cores, torch 2.13.0; the table is benchmarks/results/coupled_metrics.md.

Repeat with `python -m benchmarks.coupled_metrics`. A small network that has learned to tell even digits from odd ones
is evaluated on 899 images. The customary program reads a `DistributedSampler`, which repeats samples to fill the
shares, and either takes the mean of the ranks' values or gathers all predictions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, brier_score_loss, f1_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import shoal
from shoal.data.source import open_evaluation
from shoal.distributed.mesh import alone, open_mesh
from shoal.launch.environment import Environment
from shoal.numerics.outputs import evaluated_functions
from shoal.numerics.precision import Precision
from shoal.plans.plan import Layout, PrecisionSection
from shoal.training.microbatch.evaluation import Evaluator
from shoal.verification.forked import forked

RESULTS = Path(__file__).parent / "results"
RANKS = (1, 2, 3, 4)
CPU = torch.device("cpu")


def f1(outputs: Tensor, targets: Tensor) -> float:
    """F1 at the threshold one half."""
    return float(f1_score(targets, outputs > 0.5))


VALUES: dict[str, Callable[..., float]] = {
    "AUROC": lambda outputs, targets: roc_auc_score(targets, outputs),
    "F1": f1,
    "average precision": lambda outputs, targets: average_precision_score(targets, outputs),
    "Brier score": lambda outputs, targets: brier_score_loss(targets, outputs),
}


class Network(nn.Module):
    """Two layers that give the probability of an odd digit, and the number of their forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities [N] of images [N, 64]."""
        self.forwards += 1
        return self.layers(images)[:, 0].sigmoid()


def learned(data: tuple[Tensor, Tensor]) -> Network:
    """The network after some steps, which still errs."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy(model(data[0]), data[1].float()).backward()
        optimizer.step()
    return model


def evaluated(model: Network, data: Any, metrics: Mapping[Any, Any], ranks: int = 1) -> dict[str, float]:
    """The values of an evaluation in shoal, which all ranks have."""
    job = shoal.Job(
        model=lambda: model,
        loss=lambda model, batch: shoal.mse(model(batch[0]), batch[1].float()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
        eval_data=data,
        metrics=metrics,
        global_batch=64,
    )
    precision = Precision.of(PrecisionSection(), CPU)

    def on(mesh: Any) -> dict[str, float]:
        opened = open_evaluation("eval_data", data, None)
        return Evaluator(job, mesh, precision, opened, evaluated_functions(job)).evaluate(model)[0]

    if ranks == 1:
        return on(alone(CPU))
    with tempfile.TemporaryDirectory() as name:

        def rank(environment: Environment) -> None:
            with open_mesh(environment, Layout(data=ranks)) as mesh:
                (Path(name) / f"{environment.rank}.json").write_text(json.dumps(on(mesh)))

        with forked(ranks, rank, Path(name) / "ranks") as wait:
            wait()
        found = [json.loads((Path(name) / f"{number}.json").read_text()) for number in range(ranks)]
    assert all(one == found[0] for one in found)
    return found[0]


def customary(outputs: Tensor, targets: Tensor, ranks: int) -> dict[str, dict[str, float]]:
    """The values of the mean over ranks, and of the predictions gathered from all ranks."""
    shares = [
        torch.tensor(list(DistributedSampler(range(len(outputs)), ranks, rank, shuffle=False)))  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    every = torch.cat(shares)
    return {
        name: {
            "mean": sum(float(value(outputs[own], targets[own])) for own in shares) / ranks,
            "gathered": float(value(outputs[every], targets[every])),
        }
        for name, value in VALUES.items()
    }


def forwards(model: Network, data: Any) -> dict[str, int]:
    """Forwards of a batch for the loss and seven metrics, written in three ways."""
    first = tuple(part[:64] for part in data)

    def mean(power: int) -> Callable[[Any, Any], Any]:
        return lambda model, batch: ((model(batch[0]) ** power).sum(), len(batch[0]))

    def together(model: Any, batch: Any) -> dict[str, Any]:
        rows = model(batch[0])
        pairs: dict[str, Any] = {f"mean {power}": ((rows**power).sum(), len(rows)) for power in range(3)}
        over = {name: shoal.over_all(value, rows, batch[1]) for name, value in VALUES.items()}
        return {"loss": shoal.mse(rows, batch[1].float()), **pairs, **over}

    over = {name: shoal.over_all(value) for name, value in VALUES.items()}
    names = ("loss", *(f"mean {power}" for power in range(3)), *VALUES)
    ways: dict[str, Mapping[Any, Any]] = {
        "seven functions": {f"mean {power}": mean(power) for power in range(7)},
        "three functions, four shoal.over_all": {**{f"mean {power}": mean(power) for power in range(3)}, **over},
        "one function": {names: together},
    }
    counts = {}
    for way, metrics in ways.items():
        model.forwards = 0
        evaluated(model, first, metrics)
        counts[way] = model.forwards
    return counts


def page(numbers: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Metrics over all predictions",
        "",
        "Generated by `python -m benchmarks.coupled_metrics`; numbers in coupled_metrics.json. A network that tells "
        f"even digits from odd ones, {numbers['samples']} samples, 2 CPU cores, torch {torch.__version__}. The "
        "customary program reads a `DistributedSampler` and takes the mean of the ranks' values, or gathers all "
        "predictions with the samples that fill the shares.",
        "",
        "| metric | shoal on 1 rank | values on 1, 2, 3, 4 ranks | mean over 2, 4 ranks | gathered from 2, 4 |",
        "|---|---|---|---|---|",
    ]
    for name in VALUES:
        shown = [f"{numbers['shoal']['1'][name]:.8f}", str(len({one[name] for one in numbers["shoal"].values()}))]
        two, four = numbers["customary"]["2"][name], numbers["customary"]["4"][name]
        shown += [f"{two[kind]:.8f}, {four[kind]:.8f}" for kind in ("mean", "gathered")]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "| the loss and seven metrics | forwards of a batch |", "|---|---|"]
    lines += [f"| {way} | {count} |" for way, count in numbers["forwards"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the records."""
    torch.set_num_threads(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, is_odd = (images / 16).float(), labels % 2
    data = images[:899], is_odd[:899]
    model = learned((images[899:], is_odd[899:]))
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in data[0].split(64)])
    over = {name: shoal.over_all(value) for name, value in VALUES.items()}
    numbers: dict[str, Any] = {
        "samples": len(outputs),
        "shoal": {str(ranks): evaluated(model, data, over, ranks) for ranks in RANKS},
        "customary": {str(ranks): customary(outputs, data[1], ranks) for ranks in (2, 4)},
        "forwards": forwards(model, data),
    }
    (RESULTS / "coupled_metrics.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (RESULTS / "coupled_metrics.md").write_text(page(numbers))
    print(page(numbers))


if __name__ == "__main__":
    main()
