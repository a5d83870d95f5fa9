"""Traces come back as they were written, rank by rank; fingerprints tell what changed places."""

from pathlib import Path

import pytest
import torch

from shoal.training.observe.trace.traces import MicrobatchTrace, StepTrace, digest, fingerprint, read, write


def test_ranks_come_together_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = StepTrace(2, loss=1.5, weight=8.0, norm=0.25, factor=2.0, skipped=None)
        trace.parts = [MicrobatchTrace(rank, (rank,), ((rank * 10, rank * 10 + 1),), 3.0, 4.0)]
        trace.forward = {"layer": {rank: [0.0, 1.0, 2.0, 3.0]}}
        trace.gradients = {rank: {"w": torch.full((2, 3), float(rank))}}
        trace.tensors = {"update/w": torch.arange(6.0).view(2, 3).t()}  # not contiguous
        trace.digests = {rank: {"update/w": digest(trace.tensors["update/w"])}}
        write(tmp_path, trace, rank)
    whole = read(tmp_path, 2, 2)
    assert [part.rank for part in whole.parts] == [0, 1]
    assert whole.parts[1].ids == ((10, 11),)
    assert whole.forward == {"layer": {0: [0.0, 1.0, 2.0, 3.0], 1: [0.0, 1.0, 2.0, 3.0]}}
    assert torch.equal(whole.gradients[1]["w"], torch.ones(2, 3))
    assert torch.equal(whole.phase("update")["w"], torch.arange(6.0).view(2, 3).t())
    assert whole.digests[0] == whole.digests[1]
    assert (whole.loss, whole.weight, whole.norm, whole.factor, whole.skipped) == (1.5, 8.0, 0.25, 2.0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_fingerprints_tell_rows_apart(dtype: torch.dtype) -> None:
    value = torch.arange(24).view(6, 4).to(dtype)
    one, other = fingerprint(value, [3, 3])
    assert one != other
    assert fingerprint(value, [3, 3])[0] == fingerprint(value[:3], [3])[0]
    moved = fingerprint(value[torch.tensor([1, 0, 2])], [3])[0]
    assert moved[:2] == pytest.approx(one[:2])
    assert moved[2:] != one[2:]
    assert fingerprint(torch.zeros(2, 0), [1, 1]) == [[0.0] * 4] * 2


def test_digests_are_of_bytes() -> None:
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.ones(2, 3)) == digest(torch.ones(3, 2).t())
    assert digest(torch.empty(0)) == digest(torch.empty(0, dtype=torch.int64))
