"""A loop of one's own that is left, or never begun: what it held is free again, and no request is forgotten."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import ExitCode, JobMismatchError, SettingWarning, UserCodeError
from shoal.training.session.meeting import StopRequests

Stop = Callable[[int], bool]


def data() -> TensorDataset:
    return TensorDataset(torch.ones(16, 2), torch.ones(16, 1))


def session(kept: Path | None = None, **changes: Any) -> shoal.Session:
    return shoal.Session(global_batch=4, checkpoints=kept, **changes)


def line() -> nn.Linear:
    return nn.Linear(2, 1)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, weight_decay=0.5)


def go(own: shoal.Session, *schedulers: Callable[[SGD], Any], stop: Stop = lambda number: False) -> list[int]:
    """The numbers of the steps that a loop goes through."""
    model = line()
    own.prepare(model, optimizer := sgd(model), *(make(optimizer) for make in schedulers))
    numbers = []
    for step in own.steps(data()):
        for inputs, _ in step:
            step.backward(model(inputs).sum(), len(inputs))
        numbers.append(step.number)
        if stop(step.number):
            break
    return numbers


def test_a_resume_that_is_refused_leaves_the_directory_free(tmp_path: Path) -> None:
    with session(tmp_path) as own:
        go(own, stop=lambda number: number == 2)
    with session(tmp_path, resume=True) as own, pytest.raises(JobMismatchError, match="schedulers StepLR"):
        go(own, lambda optimizer: lr_scheduler.StepLR(optimizer, 3))
    with session(tmp_path, resume=True) as own:
        assert go(own) == [3, 4]


class Odd(lr_scheduler.StepLR):
    """A scheduler whose state is no JSON value."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": object()}


def test_a_scheduler_that_cannot_be_kept_leaves_the_directory_free(tmp_path: Path) -> None:
    with session(tmp_path) as own:
        with pytest.raises(UserCodeError, match="state_dict"):
            go(own, lambda optimizer: Odd(optimizer, 3))
        with session(tmp_path) as other:
            assert go(other) == [1, 2, 3, 4]


def test_steps_that_were_never_begun_leave_all_free(tmp_path: Path) -> None:
    model = line()
    with session(tmp_path) as own:
        own.prepare(model, optimizer := sgd(model))
        steps = own.steps(data())
    optimizer.step()
    with session(tmp_path) as own:
        assert go(own) == [1, 2, 3, 4]
    assert list(steps) == []


def interrupt(number: int) -> bool:
    if number == 2:
        signal.raise_signal(signal.SIGINT)
    return number == 2


@pytest.mark.parametrize("where", ["close", "evaluate"])
def test_ctrl_c_and_a_break_in_the_same_step(where: str, tmp_path: Path) -> None:
    own = session(tmp_path)
    assert go(own, stop=interrupt) == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        own.close() if where == "close" else own.evaluate(data(), {})
    own.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def interrupted_before_an_evaluation(kept: Path, found: list[Any]) -> None:
    model = line()
    with session(kept) as own:
        own.prepare(model, sgd(model))
        for step in own.steps(data()):
            for inputs, _ in step:
                step.backward(model(inputs).sum(), len(inputs))
            signal.raise_signal(signal.SIGINT)
            found.append(own.evaluate(data(), {}))


def test_ctrl_c_in_a_step_that_evaluates(tmp_path: Path) -> None:
    """The request waits for the end of the step."""
    found: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_before_an_evaluation(tmp_path, found)
    assert found == [({}, 16)]


def asked_between_updates(kept: Path) -> None:
    first, second = line(), line()
    one, other = sgd(first), sgd(second)
    with session(kept) as own:
        own.prepare(first, second, one, other)
        for step in own.steps(data()):
            for model, optimizer in ((first, one), (second, other)):
                for inputs, _ in step.batches(optimizer):
                    step.backward(model(inputs).sum(), len(inputs))
                if step.number == 2 and model is first:
                    signal.raise_signal(signal.SIGTERM)


def test_a_request_between_two_updates_waits_for_the_last(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        asked_between_updates(tmp_path)
    assert ended.value.code == ExitCode.PREEMPTED
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_another_rank_that_was_asked_and_a_break() -> None:
    asked = StopRequests()
    asked.insist()
    asked.elsewhere = True
    asked.insist(ValueError("the loop's own"))
    with pytest.raises(SystemExit) as ended:
        asked.insist()
    assert ended.value.code == ExitCode.PREEMPTED
    asked.insist()


def leave_first_step(kept: Path) -> int:
    """How many samples count."""
    first, second = line(), line()
    one, other = sgd(first), sgd(second)
    with session(kept) as own:
        own.prepare(first, second, one, other)
        for step in own.steps(data()):
            for model, optimizer in ((first, one), (second, other)):
                for inputs, _ in step.batches(optimizer):
                    step.backward(model(inputs).sum(), len(inputs))
            break
        return own.samples


def test_a_first_step_that_is_left_in_its_body(tmp_path: Path) -> None:
    """Nothing tells whether another update of it was to come."""
    with pytest.warns(RuntimeWarning, match="update of SGD, SGD, and no step before it tells"):
        assert leave_first_step(tmp_path) == 0
    assert list(tmp_path.glob("step-*")) == []


def test_an_evaluation_tells_what_has_no_effect() -> None:
    model = line()
    loader = DataLoader(data(), batch_size=3, num_workers=2, generator=torch.Generator())
    with session() as own:
        own.prepare(model, sgd(model))
        with pytest.warns(SettingWarning) as told:
            assert own.evaluate(loader, {}) == ({}, 16)
    said = [str(warning.message) for warning in told]
    assert [re.search(r"generator|num_workers=2", sentence) is not None for sentence in said] == [True, True]
    assert {warning.filename for warning in told} == {__file__}


def test_groups_that_the_loop_sets_have_their_effect_after_a_resume(tmp_path: Path) -> None:
    """The checkpoint holds what the step before left there, which is no news."""
    for resume, epochs in ((False, 1), (True, 2)):
        model = line()
        with session(tmp_path, resume=resume) as own:
            own.prepare(model, optimizer := AdamW(model.parameters(), lr=0.1))
            for step in own.steps(data(), epochs=epochs):
                optimizer.param_groups[0]["weight_decay"] = 0.01 * (1 + step.number)
                for inputs, _ in step:
                    step.backward(model(inputs).sum(), len(inputs))
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.09)
