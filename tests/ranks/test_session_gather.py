"""Gathers in a loop of one's own: plain torch's steps with the whole batch, however the loss is shared by the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.test_session import Told, in_ranks, session
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import JobError, ShoalError

pytestmark = pytest.mark.ranks

STEPS = 3


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)


def data(samples: int = 48) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 6, generator=draw)
    return images, images + 0.3 * torch.randn(samples, 6, generator=draw)


def clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    scores, targets = scale * images @ texts.T, torch.arange(len(images))
    return F.cross_entropy(scores, targets, reduction="sum") + F.cross_entropy(scores.T, targets, reduction="sum")


def whole_loss(step: Any, model: Towers, images: Tensor, texts: Tensor) -> None:
    """Each rank computes the whole loss."""
    image, text = (step.gather(rows) for rows in model(images, texts))
    step.backward(clip(image, text, model.scale), len(image))


def own_rows(step: Any, model: Towers, images: Tensor, texts: Tensor) -> None:
    """Each rank computes the loss of its rows against all, as OpenCLIP's local loss."""
    image, text = model(images, texts)
    images, texts = step.gather(image), step.gather(text)
    starts = step.gather(torch.arange(len(image)))  # of integers, which have no gradient
    assert starts.dtype == torch.int64
    start = next(n for n in range(len(images)) if bool((images[n : n + len(image)] == image).all()))
    targets = torch.arange(start, start + len(image))
    total = F.cross_entropy(model.scale * image @ texts.T, targets, reduction="sum")
    total = total + F.cross_entropy(model.scale * text @ images.T, targets, reduction="sum")
    step.backward(total, len(image))


def loop(compute: Callable[..., None], **settings: Any) -> Told:
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = session(**settings)
    model, optimizer = own.prepare(model, optimizer)
    losses = []
    for step in own.steps(data(), shoal.Steps(STEPS)):
        for images, texts in step:
            compute(step, model, images, texts)
        losses.append(step.loss)
    own.close()
    return {"losses": losses, "scale": float(model.scale.detach()), "weight": model.image.weight.tolist()}


def plain() -> Told:
    model, losses = Towers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, texts in zip(*(tensor.split(16) for tensor in data()), strict=True):
        optimizer.zero_grad()
        loss = clip(*model(images, texts), model.scale) / len(images)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "scale": float(model.scale.detach()), "weight": model.image.weight.tolist()}


@pytest.mark.parametrize("compute", [whole_loss, own_rows])
@parametrize("ranks", [1, 2, 3], usual=["3"])
def test_plain_torch_with_the_whole_batch(compute: Any, ranks: int, tmp_path: Path) -> None:
    wanted = plain()
    for told in in_ranks(ranks, lambda: loop(compute), tmp_path / "ranks"):
        for key, value in wanted.items():
            torch.testing.assert_close(torch.tensor(told[key]), torch.tensor(value), rtol=1e-5, atol=1e-6, msg=key)


def test_what_no_gather_can_do_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"step.gather\(\) with 8 batches a rank"):
        loop(whole_loss, fuse=False)

    def unequal(step: Any, model: Towers, images: Tensor, texts: Tensor) -> None:
        if torch.distributed.get_rank() == 0:
            step.gather(images)
        whole_loss(step, model, images, texts)

    with pytest.raises(ShoalError, match=r"of \['torch.float32'"):
        in_ranks(2, lambda: loop(unequal), tmp_path / "unequal")

    def failing(step: Any, model: Towers, images: Tensor, texts: Tensor) -> None:
        image, text = model(images, texts)
        whole = step.gather(image)
        if torch.distributed.get_rank() == 1 and step.number == 2:
            raise ValueError("an odd sample")
        step.backward(clip(whole, step.gather(text), model.scale), len(whole))

    with pytest.raises(ShoalError, match="an odd sample"):
        in_ranks(2, lambda: loop(failing), tmp_path / "failing")
