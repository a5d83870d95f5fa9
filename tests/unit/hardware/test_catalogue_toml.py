"""Cluster files: what is written is read back, and every mistake is told at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import HardwareError
from shoal.hardware import cluster, dump, load
from shoal.hardware.values import Cluster, Curve, Device, Link

positive = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)
words = st.text(alphabet="abcXYZ-09 .,ü\"'\n", min_size=1, max_size=12)
keys = st.sampled_from(["float32", "bfloat16", "any", "all_reduce", "send"])
curves = st.lists(positive, min_size=1, max_size=4, unique=True).flatmap(
    lambda sizes: st.lists(st.floats(0, 50), min_size=len(sizes), max_size=len(sizes)).map(
        lambda fractions: Curve(tuple(zip(sorted(sizes), fractions, strict=True)))
    )
)
sources = st.dictionaries(words, words, max_size=2)
devices = st.builds(
    Device,
    name=words,
    kind=st.sampled_from(["gpu", "cpu"]),
    memory_bytes=st.integers(0, 1 << 40),
    memory_bytes_per_second=positive,
    flops=st.dictionaries(keys, positive, max_size=3),
    matmul=st.dictionaries(keys, curves, max_size=2),
    convolution=st.dictionaries(keys, curves, max_size=1),
    windows=st.dictionaries(keys, st.dictionaries(words, st.floats(0, 1), max_size=2), max_size=2),
    attention=st.dictionaries(keys, st.floats(0, 1), max_size=2),
    attention_lengths=st.dictionaries(keys, curves, max_size=2),
    operators=st.dictionaries(keys, st.floats(0, 1), max_size=2),
    unaligned=st.floats(0.01, 1),
    step_seconds=positive,
    tensor_seconds=positive,
    memory=curves,
    multiprocessors=st.integers(0, 300),
    tile=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    launch_seconds=positive,
    dispatch_seconds=positive,
    host_bytes_per_second=positive,
    reserved_bytes=st.integers(0, 1 << 33),
    price_per_hour=st.none() | positive,
    sources=sources,
)
links = st.builds(
    Link,
    name=words,
    bytes_per_second=positive,
    latency_seconds=positive,
    call_seconds=positive,
    bandwidth=curves,
    collectives=st.dictionaries(keys, curves, max_size=2),
    counts=st.dictionaries(keys, curves, max_size=2),
    shared=st.booleans(),
    sources=sources,
)
clusters = st.builds(
    Cluster,
    name=words,
    device=devices,
    devices_per_host=st.integers(1, 100),
    num_hosts=st.integers(1, 5000),
    within=st.none() | links,
    between=st.none() | links,
    storage_bytes_per_second=st.none() | positive,
    mean_hours_between_failures=st.none() | positive,
    prices=st.dictionaries(words, positive, max_size=2),
    alternatives=st.dictionaries(st.integers(1, 64), devices, max_size=2),
    algorithms=st.dictionaries(st.sampled_from(["shared_memory", "ring"]), links, max_size=2),
    notes=st.lists(words, max_size=2).map(tuple),
)


@settings(max_examples=40)
@given(clusters)
def test_what_is_written_is_read_back(wanted: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(dump(wanted, beside={"machine": {"cores": 2}}), encoding="utf-8")
        assert load(path) == wanted


def test_a_named_cluster_is_read_back(tmp_path: Path) -> None:
    for name in ("64xH100", "2xDGX-1", "3xcpu"):
        path = tmp_path / "cluster.toml"
        path.write_text(dump(cluster(name)), encoding="utf-8")
        assert load(path) == cluster(name)


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load(path)


def test_like_takes_over_the_rest(tmp_path: Path) -> None:
    found = read(tmp_path, '[device]\nlike = "H100"\nname = "ours"\nprice_per_hour = 2.5\n')
    known = cluster("H100").device
    assert (found.device.name, found.device.price_per_hour) == ("ours", 2.5)
    assert found.device.flops == known.flops
    assert "price_per_hour" not in found.device.sources


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices_per_host = 2", ["device is missing"]),
        ('device = "A100"\nnum_host = 2', ["num_host is unknown; did you mean 'num_hosts'"]),
        ('device = "A100"\ndevices_per_host = 0\nnum_hosts = "two"', ["devices_per_host = 0", "num_hosts = 'two'"]),
        ('device = "A100"\nschema = 2', ["schema = 2 is not 1"]),
        ('[device]\nlike = "A100"\nflop = {}', ["device.flop is unknown; did you mean 'flops'"]),
        ('[device]\nlike = "A100"\nmemory = [[2, 1], [1, 1]]', ["device.memory = [[2, 1], [1, 1]] is not a list of"]),
        ('[device]\nlike = "A100"\nunaligned = 0', ["device.unaligned = 0 is not"]),
        ('[device]\nname = "x"\nkind = "gpu"', ["device.memory_bytes is missing", "device.flops is missing"]),
        ('within = 3\ndevice = "A100"', ["within = 3 is not a name of the catalogue or a table"]),
        ('device = "A100"\n[alternatives]\none = "A100"', ["alternatives.one"]),
        ('device = "A1000000"', ["no device of that name"]),
        ("device = ", ["it is not TOML"]),
    ],
)
def test_mistakes_are_told(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(HardwareError) as caught:
        read(tmp_path, text)
    for part in told:
        assert part in caught.value.conflict


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot be read"):
        load(tmp_path / "none.toml")
