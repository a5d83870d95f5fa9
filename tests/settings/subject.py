"""What the settings are tried on: small jobs and loops, each with one thing changed by its name."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import experts as experts_job
import layouts
import tiny
import torch
import witness
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import shoal
from shoal.errors import ShoalError


def note(name: str, text: object) -> None:
    """A line in a file of this rank."""
    with Path(f"{name}-{os.environ.get('RANK', '0')}.txt").open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


class Noting(nn.Module):
    """The perceptron of two layers; notes how many samples each forward with gradients has."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not witness.is_look():
            note("forwards", len(inputs))
        found: Tensor = self.last(self.first(inputs))
        return found


class Warmed(Noting):
    """The perceptron with outputs that grow by the number of forwards."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = super().forward(inputs) * min(1.0, self.calls / 100)
        return found


class Normalised(Noting):
    """The perceptron behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = super().forward(self.norm(inputs))
        return found


class Loaded(Noting):
    """The perceptron with a buffer that counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += len(inputs)  # type: ignore[operator]
        return super().forward(inputs)


class Images(nn.Module):
    """A convolution that notes how its input lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(1, 4, 3), nn.Linear(64, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        note("strides", inputs.stride())
        found: Tensor = self.last(self.convolution(inputs).flatten(1))
        return found


class Rows(Dataset[Any]):
    """The vectors by item; notes the process that reads."""

    def __init__(self, num_samples: int) -> None:
        self.data = tiny.vectors(num_samples)

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        worker = get_worker_info()
        note("readers", "rank" if worker is None else worker.id)
        return tuple(tensor[i] for tensor in self.data)


class Holed(Rows):
    """The same, of which the eighteenth cannot be read."""

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if i == 17:
            raise OSError("a bad sector")
        return super().__getitem__(i)


class Stream(IterableDataset[Any]):
    """The vectors without a length."""

    def __init__(self, num_samples: int = 64) -> None:
        self.data = tiny.vectors(num_samples)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(zip(*self.data, strict=True))


def doubled(samples: list[Any]) -> list[Tensor]:
    """A batch of inputs twice as large."""
    inputs, labels, ids = (torch.stack(column) for column in zip(*samples, strict=True))
    return [inputs * 2, labels, ids]


def poisoned() -> tuple[Tensor, Tensor, Tensor]:
    """The vectors, of which the eighteenth is not finite."""
    inputs, labels, ids = tiny.vectors(64)
    inputs[17] = float("nan")
    return inputs, labels, ids


def half_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Half of the cross entropy."""
    total, weight = tiny.classify(model, batch)
    return total / 2, weight


def centred(outputs: Tensor, batch: Any, rows: slice = slice(None)) -> tuple[Tensor, int]:
    """Cross entropy of logits less their mean over the whole batch, of some rows."""
    own = (outputs - outputs.mean(0))[rows]
    return nn.functional.cross_entropy(own, batch[1][rows], reduction="sum"), len(own)


def count(model: nn.Module, batch: Any) -> tuple[float, int]:
    """A metric that is one."""
    return float(len(batch[2])), len(batch[2])


# By name, the fields that differ from those of `job`.
CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    "model": {"model": partial(Noting, 5)},
    "loss": {"loss": half_loss},
    "optimizer": {"optimizer": partial(torch.optim.SGD, lr=0.5)},
    "train_data": {"train_data": partial(tiny.vectors, 64, 9)},
    "by item": {"train_data": partial(Rows, 64)},
    "a bad sample": {"train_data": partial(Holed, 64)},
    "stream": {"train_data": Stream, "length": shoal.Steps(4)},
    "stream in epochs": {"train_data": Stream, "length": shoal.Epochs(1)},
    "global_batch": {"global_batch": 24},
    "uneven grains": {"global_batch": 12},
    "eval_data": {"eval_data": partial(tiny.vectors, 11, 3)},
    "several sets": {"eval_data": {"clean": partial(tiny.vectors, 64, 2), "noisy": partial(tiny.vectors, 11, 3)}},
    "no eval_data": {"eval_data": None},
    "no eval_data, no metrics": {"eval_data": None, "metrics": {}},
    "no metrics": {"metrics": {}},
    "metrics": {"metrics": {"one": count}},
    "metrics named as what is counted": {"metrics": {"samples": count, "steps": count, "step": count}},
    "metrics named loss": {"metrics": {"loss": count}},
    "metrics together": {"metrics": {("loss", "one"): lambda m, b: {"loss": tiny.classify(m, b), "one": (1.0, 1)}}},
    "metrics together, one lost": {"metrics": {("one", "two"): lambda m, b: {"one": (1.0, 1)}}},
    "metrics twice": {"metrics": {"one": count, ("one", "two"): count}},
    "metrics over all": {"metrics": {"rows": shoal.over_all(lambda outputs, targets: len(outputs) + len(targets))}},
    "grains": {"grains": 4},
    "more grains than samples": {"grains": 64},
    "one sample a grain": {"grains": 16},
    "length": {"length": shoal.Steps(2)},
    "length in epochs": {"length": shoal.Epochs(0.5)},
    "length in samples": {"length": shoal.Samples(40)},
    "schedule": {"schedule": shoal.warmup_cosine(warmup=0.5)},
    "schedule of torch": {"schedule": shoal.Schedule(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)},
    "schedule of a metric": {"schedule": shoal.Schedule(lambda of: torch.optim.lr_scheduler.ReduceLROnPlateau(of))},
    "clip_norm": {"clip_norm": 0.01},
    "clip_value": {"clip_value": 0.001},
    "clip_norm and clip_value": {"clip_norm": 0.01, "clip_value": 0.001},
    "seed": {"seed": 7},
    "collate": {"collate": doubled},
    "collate by item": {"collate": doubled, "train_data": partial(Rows, 64)},
    "collate of a stream": {"collate": doubled, "train_data": Stream, "length": shoal.Steps(4)},
    "shuffle": {"shuffle": False},
    "sampler": {"sampler": shoal.Weighted(range(64))},
    "sampler of tokens": {"sampler": shoal.TokenBudget([5] * 64, 60), "global_batch": None, "length": shoal.Steps(2)},
    "sampler of tokens, global_batch": {"sampler": shoal.TokenBudget([5] * 64, 60)},
    "sampler, shuffle": {"sampler": shoal.Weighted(range(64)), "shuffle": False},
    "sampler of other data": {"sampler": shoal.Weighted(range(63))},
    "stop": {"train_data": poisoned},
    "skip": {"train_data": poisoned, "on_nonfinite": "skip"},
    "rollback": {"train_data": poisoned, "on_nonfinite": "rollback"},
    "fuse": {"fuse": False},
    "buffers": {"model": Loaded, "buffers": {"se*n": "max"}},
    "buffers: declared": {"model": Loaded, "buffers": {"seen": "max"}},
    "state": {"model": Warmed},
    "allow_state": {"model": Warmed, "allow_state": ("calls",)},
    "allow_state of nothing": {"allow_state": ("first.*.calls",)},
    "allow_state as a text": {"allow_state": "calls"},
    "outputs": {"outputs": lambda model, batch: model(batch[0]), "loss": centred},
    "loss_by_rows": {"outputs": lambda model, batch: model(batch[0]), "loss": centred, "loss_by_rows": True},
    "loss_by_rows alone": {"loss_by_rows": True},
    "batch_norm by grain": {"model": Normalised},
    "batch_norm": {"model": Normalised, "batch_norm": "batch"},
    "batch_norm without any": {"batch_norm": "batch"},
    "batch_norm and fuse": {"batch_norm": "batch", "fuse": False},
    "batch_norm: no such": {"batch_norm": "global"},
    "predict": {"predict": lambda model, batch: {"class": model(batch[0]).argmax(1)}},
    "watch": {"watch": "accuracy:max"},
    "callbacks": {"callbacks": [shoal.EMA(0.5)]},
    "callbacks: best": {"callbacks": [shoal.KeepBest("accuracy", mode="max")]},
    "callbacks: no object": {"callbacks": [shoal.EMA]},
    "callbacks: of nothing": {"callbacks": [shoal.EarlyStopping()], "eval_data": None, "metrics": {}},
    "watch nothing": {"watch": "loss:min", "eval_data": None, "metrics": {}},
    "watch another": {"watch": "perplexity:min"},
    "images": {
        "model": Images,
        "train_data": partial(tiny.images, 64),
        "eval_data": partial(tiny.images, 16, 2),
    },
}


def job(change: str = "", steps: int = 0, lr: float = 0.1) -> shoal.Job:
    """The perceptron on 64 samples, 4 steps of 16 in 8 grains, but for what the change says."""
    fields: dict[str, Any] = {
        "model": Noting,
        "loss": tiny.classify,
        "optimizer": partial(tiny.sgd, lr=lr),
        "train_data": partial(tiny.vectors, 64),
        "eval_data": partial(tiny.vectors, 21, 2),
        "metrics": {"accuracy": shoal.accuracy},
        "global_batch": 16,
        "length": shoal.Steps(4),
    }
    fields |= CHANGES[change]
    if "SUBJECT" in os.environ:  # the file was changed
        fields["optimizer"] = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1)
    return shoal.Job(**(fields | ({"length": shoal.Steps(steps)} if steps else {})))


def gpt(steps: int = 2) -> shoal.Job:
    """A language model that every axis divides."""
    found: shoal.Job = layouts.stack(steps)
    return found


class Deep(layouts.Stack):
    """The same with four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layouts.Block() for _ in range(4))
        self.mark()


