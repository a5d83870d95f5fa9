"""Output of other processes on a stream of Python's."""

from __future__ import annotations

import io
import subprocess
import sys
import threading

import pytest

from shoal.launch.signals import Signals, pausing
from shoal.launch.supervise.child import OutputRelay, other_stream


def test_what_a_process_says_is_written_to_the_stream() -> None:
    stream = io.StringIO()
    relay = OutputRelay(stream)
    program = "import os; os.write(1, b'one \\xc3'); os.write(2, b'\\xa4\\n'); os.write(1, b'\\xff')"
    subprocess.run([sys.executable, "-c", program], stdout=relay.writer, stderr=relay.writer, check=True)
    relay.close()
    assert stream.getvalue() == "one ä\n�"
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-output"]


def test_a_closed_stream_takes_nothing_and_disturbs_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    relay = OutputRelay(stream)
    relay.writer.write(b"text")
    relay.close()


def test_whose_output_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(1, "w", closefd=False) as own:
        monkeypatch.setattr(sys, "stdout", own)
        assert other_stream() is None
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert other_stream() is stream


def test_signals_outside_of_the_main_thread() -> None:
    done = []

    def work() -> None:
        with Signals(impatient=False).handled(), pausing(print):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
