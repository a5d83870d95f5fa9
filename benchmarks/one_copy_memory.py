"""Claim: ranks of a host with one copy of a GPT of 30 M parameters and AdamW hold what is predicted, within 2 %.

Two steps on 2 and 4 processes. Between steps each rank's share of the pages that it maps (PSS in
/proc/PID/smaps_rollup: a page that n processes map counts 1/n for each) above what it was once everything was loaded
and a small model had been trained the same way; added over the ranks, beside parameters, gradients and optimizer state
by the formulas. Both times after malloc_trim: pages that hold nothing, but that the C library keeps for later, 10 to
20 MB for each rank, are not what a rank holds.

    python -m benchmarks.one_copy_memory                    # 2 and 4 ranks, about three minutes
    python -m benchmarks.one_copy_memory --ranks 2 --layers 2
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shoal
from benchmarks.sharded_memory import WIDTH, job, of_each_rank, train
from shoal.distributed.mesh import Mesh
from shoal.plans.plan import Plan
from shoal.training.observe.metering import Shares, StepMeter, describe, predicted
from shoal.training.setup.engine import Options, build

HELD = ("parameters", "gradients", "optimizer")


def share_of_pages() -> int:
    """PSS of this process in bytes, without pages that hold nothing any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"), re.M)
    assert found is not None, "the kernel tells it"
    return int(found[1]) << 10


def held(made: shoal.Job, plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """Growth of this rank's PSS over two steps, and what the formulas say that it holds between steps."""
    dist.barrier()
    before, meter = share_of_pages(), StepMeter()
    dist.barrier()
    engine = build(made, plan, mesh, Options(telemetry=False, eval_samples=1, observer=meter))
    try:
        meter.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
        found = train(engine)
        dist.barrier()
        grown = share_of_pages() - before
        dist.barrier()
        shares = Shares(
            engine.job.num_grains,
            engine.order.grains(meter.step or 0),
            found.effective_grains,
            engine.buffers.num_values,
        )
        step = describe(engine.sharded_model, engine.updater.optimizer, plan, engine.precision, shares)
        footprint = predicted(plan, step, mesh.rank)["memory"]
        return {"pss": grown, "predicted": sum(footprint[name] for name in HELD)}
    finally:
        meter.close()
        engine.close()


def measure(ranks: int, *, shared: bool, layers: int, width: int = WIDTH) -> list[dict[str, Any]]:
    """Every rank of one plan, as `held`."""
    sections = {"layout": {"data": ranks}, "collectives": {"all_reduce": "shared_memory"}, "memory": {"shared": shared}}
    whole = shoal.Plan().with_sections(**sections)
    return of_each_rank(whole, (job(layers=1, width=64), job(layers=layers, width=width)), held, lean=True)


def main() -> None:
    """Prints a line for each plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=9)
    options = parser.parse_args()
    for ranks in options.ranks:
        for shared in (True, False):
            told = measure(ranks, shared=shared, layers=options.layers)
            pss, wanted = (sum(rank[name] for rank in told) for name in ("pss", "predicted"))
            print(json.dumps({"ranks": ranks, "shared": shared, "pss": pss, "predicted": wanted}), flush=True)


if __name__ == "__main__":
    main()
