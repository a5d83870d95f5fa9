"""What would be asked of Ray, and what is said where it cannot be reached; on real Ray: tests/engines."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.ray import _not_connected, _refuse_unreachable, _token, render


def submission(options: str = "") -> Submission:
    return Submission(("run", "job.py", "--out", "/runs/a"), "job", Path("/runs/a"), Path("/job"), 4, options)


def test_a_dry_run_names_cluster_group_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = render(submission("cpus=2"))["ray"]
    assert "a new cluster on this host" in text
    assert "PACK, 4 bundles of 2 CPU, 1 GPU where there are any" in text
    assert "shoal run job.py --out /runs/a" in text
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert "head:6379" in render(submission())["ray"]
    assert "a new cluster on this host" in render(submission("address=local"))["ray"]


@pytest.mark.parametrize("options", ["gpus=2", "strategy=pack", "cpu=1"])
def test_settings_that_it_does_not_take(options: str) -> None:
    with pytest.raises(CommandError):
        render(submission(options))


def test_an_address_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        _refuse_unreachable(address)
    with pytest.raises(LaunchError, match="ray start --head"):
        _refuse_unreachable(address)
    _refuse_unreachable("auto")


def test_a_cluster_that_is_there_and_does_not_take_us() -> None:
    assert "RAY_AUTH_TOKEN" in _not_connected("head:6379", RuntimeError("failed to connect"), reached=True).remedy


def test_a_cluster_of_our_own_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.modules", {})
    made = _token({})
    assert made["RAY_AUTH_MODE"] == "token"
    assert len(made["RAY_AUTH_TOKEN"]) == 64
    assert _token({"RAY_AUTH_MODE": "disabled"}) == {}