def deep() -> shoal.Job:
    """A language model for four stages."""
    found: shoal.Job = dataclasses.replace(layouts.stack(2), model=Deep)
    return found


def mixture(count: int) -> shoal.Job:
    """A language model with mixtures of experts."""
    found: shoal.Job = experts_job.job("stacked" if count == 4 else "three", steps=2)
    return found


def experts() -> shoal.Job:
    """Four experts in each of two layers."""
    return mixture(4)


def three() -> shoal.Job:
    """Three experts in each layer."""
    return mixture(3)


class Wide(nn.Module):
    """Two blocks of layers that are wide enough for float8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 128), nn.Linear(128, 3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(2)))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.blocks(self.first(inputs)))
        return found


def wide() -> shoal.Job:
    """The perceptron with wide blocks."""
    return dataclasses.replace(job(), model=Wide)


class Counted(TorchDispatchMode):
    """Notes each product of matrices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            note("products", func)
        return func(*args, **(kwargs or {}))


def counted() -> shoal.Job:
    """The language model; products of matrices are noted, those in a backward too."""
    Counted().__enter__()
    return gpt()


# --------------------------------------------------------------------------------------------------- loops of one's own


class Ending(shoal.Callback):
    """Ends the training after its second step."""

    def on_step(self, run: Any, record: Any) -> None:
        if record.step == 2:
            run.request_end("two are enough")


