"""Claim: on CPUs a dropout of 16 thousand elements or more takes less time than torch's own; a small one takes longer.

Repeat with `python -m benchmarks.dropout`, which writes `results/dropout.json`. An `nn.Dropout(0.1)` runs forward and
backward inside shoal's scope of random numbers, in turns with the same module without it (A B A: torch, shoal, torch;
the turn's ratio is shoal's time over the mean of torch's two). A microbatch has 20 such dropouts and one backward.
Medians over the turns of the processor's time, of one and two threads.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.numerics.grain_randomness import GrainScope
from shoal.plans.grains import divide

RESULT = Path(__file__).parent / "results" / "dropout.json"
SHAPES: list[tuple[int, ...]] = [(8, 64), (32, 512), (64, 4096), (16, 128, 384), (16, 4, 128, 128)]


def seconds(module: nn.Module, input: torch.Tensor, gradients: list[torch.Tensor], scope: Any) -> float:
    """Time of a forward and backward of one dropout."""
    input.grad = None
    with scope:
        began = time.process_time()
        outputs = [module(input) for _ in gradients]
        spent = time.process_time() - began
    began = time.process_time()
    torch.autograd.backward(outputs, gradients)
    return (spent + time.process_time() - began) / len(gradients)


def measured(shape: tuple[int, ...], dtype: torch.dtype, num_turns: int) -> dict[str, Any]:
    """Medians in microseconds, and the median and quartiles of the turns' ratios."""
    module = nn.Dropout(0.1)
    input, gradients = torch.randn(shape, dtype=dtype, requires_grad=True), [torch.ones(shape, dtype=dtype)] * 20
    grains, names = divide(shape[0], shape[0], 8), {module: "drop"}
    rows = []
    for turn in range(num_turns):
        scopes = nullcontext(), GrainScope(0, turn, grains, names), nullcontext()
        rows.append([seconds(module, input, gradients, scope) * 1e6 for scope in scopes])
    ratios = [own / (before + after) * 2 for before, own, after in rows]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch_us": round(statistics.median(min(before, after) for before, _, after in rows), 1),
        "shoal_us": round(statistics.median(own for _, own, _ in rows), 1),
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def main(num_turns: int = 15) -> None:
    """Prints a line for each case, and writes the record."""
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                rows.append(measured(shape, dtype, num_turns))
                print(rows[-1], flush=True)
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    record = {"processor": processor.partition(": ")[2], "torch": torch.__version__, "turns": num_turns, "rows": rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
