"""Each fault of a host is told with what to do, and a good host has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.doctor.health import Severity, judged, worst
from shoal.doctor.host_facts import GPU_FIELDS, ClockFacts, DiskFacts, HostFacts

GIB = 1 << 30
GOOD = HostFacts(
    name="a",
    system="Linux 6.1",
    processor="a processor",
    cores=16,
    all_cores=16,
    quota_cores=None,
    load=0.1,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    memory_limit_bytes=None,
    swap_used_bytes=0,
    shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
    open_files=65536,
    locked_bytes=None,
    processes=None,
    variables={"OMP_NUM_THREADS": "8"},
    versions={"shoal": "0.1", "torch": "2.13.0+cpu", "python": "3.11.7", "torch_cuda": None, "driver": None},
    interfaces=("lo", "eth0"),
    loopback_error=None,
    name_error=None,
    shared_memory_error=None,
    governor="performance",
    clock=ClockFacts("tsc", True, 0.001),
    disk=DiskFacts("runs", "ext4", 100 * GIB, 1e9, 0.002),
    is_measured=True,
)
CUDA = {"torch": "2.13.0+cu126", "torch_cuda": "12.6", "driver": "550.54.15"}
ROW = dict(
    zip(
        GPU_FIELDS,
        ("NVIDIA H100", "550.54.15", "81559", "3", "1980", "1980", "16", "16", "33", "[N/A]"),
        strict=True,
    )
)
GPUS = replace(
    GOOD, gpus=("NVIDIA H100",) * 2, versions={**GOOD.versions, **CUDA}, gpu_rows=(ROW, ROW), gpu_links="GPU0 X NV18"
)


@pytest.mark.parametrize("facts", [GOOD, GPUS], ids=["cores", "gpus"])
def test_a_good_host_has_no_fault(facts: HostFacts) -> None:
    assert {check.severity for check in judged(facts)} == {Severity.OK}
    assert worst(judged(facts)) is Severity.OK


def versions(**changed: str | None) -> dict[str, Any]:
    return {"versions": {**GPUS.versions, **changed}}


def gpu(**changed: str) -> dict[str, Any]:
    return {"gpu_rows": (ROW, {**ROW, **{name.replace("__", "."): value for name, value in changed.items()}})}


# What is planted in a good host with GPUs, how much it matters, and a word of what is told.
PLANTED: list[tuple[dict[str, Any], Severity, str]] = [
    (versions(torch=None), Severity.ERROR, "pip install torch"),
    (versions(torch="2.4.1"), Severity.ERROR, "torch>=2.10"),
    (versions(torch_cuda=None), Severity.ERROR, "without CUDA"),
    (versions(driver="470.82.01"), Severity.ERROR, "525 or newer"),
    ({"quota_cores": 1.5, "variables": {}}, Severity.WARNING, "OMP_NUM_THREADS=1"),
    ({"load": 12.0}, Severity.WARNING, "a load of 12.0"),
    ({"governor": "powersave"}, Severity.NOTE, "powersave"),
    ({"variables": {"OMP_NUM_THREADS": "32"}}, Severity.WARNING, "unset OMP_NUM_THREADS"),
    ({"variables": {"MKL_NUM_THREADS": "64"}}, Severity.WARNING, "unset MKL_NUM_THREADS"),
    ({"available_bytes": GIB}, Severity.WARNING, "1.0 of 64.0 GiB"),
    ({"swap_used_bytes": 8 * GIB}, Severity.WARNING, "8.0 GiB are swapped out"),
    ({"shared_memory_error": "no memfd"}, Severity.NOTE, "no memfd"),
    ({"shm_bytes": None}, Severity.WARNING, "--shm-size"),
    ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, Severity.WARNING, "--shm-size"),
    ({"open_files": 1024}, Severity.WARNING, "ulimit -n"),
    ({"processes": 512}, Severity.WARNING, "ulimit -u"),
    ({"locked_bytes": 65536}, Severity.NOTE, "64 KiB"),
    ({"loopback_error": "refused"}, Severity.ERROR, "refused"),
    ({"name_error": "unknown"}, Severity.NOTE, "/etc/hosts"),
    ({"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, Severity.ERROR, "lo, eth0"),
    ({"variables": {"NCCL_SOCKET_IFNAME": "ib,bond"}}, Severity.ERROR, "unset NCCL_SOCKET_IFNAME"),
    ({"disk": DiskFacts("runs", error="read-only")}, Severity.ERROR, "read-only"),
    ({"disk": replace(GOOD.disk, free_bytes=GIB)}, Severity.WARNING, "1 GiB free"),
    ({"disk": replace(GOOD.disk, bytes_per_second=20e6)}, Severity.WARNING, "20 MB/s"),
    ({"disk": replace(GOOD.disk, sync_seconds=0.5)}, Severity.WARNING, "500 ms"),
    ({"clock": ClockFacts("hpet", True, 0.001)}, Severity.NOTE, "hpet"),
    ({"clock": ClockFacts("tsc", False)}, Severity.NOTE, "chronyd"),
    ({"clock": ClockFacts("tsc", True, 3.0)}, Severity.NOTE, "3.0 s"),
    ({"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, Severity.WARNING, "TORCH_DISTRIBUTED_DEBUG"),
    ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, Severity.WARNING, "waits for each kernel"),
    ({"gpus": ("NVIDIA H100", "NVIDIA L40S")}, Severity.WARNING, "of one kind"),
    (gpu(memory__used="70000"), Severity.WARNING, "70000 of 81559 MiB"),
    (gpu(pcie__link__width__current="8"), Severity.WARNING, "x8 of x16"),
    (gpu(ecc__errors__uncorrected__volatile__total="2"), Severity.ERROR, "2 uncorrected"),
    (gpu(temperature__gpu="91"), Severity.WARNING, "91 degrees"),
    ({"gpu_links": "GPU0 X PHB"}, Severity.NOTE, "PCIe"),
    ({"is_measured": False}, Severity.NOTE, "shoal bench"),
]


@pytest.mark.parametrize(("planted", "severity", "told"), PLANTED, ids=[told for _, _, told in PLANTED])
def test_a_fault_is_told(planted: dict[str, Any], severity: Severity, told: str) -> None:
    found = [check for check in judged(replace(GPUS, **planted)) if check.severity is not Severity.OK]
    assert [check.severity for check in found] == [severity]
    assert told in f"{found[0].seen} {found[0].remedy}"
    assert found[0].remedy


@pytest.mark.parametrize("value", ["eth0", "eth", "^docker0", "=eth0", ""])
def test_interfaces_that_may_be_named(value: str) -> None:
    assert worst(judged(replace(GPUS, variables={"NCCL_SOCKET_IFNAME": value}))) is Severity.OK
