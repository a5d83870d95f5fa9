"""Claim: a CLIP-like job of 256 samples on 2 processes takes at most 1.1 of the time of DDP with a hand-written gather.

2 CPU cores, torch 2.13.0; the table is benchmarks/results/coupled_cost.md.

Repeat with `python -m benchmarks.coupled_cost`. Both programs train the same two towers from the same data, in turns.
The program with DDP gathers the rows of both towers with a gradient, and computes the whole loss on each rank.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

RESULTS = Path(__file__).parent / "results"
BATCH, STEPS, TURNS, FIRST = 256, 12, 4, 4  # steps before FIRST start the programs up
WIDTH = 96


class Towers(nn.Module):
    """Transformers for images of 64 patches and for texts of 16 tokens, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.words = nn.Linear(48, WIDTH), nn.Embedding(500, WIDTH)
        self.image, self.text = (
            nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(count))
            for count in (3, 2)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of norm 1 of both towers, float32 [N, WIDTH], and the temperature's logarithm."""
        rows = []
        for hidden, layers in ((self.patches(images), self.image), (self.words(texts), self.text)):
            for layer in layers:
                hidden = layer(hidden)
            rows.append(F.normalize(hidden.mean(1), dim=1))
        return rows[0], rows[1], self.log_scale


def data() -> tuple[Tensor, Tensor]:
    """Return images, float32 [N, 64, 48], and texts, int64 [N, 16], of all steps."""
    draw, samples = torch.Generator().manual_seed(1), BATCH * STEPS
    return torch.randn(samples, 64, 48, generator=draw), torch.randint(500, (samples, 16), generator=draw)


def clip_loss(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
    """Return the mean of both cross entropies."""
    scores, targets = log_scale.exp() * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


class Meter(shoal.Callback):
    """Writes the processor seconds of each rank's steps and its peak memory."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step(self, run: Any, *given: Any) -> None:
        """Note the processor's time after a step."""
        self.marks.append(time.process_time())

    def on_end(self, run: Any, *given: Any) -> None:
        """Write what was measured."""
        write(self.marks)


def write(marks: list[float]) -> None:
    """Write processor seconds between marks, and the peak resident bytes of this process, to the folder $METERS."""
    peak = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    seconds = [after - before for before, after in itertools.pairwise(marks)][FIRST:]
    Path(os.environ["METERS"], f"meter-{os.getpid()}").write_text(json.dumps({"cpu": seconds, "bytes": peak}))


def job() -> shoal.Job:
    """The job, in the order of the data."""
    return shoal.Job(
        model=Towers,
        outputs=lambda model, batch: model(*batch),
        loss=lambda outputs, batch: (clip_loss(*outputs) * len(outputs[0]), len(outputs[0])),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train_data=data(),
        global_batch=BATCH,
        shuffle=False,
        callbacks=[Meter()],
    )


def ddp(out: Path) -> None:
    """One rank of the program with DDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = torch.utils.data.TensorDataset(*data())
    own = [n for n in range(len(dataset)) if n % BATCH // (BATCH // ranks) == rank]
    losses, seconds, marks, begun = [], [], list[float](), time.perf_counter()
    for batch in torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, own), BATCH // ranks):
        images, texts, log_scale = model(*batch)
        images, texts = (torch.cat(collectives.all_gather(rows.contiguous())) for rows in (images, texts))
        loss = clip_loss(images, texts, log_scale)
        loss.backward()  # the gathers sum the gradients of all ranks, and DDP takes their mean
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begun)
        marks.append(time.process_time())
        begun = time.perf_counter()
    write(marks)
    if rank == 0:
        out.mkdir()
        lines = [json.dumps({"loss": a, "seconds": b}) for a, b in zip(losses, seconds, strict=True)]
        (out / "ddp.json").write_text("\n".join(lines))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may wait for ever where DDP's last reference to a Gloo group ends with the interpreter


def measured(program: str) -> dict[str, Any]:
    """Run a program once. Return medians over steps, the peak bytes of the fullest rank, and the losses."""
    with tempfile.TemporaryDirectory() as name:
        out, python = Path(name, "out"), [sys.executable, "-m"]
        command = [*python, "shoal", "run", f"{__file__}:job", "--devices", "2", "--out", str(out), "--step", "eager"]
        if program == "ddp":
            command = [*python, "torch.distributed.run", "--nproc-per-node", "2", __file__, str(out)]
        environ = {**os.environ, "METERS": name, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environ, capture_output=True)
        file = out / ("ddp.json" if program == "ddp" else "records.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
        meters = [json.loads(one.read_text()) for one in Path(name).glob("meter-*")]
        return {
            "wall": statistics.median(one["seconds"] for one in records[FIRST:]),
            "cpu": statistics.median(seconds for one in meters for seconds in one["cpu"]),
            "bytes": max(one["bytes"] for one in meters),
            "losses": [one["loss"] for one in records],
        }


def main() -> None:
    """Measure both programs in turns and write the page."""
    turns = [{program: measured(program) for program in ("shoal", "ddp")} for _ in range(TURNS)]
    ratios = {
        kind: sorted(turn["shoal"][kind] / turn["ddp"][kind] for turn in turns) for kind in ("cpu", "wall", "bytes")
    }
    apart = max(
        abs(a - b) for turn in turns for a, b in zip(turn["shoal"]["losses"], turn["ddp"]["losses"], strict=True)
    )
    (RESULTS / "coupled_cost.json").write_text(json.dumps({"turns": turns, "ratios": ratios}, indent=1) + "\n")
    lines = [
        "# What a loss over the whole batch costs",
        "",
        f"Generated by `python -m benchmarks.coupled_cost`; numbers in coupled_cost.json. A CLIP-like job of {BATCH} "
        f"samples on 2 processes with one thread each, {STEPS} steps, {TURNS} turns; {os.cpu_count()} CPU cores "
        f"({platform.processor() or platform.machine()}), torch {torch.__version__}. Losses of both programs differ by "
        f"{apart:.0e} at most.",
        "",
        "| | shoal | DDP with a hand-written gather | ratio, median (least to largest) |",
        "|---|---|---|---|",
    ]
    kinds = (("cpu", "processor time of a step"), ("wall", "step"), ("bytes", "peak memory of a rank"))
    for kind, name in kinds:
        unit, scale = ("GiB", 2.0**30) if kind == "bytes" else ("s", 1.0)
        own, peer = (statistics.median(turn[program][kind] for turn in turns) / scale for program in ("shoal", "ddp"))
        ratio = f"{statistics.median(ratios[kind]):.3f} ({ratios[kind][0]:.3f} to {ratios[kind][-1]:.3f})"
        lines.append(f"| {name} | {own:.3f} {unit} | {peer:.3f} {unit} | {ratio} |")
    (RESULTS / "coupled_cost.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else ddp(Path(sys.argv[1]))
