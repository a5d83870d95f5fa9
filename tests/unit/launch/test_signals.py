"""Signals are noted; one kind twice is impatience, two kinds are not."""

import os
import signal
import subprocess
import sys

import pytest

from shoal.launch.signals import BURST_SECONDS, Signals


@pytest.mark.parametrize(
    ("numbers", "twice"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGHUP], False),
        ([signal.SIGTERM, signal.SIGINT], False),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], True),
        ([signal.SIGINT, signal.SIGINT], True),
    ],
)
def test_noted_while_handled(numbers: list[int], twice: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    now = 0.0
    signals = Signals(impatient=False, clock=lambda: now)
    with signals.handled():
        for number in numbers:
            now += BURST_SECONDS
            os.kill(os.getpid(), number)
        assert signals.received == numbers
    assert signals.twice is twice
    assert signal.getsignal(signal.SIGTERM) is before


def test_deliveries_within_a_second_are_one_request() -> None:
    now = 5.0
    signals = Signals(impatient=True, clock=lambda: now)
    with signals.handled():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now += 0.3
        assert signals.received == [signal.SIGTERM]
        assert not signals.twice


def test_what_a_launcher_hands_on_is_no_second_request_however_late() -> None:
    now = 0.0
    signals = Signals(impatient=False, clock=lambda: now)
    assert signals.takes(signal.SIGTERM)
    now += 60.0
    assert not signals.takes(signal.SIGTERM, from_launcher=True)
    assert not signals.twice
    now += 60.0
    assert signals.takes(signal.SIGTERM, from_launcher=True), "the launcher's second one"
    assert not signals.takes(signal.SIGTERM), "which has come directly too"
    assert signals.received == [signal.SIGTERM, signal.SIGTERM]
    assert signals.twice


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_nohup_or_a_background_job_ignores_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    signals = Signals(impatient=True)
    try:
        with signals.handled():
            for _ in range(2):
                os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert signals.received == []


DROPPED = """
import os, signal, time
from shoal.launch.signals import exiting

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

with exiting((signal.SIGTERM,)):
    Finalized()
    time.sleep(20)
"""


def test_an_exit_that_a_finalizer_drops_is_raised_again() -> None:
    ended = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")
