"""The catalogue itself: every number has a source, every name leads to one entry, and peaks are plausible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.errors import HardwareError
from shoal.hardware import catalogue, device, link
from shoal.hardware.catalogue import described, devices, hosts, links, names, plain

NOT_NUMBERS = {"name", "kind", "sources", "aliases", "match", "host", "reach", "guesses"}


@pytest.mark.parametrize("table", [devices(), links()], ids=["devices", "links"])
def test_every_number_has_a_source_and_every_source_a_number(table: Mapping[str, Mapping[str, Any]]) -> None:
    wrong = {name: (set(entry) - NOT_NUMBERS) ^ set(entry["sources"]) for name, entry in table.items()}
    assert {name: keys for name, keys in wrong.items() if keys} == {}
    assert all(len(text) > 5 for entry in table.values() for text in entry["sources"].values())


def test_every_entry_is_a_value_and_every_host_has_its_parts() -> None:
    for name in devices():
        found = device(name)
        assert found.name == name
        assert set(found.matmul) == set(found.flops)
        fractions = [y for curve in found.matmul.values() for _, y in curve.points]
        assert all(0 < y <= 1 for y in fractions)
        assert found.kind == "cpu" or {"flash2_forward", "flash2_backward"} <= set(found.attention)
        assert devices()[name]["host"] in hosts()
    for name in links():
        assert link(name).name == name
    for host in map(catalogue.host, hosts()):
        assert host.source
        assert device(host.device)
        assert host.within is None or links()[plain_name(host.within)]["reach"] == "host"
        assert host.between is None or links()[plain_name(host.between)]["reach"] == "network"


def plain_name(name: str) -> str:
    return link(name).name


def test_no_name_has_two_meanings() -> None:
    for tables in ([devices(), hosts()], [links()]):
        entries = [{name: entry} for table in tables for name, entry in table.items()]
        counted = Counter(name for entry in entries for name in set(map(plain, names(entry))))
        assert [name for name, count in counted.items() if count > 1] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float8"])
def test_old_gpus_have_no_new_dtypes(dtype: str) -> None:
    assert dtype not in device("V100").flops
    assert dtype in device("H100").flops


def test_rows_that_are_not_aligned_slow_down_tensor_cores_of_nvidia_alone() -> None:
    assert all(device(name).unaligned < 1.0 for name in ("V100", "T4", "A100", "RTX-4090", "H100", "H200", "B200"))
    assert all(device(name).unaligned == 1.0 for name in ("P100", "K80", "Titan-Xp", "MI300X", "MI250X"))


def test_a_value_stated_anew_loses_the_source_of_the_old_one() -> None:
    table = described("device", {"like": "A100", "flops": {"float32": 1.0}})
    assert "flops" not in table["sources"]
    assert table["sources"]["multiprocessors"] == devices()["A100-80-SXM"]["sources"]["multiprocessors"]
    assert "price_per_hour" not in described("device", {"like": "A100", "price_per_hour": "none"})


@pytest.mark.parametrize(("find", "name", "near"), [(device, "H10O", "H100"), (link, "NVLink44", "NVLink4")])
def test_an_unknown_name_is_refused_with_the_nearest(find: Any, name: str, near: str) -> None:
    with pytest.raises(HardwareError) as caught:
        find(name)
    assert f"did you mean '{near}'" in caught.value.conflict
