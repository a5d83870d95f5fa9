"""Writer of run directories whose every second is known: what a report says of them is compared with this account."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from shoal.runs.attempts import AttemptLog
from shoal.runs.records import SPANS, RankTimes, RunRecord, Spread, StepRecord

BEGAN = 1_700_000_000.0
# The record of one step of a process, where a test is about the file and not about the numbers.
RECORD = StepRecord(
    step=1,
    epoch=0,
    samples=8,
    num_samples=8,
    loss=0.5,
    weight=8.0,
    grad_norm=1.0,
    learning_rate=0.1,
    loss_scale=None,
    seconds=1.0,
    spans={},
    ranks={},
    memory_bytes=1,
    digest="",
)
# Shares of a step, by span of rank 0.
_SHARES = (0.04, 0.01, 0.3, 0.4, 0.15, 0.06, 0.0, 0.04)
VERSIONS = {"shoal": "0.1", "torch": "2.13.0", "python": "3.11.7"}
TERMS = {"compute": 0.06, "gradients": 0.01, "optimizer": 0.005, "data": 0.0, "host": 0.002, "bubble": 0.0}
PREDICTION = {
    "cluster": "8xH100",
    "device": "H100",
    "device_kind": "gpu",
    "devices": 8,
    "step_seconds": 0.08,
    "terms": TERMS,
    "peak_bytes": 30 << 30,
    "memory": {"parameters": 4 << 30, "activations": 20 << 30},
    "mfu": 0.4,
    "peak_dtype": "bfloat16",
    "peak_flops": 989e12,
    "flops_per_sample": 1e12,
    "price_per_hour": 3.0,
    "sample_tokens": 1024,
    "curve": {"1": 0.4, "2": 0.22, "4": 0.12, "8": 0.08, "64": 0.05},
}


class RunFolder:
    """A run as it is written, on a clock of its own; `seconds` has what each part of the wall clock is to be."""

    def __init__(
        self,
        path: Path,
        *,
        ranks: int = 1,
        prediction: bool = True,
        name: str = "job",
        batch: int = 64,
        device: str = "NVIDIA H100",
        compute: str = "bfloat16",
    ) -> None:
        path.mkdir(parents=True)
        self.path, self.ranks, self.batch, self.now, self.device = path, ranks, batch, BEGAN, device
        self.seconds: Counter[str] = Counter()
        self.waits: dict[int, list[float]] = {}
        self.step, self.records, self.random = 0, list[StepRecord](), random.Random(0)
        self.log = AttemptLog(path / "attempts.jsonl", lambda: self.now)
        settings = {"lr": 0.1, "name": name}
        about = {"file": f"{name}.py", "function": "job", "settings": settings, "global_batch": batch, "grains": 8}
        about |= {"length": {"kind": "steps", "count": 100}, "train_samples": 6400, "parameters": 1_000_000, "seed": 0}
        about |= {"versions": VERSIONS}
        (path / "job.json").write_text(json.dumps(about))
        plan: dict[str, Any] = {"layout": {"data": ranks}, "precision": {"compute": compute}}
        (path / "plan.toml").write_text(tomli_w.dumps(plan | ({"prediction": PREDICTION} if prediction else {})))

    def takes(self, part: str, seconds: float) -> None:
        self.now += seconds
        self.seconds[part] += seconds

    def begins(
        self,
        start_up: float = 3.0,
        *,
        idle: float = 0.0,
        after_loss: bool = False,
        num_steps: int = 100,
        resumed_from: int | None = None,
    ) -> None:
        self.takes("idle", idle)
        started, resumed = self.now, resumed_from if resumed_from is not None else self.step or None
        self.takes("start_up", start_up)
        if after_loss:
            with (self.path / "events.jsonl").open("a") as file:
                file.write(json.dumps({"kind": "going_on", "step": (resumed or 0) + 1, "seconds": start_up}) + "\n")
        self.log.began(
            started,
            {"launch": start_up / 2, "build": start_up / 2},
            resumed_from=resumed,
            restarts=int(after_loss),
            num_steps=num_steps,
            world_size=self.ranks,
            host="node",
            device=self.device,
        )

    def steps(self, count: int, seconds: float = 0.1, **more: Any) -> None:
        for _ in range(count):
            self.one_step(seconds * (1 + 0.2 * self.random.random()), **more)

    def one_step(self, seconds: float, checkpoint: float = 0.0, between: float = 0.001, **more: Any) -> None:
        self.step += 1
        spans = {n: s * seconds for n, s in zip(SPANS, _SHARES, strict=True)} | {"checkpoint": checkpoint}
        whole = seconds + checkpoint
        for name, value in spans.items():
            self.takes(name, value)
        slowest = self.random.randrange(self.ranks)
        ranks = {n: Spread(0.9 * v, 1.1 * v, slowest) for n, v in (*spans.items(), ("step_seconds", whole))}
        ranks |= {"busy_seconds": Spread(0.7 * whole, 0.9 * whole, slowest), "memory_bytes": Spread(1e9, 2e9, 0)}
        record = StepRecord(
            step=self.step,
            epoch=(self.step - 1) // 100,
            samples=self.step * self.batch,
            num_samples=self.batch,
            loss=2.0 / self.step**0.3 + 0.05 * self.random.random(),
            weight=float(self.batch),
            grad_norm=1.0 + self.random.random(),
            learning_rate=0.1,
            loss_scale=None,
            seconds=whole,
            spans=spans,
            ranks=ranks,
            memory_bytes=2 << 30,
            digest=f"{self.step:064x}",
            at=self.now,
            by_rank=self._by_rank(slowest, whole),
        )
        self.records.append(replace(record, **more))
        self.takes("between_steps", between)

    def _by_rank(self, slowest: int, seconds: float) -> RankTimes | None:
        """Each tenth record is of the ten steps before: in each all ranks waited a fifth for the slowest."""
        waits = self.waits.setdefault(slowest, [0.0] * self.ranks)
        self.waits[slowest] = [w + 0.2 * seconds * (rank != slowest) for rank, w in enumerate(waits)]
        if self.ranks == 1 or self.step % 10:
            return None
        found, self.waits = RankTimes(10, [0.8 * seconds] * self.ranks, self.waits), {}
        return found

    def evaluates(self, seconds: float = 0.5, **metrics: float) -> None:
        metrics = metrics or {"loss": 2.1 / self.step**0.3, "accuracy": 1 - 1 / self.step}
        self.records[-1] = self.records[-1].evaluated(metrics).followed_by("evaluation", seconds)
        self.takes("evaluation", seconds)

    def goes_back_to(self, step: int) -> None:
        """Steps after `step` will be trained again: their seconds are in vain."""
        undone = [record for record in self.records if record.step > step]
        for record in undone:
            for name in SPANS:
                self.seconds[name] -= record.spans[name]
            for name, seconds in (record.after or {}).items():
                self.seconds[name] -= seconds
                self.seconds["trained_again"] += seconds
            self.seconds["trained_again"] += record.seconds
        self.records, self.step = self.records[: len(self.records) - len(undone)], step
        self.log.undone(undone)

    def is_lost(self, seconds: float, rank: int = 0) -> None:
        """A rank is gone; nobody notices for some seconds. What lay between the last steps is part of that wait."""
        last = self.records[-1]
        gap = self.now - (last.at or 0.0) - sum((last.after or {}).values())
        self.seconds["between_steps"] -= gap
        self.takes("lost", gap)
        self.now -= gap
        self.takes("lost", seconds)
        event = {
            "at": "2023-11-14T22:13:20+00:00",
            "kind": "lost",
            "rank": rank,
            "host": "node",
            "after_step": self.step,
        }
        with (self.path / "events.jsonl").open("a") as file:
            file.write(
                json.dumps({**event, "what": "it was killed by SIGKILL", "done": "all ranks start again"}) + "\n"
            )

    def ends(self, status: str = "completed", checkpoint: float = 0.25, shut_down: float = 0.125, **more: Any) -> None:
        self.takes("checkpoint", checkpoint)
        trained = self.now
        self.takes("shut_down", shut_down)
        self.log.ended(status, self.step, trained, {"checkpoint": checkpoint})
        record = RunRecord(
            status=status,
            steps=self.step,
            samples=self.step * self.batch,
            world_size=self.ranks,
            train_loss=self.records[-1].loss if self.records else None,
            metrics={},
            eval_samples=0,
            weights_sha256="0" * 64,
            sample_digest=f"{self.step:064x}",
            step_seconds={},
            wall_seconds=self.now - BEGAN,
            **{"traffic": traffic(self.ranks), "memory": memory(self.ranks), "versions": VERSIONS, **more},
        )
        (self.path / "result.json").write_text(record.to_json())
        (self.path / "saved.json").write_text(json.dumps({"step": self.step}))

    def written(self) -> Path:
        lines = "".join(record.to_line() + "\n" for record in self.records)
        (self.path / "records.jsonl").write_text(lines)
        return self.path


def traffic(ranks: int) -> dict[str, Any]:
    volume = {"world": {"all_reduce": {"messages": 3, "bytes": 1 << 20}}}
    return {"ranks": [{"rank": rank, "step": 2, "measured": volume, "predicted": volume} for rank in range(ranks)]}


def memory(ranks: int) -> dict[str, Any]:
    found = {"parameters": 1 << 20, "gradients": 1 << 20, "optimizer": 2 << 20, "activations": 5 << 20}
    predicted = {**found, "activations": None}
    return {"ranks": [{"rank": rank, "step": 2, "measured": found, "predicted": predicted} for rank in range(ranks)]}


def one_process(path: Path) -> RunFolder:
    run = RunFolder(path, ranks=1, prediction=False)
    run.begins()
    for _ in range(4):
        run.steps(25)
        run.evaluates()
    run.ends()
    return run


def long(path: Path, steps: int = 10_000) -> RunFolder:
    run = RunFolder(path, ranks=8)
    run.begins(num_steps=steps)
    for number in range(10):
        run.steps(steps // 10 - 1)
        run.one_step(0.1, checkpoint=0.4)
        if number % 2:
            run.evaluates()
    run.ends()
    return run


def resumed_twice(path: Path) -> RunFolder:
    """Preempted and resumed after a night; then a rank is lost and all ranks start again."""
    run = RunFolder(path, ranks=4)
    run.begins()
    run.steps(30)
    run.ends("preempted")
    run.begins(idle=3600.0)
    run.steps(25)
    run.evaluates()
    run.is_lost(4.0, rank=2)
    run.begins(after_loss=True, resumed_from=40)
    run.goes_back_to(40)
    run.steps(60)
    run.evaluates()
    run.ends(restarts=1)
    return run


def failed(path: Path) -> RunFolder:
    run = RunFolder(path, ranks=2)
    run.begins()
    run.steps(20)
    run.one_step(0.1, skipped="nonfinite", loss=None, grad_norm=None, nonfinite={"rank": 1, "samples": [7, 9]})
    error = {"kind": "NonFiniteError", "given": "step 22", "conflict": "the loss is nan", "remedy": "lower the rate"}
    run.ends("failed", error=error)
    return run


def served(path: Path) -> RunFolder:
    run = RunFolder(path, ranks=3, prediction=False)
    run.begins()
    for number in range(40):
        run.one_step(0.1, push={"step": number + 1, "workers": [0, 1], "staleness": number % 3})
    said = "worker 1 is gone; it was computing part 1 of step 9"
    incident = {"kind": "lost", "worker": 1, "rank": 1, "step": 8, "said": said}
    run.ends(
        server={
            "mode": "async",
            "num_servers": 1,
            "num_workers": 2,
            "staleness": {"0": 20, "1": 20},
            "incidents": [incident],
        }
    )
    return run


def divided(path: Path) -> RunFolder:
    run = RunFolder(path, ranks=4)
    run.begins()
    run.steps(40)
    run.evaluates()
    volumes = {
        "tensor": {"all_reduce": {"messages": 24, "bytes": 3 << 20}},
        "pipeline": {"send": {"messages": 4, "bytes": 1 << 16}},
    }
    ranks = [{"rank": rank, "step": 2, "measured": volumes, "predicted": None} for rank in range(4)]
    run.ends(traffic={"ranks": ranks})
    return run


STORIES = {
    "one process": one_process,
    "long": long,
    "resumed twice": resumed_twice,
    "failed": failed,
    "served": served,
    "divided": divided,
}
