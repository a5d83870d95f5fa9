"""Findings of what ranks do apart, from made-up records; `tests/programs` has real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.programs.apart import by_sample, differences, divided_by_hand
from shoal.programs.check import Evidence, findings_of
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
            "idle": [],
            "joins": None,
            "untrained": [],
        }
        made[-1]["modules"] = [
            {"class": "Net", "names": ["weight"], "shapes": {"weight": (2,)}, "beside": [], "loose": []}
        ]
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


def whole_records() -> list[dict[str, Any]]:
    """Records with all that is compared without a replay."""
    ranks = records()
    for rank in ranks:
        rank |= {"hooks": [], "exchanges": [], "samplers": []}
        for number, step in enumerate(rank["steps"]):
            step["calls"][0] |= {"weights": {"0:weight": "w0"}, "outputs": [0], "number": 0}
            loss = {"function": "cross_entropy", "count": 4, "ignored": 0, "weighted": False, "classes": ""}
            loss |= {"rows": 4, "pairs": None}
            step["losses"] = [loss | {"reduction": "mean", "gradient": 8.0, "call": 0}]
            step |= {"gradients": {"0:weight": torch.ones(2)}, "local": {"0:weight": torch.full((2,), 8.0)}}
            step |= {"groups": [{"names": ["0:weight"], "values": {"lr": 0.1}}], "strange": 0, "after": {}}
            step |= {"passes": {"0:weight": [number + 1]}, "began": number}
        rank["loaders"] = [{"step": 0, "sampler": "DistributedSampler", "shares": 2}]
    return ranks


def one_sample(ranks: list[dict[str, Any]], equal: tuple[int, ...]) -> None:
    """Batches of one sample, which are equal on both ranks in some steps."""
    for rank, record in enumerate(ranks):
        for number, step in enumerate(record["steps"]):
            step["calls"][0]["rows"] = [f"{number}" if number in equal else f"{rank} {number}"]


def in_all(change: Callable[[dict[str, Any]], object]) -> Callable[[list[dict[str, Any]]], object]:
    return lambda ranks: [change(step) for rank in ranks for step in rank["steps"]]


def divided_twice(ranks: list[dict[str, Any]]) -> None:
    for rank, record in enumerate(ranks):
        record["loaders"][0]["subset"] = f"part {rank}"


def copies(ranks: list[dict[str, Any]]) -> None:
    """The optimizer has tensors of its own, and the script changes the module's weights from them."""
    for record in ranks:
        record["alone"] = ["0:weight"]
    strange(ranks)


def strange(ranks: list[dict[str, Any]]) -> None:
    for record in ranks:
        for step in record["steps"]:
            step |= {"gradients": {}, "local": {}, "strange": 1, "groups": [{"names": [], "values": {}}]}


CLIP = {"kind": "value", "limit": 100.0, "norm": None, "keys": ["0:weight"], "raw": False, "backwards": 2}


def drawn(ranks: list[dict[str, Any]]) -> None:
    """One of two optimizers trains on equal noise on all ranks."""
    for record in ranks:
        record["optimizers"] = ["Adam", "SGD"]
        record["steps"][1] |= {"optimizer": 1}
        record["steps"][1]["calls"][0]["rows"] = list("abcd")
        record["steps"][2]["calls"][0]["rows"] += list("efg")  # made of equal noise, too


def read_alike(ranks: list[dict[str, Any]]) -> None:
    """One of two optimizers reads the same samples on all ranks, and the other reads most of them."""
    drawn(ranks)
    for record in ranks:
        record["steps"][0]["calls"][0]["rows"] += list("efghi")


def divided(ranks: list[dict[str, Any]], *, rows: bool) -> None:
    """Ranks compute parts of one forward, and get other gradients; `rows`: from the same samples."""
    for rank, record in enumerate(ranks):
        record["modules"][0]["beside"] = [0, 1]
        for step in record["steps"]:
            step["gradients"] = step["local"] = {"0:weight": torch.ones(2) + rank}
            step["scales"] = []
            step["losses"] = []
            step["calls"][0]["rows"] = list("abcd") if rows else step["calls"][0]["rows"]


def carried(step: dict[str, Any]) -> None:
    """The gradient of the step before is still there at the first backward."""
    step |= {"carried": {"0:weight": torch.ones(2)}, "gradients": {"0:weight": torch.full((2,), 1.125)}}


