"""Signals are noted; one kind twice is impatience, two kinds are not."""

import os
import signal

import pytest

from shoal.launch.signals import Signals


@pytest.mark.parametrize(
    ("numbers", "twice"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGINT], False),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], True),
        ([signal.SIGINT, signal.SIGINT], True),
    ],
)
def test_noted_while_handled(numbers: list[int], twice: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(impatient=False)
    with signals.handled():
        for number in numbers:
            os.kill(os.getpid(), number)
        assert signals.received == numbers
    assert signals.twice is twice
    assert signal.getsignal(signal.SIGTERM) is before
