"""Losses and metrics are pairs of sums, the same over any division of the batch."""

import pytest
import torch
import torch.nn.functional as F

from shoal.sums import accuracy, cross_entropy, mse


def test_cross_entropy_sums_over_valid_targets() -> None:
    logits, targets = torch.randn(10, 4), torch.randint(4, (10,))
    targets[::3] = -100
    total, weight = cross_entropy(logits, targets)
    assert int(weight) == 6
    torch.testing.assert_close(total / weight, F.cross_entropy(logits, targets))
    halves = [cross_entropy(logits[part], targets[part]) for part in (slice(0, 3), slice(3, 10))]
    torch.testing.assert_close(sum(t for t, _ in halves), total)
    assert sum(int(w) for _, w in halves) == 6
    total, weight = cross_entropy(logits, torch.full((10,), 7), ignore_index=7)
    assert (float(total), int(weight)) == (0.0, 0)


def test_cross_entropy_of_tokens_and_of_narrow_logits() -> None:
    logits, targets = torch.randn(2, 5, 3), torch.randint(5, (2, 3))
    _total, weight = cross_entropy(logits, targets)
    assert int(weight) == 6
    narrow, _ = cross_entropy(logits.bfloat16(), targets)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, cross_entropy(logits.bfloat16().float(), targets)[0], rtol=0, atol=0)
    assert cross_entropy(logits.double(), targets)[0].dtype == torch.float64


def test_mse_counts_elements_and_demands_equal_shapes() -> None:
    total, weight = mse(torch.ones(3, 2), torch.full((3, 2), 3.0))
    assert (float(total), int(weight)) == (24.0, 6)
    with pytest.raises(ValueError, match=r"\(3, 1\) and targets \(3,\) differ"):
        mse(torch.ones(3, 1), torch.ones(3))


def test_accuracy_counts_right_answers() -> None:
    batch = (torch.eye(4), torch.tensor([0, 1, 0, 0]))
    assert [int(v) for v in accuracy(lambda x: x, batch)] == [2, 4]
