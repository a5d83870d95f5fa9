"""Claim: compressed sums send the bytes that the formulas say, and int8 and 16 bits train to the uncompressed loss.

On 2 busy cores, torch 2.13, two seeds a row and three of the uncompressed run: bytes of every scheme are the formula's.
Within the spread of the uncompressed run (LeNet on Fashion-MNIST, an epoch: 0.035; a GPT, 300 steps: 0.009) end
bfloat16, float16 and int8 (0.0006 above it at most, as means over seeds), and on LeNet topk of 10 % and powersgd of
rank 4. Not within it: topk of 1 % (0.045 and 0.50 above), and on the GPT, trained by AdamW, topk of 10 % (0.11) and
powersgd (0.064). The guard fires on the planted case of either task and on no other. A step of a GPT of 3.3 M takes
0.94 to 1.07 times that of the uncompressed run in the same rounds (five, with quartiles as far apart): over loopback
compression neither pays nor costs much.

benchmarks/results/compression.md has the table: of each scheme, on two ranks, bytes of gradients and of all messages in
a step, the loss on held-out data after training, beside the spread of the uncompressed run over seeds, and the
time of a step beside the uncompressed one in the same run. Repeat with `python -m benchmarks.compression [--again]`.
Each cell is kept in benchmarks/results/compression.json as it comes, so that what was cut short goes on (`--seconds`,
`--only`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compression.json"
PAGE = ROOT / "benchmarks" / "results" / "compression.md"
BEGIN, END = "<!-- written by benchmarks/compression.py -->", "<!-- end of what it writes -->"


@dataclass(frozen=True)
class Row:
    """A scheme with its options."""

    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1)


ROWS = {
    "none": Row("none", seeds=(0, 1, 2)),  # what a seed changes is the noise
    "bfloat16": Row("bfloat16"),
    "float16": Row("float16"),
    "int8": Row("int8"),
    "topk 10 %": Row("topk", {"density": 0.1}),
    "topk 1 %": Row("topk", {"density": 0.01}),
    "powersgd": Row("powersgd"),
}
# What loses nearly all of each gradient for good: here the guard has to fire.
PLANTED = {
    "topk of 0.01 % without feedback": Row("topk", {"density": 1e-4, "feedback": False}, (0,)),
}
GUARD_EVERY = 25
TASKS: dict[str, dict[str, Any]] = {
    "lenet": {"epochs": 1},
    "gpt": {"steps": 300, "layers": 2, "width": 64, "block": 64},
}
TITLES = {"lenet": "LeNet on Fashion-MNIST, one epoch", "gpt": "GPT of 0.12 M parameters, 300 steps"}
TIMED_STEPS, ROUNDS, DISCARDED = 6, 5, 2
TIMED = {"steps": 10**6, "layers": 4, "width": 256}


@dataclass(frozen=True)
class Cell:
    """What came of one training: bytes of one rank in a step, and the mean loss over the evaluation data."""

    task: str
    row: str
    seed: int
    eval_loss: float
    eval_accuracy: float
    payload_bytes: int
    traffic: dict[str, Any]
    predicted: dict[str, Any]
    num_compared: int
    worst_lost: float | None
    least_cosine: float | None
    fell_back: dict[str, Any] | None
    step_seconds: float


def job(task: str, **settings: Any) -> Any:
    """The example's job."""
    sys.path.insert(0, str(ROOT / "examples"))
    import fashion_mnist
    import gpt

    made = {"lenet": fashion_mnist.job, "gpt": gpt.job}[task]
    return made(**settings)


def planned(made: Any, row: Row) -> Any:
    """Two data ranks."""
    import shoal

    sections: dict[str, dict[str, Any]] = {"layout": {"data": 2}, "collectives": {"compression": row.scheme}}
    if row.scheme != "none":
        sections["compression"] = {"guard_every": GUARD_EVERY, **row.options}
    from shoal.training.setup.preflight import judged

    return judged(made, shoal.Plan().with_sections(**sections)).plan


def train(task: str, name: str, seed: int, folder: Path) -> Cell:
    """One cell on two forked ranks, each with one thread."""
    from shoal.verification.forked import forked

    made = job(task, seed=seed, **TASKS[task])
    plan = planned(made, (ROWS | PLANTED)[name])
    with forked(2, partial(_rank, made, plan, folder), folder) as wait:
        wait()
    told = json.loads((folder / "told.json").read_text())
    return Cell(task=task, row=name, seed=seed, **told)


