"""Claim: in fast mode a step with one sample a grain takes as long as with 8 grains; in exact mode each grain costs.

`python -m benchmarks.many_grains` trains two models with dropout at batch 256 on two CPU processes, data-parallel, one
thread each: with 8 grains (32 samples each) up to 256 (one sample each), in fast and exact mode. One pair of processes
holds all engines of a model and mode; they take turns of some steps in an order that alternates, so that what else the
machine does falls on all. Arguments such as `mlp-fast` measure these alone. It writes results/many_grains.json: for
each the median seconds of a step of rank 0, and as `ratio` the median over the rounds of a round's median to that of 8
grains, with the quartiles.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import Mesh, open_mesh
from shoal.distributed.process_setup import prepare_process, versions
from shoal.hardware.detect import all_reduce_here
from shoal.launch.environment import Environment
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Engine, Options, build
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

RESULTS = Path(__file__).resolve().parent / "results" / "many_grains.json"
BATCH, SAMPLES, CLASSES, PIXELS, WORDS, TOKENS = 256, 4096, 10, 784, 256, 32
GRAINS = {"fast": (8, 32, 256), "exact": (8, 16, 32, 64, 256)}
ROUNDS = {"mlp-fast": 40, "mlp-exact": 12, "encoder-fast": 12, "encoder-exact": 6}
STEPS = {"mlp-fast": 12, "mlp-exact": 3, "encoder-fast": 2, "encoder-exact": 1}
WARM_UP = 2


def mlp() -> nn.Module:
    """784-512-512-10 with two dropouts."""
    hidden = [nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Linear(PIXELS, 512), nn.ReLU(), nn.Dropout(0.2), *hidden, nn.Linear(512, CLASSES))


class Layer(nn.Module):
    """Encoder layer with dropout of attention weights and of both residuals."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """States, [batch, positions, width]."""
        query, key, value = (
            t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.norm1(x)).chunk(3, 2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        found: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return found


class Encoder(nn.Module):
    """Two encoder layers over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [batch, words, positions]."""
        found: Tensor = self.head(self.layers(self.embedding(tokens))).transpose(1, 2)
        return found


def job(kind: str, grains: int) -> shoal.Job:
    """The job of a model with so many grains."""
    generator = torch.Generator().manual_seed(0)
    data: tuple[Tensor, Tensor]
    if kind == "mlp":
        labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        data = torch.randn(SAMPLES, PIXELS, generator=generator), labels
    else:
        words = torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator)
        data = words, words.roll(-1, 1)
    model: Callable[[], nn.Module] = mlp if kind == "mlp" else Encoder
    return shoal.Job(
        model=model,
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train_data=data,
        global_batch=BATCH,
        grains=grains,
        length=shoal.Steps(10**6),
    )


class Turns:
    """An engine that trains some steps at a time."""

    def __init__(self, kind: str, grains: int, plan: shoal.Plan, mesh: Mesh) -> None:
        one = job(kind, grains)
        self.engine: Engine = build(one, judged(one, plan).plan, mesh, Options(telemetry=False))
        self.rounds: list[float] = []

    def start(self) -> None:
        """Begins the training, of which `turn` does a part."""
        self.stamps: list[float] = []
        around = Surroundings(lambda line: None, lambda *told: self.stamps.append(time.perf_counter()), lambda: False)
        self.trainer = partial(self.engine.trainer, around=around, records=RecordWriter(None))
        self.state: Any = None

    def turn(self, steps: int) -> None:
        """Some steps more; the first, whose data were not read ahead, does not count."""
        self.stamps.clear()
        end = (self.state.step if self.state is not None else 0) + steps + 1
        trainer = self.trainer(self.state, end)
        trainer.train()
        self.state = trainer.state
        taken = [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]
        self.rounds.append(statistics.median(taken))


def measured(kind: str, mode: str, folder: Path) -> dict[int, list[float]]:
    """By number of grains, the median seconds of a step in each round, of rank 0."""
    plan = shoal.Plan().with_sections(layout={"data": 2}, execution={"exact": mode == "exact"})
    if mode == "fast":
        plan = plan.with_sections(collectives={"all_reduce": all_reduce_here(2)})

    def work(environment: Environment) -> None:
        prepare_process(mode == "exact", 1)
        with open_mesh(environment, plan.layout) as mesh:
            turns = {grains: Turns(kind, grains, plan, mesh) for grains in GRAINS[mode]}
            for one in turns.values():
                one.start()
                one.turn(WARM_UP)
                one.rounds.clear()
            for number in range(ROUNDS[f"{kind}-{mode}"]):
                order = list(turns.values())
                for one in order if number % 2 == 0 else reversed(order):
                    one.turn(STEPS[f"{kind}-{mode}"])
            if mesh.rank == 0:
                found = {grains: one.rounds for grains, one in turns.items()}
                (folder / "rounds.json").write_text(json.dumps(found), encoding="utf-8")
            for one in turns.values():
                one.engine.close()

    with forked(2, work, folder / "ranks") as wait:
        wait()
    document = json.loads((folder / "rounds.json").read_text(encoding="utf-8"))
    return {int(grains): rounds for grains, rounds in document.items()}


def row(rounds: dict[int, list[float]], grains: int) -> dict[str, Any]:
    """Median seconds of a step, and what it is of that with 8 grains."""
    ratios = [own / few for own, few in zip(rounds[grains], rounds[8], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "grains": grains,
        "samples_each": BATCH // grains,
        "seconds": round(statistics.median(rounds[grains]), 6),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def main(wanted: list[str]) -> None:
    """Measures everything, or the named ones as `mlp-fast`, and writes the results beside the others that are there."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    for kind, mode in ((kind, mode) for kind in ("mlp", "encoder") for mode in ("fast", "exact")):
        if wanted and f"{kind}-{mode}" not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="many-grains-") as folder:
            rounds = measured(kind, mode, Path(folder))
        rows = [one for one in rows if (one["model"], one["mode"]) != (kind, mode)]
        rows += [{"model": kind, "mode": mode, **row(rounds, grains)} for grains in GRAINS[mode]]
        about = {"batch": BATCH, "processes": 2, "threads_each": 1, "rounds": ROUNDS, "versions": versions()}
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        for one in rows[-len(GRAINS[mode]) :]:
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
