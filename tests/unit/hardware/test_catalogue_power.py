"""Power caps: the clock falls with the power, memory does not, and what is not known or not possible is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import HardwareError
from shoal.hardware import cluster, device, dump, load


def test_a_cap_slows_products_and_attention_and_leaves_memory_alone() -> None:
    whole, capped = device("H100"), device("H100@500W")
    assert capped.watts == 500
    for before, after in (
        (whole.sustained, capped.sustained),
        (whole.sustained_at("float8"), capped.sustained_at("float8")),
        (whole.attention["flash3_forward"], capped.attention["flash3_forward"]),
    ):
        assert 0.8 < after / before < 0.9  # between the square root and the cube root of what is above idle power
    assert capped.memory_bytes_per_second == whole.memory_bytes_per_second
    assert "500 of 700 W" in capped.sources["sustained"]


def test_the_lower_the_cap_the_slower_and_the_own_limit_changes_nothing() -> None:
    shares = [device(f"H100@{watts}W").sustained for watts in (300, 400, 500, 600, 700)]
    assert shares == sorted(set(shares))
    assert device("H100@700W") == device("H100")


def test_a_cluster_has_a_cap_by_name_and_by_file(tmp_path: Path) -> None:
    named = cluster("2x8xH100@500W@400Gb")
    assert named.device == device("H100@500W")
    file = tmp_path / "own.toml"
    file.write_text(dump(named))
    assert load(file).device == named.device
    file.write_text('schema = 1\ndevice = "H100@500W"\n')
    assert load(file).device == named.device
    file.write_text('schema = 1\n[device]\nlike = "H100@500W"\nprice_per_hour = 2.0\n')
    own = load(file).device
    assert (own.sustained, own.price_per_hour) == (named.device.sustained, 2.0)


@pytest.mark.parametrize(
    ("name", "conflict"),
    [("H100@800W", "its own limit is 700 W"), ("H100@100W", "no less than 210 W"), ("cpu@50W", "does not know")],
)
def test_a_cap_that_no_driver_sets_is_refused(name: str, conflict: str) -> None:
    for make in (device, cluster):
        with pytest.raises(HardwareError) as caught:
            make(name)
        assert conflict in caught.value.conflict


def test_a_device_takes_nothing_but_a_cap_behind_its_name() -> None:
    with pytest.raises(HardwareError, match="no power cap"):
        device("H100@pcie4")
