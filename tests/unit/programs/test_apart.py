"""Findings of what ranks do apart, from made-up records; `tests/programs` has real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.programs.apart import differences
from shoal.programs.check import Evidence
from shoal.programs.observer import new_step

SAME = {"torch": torch.tensor([0])}


def records() -> list[dict[str, Any]]:
    """Two ranks with three steps of a right script each."""
    made = []
    for rank in range(2):
        steps = []
        for number in range(3):
            call = {"module": 0, "training": True, "unlike": [], "autocast": None, "digest": f"w{number}", "dtypes": {}}
            call |= {"draws": ["torch"], "random": {"torch": torch.tensor([rank])}, "exchanges": False}
            call |= {"passes": {1: {}}, "outputs": []}
            call["rows"] = [f"{rank} {number} {row}" for row in range(4)]
            own = {"calls": [call], "buffers": {"0:mean": torch.ones(2)}, "after_digests": {"0:weight": f"a{number}"}}
            steps.append({**new_step(), **own, "scales": [8.0], "unscaled": True, "raw": False, "optimizer": 0})
        sampler = {"seed": 0, "epoch": 0, "shuffle": True, "step": 0}
        made.append({"rank": rank, "steps": steps, "samplers": [sampler], "loaders": [{"step": 0}]})
        made[-1] |= {
            "unseen": [],
            "redirected": {},
            "optimizers": ["SGD"],
            "num_unseen": 0,
            "alone": [],
            "joins": False,
        }
        made[-1]["modules"] = [{"class": "Net", "names": ["weight"], "shapes": {"weight": (2,)}, "beside": []}]
    return made


def same_rows(ranks: list[dict[str, Any]]) -> None:
    """The second rank reads what the first has read a step before."""
    for number in (1, 2):
        ranks[1]["steps"][number]["calls"][0]["rows"] = ranks[0]["steps"][number - 1]["calls"][0]["rows"]


def second(step: int, change: Callable[[dict[str, Any]], object]) -> Callable[[list[dict[str, Any]]], object]:
    """A change of a step of the second rank."""
    return lambda ranks: change(ranks[1]["steps"][step])


def both(change: Callable[[dict[str, Any]], object]) -> Callable[[list[dict[str, Any]]], object]:
    return lambda ranks: [change(rank["steps"][1]) for rank in ranks]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda ranks: None, None),
        (lambda ranks: ranks[1]["samplers"][0].update(seed=1), (0, "data", "order of samples", True)),
        (same_rows, (2, "data", "samples of a pass", False)),
        (second(1, lambda step: step["calls"][0].update(training=False)), (1, "forward", "Net", True)),
        (second(1, lambda step: step["calls"][0].update(unlike=["norm"])), (1, "forward", "Net", True)),
        (second(1, lambda step: step["calls"][0].update(autocast="torch.bfloat16")), (1, "forward", "Net", True)),
        (second(1, lambda step: step["calls"][0].update(digest="other")), (0, "replicas", "Net", True)),
        (second(0, lambda step: step["calls"][0].update(random=SAME)), (0, "forward", "Net", False)),
        (second(0, lambda step: step["buffers"].update({"0:mean": torch.zeros(2)})), (0, "replicas", "mean", False)),
        (both(lambda step: step["clips"].append({"raw": True})), (1, "clipping", "scaled gradients", False)),
        (both(lambda step: step.update(raw=True)), (1, "update", "SGD", True)),
    ],
)  # fmt: skip
def test_what_ranks_do_apart(change: Callable[[Any], object], found: tuple[Any, ...] | None) -> None:
    ranks = copy.deepcopy(records())
    change(ranks)
    findings = [(one.step, one.phase, one.name, one.fails) for one in differences(Evidence(ranks, None))]
    assert findings == ([found] if found else [])


def test_samples_that_a_rank_reads_twice_may_be_drawn() -> None:
    ranks = records()
    for rank in ranks:
        rank["steps"][2]["calls"][0]["rows"] = rank["steps"][1]["calls"][0]["rows"] = list("abcd")
    assert list(differences(Evidence(ranks, None))) == []
