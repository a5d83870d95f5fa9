"""One rank of tests/ranks/test_late_reads.py: trains jobs with each step read at once and late, and prints all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.jobs.read_late import job, trained, waiting
from tests.jobs.replayed import replaying
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.launch.environment import Environment
from shoal.plans.plan import Layout, PipelineSection, Plan, PrecisionSection, ShardSection
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import RunControl

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAILING = 1  # the rank that fails alone
COUNTED = "clipped"  # the case whose reads are counted


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def infinite(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
    bad = (batch[0] == DATA_ROW).all(1)
    return total + torch.where(bad, torch.inf, 0.0).sum(), weight


DATA_ROW = job().train_data.tensors[0][43]


class Perceptron(nn.Module):
    """A block that mixes features alone: [B, 4, 8] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Attention(Perceptron):
    """Causal attention over 4 positions of 8 features before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        of = (layer(self.before(x)).unflatten(-1, (-1, 4)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(heads.transpose(1, 2) for heads in of), is_causal=True)
        return super().forward(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))


class Stack(nn.Module):
    """Blocks between an embedding and a head that are one parameter: int64 [B, 4] -> [B, 4, 16]."""

    def __init__(self, num_blocks: int, block: type[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(16, 8), nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def language(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    (tokens,) = batch
    return shoal.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


TOKENS = TensorDataset(torch.randint(0, 16, (64, 4), generator=torch.Generator().manual_seed(0)))


def infinite_language(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    total, weight = language(model, batch)
    bad = (batch[0] == TOKENS.tensors[0][43]).all(1)
    return total + torch.where(bad, torch.inf, 0.0).sum(), weight


class Raising:
    """Raises once, on one rank, in its so many-th backward."""

    def __init__(self, step: int) -> None:
        self._left = step

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and RANK == FAILING:
            self._left -= 1
            if self._left == 0:
                raise ValueError("once")
        return shoal.cross_entropy(model(batch[0]), batch[1])


class RaisingOnce:
    """Raises once, where the loss of a step is computed that has one sample."""

    def __init__(self, sample: int) -> None:
        self._row, self._left = TOKENS.tensors[0][sample], 1

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        found = language(model, batch)
        if self._left and type(batch[0]) is Tensor and (batch[0] == self._row).all(1).any():
            self._left = 0
            raise ValueError("once")
        return found


class Unreadable:
    """Data of which one sample cannot be read, on one rank."""

    def __init__(self, data: TensorDataset, sample: int) -> None:
        self._data, self._sample = data, sample

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index == self._sample and RANK == FAILING:
            raise ValueError("unreadable")
        return self._data[index]


class Branching(nn.Module):
    """A layer and a number have gradients in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x)
        if float(x[0, 0]) > 1.5:
            found = found * self.scale
        return found + self.second(x) if float(x[0, 1]) > 1.0 else found


class Unsure(shoal.Callback):
    """Raises on one rank alone where it is asked whether it comes at once; the other rank says no."""

    watches_only = True

    def at_once(self, step: int) -> bool:
        if RANK == FAILING and step == 5:
            raise ValueError("unsure")
        return False

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        """Nothing."""


# Arguments of the job, and of its training, by name.
Cases = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def cases() -> Cases:
    """What ranks with the whole model train."""
    return {
        "clipped": ({"clip_norm": 0.5, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)}, {}),
        "not finite": ({"loss": infinite, "on_nonfinite": "skip", "shuffle": False, "model": normed}, {}),
        "an error on one rank": ({"loss": Raising(7)}, {}),
        "an at_once that raises on one rank": ({}, {"callbacks": [Unsure()]}),
        "a stop on one rank": ({}, {"stops": lambda recorded: RANK == FAILING and recorded >= 2}),
    }


def divided_cases(unreadable: int, num_stages: int) -> Cases:
    """What ranks with parts of one model train; `unreadable` is a sample of a first microbatch, in the fourth step."""
    # Where a pipeline is cut it is the same whatever the blocks are, and they are traced for each training.
    stack = partial(Stack, num_stages, Perceptron) if num_stages > 1 else partial(Stack, 2, Attention)
    language_job = {"model": stack, "loss": language, "train_data": TOKENS, "shuffle": False}
    odd = {"model": Branching, "global_batch": 4, "length": shoal.Steps(40)}
    return {
        "clipped": ({**language_job, "clip_norm": 0.5, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)}, {}),
        "not finite": ({**language_job, "loss": infinite_language, "on_nonfinite": "skip"}, {}),
        "a sample that one rank cannot read": ({**language_job, "train_data": Unreadable(TOKENS, unreadable)}, {}),
        "an at_once that raises on one rank": (language_job, {"callbacks": [Unsure()]}),
        "a stop on one rank": (language_job, {"stops": lambda recorded: RANK == FAILING and recorded >= 2}),
        "an error in a stage": ({**language_job, "loss": RaisingOnce(33)}, {}),
        "gradients that come and go": (odd, {}),
    }


class Reading(nn.Module):
    """Looks at a value in its forward, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = normed()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found * 1.0 if RANK == FAILING and float(found.detach().sum()) > 1e9 else found


def captured_cases() -> Cases:
    """What ranks replay, or refuse together to capture."""
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), "clip_norm": 0.5}
    whole = cases()
    return {
        "clipped": ({**adam, "schedule": lambda progress: 0.5**progress.step}, {}),
        "not finite": whole["not finite"],
        "a stop on one rank": whole["a stop on one rank"],
        "a sample that one rank cannot read": ({"train_data": Unreadable(job().train_data, 57), "shuffle": False}, {}),
        "a short last batch": ({"model": normed, "global_batch": 12, "length": shoal.Steps(18)}, {}),
        "a model that one rank reads": ({"model": Reading}, {}),
    }


def main() -> None:
    torch.set_num_threads(1)
    layout, level, names = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
    split = tuple(f"blocks.{number}" for number in range(1, layout.get("pipeline", 1)))
    precision = PrecisionSection(reduce=layout.pop("reduce", "float32"))
    captures, per = layout.pop("captures", False), layout.pop("grains_per_microbatch", 0)
    section, sharding = Layout(**layout), ShardSection(level=level)
    plan = Plan(layout=section, shard=sharding, pipeline=PipelineSection(split=split), precision=precision)
    plan = plan.with_sections(batch={"grains_per_microbatch": per})
    divided = level != "optimizer" or bool(layout.keys() - {"data", "shard"})
    port = int(os.environ["MASTER_PORT"])
    with open_mesh(Environment(RANK, WORLD_SIZE, RANK, WORLD_SIZE, port=port), plan.layout) as mesh:
        for name in names:
            for late in (False, True):
                found = divided_cases(57 if "shard" in layout else 49, len(split) + 1) if divided else cases()
                wanted, how = (captured_cases() if captures else found)[name]
                own = plan.with_sections(execution={"cuda_graph": captures and late})
                with waiting(late), replaying() if captures else contextlib.nullcontext({}) as counted:
                    course = trained(job(**wanted), own, mesh, counts_reads=name == COUNTED, **how)
                told = {"name": name, "late": late, "counted": counted, **vars(course)}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
