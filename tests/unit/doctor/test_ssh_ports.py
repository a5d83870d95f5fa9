"""Ports are tried between two hosts or more."""

from __future__ import annotations

import pytest

from shoal.doctor.ssh_ports import between
from shoal.errors import CommandError


@pytest.mark.parametrize("given", ["", "one", "one,one", "one,-oProxyCommand=touch"])
def test_two_hosts_are_wanted(given: str) -> None:
    with pytest.raises(CommandError, match=r"no host|two hosts or more"):
        between(given)
