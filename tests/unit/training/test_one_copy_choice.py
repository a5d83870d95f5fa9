"""Choice between one copy and a copy each: what else has a parameter's memory is given a while to let go of it."""

import threading

import torch
from torch import nn

from shoal.training.one_copy_choice import is_held_elsewhere


def test_a_tensor_that_is_let_go_of_in_a_while_is_none_that_holds_a_parameter() -> None:
    """As a thread of a process group, which has just broadcast it."""
    parameter = nn.Parameter(torch.ones(3))
    others = [parameter.detach()]
    timer = threading.Timer(0.1, others.clear)
    timer.start()
    assert not is_held_elsewhere(parameter, 60.0)
    timer.join()


def test_a_view_that_stays_holds_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    view = parameter.data[:2]
    assert is_held_elsewhere(parameter, 0.01)
    del view
    assert not is_held_elsewhere(parameter, 0.0)