def _rank(made: Any, plan: Any, folder: Path, environment: Any) -> None:
    from shoal.distributed.mesh import open_mesh
    from shoal.plans.accounting.all_reduce import compressed_calls
    from shoal.training.microbatch.policy import MicrobatchPolicy
    from shoal.training.observe.metering import Shares, StepMeter, describe, predicted
    from shoal.training.observe.step_records import RecordWriter, Surroundings
    from shoal.training.setup.engine import Options, build

    records: list[Any] = []
    around = Surroundings(lambda line: None, lambda record, rank: records.append(record), lambda: False)
    with open_mesh(environment, plan.layout) as mesh:
        meter = StepMeter()
        engine = build(made, plan, mesh, Options(telemetry=False, observer=meter))
        try:
            meter.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
            outcome = engine.trainer(None, engine.order.num_steps, around, RecordWriter(None)).train()
            found = MicrobatchPolicy.from_json(outcome.state.computation or {})
            shares = Shares(made.grains, engine.order.grains(1), found.effective_grains, engine.buffers.num_values)
            step = describe(engine.sharded_model, engine.updater.optimizer, plan, engine.precision, shares)
            if mesh.rank:
                return
            compared = [r.compression for r in records if r.compression]
            payload = step.gradients.numel * step.gradients.reduce_itemsize
            if plan.collectives.compression != "none":
                buckets = [[step.gradients.parameters[i].shape for i in group] for group in step.gradients.groups]
                payload = sum(
                    call.numel * call.itemsize for shapes in buckets for call in compressed_calls(plan, shapes)
                )
            told = {
                "eval_loss": outcome.metrics.get("loss", outcome.metrics.get("bits_per_byte")),
                "eval_accuracy": outcome.metrics["accuracy"],
                "payload_bytes": payload,
                "traffic": (meter.to_json() or {})["traffic"],
                "predicted": predicted(plan, step, mesh.rank)["traffic"],
                "num_compared": len(compared),
                "worst_lost": max((c["lost"] for c in compared), default=None),
                "least_cosine": min((c["cosine"] for c in compared), default=None),
                "fell_back": engine.strategy.compression.fell_back if engine.strategy.compression else None,
                "step_seconds": statistics.median(outcome.step_seconds),
            }
            (folder / "told.json").write_text(json.dumps(told))
        finally:
            meter.close()
            engine.close()


# -------------------------------------------------------------------------------------------------------------- time


def timed(folder: Path, number: int) -> dict[str, float]:
    """Median seconds of a step of the GPT example under each scheme, in one round of them."""
    from shoal.verification.forked import forked

    found = {}
    made = job("gpt", **TIMED)
    for name, row in ROWS.items():
        into = folder / f"{name}-{number}"
        with forked(2, partial(_timed_rank, made, planned(made, row), into), into) as wait:
            wait()
        found[name] = json.loads((into / "told.json").read_text())
    return found


def _timed_rank(made: Any, plan: Any, folder: Path, environment: Any) -> None:
    from shoal.distributed.mesh import open_mesh
    from shoal.training.observe.step_records import RecordWriter, Surroundings
    from shoal.training.setup.engine import Options, build

    around = Surroundings(lambda line: None, lambda record, rank: None, lambda: False)
    with open_mesh(environment, plan.layout) as mesh:
        engine = build(made, plan, mesh, Options(telemetry=False, eval_samples=1))
        try:
            outcome = engine.trainer(None, TIMED_STEPS, around, RecordWriter(None)).train()
            if mesh.rank == 0:
                seconds = statistics.median(outcome.step_seconds[DISCARDED:])
                (folder / "told.json").write_text(json.dumps(seconds))
        finally:
            engine.close()


# ------------------------------------------------------------------------------------------------------------- table


def total_bytes(traffic: dict[str, Any]) -> int:
    """Bytes that each of two ranks puts on the wire in a step: half of what is gathered, all of what is summed."""
    return sum(
        kind["bytes"] // 2 if name == "all_gather" else kind["bytes"]
        for kinds in traffic.values()
        for name, kind in kinds.items()
    )


def table(kept: dict[str, Any]) -> list[str]:
    """The tables of the page."""
    cells = [Cell(**cell) for cell in kept["cells"].values()]
    lines = []
    for task, title in TITLES.items():
        by = {name: found for name in ROWS if (found := [c for c in cells if c.task == task and c.row == name])}
        if "none" in by:
            lines += [*losses(title, by), ""]
    for c in cells:
        if c.row in PLANTED and c.fell_back is not None:
            plain = next(other for other in cells if (other.task, other.row, other.seed) == (c.task, "none", c.seed))
            lines.append(
                f"- The guard's planted case, {c.task}, {c.row}: fires at step {c.fell_back['step']} "
                f"(`lost` {c.fell_back['lost']:.2f}); from there uncompressed it ends at {c.eval_loss:.4f}, "
                f"the uncompressed run of its seed at {plain.eval_loss:.4f}."
            )
        elif c.row in PLANTED:
            lines.append(f"- The guard's planted case, {c.task}, {c.row}: **silent**, worst `lost` {c.worst_lost:.2g}.")
    return [*lines, *([] if lines[-1:] == [""] else [""]), *times(kept["rounds"])]


