"""Steps of models of next to nothing, by the engine itself."""

from __future__ import annotations

import torch

from shoal.distributed.mesh import Mesh
from shoal.planner.measure.worker import FEW, MANY, _blocks, _loss, _model, step_operators, steps
from shoal.planner.profile.profiles import profile
from shoal.plans.plan import Layout


def test_a_step_of_few_and_of_many_parameters() -> None:
    rows = list(steps(Mesh(Layout(), 0, torch.device("cpu"), "host"), quick=True))
    assert [row["size"] for row in rows] == [2 * FEW, 2 * MANY] == [2, 50]
    few, many = rows
    assert len(few["seconds"]) == len(many["seconds"]) > 10
    assert (few["work"], many["work"]) == (5, 101)


def test_the_operators_are_those_of_a_profile() -> None:
    for layers in (FEW, MANY):
        traced = profile(_model(layers), _loss, lambda n: [torch.zeros(n, 8)], device="cpu")
        assert step_operators(layers) == sum(o.launches for unit in traced.units for o in unit.body.operations)
    blocks = profile(_blocks(4), _loss, lambda n: [torch.zeros(n, 8)], device="cpu")
    assert step_operators(4) == sum(o.launches for unit in blocks.units for o in unit.body.operations)
