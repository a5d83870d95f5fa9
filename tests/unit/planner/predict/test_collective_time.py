"""Seconds of collectives against alpha-beta by hand."""

from dataclasses import replace

import pytest
from tests.unit.planner.made import DEVICE, LINK, cluster

from shoal.hardware.values import Curve
from shoal.planner.predict.collective_time import Network, RankGroup

FAST = Network(cluster(8))


def test_where_a_group_sits():
    two_hosts = Network(cluster(8, 4))
    assert two_hosts.group(8, 1) == RankGroup(8, 8, 1)
    assert two_hosts.group(4, 8) == RankGroup(4, 1, 8)  # data ranks, one a host: eight such rings leave each host
    assert two_hosts.group(16, 1) == RankGroup(16, 8, 1)
    assert two_hosts.group(4, 2) == RankGroup(4, 4, 2)


def test_a_lone_rank_sends_nothing():
    assert FAST.seconds("all_reduce", 1e9, FAST.group(1, 1)) == 0.0


@pytest.mark.parametrize(("kind", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75)])
def test_a_ring_moves_its_part_of_the_bytes(kind, factor):
    assert FAST.seconds(kind, 1e9, FAST.group(4, 1)) == pytest.approx(factor * 1e9 / 1e10)


def test_a_ring_takes_as_many_hops_as_it_has_ranks_less_one():
    slow = Network(cluster(8, link=replace(LINK, latency_seconds=1.0)))
    assert slow.seconds("all_gather", 1.0, slow.group(8, 1)) == pytest.approx(7.0)
    assert slow.seconds("all_reduce", 1.0, slow.group(8, 1)) == pytest.approx(14.0)


def test_between_hosts_a_tree_wins_where_there_are_many_hops():
    wide = Network(cluster(1, 64, link=replace(LINK, latency_seconds=1.0)))
    assert wide.seconds("all_reduce", 1.0, wide.group(64, 1)) == pytest.approx(12.0)


def test_rings_that_leave_a_host_at_once_share_its_network():
    network = Network(cluster(8, 4))
    alone, together = RankGroup(4, 1, 1), network.group(4, 8)
    assert network.seconds("all_gather", 1e9, together) == pytest.approx(
        8 * network.seconds("all_gather", 1e9, alone), rel=1e-6
    )


def test_ranks_on_a_shared_link_share_its_bandwidth():
    shared = Network(cluster(8, link=replace(LINK, shared=True)))
    assert shared.seconds("all_gather", 1e9, shared.group(8, 1)) == pytest.approx(
        8 * FAST.seconds("all_gather", 1e9, FAST.group(8, 1))
    )


def test_a_message_takes_its_bytes_over_the_link():
    assert FAST.seconds("send", 1e9, FAST.group(2, 1)) == pytest.approx(0.1)
    across = Network(cluster(1, 2))
    assert across.seconds("send", 1e9, across.group(2, 1)) == pytest.approx(1.0)


def test_a_lone_device_needs_no_link():
    assert (
        Network(replace(cluster(1), within=None, between=None, device=DEVICE)).seconds(
            "all_reduce", 1e9, RankGroup(1, 1)
        )
        == 0.0
    )


def test_a_message_is_as_fast_as_sends_of_its_size_were():
    small = replace(LINK, collectives={"send": Curve(((1e6, 0.1), (1e9, 1.0)))})
    network = Network(cluster(8, link=small))
    assert network.seconds("send", 1e6, network.group(2, 1)) == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (4, 2), (4, 8), (16, 1), (32, 1)])
def test_no_byte_is_faster_than_the_best_of_each_link(kind, size, stride):
    link = replace(LINK, latency_seconds=1e-6, bandwidth=Curve(((1e3, 0.1), (1e7, 0.9), (1e9, 0.6))))
    network = Network(cluster(8, 4, link=link))
    group = network.group(size, stride)
    per_byte = network.least_per_byte(kind, group)
    assert per_byte > 0.0
    for num_bytes in (1.0, 1e5, 1e7, 3e8, 1e12):
        assert num_bytes * per_byte <= network.seconds(kind, num_bytes, group) * (1 + 1e-9)
    assert network.least_per_byte(kind, network.group(1, 1)) == 0.0
