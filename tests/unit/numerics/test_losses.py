"""Losses and metrics are pairs of sums, the same over any division of the batch."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import LossError
from shoal.numerics.losses import accuracy, cross_entropy, mse


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
    with pytest.raises(LossError, match=r"outputs \[3, 1\] and targets \[3\]"):
        mse(torch.ones(3, 1), torch.ones(3))


def test_accuracy_counts_right_answers() -> None:
    batch = (torch.eye(4), torch.tensor([0, 1, 0, 0]))
    assert [int(v) for v in accuracy(lambda x: x, batch)] == [2, 4]


class ModelOutput(OrderedDict[str, Any]):
    """As transformers gives."""


LOGITS, LABELS = torch.eye(4), torch.arange(4)
NO_PAIRS: dict[str, tuple[Any, Any, str]] = {
    "a dictionary": (None, {"input_ids": LOGITS, "labels": LABELS}, "type dict of input_ids, labels"),
    "inputs alone": (None, LOGITS, r"a tensor \[4, 4\]"),
    "an output by names": (lambda x: ModelOutput(logits=x), (LOGITS, LABELS), "type ModelOutput of logits"),
    "targets in a column": (lambda x: x, (LOGITS, LABELS.view(4, 1)), r"logits \[4, 4\] and targets \[4, 1\]"),
    "one-hot targets": (lambda x: x, (LOGITS, LOGITS), r"targets \[4, 4\]"),
    "one logit": (lambda x: x[:, 0], (LOGITS, LABELS), r"logits \[4\] and"),
    "positions before classes": (lambda x: x, (torch.zeros(2, 5, 3), torch.zeros(2, 5)), r"logits \[2, 5, 3\]"),
}


@pytest.mark.parametrize("kind", NO_PAIRS)
def test_accuracy_says_what_it_takes_and_what_to_write(kind: str) -> None:
    model, batch, said = NO_PAIRS[kind]
    with pytest.raises(LossError, match=said) as caught:
        accuracy(model, batch)
    assert "def right(model, batch):" in caught.value.remedy


def test_the_metric_that_accuracy_tells_of_works() -> None:
    with pytest.raises(LossError) as caught:
        accuracy(None, {})
    names: dict[str, Any] = {}
    exec(caught.value.remedy.partition("\n")[2], names)
    batch = {"labels": torch.tensor([0, 1, 0, 0])}

    class Output:
        logits = LOGITS

    assert [int(v) for v in names["right"](lambda **inputs: Output, batch)] == [2, 4]


WRONG: dict[str, tuple[Any, Any, str]] = {
    "an output by names": (ModelOutput(logits=LOGITS), LABELS, "model.*logits"),
    "probabilities": (LOGITS, LOGITS, "len"),
    "labels as floats": (LOGITS, LABELS.float(), "targets.long"),
    "positions before classes": (torch.zeros(2, 5, 3), torch.zeros(2, 5).long(), "logits.flatten"),
    "a column": (LOGITS, LABELS.view(4, 1), "classes are dim 1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_cross_entropy_says_what_it_takes(kind: str) -> None:
    logits, targets, said = WRONG[kind]
    with pytest.raises(LossError, match=said):
        cross_entropy(logits, targets)


def test_cross_entropy_of_one_sample() -> None:
    total, weight = cross_entropy(torch.zeros(4), torch.tensor(1))
    assert (round(float(total), 4), int(weight)) == (1.3863, 1)
