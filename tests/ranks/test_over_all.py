"""Metrics over all predictions: the value of one process on any number of ranks, each sample once and in order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.data.source import Opened, open_evaluation
from shoal.distributed.mesh import Mesh, alone, open_mesh
from shoal.errors import JobError, UserCodeError
from shoal.launch.environment import Environment
from shoal.numerics import over_all as rows_of_all
from shoal.numerics.outputs import evaluated_functions
from shoal.numerics.precision import Precision
from shoal.plans.plan import Layout, PrecisionSection
from shoal.training.microbatch.evaluation import Evaluator
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

SCORES = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.2, 0.6, 0.6, 0.3, 0.9, 0.5])
TARGETS = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 1, 0])
# The area under the curve and F1 of the ten samples; of the means of halves 0.708333, with two samples twice 0.757143.
AUROC, F1 = 0.74, 0.6


class Scores(nn.Module):
    """The scores themselves, and the number of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.forwards: list[int] = []

    def forward(self, scores: Tensor) -> Tensor:
        self.forwards.append(len(scores))
        return scores * self.scale


def loss(model: Any, batch: Any) -> Any:
    return shoal.mse(model(batch[0]), batch[1].float())


def job(metrics: Mapping[Any, Any], **settings: Any) -> shoal.Job:
    return shoal.Job(
        model=Scores,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        train_data=(SCORES, TARGETS),
        eval_data=(SCORES, TARGETS),
        metrics=metrics,
        global_batch=3,  # four chunks, the last of one sample
        **settings,
    )


def evaluated(metrics: Mapping[Any, Any], mesh: Mesh, model: nn.Module | None = None, fills: bool = False) -> Any:
    data: Opened | None = open_evaluation("eval_data", (SCORES, TARGETS), None)
    precision = Precision.of(PrecisionSection(), mesh.device)
    evaluator = Evaluator(job(metrics), mesh, precision, data, metrics, syncs_every_microbatch=fills)
    return evaluator.evaluate(model or Scores())[0]


def on_ranks(count: int, metrics: Mapping[Any, Any], folder: Path) -> list[dict[str, float]]:
    """What the ranks return, where those with fewer chunks compute fillers; raises what they raise."""

    def rank(environment: Environment) -> None:
        with open_mesh(environment, Layout(data=count)) as mesh:
            found = evaluated(metrics, mesh, fills=count > 2)
        (folder / f"{environment.rank}.json").write_text(json.dumps(found))

    with forked(count, rank, folder / str(count)) as wait:
        wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def f1(outputs: Tensor, targets: Tensor) -> float:
    return float(f1_score(targets, outputs > 0.45))


def auroc(outputs: Tensor, targets: Tensor) -> float:
    return float(roc_auc_score(targets, outputs))


