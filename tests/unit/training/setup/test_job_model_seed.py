"""Models whose initial values do not follow from the job's seed are named; those that do, or are constants, are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from shoal.distributed.mesh import Mesh
from shoal.distributed.process_setup import has_drawn_since_loading, seed_loading
from shoal.errors import JobError
from shoal.numerics.generators import seed_everything
from shoal.training.setup.job_model import construct_twice, unlike_ranks

OUTSIDE = nn.Linear(3, 2)
GROWS = nn.Sequential(nn.Linear(2, 2))


def own_numbers() -> nn.Module:
    model = nn.Linear(3, 2)
    values = np.random.default_rng().normal(size=(2, 3))
    model.weight.data.copy_(torch.from_numpy(values))
    return model


def own_generator() -> nn.Module:
    generator = torch.Generator()
    generator.seed()
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("noise", torch.randn(3, generator=generator))
    return model


def seeded_generator() -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(1))
    return model


def constant() -> nn.Module:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    return model


def found(make: Callable[[], nn.Module], *, drawn: bool = True) -> list[str]:
    def seeded() -> nn.Module:
        seed_everything(1)
        return make()

    model, said = construct_twice(seeded, drawn)
    state = torch.default_generator.get_state()
    seeded()
    assert torch.equal(state, torch.default_generator.get_state())
    assert isinstance(model, nn.Module)
    return said


@pytest.mark.parametrize(
    ("make", "says", "names"),
    [
        (lambda: OUTSIDE, "were made before", "weight and 1 more"),
        (lambda: nn.Sequential(OUTSIDE, nn.Linear(2, 2)), "were made before", "0.weight and 1 more"),
        (own_numbers, "other initial values", "(weight)"),
        (own_generator, "other initial values", "(noise)"),
    ],
    ids=["outside", "a part", "numpy", "torch"],
)
def test_values_of_another_origin_are_named(make: Callable[[], nn.Module], says: str, names: str) -> None:
    (said,) = found(make)
    assert says in said
    assert names in said


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout()),
        lambda: copy.deepcopy(OUTSIDE),
        lambda: nn.LazyLinear(2),
        seeded_generator,
        constant,
        nn.Identity,
    ],
    ids=["usual", "a copy", "lazy", "seeded", "constant", "empty"],
)
def test_others_are_not(make: Callable[[], nn.Module]) -> None:
    assert found(make) == []


def test_weights_from_a_file_are_not(tmp_path: Path) -> None:
    torch.save(OUTSIDE.state_dict(), tmp_path / "weights.pt")

    def loaded() -> nn.Module:
        model = nn.Linear(3, 2)
        model.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return model

    assert found(loaded) == []
    kept = loaded()
    assert found(lambda: kept, drawn=False) == []  # loaded at import, where nothing was drawn


def test_model_is_called_once_in_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[nn.Module] = []

    def make() -> nn.Module:
        print("made")
        calls.append(nn.Linear(3, 2))
        return calls[-1]

    model, said = construct_twice(make, drawn=True)
    assert calls == [model]
    assert capfd.readouterr().out == "made\n"
    assert len(said) == 1  # each call draws from the generator as the one before left it


def test_a_function_that_can_be_called_once() -> None:
    calls: list[int] = []

    def make() -> nn.Module:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("a second call")
        return nn.Linear(3, 2)

    model, said = construct_twice(make, drawn=True)
    assert (type(model), said) == (nn.Linear, [])


class Features(nn.Linear):
    """Random features in a plain attribute."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(3, 2)
        self.drawn = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 3)))
        self.also = self.drawn + 1
        self.scratch = torch.empty(1000)


def test_an_attribute_that_each_call_draws_anew_is_refused() -> None:
    with pytest.raises(JobError, match=r"other values to drawn and 1 more when it is called again"):
        found(lambda: Features(None))
    assert found(lambda: Features(3)) == []


def test_a_module_that_each_call_changes_is_named() -> None:
    (said,) = found(lambda: GROWS.append(nn.Linear(2, 2)))
    assert "another structure" in said


@pytest.mark.parametrize(("told", "says"), [(0, []), (1, ["on rank 1 than on rank 0"])])
def test_ranks_with_other_values_are_named(told: int, says: list[str]) -> None:
    """Ranks that have loaded the job each for itself: what the other one tells is given here."""

    class Two:
        world_size = 2

        def gather_json(self, own: int) -> list[int]:
            return [own, own + told]

    found = unlike_ranks(cast("Mesh", Two()), OUTSIDE)
    assert len(found) == len(says)
    assert all(said in line for line, said in zip(found, says, strict=True))


def test_what_a_job_draws_while_it_is_loaded() -> None:
    state = torch.default_generator.get_state()
    seed_loading()
    assert not has_drawn_since_loading()
    first = nn.Linear(3, 2).weight
    assert has_drawn_since_loading()
    seed_loading()
    assert torch.equal(nn.Linear(3, 2).weight, first)
    torch.manual_seed(3)  # by the job itself
    assert not has_drawn_since_loading()
    torch.default_generator.set_state(state)
