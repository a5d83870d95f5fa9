"""One copy of a model whose largest parameter several ranks update: the bits are those of a copy for each rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import one_large
from tests.launching import JOBS, Ended, Run, run, run_all, start_command
from tests.ranks.test_one_copy import in_ranks, plan
from tests.ranks.test_one_copy_default import copies, same, shared
from tests.usual import parametrize

from shoal.parallel.shard.one_copy import OneCopyUpdate
from shoal.training.observer import Observer
from shoal.training.setup.engine import Engine

pytestmark = pytest.mark.ranks

JOB = str(JOBS / "one_large.py")
LARGE = "2.weight"


def parts(engine: Engine) -> Any:
    """The bytes of the large parameter that this rank steps, and the shapes of its state on this rank."""
    owner = engine.strategy.update_division
    assert isinstance(owner, OneCopyUpdate)
    assert owner._pieces is not None
    [part] = owner._pieces.parts.values()
    weight = dict(engine.sharded_model.parameters())[LARGE]
    state = engine.updater.optimizer.state.get(weight)
    shapes = None if state is None else {key: list(value.shape) for key, value in state.items() if value.ndim}
    return [0 if part is None else part.numel() * part.itemsize, shapes]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_step_as_much_and_the_owner_has_the_state(ranks: int, tmp_path: Path) -> None:
    """Its 1 MiB is nearly all there is; the state of it all is where a checkpoint looks for it."""
    told = in_ranks(partial(one_large.job, "Adam"), tmp_path / "ranks", parts, ranks=ranks)
    stepped = [num_bytes for num_bytes, _ in told]
    assert sum(stepped) == 1 << 20
    assert max(stepped) < 1.1 * (1 << 20) / ranks
    assert [shapes for _, shapes in told if shapes] == [{"exp_avg": [512, 512], "exp_avg_sq": [512, 512]}]


def written(folder: Path, ranks: int, is_shared: bool) -> Any:
    """The weights after a step, a change of the optimizer's state in place by its owner, and two steps more."""

    def change(step: int, engine: Engine) -> None:
        weight = dict(engine.sharded_model.parameters())[LARGE]
        state = engine.updater.optimizer.state.get(weight)
        if step == 1 and state:
            state["step"].zero_()
            state["exp_avg"].zero_()
            state["mine"] = {"kept": 1}

    def weights(engine: Engine) -> Any:
        state = engine.updater.optimizer.state.get(dict(engine.sharded_model.parameters())[LARGE])
        kept = None if state is None else state["mine"]
        return [kept, [p.detach().view(torch.uint8).flatten().tolist() for _, p in engine.sharded_model.parameters()]]

    job = partial(one_large.job, "Adam")
    return in_ranks(job, folder, weights, ranks=ranks, steps=3, shared=is_shared, observer=Changing(change))


class Changing(Observer):
    """Calls a function after each update."""

    def __init__(self, change: Callable[[int, Engine], None]) -> None:
        self.change, self.step = change, 0

    def updated(self, skipped: str | None) -> None:
        self.step += 1
        self.change(self.step, ENGINES[-1])


ENGINES: list[Engine] = []


def test_what_somebody_writes_to_the_owners_state_all_ranks_have(tmp_path: Path, monkeypatch: Any) -> None:
    """A counter too, of which each rank has its own; and what no step looks at stays in it."""
    whole = Engine.trainer

    def trainer(self: Engine, *of: Any, **named: Any) -> Any:
        ENGINES.append(self)
        return whole(self, *of, **named)

    monkeypatch.setattr(Engine, "trainer", trainer)
    one, other = (written(tmp_path / str(shared), 2, shared) for shared in (True, False))
    assert [weights for _, weights in one] == [weights for _, weights in other]
    assert {"kept": 1} in [kept for kept, _ in one]


@parametrize("optimizer", ["SGD", "AdamW"], usual=["AdamW"])
def test_the_bits_are_those_of_a_copy_each(optimizer: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {"optimizer": optimizer}
    ended = run_all(
        [
            Run(JOB, first, 2, settings=settings),
            Run(JOB, second, None, settings=settings, arguments=copies(tmp_path, False)),
        ]
    )
    assert same(ended[0]) == same(ended[1])
    assert [shared(out)[0] for out in (first, second)] == [True, False]


def test_what_a_model_writes_to_such_a_parameter_is_updated(tmp_path: Path) -> None:
    settings = {"normalised": True}
    ended = run_all(
        [
            Run(JOB, tmp_path / "first", 2, settings=settings),
            Run(JOB, tmp_path / "second", None, settings=settings, arguments=copies(tmp_path, False)),
        ]
    )
    assert same(ended[0]) == same(ended[1])


@parametrize("optimizer", ["SGD", "AdamW"], usual=["SGD"])
def test_its_state_goes_on_under_another_layout(optimizer: str, tmp_path: Path) -> None:
    """Two ranks with one copy, then three, then two with a copy each: each takes up what the one before has saved."""

    def on(out: Path, *ways: tuple[int, bool]) -> Ended:
        for number, (ranks, is_shared) in enumerate(ways):
            where = plan(tmp_path, ranks, exact=False, shared=is_shared)
            more = ("--resume",) if number else ()
            steps = ("--steps", str(2 * (number + 1)))
            ended = run(Run(JOB, out, None, settings={"optimizer": optimizer}, arguments=(*where, *more, *steps)))
            ended.expect(0)
        return ended

    one = on(tmp_path / "one", (2, True), (3, True), (2, False))
    other = on(tmp_path / "other", (2, False), (3, False), (2, True))
    assert same(one) == same(other)


@pytest.mark.slow
def test_the_certificate_is_of_such_a_run(tmp_path: Path) -> None:
    out = tmp_path / "verify"
    command = [sys.executable, "-m", "shoal", "verify", JOB, "--devices", "2", "--out", str(out)]
    with start_command(command, out) as started:
        started.wait().expect(0)
    document = json.loads((out / "certificate.json").read_text(encoding="utf-8"))
    assert document["plan"]["memory"]["shared"]
    assert document["verdict"] == "verified"
