"""Processes that try each other's ports, on this host without ssh."""

from __future__ import annotations

import json
import socket
import subprocess
import sys


def test_each_says_where_it_listens_and_what_it_reached() -> None:
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "shoal.launch.supervise.host_process", "ports"]
    probes = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as closing:
        shut = closing.getsockname()[1]
    try:
        ports = [json.loads(probe.stdout.readline()) for probe in probes if probe.stdout is not None]
        for probe, own in zip(probes, reversed(ports), strict=True):
            assert probe.stdin is not None
            probe.stdin.write(json.dumps([*(("127.0.0.1", port) for port in own), ("127.0.0.1", shut)]) + "\n")
            probe.stdin.flush()
        for probe in probes:
            assert probe.stdout is not None
            *reached, refused = json.loads(probe.stdout.readline())
            assert reached == ["", ""]
            assert "refused" in refused
    finally:
        for probe in probes:
            probe.communicate(timeout=20)
    assert [probe.returncode for probe in probes] == [0, 0]
