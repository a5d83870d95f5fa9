"""Gloo listens on the interface that leads to rank 0, and an interface that is not there is named."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from shoal.distributed.joining import choose_interface
from shoal.errors import LaunchError
from shoal.launch.environment import Environment

NAME = "GLOO_SOCKET_IFNAME"


def outside() -> tuple[str, str] | None:
    """An interface of this machine that is not loopback, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return name, found.address
    return None


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "lo,ib7")
    with pytest.raises(LaunchError, match="no network interface ib7") as caught:
        choose_interface(Environment())
    assert "lo" in caught.value.remedy


def test_the_interface_that_leads_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # so that it is put back
    del os.environ[NAME]
    choose_interface(Environment(address="127.0.0.1"))
    choose_interface(Environment(address="no-such-host.invalid"))
    assert NAME not in os.environ
    found = outside()
    if found is not None:
        choose_interface(Environment(address=found[1]))
        assert os.environ[NAME] == found[0]
