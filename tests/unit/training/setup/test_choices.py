"""Choice between one copy and a copy each: what else has a parameter's memory is given a while to let go of it."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.training.setup.choices import is_held_elsewhere


def test_a_tensor_that_is_let_go_of_in_a_while_is_none_that_holds_a_parameter() -> None:
    """As a thread of a process group, which has just broadcast it."""
    parameter = nn.Parameter(torch.ones(3))
    others = [parameter.detach()]
    timer = threading.Timer(0.1, others.clear)
    timer.start()
    assert not is_held_elsewhere(parameter, 60.0)
    timer.join()


@pytest.mark.parametrize(
    "made",
    [lambda: torch.ones(3).share_memory_(), lambda: torch.from_numpy(np.ones(3, np.float32))],
    ids=["process", "array"],
)
def test_what_a_process_or_an_array_has_too_is_held_elsewhere(made: Callable[[], Tensor]) -> None:
    assert is_held_elsewhere(nn.Parameter(made()), 0.0)


def test_a_view_that_stays_holds_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    view = parameter.data[:2]
    assert is_held_elsewhere(parameter, 0.01)
    del view
    assert not is_held_elsewhere(parameter, 0.0)