def losses(title: str, by: dict[str, list[Cell]]) -> list[str]:
    """One task's table: cells by row, those of the uncompressed run among them."""
    plain = {c.seed: c.eval_loss for c in by["none"]}
    noise = max(plain.values()) - min(plain.values())
    whole = by["none"][0].payload_bytes
    lines = [
        f"**{title}**. Uncompressed: loss {min(plain.values()):.4f} to {max(plain.values()):.4f} over "
        f"{len(plain)} seeds, a spread of {noise:.4f}.",
        "",
        "| scheme | gradients, bytes | of float32 | a rank sends, bytes | as the formula | loss | beside "
        "uncompressed, by seed | mean | within noise | guard | worst `lost` | least cosine |",
        "|---|---:|---:|---:|---|---:|---|---:|---|---|---:|---:|",
    ]
    for name, found in by.items():
        first = found[0]
        paired = [c.eval_loss - plain[c.seed] for c in found if c.seed in plain]
        beside = statistics.mean(paired)
        words = [
            name,
            f"{first.payload_bytes:,}",
            f"1 / {whole / first.payload_bytes:.1f}",
            f"{total_bytes(first.traffic):,}",
            "yes" if all(c.traffic == c.predicted for c in found) else "no",
            f"{statistics.mean(c.eval_loss for c in found):.4f}",
        ]
        if name == "none":
            lines.append("| " + " | ".join([*words[:2], "", *words[3:], *[""] * 6]) + " |")
            continue
        worst = max(c.worst_lost or 0.0 for c in found)
        fired = sum(c.fell_back is not None for c in found)
        words += [
            ", ".join(f"{difference:+.4f}" for difference in paired),
            f"{beside:+.4f}",
            "yes" if beside <= noise else "no",
            f"fired in {fired}" if fired else f"silent, {sum(c.num_compared for c in found)} times asked",
            f"{worst:.2g}" if worst >= 1e-6 else "< 1e-6",
            f"{min(c.least_cosine or 0.0 for c in found):.3f}",
        ]
        lines.append("| " + " | ".join(words) + " |")
    return lines


def times(rounds: list[dict[str, float]]) -> list[str]:
    """The table of seconds."""
    if not rounds:
        return []
    by = {name: [round_[name] for round_ in rounds] for name in ROWS}
    lines = [
        f"**Time of a step**, GPT of 3.3 M parameters, two ranks of a thread each, Gloo over loopback, median of "
        f"{len(rounds)} rounds of {TIMED_STEPS - DISCARDED} steps (least and most):",
        "",
        "| scheme | milliseconds | beside uncompressed, round by round |",
        "|---|---:|---:|",
    ]
    for name, seconds in by.items():
        ratios = [a / b for a, b in zip(seconds, by["none"], strict=True)]
        spread = f"({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if name != "none" else ""
        lines.append(f"| {name} | {statistics.median(seconds) * 1e3:.0f} {spread} | {ratio} |")
    return lines


def remembered() -> dict[str, Any]:
    """The results so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}, "rounds": []}


def wanted() -> Iterator[tuple[str, str, int]]:
    """What there is to do: what a table cannot be without comes first."""
    yield from ((task, "none", seed) for seed in ROWS["none"].seeds for task in TASKS)
    for seed in (0, 1):
        yield from ((task, name, seed) for task in TASKS for name in ROWS if name != "none")
        yield from ((task, name, seed) for task in TASKS for name, row in PLANTED.items() if seed in row.seeds)
    yield from (("time", "all", number) for number in range(ROUNDS))


def is_known(kept: dict[str, Any], task: str, name: str, seed: int) -> bool:
    """Whether it was done before."""
    return len(kept["rounds"]) > seed if task == "time" else f"{task} {name} {seed}" in kept["cells"]


def main() -> int:
    """Does what is missing, and writes the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--only", choices=(*TASKS, "time"), help="one part of it; time alone on an idle machine")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no cell after so long; a further call goes on"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.again:
        RESULTS.unlink(missing_ok=True)
    kept = remembered()
    with tempfile.TemporaryDirectory() as name:
        for task, row, seed in wanted():
            asked = arguments.only == task or (arguments.only is None and task != "time")
            if not asked or is_known(kept, task, row, seed):
                continue
            if time.monotonic() - began > arguments.seconds:
                break
            into = Path(name) / f"{task}-{row}-{seed}"
            if task == "time":
                told: Any = timed(into, seed)
            else:
                told = asdict(train(task, row, seed, into))
            kept = remembered()  # another call may have gone on with another part
            if task == "time":
                kept["rounds"].append(told)
            else:
                kept["cells"][f"{task} {row} {seed}"] = told
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
            print(f"{time.monotonic() - began:.0f} s: {task} {row} {seed}", flush=True)
    lines = "\n".join(table(kept))
    print(lines)
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN)] + f"{BEGIN}\n{lines}\n{END}" + page.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