LOOPS: dict[str, dict[str, Any]] = {
    "": {},
    "global_batch": {"global_batch": 32},
    "grains": {"grains": 4},
    "seed": {"seed": 7},
    "clip_norm": {"clip_norm": 0.01},
    "clip_value": {"clip_value": 0.001},
    "clip_norm and clip_value": {"clip_norm": 0.01, "clip_value": 0.001},
    "schedule": {"schedule": shoal.warmup_cosine(warmup=0.5)},
    "collate": {"collate": doubled},
    "shuffle": {"shuffle": False},
    "sampler": {"sampler": shoal.Balanced([number % 3 for number in range(64)])},
    "fuse": {"fuse": False},
    "skip_nonfinite": {"skip_nonfinite": True},
    "more grains than samples": {"grains": 64},
    "grains, fuse": {"grains": 4, "fuse": False},
    "checkpoints": {"checkpoints": "kept"},
    "checkpoints in out": {"checkpoints": "out/kept"},
    "checkpoint_every": {"checkpoints": "kept", "checkpoint_every": 1},
    "checkpoint_every 0": {"checkpoints": "kept", "checkpoint_every": 0},
    "checkpoint_every without checkpoints": {"checkpoint_every": 1},
    "keep_checkpoints": {"checkpoints": "kept", "checkpoint_every": 1, "keep_checkpoints": "all"},
    "keep_checkpoints 0": {"checkpoints": "kept", "keep_checkpoints": 0},
    "no_source": {"checkpoints": "kept", "no_source": True},
    "resume": {"checkpoints": "out/kept", "resume": True},
    "resume without checkpoints": {"resume": True},
    "callbacks": {"callbacks": [shoal.LossSpikes(), Ending()]},
    "callbacks: no object": {"callbacks": [shoal.EMA]},
    "callbacks: KeepBest": {"callbacks": [shoal.KeepBest("loss")]},
    "exact": {"exact": True},
    "precision": {"precision": "bf16"},
    "allow_state": {"allow_state": ("calls",)},
    "buffers": {"buffers": {"seen": "sum"}},
    "plan": {"plan": shoal.Plan().with_sections(batch={"grains_per_microbatch": 2})},
    "plan without effect": {"plan": shoal.Plan().with_sections(pipeline={"schedule": "gpipe"})},
    "plan with servers": {"plan": shoal.Plan().with_sections(server={"mode": "synchronous"})},
    "plan with a captured step": {"plan": shoal.Plan().with_sections(execution={"cuda_graph": True})},
    "plan, divided": {"plan": shoal.Plan().with_sections(layout={"tensor": 2})},
    "fuse, plan": {"fuse": False, "plan": shoal.Plan().with_sections(batch={"grains_per_microbatch": 2})},
}


def loop(name: str) -> None:
    """Four steps of the perceptron by a Session; what came of them is in `out/result.json`."""
    changes, _, poison = name.partition("; ")
    torch.manual_seed(0)
    data = poisoned() if poison == "poisoned" else tiny.vectors(64)
    with shoal.Session(**({"global_batch": 16} | LOOPS[changes])) as session:
        model = Warmed() if changes == "allow_state" or poison == "state" else Noting()
        model = Loaded() if changes == "buffers" or poison == "buffer" else model
        model, _ = session.prepare(model, tiny.sgd(model.parameters()))
        losses, rates = [], []
        for step in session.steps(TensorDataset(*data), shoal.Steps(4)):
            for batch in step:
                step.backward(*tiny.classify(model, batch))
            losses.append([step.loss, step.grad_norm])
            rates.append(step.learning_rate)
        if session.rank == 0:
            Path("out").mkdir(exist_ok=True)
            told = {"weights_sha256": shoal.weights_sha256(model.state_dict()), "steps": losses}
            told["learning_rates"] = rates
            Path("out/result.json").write_text(json.dumps(told), encoding="utf-8")


def main(name: str) -> int:
    """The loop as a program; what shoal refuses is told as the command does."""
    try:
        loop(name)
    except ShoalError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