class Updated:
    """A metric like those of torchmetrics, with more results than anybody asks for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append((outputs, targets))

    def compute(self) -> dict[str, Any]:
        outputs, targets = map(torch.cat, zip(*self.seen, strict=True))
        return {
            "of updates": torch.tensor(auroc(outputs, targets), dtype=torch.float64),
            "count": len(outputs),
            "other": None,
        }


class WithArguments(Updated):
    """A metric whose class alone is not enough."""

    def __init__(self, threshold: float) -> None:
        super().__init__()


def texts(outputs: list[str], targets: dict[str, Any]) -> float:
    assert outputs == [f"{score:.2f}" for score in SCORES.tolist()]
    assert targets["few"] == [[target] * target for target in TARGETS.tolist()]
    return float((targets["all"] == TARGETS).sum())


def own(model: Any, batch: Any) -> dict[str, Any]:
    scores = model(batch[0])
    return {"mean": (scores.sum(), len(scores)), "auroc too": shoal.over_all(auroc, scores, batch[1])}


METRICS = {
    "auroc": shoal.over_all(roc_auc_score),  # whose targets come first
    "f1": shoal.over_all(f1),
    ("of updates", "count"): shoal.over_all(Updated()),
    ("mean", "auroc too"): own,
    "texts": shoal.over_all(
        texts,
        outputs=lambda model, batch: [f"{score:.2f}" for score in model(batch[0]).tolist()],
        targets=lambda batch: {"few": [[t] * t for t in batch[1].tolist()], "all": batch[1]},
    ),
}
VALUES = {"auroc": AUROC, "f1": F1, "of updates": AUROC, "count": 10.0, "auroc too": AUROC, "texts": 10.0}


@parametrize("ranks", [2, 3, 5], usual=["3"])
def test_the_value_is_that_of_one_process(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = on_ranks(1, METRICS, tmp_path)[0]
    assert {name: value for name, value in one.items() if name != "mean"} == VALUES
    monkeypatch.setattr(rows_of_all, "IN_MEMORY", 8)  # all on disk
    assert on_ranks(ranks, METRICS, tmp_path) == [one] * ranks


def test_metrics_of_torchmetrics_as_they_are(tmp_path: Path) -> None:
    kinds = pytest.importorskip("torchmetrics.classification", reason="it is in the extra dev: pip install shoal[dev]")
    collection = pytest.importorskip("torchmetrics").MetricCollection(
        {"a": kinds.BinaryAUROC(), "b": kinds.BinaryAUROC()}
    )
    metrics = {"auroc": kinds.BinaryAUROC, "f1": kinds.BinaryF1Score(threshold=0.45), ("a", "b"): collection}
    for found in (*on_ranks(1, metrics, tmp_path), *on_ranks(3, metrics, tmp_path)):
        assert found == pytest.approx({"auroc": AUROC, "f1": F1, "a": AUROC, "b": AUROC}, rel=1e-6)  # float32


def test_an_exception_in_the_function_ends_all_ranks(tmp_path: Path) -> None:
    def one_class(outputs: Tensor, targets: Tensor) -> float:
        raise ValueError(f"only one class in {len(outputs)} rows")

    def rank(environment: Environment) -> None:
        with open_mesh(environment, Layout(data=2)) as mesh:
            try:
                evaluated({"bad": shoal.over_all(one_class)}, mesh)
            except UserCodeError as error:
                (tmp_path / str(environment.rank)).write_text(f"{error} {error.traceback_text}")

    with forked(2, rank, tmp_path / "ranks") as wait:
        wait()
    for number in range(2):
        said = (tmp_path / str(number)).read_text()
        assert "only one class in 10 rows" in said
        assert "in one_class" in said


def test_seven_metrics_and_the_loss_take_one_forward() -> None:
    names = ("loss", *map(str, range(6)), "auroc")

    def values(model: Any, batch: Any) -> dict[str, Any]:
        scores = model(batch[0])
        pairs = {str(number): (scores.sum() * number, len(scores)) for number in range(6)}
        return {"loss": shoal.mse(scores, batch[1].float()), **pairs, "auroc": shoal.over_all(auroc, scores, batch[1])}

    model, mesh = Scores(), alone(torch.device("cpu"))
    metrics = evaluated_functions(job({names: values}, watch="5:max"))
    found = evaluated(metrics, mesh, model)
    assert model.forwards == [3, 3, 3, 1]
    assert list(found) == list(names)
    assert found["auroc"] == AUROC
    assert found["5"] == pytest.approx(5 * float(SCORES.mean()))
    model.forwards.clear()
    evaluated({"auroc": shoal.over_all(auroc), "f1": shoal.over_all(f1), "texts": METRICS["texts"]}, mesh, model)
    assert model.forwards == [3, 3, 3, 3, 3, 3, 1, 1]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"a": shoal.over_all(lambda outputs, targets: {"map": 1.0})}, r"a dict of map"),
        ({("a", "b"): lambda model, batch: {"a": (1.0, 1)}}, "which returned a;"),
        ({"a": shoal.over_all(auroc, outputs=lambda model, batch: model(batch[0])[None])}, "pad them to one shape"),
        ({"a": shoal.over_all(auroc, outputs=lambda model, batch: object())}, "outputs of type object"),
        ({"a": shoal.over_all(auroc, outputs=lambda model, batch: model(batch[0]).sum())}, "which has no rows"),
        ({"a": lambda m, b: shoal.over_all(f1, m(b[0]), b[1]) if len(b[0]) > 1 else (1.0, 1)}, "a pair for others"),
        ({"a": lambda model, batch: shoal.over_all(f1, model(batch[0]))}, "without targets"),
    ],
)
def test_wrong_results_are_refused(metrics: Mapping[Any, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        evaluated(metrics, alone(torch.device("cpu")))
    with pytest.raises(JobError, match="it takes a function of all outputs and targets"):
        shoal.over_all(0.5)
    with pytest.raises(JobError, match=r"give an object: shoal.over_all\(WithArguments"):
        shoal.over_all(WithArguments)
    with pytest.raises(JobError, match="without reset"):
        shoal.over_all(type("Lasting", (), {"update": print, "compute": print})())


def test_a_function_that_needs_more_samples_than_a_verification_evaluates_has_no_value() -> None:
    def needs_ten(outputs: Tensor, targets: Tensor) -> float:
        return float(outputs[9])

    mesh, metrics = alone(torch.device("cpu")), {"tenth": shoal.over_all(needs_ten)}
    data, precision = (
        open_evaluation("eval_data", (SCORES, TARGETS), None),
        Precision.of(PrecisionSection(), mesh.device),
    )
    few = Evaluator(job(metrics), mesh, precision, data, metrics, most_samples=4)
    assert str(few.evaluate(Scores())[0]) == "{'tenth': nan}"
    assert few.without_value == {"tenth": "its function returned nan"}
    assert evaluated(metrics, mesh) == {"tenth": 0.5}
