"""The device and backend of a rank, by the GPUs of its host and what the run allows."""

from __future__ import annotations

import pytest

from shoal.distributed.mesh import device_of
from shoal.errors import LaunchError
from shoal.launch.environment import Environment

OVER_NCCL = "cpu:gloo,cuda:nccl"


def ranks(number: int, **more: bool) -> list[Environment]:
    return [Environment(rank, number, rank, number, **more) for rank in range(number)]


def chosen(environments: list[Environment], num_gpus: int, nccl: tuple[int, ...] | None = None) -> list[str]:
    return [f"{one.device} {one.backend}" for one in (device_of(e, num_gpus, nccl) for e in environments)]


def test_ranks_have_a_gpu_each_or_the_cpu() -> None:
    assert chosen(ranks(2), 0) == ["cpu gloo"] * 2
    assert chosen(ranks(2, shares_gpu=True), 0) == ["cpu gloo"] * 2
    assert chosen(ranks(2), 2) == [f"cuda:0 {OVER_NCCL}", f"cuda:1 {OVER_NCCL}"]
    assert chosen(ranks(2, own_gpu=True), 1) == [f"cuda:0 {OVER_NCCL}"] * 2
    with pytest.raises(LaunchError, match="a GPU serves one process") as caught:
        device_of(ranks(2)[0], 1)
    assert "--share-gpu" in caught.value.remedy


def test_ranks_that_share_gpus_use_gloo() -> None:
    assert chosen(ranks(2, shares_gpu=True), 1) == ["cuda:0 gloo"] * 2
    assert chosen(ranks(4, shares_gpu=True), 2) == ["cuda:0 gloo", "cuda:1 gloo"] * 2
    assert chosen(ranks(2, shares_gpu=True, own_gpu=True), 1) == ["cuda:0 gloo"] * 2


def test_nccls_own_variable_allows_two_ranks_a_gpu_since_its_release_2_30() -> None:
    assert chosen(ranks(2, shares_gpu=True), 1, (2, 30, 7)) == [f"cuda:0 {OVER_NCCL}"] * 2
    with pytest.raises(LaunchError, match="NCCL takes 2 processes a GPU"):
        device_of(ranks(4, shares_gpu=True)[0], 1, (2, 30, 7))
    with pytest.raises(LaunchError, match=r"NCCL 2\.29\.7 takes one process a GPU"):
        device_of(ranks(2, shares_gpu=True)[0], 1, (2, 29, 7))
