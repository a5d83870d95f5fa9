"""Claim: `shoal plan` takes 3.5 s for a GPT of 8 billion parameters on 512 H100, and 14 s on 16,384.

Seconds of processor time on one core, by part: the profile of the job, the choice (with the next best layouts and the
reasons of the others), the scaling curve. The aims for all three are 5 s on 512 devices and 60 s on 16,384.
`grains` is how many parts the batch has: with fewer than devices every plan divides the model.

Repeat with `python -m benchmarks.plan_search --trials 2`; each row is the median of its trials, with the least and the
most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.small_jobs import adamw, continued

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import shoal
from models import GPT
from shoal.planner.answer.answer import question
from shoal.planner.answer.outlook import curve
from shoal.planner.search.search import Aim, choose
from shoal.plans.plan import Plan, described

RESULTS = Path(__file__).resolve().parent / "results" / "plan_search.json"
# Devices and grains.
ROWS = ((8, 512), (512, 512), (16_384, 16_384), (16_384, 2_048))
BLOCK = 8192


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """As many sequences as a batch has."""

    def __init__(self, size: int) -> None:
        self._size, self._one = size, torch.zeros(BLOCK, dtype=torch.long)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self._one, self._one


def job(grains: int) -> shoal.Job:
    """A decoder of 40 layers of 4,096, 8.1 billion parameters."""
    return shoal.Job(
        model=partial(GPT, 40, 4096, 32, BLOCK, 0.0),
        loss=continued,
        optimizer=partial(adamw, lr=1e-3),
        train_data=partial(Tokens, grains),
        global_batch=grains,
        grains=grains,
        length=shoal.Steps(1000),
    )


def measured(devices: int, grains: int) -> tuple[dict[str, float], str]:
    """Seconds of each part, and what was chosen."""
    base = Plan().with_sections(precision={"compute": "bfloat16"})
    times = [time.process_time()]
    asked = question(job(grains), base, f"{devices // 8}x8xH100-SXM" if devices > 8 else "8xH100-SXM", None)
    times.append(time.process_time())
    search = asked.case.search()
    choice = choose(search, Aim(), asked.num_steps)
    times.append(time.process_time())
    curve(search, choice.chosen.devices)
    times.append(time.process_time())
    parts = (after - before for before, after in pairwise(times))
    found = dict(zip(("profile", "choice", "curve"), parts, strict=True))
    return found, described(choice.chosen.plan)


def main() -> None:
    """Measures, prints and writes what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--most", type=int, default=ROWS[-1][0], help="no more devices than these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for devices, grains in (row for row in ROWS if row[0] <= options.most):
        found = [measured(devices, grains) for _ in range(options.trials)]
        row: dict[str, object] = {"devices": devices, "grains": grains, "chosen": found[0][1]}
        for part in found[0][0]:
            seconds = sorted(one[part] for one, _ in found)
            row[part] = [round(s, 2) for s in (statistics.median(seconds), seconds[0], seconds[-1])]
        rows.append(row)
        print(row, flush=True)
    document = {"torch": torch.__version__, "trials": options.trials, "seconds": "median, least, most"}
    document |= {"rows": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