def summed(step: dict[str, Any]) -> None:
    """The script divides its losses by the whole batch, and sums gradients over ranks."""
    step |= {"scales": [], "local": {"0:weight": torch.ones(2)}, "gradients": {"0:weight": torch.full((2,), 2.0)}}
    step["losses"][0]["gradient"] = 0.5


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda ranks: None, None),
        (lambda ranks: one_sample(ranks, (1,)), (1, "data", "samples", False)),
        (lambda ranks: one_sample(ranks, (0, 1, 2)), (0, "data", "samples", True)),
        (divided_twice, (0, "data", "dataset", True)),
        (second(1, lambda step: step["losses"][0].update(classes="a")), (1, "loss", "weight of cross_entropy", False)),
        (in_all(lambda step: step.update(passes={"0:weight": [0, 9]}, began=5)), (0, "backward", "SGD", False)),
        (in_all(carried), (1, "backward", "SGD", False)),
        (in_all(lambda step: step.update(clips=[CLIP])), (2, "clipping", "accumulated gradients", False)),
        (in_all(lambda step: step["gathered"].append("all_gather")), (0, "loss", "gathered values", False)),
        (in_all(lambda step: step["losses"][0].update(pairs=(0, 4))), (0, "loss", "targets", False)),
        (in_all(lambda step: step["losses"][0].update(pairs=(0, 8))), (0, "loss", "targets", False)),
        (in_all(lambda step: step["losses"][0].update(pairs=(0, 10))), None),
        (lambda ranks: ranks[0].update(idle=["0:weight"]), (0, "update", "weight", False)),
        (drawn, (1, "data", "samples", False)),
        (read_alike, (0, "data", "samples", False)),
        (lambda ranks: divided(ranks, rows=False), (0, "data", "samples", True)),
        (lambda ranks: divided(ranks, rows=True), (0, "forward", "Net", True)),
        (in_all(summed), None),
        (strange, (0, "update", "SGD", True)),
        (copies, (0, "update", "SGD", False)),
        (second(2, lambda step: step["local"].clear()), (2, "reduction", "weight", True)),
        (lambda ranks: ranks[1]["steps"].pop(), (2, "processes", "number of steps", True)),
        (lambda ranks: (ranks[1]["steps"].pop(), ranks[1].update(joins=2)), None),
        (lambda ranks: (ranks[1]["steps"].pop(), ranks[1].update(num_unseen=1)), None),
    ],
)
def test_what_records_show_without_a_replay(change: Callable[[Any], object], found: tuple[Any, ...] | None) -> None:
    ranks = whole_records()
    change(ranks)
    findings = [(one.step, one.phase, one.name, one.fails) for one in findings_of(Evidence(ranks, None))]
    assert findings[:1] == ([found] if found else []), findings


@pytest.mark.parametrize(
    ("left", "mine", "fails"),
    [
        (8.0, (3.0, 3.0), None),  # changed on both ranks alike, after the backward had left the mean
        (8.0, (3.0, 5.0), True),
        (5.0, (3.0, 3.0), True),
        (8.0, (2.0, 2.0), True),  # a factor that follows the ranks
    ],
)
def test_gradients_that_the_script_changes(left: float, mine: tuple[float, float], fails: bool | None) -> None:
    ranks = whole_records()
    for record, own in zip(ranks, mine, strict=True):
        for step in record["steps"]:
            step["left"] = {"0:weight": torch.full((2,), left)}
            step["gradients"] = {"0:weight": torch.tensor([own, own if fails and own == 2.0 else -1.0])}
    found = findings_of(Evidence(ranks, None))
    assert {(one.phase, one.fails) for one in found} == {("reduction", True) if fails else ("clipping", False)}


def test_divided_models_are_named() -> None:
    ranks = whole_records()
    assert divided_by_hand(ranks) == ""
    for record in ranks:
        record["exchanges"] = ["all_reduce"]
    assert divided_by_hand(ranks) == ""
    ranks[1]["steps"][0]["calls"][0]["weights"] = {"0:weight": "other"}
    assert "ranks have other weights" in divided_by_hand(ranks)
    ranks[1]["modules"][0]["shapes"] = {"weight": (3,)}
    assert "ranks have other modules" in divided_by_hand(ranks)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([0.125, 0.125], ""),
        ([0.1, 0.2], "samples weigh 0.8 to 1.6 times"),
        ([[0.1, 0.2, 0.1, 0.1], 0.125], "are not those"),
    ],
)
def test_what_samples_weigh_is_that_of_one_process(weights: list[Any], said: str) -> None:
    """A forward returns scores and a loss; ranks divide the losses of four samples, one process those of eight."""
    ranks = records()
    rows, values = [], []
    for record, weight in zip(ranks, weights, strict=True):
        call = record["steps"][0]["calls"][0]
        scores = torch.arange(4.0).view(4, 1) + 10 * record["rank"]
        gradient = 2 * torch.as_tensor(weight).expand(4).reshape(4, 1)
        call["outputs"] = [{"values": scores.flatten()}, {"values": torch.ones(1)}]
        call["passes"] = {1: {0: gradient, 1: torch.ones(())}}
        record["steps"][0]["scales"] = []
        rows += call["rows"]
        values.append(scores)
    alone = copy.deepcopy(ranks[0])
    call = alone["steps"][0]["calls"][0]
    call["rows"], call["outputs"][0]["values"] = rows, torch.cat(values).flatten()
    call["passes"][1][0] = torch.full((8, 1), 0.125)
    findings = list(by_sample(Evidence(ranks, None), alone))
    assert [said in one.said for one in findings] == ([True] if said else []), findings
    assert all(one.fails == ("weigh" in said) for one in findings)
