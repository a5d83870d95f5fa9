"""Facts of a host are read where the system tells them, and what cannot be read is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.hardware.host_facts import GPU_FIELDS, _file_system, allowed_cores, cpu_quota, host_facts, parsed_gpu_rows


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_this_host(tmp_path: Path) -> None:
    found = host_facts(tmp_path / "runs")
    assert 1 <= found.cores <= found.all_cores
    assert found.versions["torch"]
    assert found.loopback_error is None
    assert found.disk.folder == str(tmp_path)
    assert found.disk.bytes_per_second is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n1:memory:/\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_quota_of_a_cgroup(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cpu_quota(plant(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [("max", 4), ("250000", 2), ("50000", 1), ("900000", 4)])
def test_cores_whose_time_a_process_gets(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.hardware.host_facts.cores", lambda: 4)
    assert allowed_cores(plant(tmp_path, {"sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})) == cores


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    found = host_facts(tmp_path, root=tmp_path / "empty")
    assert (found.shm_bytes, found.governor, found.memory_limit_bytes, found.clock.source) == (None, None, None, None)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.hardware.host_facts.tempfile.NamedTemporaryFile", refuse)
    assert "No space left" in str(host_facts(tmp_path).disk.error)


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    root = plant(tmp_path / "root", {"proc/mounts": mounts})
    assert _file_system(tmp_path, root) == "nfs4"
    assert _file_system(Path("/"), root) == "ext4"


def test_rows_of_gpus() -> None:
    line = "NVIDIA H100 80GB HBM3, 550.54.15, 81559, 3, 1980, 1980, 16, 16, 33, 0"
    (row,) = parsed_gpu_rows(line + "\n")
    assert set(row) == set(GPU_FIELDS)
    assert (row["name"], row["memory.total"]) == ("NVIDIA H100 80GB HBM3", "81559")
    assert parsed_gpu_rows("Failed to initialize NVML\n") == ()
