"""Values: a curve between its points, what a link reaches, and which device a rank has."""

from __future__ import annotations

import math

import pytest

from shoal.hardware.values import Cluster, Curve, Device, Link, intensity


def test_curve_is_linear_in_the_logarithm_and_constant_beyond() -> None:
    curve = Curve(((1e3, 0.2), (1e5, 0.6)))
    assert [curve.at(size) for size in (1.0, 1e3, 1e5, 1e9)] == [0.2, 0.2, 0.6, 0.6]
    assert math.isclose(curve.at(1e4), 0.4)
    assert Curve().at(123.0) == 1.0


def test_intensity() -> None:
    m, n, k = 100.0, 20.0, 50.0
    assert math.isclose(intensity(m, n, k), m * n * k / (m * n + n * k + m * k))
    assert intensity(m, n, k) == intensity(k, m, n)


def test_link_reaches_by_kind_size_and_count() -> None:
    link = Link(
        "l",
        100.0,
        1e-6,
        bandwidth=Curve(((1.0, 0.5),)),
        collectives={"all_reduce": Curve(((1.0, 1.2),))},
        counts={"any": Curve(((2.0, 0.1), (8.0, 1.0))), "send": Curve(((2.0, 0.3),))},
    )
    assert math.isclose(link.reached("all_reduce", 1e6, 8), 120.0)
    assert math.isclose(link.reached("all_gather", 1e6, 2), 5.0)
    assert math.isclose(link.reached("send", 1e6, 8), 15.0)
    assert Link("plain", 7.0, 0.0).reached("all_reduce", 1.0, 3) == 7.0


def device(name: str) -> Device:
    return Device(name, "cpu", 1, 1.0, {"float32": 1.0})


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "one"), (2, "two"), (3, "four"), (4, "four"), (8, "eight"), (9, "eight")]
)
def test_fewer_ranks_get_more_of_a_host(ranks: int, name: str) -> None:
    alternatives = {1: device("one"), 2: device("two"), 4: device("four")}
    cluster = Cluster("c", device("eight"), devices_per_host=8, alternatives=alternatives)
    assert cluster.device_for(ranks).name == name
    assert Cluster("gpu", device("one"), devices_per_host=8).device_for(ranks).name == "one"


def test_a_device_for_images_with_their_channels_last_is_as_it_was_measured_with_them() -> None:
    operators = {"aten.pool": 0.1, "aten.pool_channels_last": 0.8, "aten.sum": 0.5}
    operators |= {"aten.norm": 0.4, "aten.norm_channels_last": 0.2}
    windows = {"float32": {"a": 0.5, "b": 0.6}, "float32_channels_last": {"a": 0.7}}
    made = Device("core", "cpu", 1, 1.0, {"float32": 1.0}, operators=operators, windows=windows)
    last = made.with_channels_last()
    assert [last.operators[name] for name in ("aten.pool", "aten.sum", "aten.norm")] == [0.8, 0.5, 0.2]
    assert last.windows["float32"] == {"a": 0.7, "b": 0.6}
    faster = made.in_faster_format()
    assert [faster.operators[name] for name in ("aten.pool", "aten.sum", "aten.norm")] == [0.8, 0.5, 0.4]
    plain = Device("core", "cpu", 1, 1.0, {"float32": 1.0}, operators={"aten.pool": 0.1})
    assert plain.with_channels_last() == plain.in_faster_format() == plain
