"""Facts of a host are read where the system tells them, and what cannot be read is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.doctor.host_facts import GPU_FIELDS, _file_system, host_facts, parsed_gpu_rows


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


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    found = host_facts(tmp_path, root=tmp_path / "empty")
    assert (found.shm_bytes, found.governor, found.memory_limit_bytes, found.clock.source) == (None, None, None, None)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.doctor.host_facts.tempfile.NamedTemporaryFile", refuse)
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
