"""Which files count as installed: also those of folders that no list of this interpreter has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal import installed
from shoal.installed import is_installed, own_package


def test_files_of_packages_and_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target" / "some-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "target"), str(tmp_path / "mine")])
    installed._folders.cache_clear()
    try:
        assert all(map(is_installed, (os.__file__, torch.__file__, shoal.__file__, tmp_path / "target" / "some.py")))
        assert is_installed("/other/lib/python3/dist-packages/torch/nn.py")
        assert not is_installed(tmp_path / "mine" / "some.py")
        assert not is_installed(__file__)
    finally:
        installed._folders.cache_clear()


def test_an_installed_package_of_the_job_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_of_jobs", [])
    folder = Path("/other/site-packages/mine")
    assert is_installed(folder / "nets.py")
    own_package(folder)
    assert not is_installed(folder / "nets.py")
    assert is_installed("/other/site-packages/mine_too/nets.py")
