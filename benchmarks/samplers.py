"""Claim: drawn samples train one set of weights on 1 to 4 ranks, where samplers by rank draw others.

2 CPU cores, torch 2.13.0; the tables are benchmarks/results/samplers.md.

Repeat with `python -m benchmarks.samplers`. The job of tests/jobs/sampled.py trains 12 steps of 16 samples with each
sampler, in exact mode. Programs by rank are the customary ones of DDP for weighted samples: in each process a
WeightedRandomSampler with the same seed, or a DistributedSampler, which has no weights. Then a small transformer on
texts of ragged lengths trains with random batches and with shoal.ByLength, in turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.launching import JOBS
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DistributedSampler, WeightedRandomSampler

import shoal
from benchmarks.coupled import DEVICES, RESULTS, STEPS, trained
from shoal.data.source import opened, order_of
from shoal.numerics.checksum import bits_checksum

sys.path.insert(0, str(JOBS))
import sampled

BATCH, EPOCHS = 16, 40
TRIALS, TEXTS, MEAN, WIDTH = 5, 2000, 60, 64


def hashes(name: str) -> int:
    """Number of different weights after the last step on 1 to 4 ranks."""
    job = replace(sampled.job(name), schedule=None, grains=8, length=shoal.Steps(STEPS))
    found = set()
    for ranks in DEVICES:
        _, last = trained(job, shoal.Plan().with_sections(layout={"data": ranks}, execution={"exact": True}))
        found.add(bits_checksum([last.parameters[own] for own in sorted(last.parameters)]))
    return len(found)


def by_rank(kind: str, ranks: int) -> Iterator[list[int]]:
    """The samples of each step of a DDP program over some epochs."""
    weights = torch.where(sampled.LABELS == 0, 0.1, 5.0)
    size = BATCH // ranks
    for epoch in range(EPOCHS):
        lists = []
        for rank in range(ranks):
            if kind == "DistributedSampler":
                own = DistributedSampler(range(sampled.SAMPLES), ranks, rank)  # type: ignore[arg-type]
                own.set_epoch(epoch)
                lists.append(list(own))
            else:
                generator = torch.Generator().manual_seed(epoch)
                lists.append(list(WeightedRandomSampler(weights, sampled.SAMPLES // ranks, generator=generator)))
        for start in range(0, len(lists[0]) - size + 1, size):
            yield [sample for own in lists for sample in own[start : start + size]]


def ours() -> Iterator[list[int]]:
    """The samples of each whole step of the job with weights."""
    job = opened(replace(sampled.job("weighted"), grains=8, length=shoal.Epochs(EPOCHS)))
    order = order_of(job.train_data, job, job.length)
    for step in range(order.num_steps):
        ids = np.concatenate(order.ids(step, order.grains(step))).tolist()
        if len(ids) == BATCH:
            yield ids


def drawn(steps: Iterator[list[int]]) -> dict[str, float]:
    """Mean number of different samples in a step, and the part of samples of the large weight."""
    ids = list(steps)
    rare = statistics.mean(bool(sampled.LABELS[sample]) for step in ids for sample in step)
    return {"different": statistics.mean(len(set(step)) for step in ids), "rare": rare}


class Encoder(nn.Module):
    """One layer of a transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, 100] of int64 [N, T]."""
        logits: Tensor = self.out(self.layer(self.embed(tokens), src_key_padding_mask=tokens == 0))
        return logits


def ragged() -> dict[str, Any]:
    """Padding, and trained tokens in a second, of random batches and of batches by length, in turns."""
    draws = np.random.default_rng(0)
    lengths = np.clip(draws.lognormal(np.log(MEAN), 0.8, TEXTS), 4, 512).astype(int)
    texts = [torch.from_numpy(draws.integers(1, 100, length)) for length in lengths]
    ways = {"random": None, "ByLength(window=10)": shoal.ByLength(lengths, 10), "ByLength": shoal.ByLength(lengths)}
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, Any] = {name: {"tokens_per_second": []} for name in ways}
    for trial in range(TRIALS):
        for name, way in ways.items():
            job = shoal.Job(
                model=Encoder, loss=print, optimizer=print, train_data=texts, sampler=way, global_batch=32,
                grains=1, seed=trial,
            )  # fmt: skip
            job = opened(job)
            order = order_of(job.train_data, job, shoal.Epochs(1))
            batches = [order.ids(step, order.grains(step))[0] for step in range(order.num_steps)]
            full = sum(len(batch) * lengths[batch].max() for batch in batches)
            began, tokens = time.perf_counter(), 0
            for ids in batches[: 20 if trial else 5]:
                batch = pad_sequence([texts[i] for i in ids], batch_first=True)
                optimizer.zero_grad()
                logits = model(batch[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0).backward()
                optimizer.step()
                tokens += int(lengths[ids].sum())
            if trial:  # the first warms up
                found[name]["tokens_per_second"].append(tokens / (time.perf_counter() - began))
            found[name]["padding"] = 1 - lengths.sum() / full
    return found


def page(found: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Samplers",
        "",
        "Generated by `python -m benchmarks.samplers`; numbers in samplers.json. The job of tests/jobs/sampled.py, "
        f"{STEPS} steps of {BATCH} samples of {sampled.SAMPLES}, with dropout, 2 CPU cores, torch {torch.__version__}.",
        "",
        "| sampler | exact mode: hashes on 1, 2, 3, 4 ranks |",
        "|---|---|",
        *(f"| {name} | {number} |" for name, number in found["hashes"].items()),
        "",
        f"Weighted samples of shoal beside the customary programs of DDP, {EPOCHS} epochs. The weights ask for "
        f"{found['wanted']:.1%} of samples of the rare class.",
        "",
        f"| program | different samples in a step of {BATCH} | rare class |",
        "|---|---|---|",
        *(f"| {name} | {one['different']:.1f} | {one['rare']:.1%} |" for name, one in found["drawn"].items()),
        "",
        f"{TEXTS:,} texts, median {MEAN} tokens, batches of 32, one process; {TRIALS - 1} trials in turns, with other "
        "programs on the machine.",
        "",
        "| order | padding | tokens/s, median | least, most |",
        "|---|---|---|---|",
    ]
    for name, one in found["lengths"].items():
        rates = one["tokens_per_second"]
        spread = f"{min(rates):,.0f}, {max(rates):,.0f}"
        lines.append(f"| {name} | {one['padding']:.1%} | {statistics.median(rates):,.0f} | {spread} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the records."""
    torch.set_num_threads(1)
    weights = torch.where(sampled.LABELS == 0, 0.1, 5.0)
    found: dict[str, Any] = {"wanted": float(weights[sampled.LABELS == 1].sum() / weights.sum())}
    found["drawn"] = {"shoal, any number of ranks": drawn(ours()), "one process": drawn(by_rank("one", 1))}
    for ranks in (2, 4):
        for kind in ("WeightedRandomSampler", "DistributedSampler"):
            found["drawn"][f"{kind} on {ranks} ranks"] = drawn(by_rank(kind, ranks))
    found["lengths"] = ragged()
    found["hashes"] = {name: hashes(name) for name in sampled.samplers()}
    (RESULTS / "samplers.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "samplers.md").write_text(page(found))


if __name__ == "__main__":
    main()
