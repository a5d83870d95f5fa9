"""Rank 0's store listens where ranks of other hosts find it, or the address is refused."""

from __future__ import annotations

import pytest

from shoal.errors import LaunchError
from shoal.launch.environment import Environment
from shoal.launch.supervise.ranks import listener_at


def test_only_rank_0s_host_listens() -> None:
    assert listener_at(Environment(rank=2, world_size=4, num_hosts=2)) is None


def test_an_address_that_no_other_host_reaches_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1, which no other host reaches"):
        listener_at(Environment(world_size=4, address="localhost", num_hosts=2))
    listener = listener_at(Environment(world_size=4, address="localhost"))
    assert listener is not None
    listener.close()


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(LaunchError, match="nothing can listen there"):
        listener_at(Environment(world_size=4, address="192.0.2.77", num_hosts=2))
