"""Claim: with channels last, 39 nets take 0.51 to 1.47 of their step with channels first.

One thread of an Intel Xeon (Sapphire Rapids) in a virtual machine, torch 2.13.0: results/memory_format.json.
Which nets gain is not seen from the net alone, so that a run tries both formats. `chosen` in the results is of a rule
with constants of that processor, which runs followed before.

Repeat with `python -m benchmarks.memory_format`: forward and backward of the nets in image_nets.py with made-up images,
in both formats in turn. A ratio is taken of two steps after each other, and the median of the ratios is reported with
their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.image_nets import NETS, ImageNet
from benchmarks.small_jobs import machine
from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection

_FIRST = Precision.of(PrecisionSection(), torch.device("cpu"))
_LAST = replace(_FIRST, channels_last=True)
_WARM, _FEWEST, _MOST = 2, 7, 300


def samples(net: ImageNet) -> TensorDataset:
    """One batch of made-up inputs and classes; of texts the classes of all positions."""
    generator = torch.Generator().manual_seed(0)
    if len(net.batch) > 2:
        return TensorDataset(torch.randn(net.batch, generator=generator), torch.zeros(net.batch[0], dtype=torch.int64))
    text = torch.randint(net.classes, net.batch, generator=generator)
    return TensorDataset(text, text)


def steps(net: ImageNet) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that compute a step with channels first, and last; seconds. Gradients are added up where they lie."""
    torch.manual_seed(0)
    model, (inputs, targets) = net.make().train(), samples(net).tensors
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def step(images: Any) -> float:
        began = time.perf_counter()
        torch._foreach_zero_(gradients)
        F.cross_entropy(model(images).flatten(0, -2), targets.flatten()).backward()
        return time.perf_counter() - began

    return partial(step, _FIRST.inputs([inputs])[0]), partial(step, _LAST.inputs([inputs])[0])


def measured(net: ImageNet, seconds: float) -> dict[str, Any]:
    """Milliseconds of both, and the ratio of last over first with its quartiles."""
    first, last = steps(net)
    for _ in range(_WARM):
        first(), last()
    rows: list[tuple[float, float]] = []
    until = time.monotonic() + seconds
    while len(rows) < _FEWEST or (time.monotonic() < until and len(rows) < _MOST):
        if len(rows) % 2:  # neither always comes first
            second = last()
            rows.append((first(), second))
        else:
            rows.append((first(), last()))
    low, median, high = statistics.quantiles([b / a for a, b in rows], n=4)
    return {
        "first_milliseconds": round(statistics.median(a for a, _ in rows) * 1e3, 2),
        "last_milliseconds": round(statistics.median(b for _, b in rows) * 1e3, 2),
        "last / first": round(median, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rows": len(rows),
    }


def main() -> None:
    """Measures, prints, and adds to the results where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS), metavar="NET")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each net")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.nets:
        results[name] = measured(NETS[name], options.seconds)
        print(name, json.dumps(results[name]), flush=True)
    if options.out:
        before = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
        own = before.get(f"{options.threads} threads", {}) | results
        document = {**machine(), "results": {**before, f"{options.threads} threads": own}}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
