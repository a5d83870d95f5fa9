"""Remedies: what is told of an exception fits its kind; shapes are told of where shapes are what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.distributed.failures import user_error
from shoal.jobs.user_errors import described

BATCH = (torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64))
SHAPES = "shapes and dtypes of the batch are those of the dataset after collation"


def told(act: Callable[[], Any], batch: Any = BATCH) -> str:
    with pytest.raises(Exception, match=r"^(?s:.)") as caught:
        act()
    return user_error("the model or loss", caught.value, batch).remedy


def unpack(values: Any) -> None:
    _, _, _ = values


def wrong() -> None:
    raise ValueError("the mode is 'train' or 'eval'")


@pytest.mark.parametrize(
    "act",
    [
        lambda: nn.Linear(5, 2)(BATCH[0]),
        lambda: BATCH[0] + torch.zeros(4, 5),
        lambda: nn.Linear(6, 2)(BATCH[1].expand(6, 4).T),
        lambda: nn.Conv2d(3, 2, 1)(torch.zeros(1, 1, 4, 4)),
        lambda: F.cross_entropy(torch.zeros(4, 2), torch.zeros(3, dtype=torch.int64)),
        lambda: F.binary_cross_entropy(torch.zeros(4, 2), torch.zeros(4)),
        lambda: torch.cat([torch.zeros(2, 2), torch.zeros(2, 2, 2)]),
        lambda: BATCH[0].view(5, 5),
        lambda: nn.LayerNorm(5)(BATCH[0]),
    ],
)
def test_of_shapes_and_dtypes_the_batch_is_told(act: Callable[[], Any]) -> None:
    found = told(act)
    assert SHAPES in found
    assert found.endswith("; the batch was (float32 [4, 6], int64 [4])")


def test_of_a_lone_sample_under_batch_statistics_the_grains_are_named() -> None:
    assert "Job(grains=...) fewer grains" in told(lambda: nn.BatchNorm1d(6)(torch.zeros(1, 6)))


@pytest.mark.parametrize(
    ("act", "wanted"),
    [
        (lambda: {"a": 1}["b"], "mend that line: ask for a key that is there"),
        (lambda: None.shape, "mend that line: a value there is None; what should have made it may lack a return"),  # type: ignore[attr-defined]
        (lambda: nn.Linear(2, 2).blocks, "mend that line"),
        (lambda: nn.Linear(2, 2)(1, 2), "mend that line"),
        (wrong, "mend that line"),
        (lambda: int("a size"), "mend that line"),
        (lambda: __import__("no_such.part"), "install what is imported (no_such) in the environment that runs shoal"),
        (
            lambda: exec("from .part import x", {"__name__": "a", "__package__": ""}),
            "put an __init__.py into the pack",
        ),
        (lambda: Path("/nowhere/a shape").read_text(), "give a path that is there wherever a rank runs"),
        (lambda: nn.Module()(1), "give that module a method forward"),
        (lambda: (_ for _ in ()).throw(AssertionError("shape")), "mend what that line asserts, or what it is"),
        (lambda: unpack(BATCH), "mend that line: unpack as many values as there are; the batch was (float32 [4, 6], i"),
        (lambda: nn.Embedding(3, 2)(torch.tensor([3])), "mend that line: a label or a token is beyond what the layer"),
        (lambda: BATCH[0] + torch.zeros(4, 6, device="meta"), "device=x.device of one of them"),
    ],
)
def test_of_other_kinds_no_shape_is_told(act: Callable[[], Any], wanted: str) -> None:
    found = told(act)
    assert wanted in found
    assert SHAPES not in found


def test_a_folder_called_torch_is_not_the_package(tmp_path: Path) -> None:
    file = tmp_path / "torch" / "job.py"
    code = compile("raise ValueError('no sizes are known')", str(file), "exec")
    assert SHAPES not in told(lambda: exec(code))


def test_without_a_line_of_the_users_none_is_meant() -> None:
    assert user_error("the model", KeyError("a")).remedy == (
        "mend what raised it (the traceback is in errors/ of the run directory): ask for a key that is there"
    )


def test_a_batch_in_words() -> None:
    assert described({"ids": [1, BATCH[0]], "text": "a"}) == "{'ids': [int, float32 [4, 6]], 'text': str}"
    assert described(tuple(range(10))) == "(int, int, int, int, int, int, int, int, ...)"
