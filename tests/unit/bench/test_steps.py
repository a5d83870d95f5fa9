"""Steps of models of next to nothing, by the engine itself."""

from __future__ import annotations

import torch

from shoal.bench.steps import FEW, MANY, steps, tensors
from shoal.mesh import Mesh
from shoal.plan.layout import Layout


def test_a_step_of_few_and_of_many_parameters() -> None:
    rows = list(steps(Mesh(Layout(), 0, torch.device("cpu"), "host"), quick=True))
    assert [row["size"] for row in rows] == [tensors(FEW), tensors(MANY)] == [2, 50]
    few, many = rows
    assert len(few["seconds"]) == len(many["seconds"]) > 10
    # Each layer more is its product, and in the backward those of its input and weight and the bias's sum.
    assert many["work"] - few["work"] == 4 * (MANY - FEW)
