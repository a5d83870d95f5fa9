"""Losses that compare the samples of the whole global batch: the same numbers on any number of devices.

Each job returns what its loss compares as `outputs`; the loss sees them for the global batch, in the order of samples:

    shoal run examples/global_losses.py:clip --devices 2
    shoal verify examples/global_losses.py:barlow --devices 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

# ------------------------------------------------------------------------------------------------------------- losses


def clip_loss(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """Return the mean of both cross entropies of CLIP (Radford et al., arXiv 2103.00020) for rows of norm 1."""
    scores, targets = scale * images @ texts.T, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return the loss of SimCLR (Chen et al., arXiv 2002.05709) for two views, rows of norm 1."""
    views, n = torch.cat([first, second]), len(first)
    scores = (views @ views.T / temperature).fill_diagonal_(float("-inf"))
    return F.cross_entropy(scores, torch.arange(2 * n, device=first.device).roll(n))


def sup_con(rows: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss of Khosla et al. (arXiv 2004.11362), and the number of anchors that have a positive."""
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    positive = (labels[:, None] == labels) & ~itself
    log_shares = (rows @ rows.T / temperature).masked_fill(itself, float("-inf")).log_softmax(1)
    counts = positive.sum(1)
    by_anchor = -log_shares.masked_fill(~positive, 0.0).sum(1) / counts.clamp(min=1)
    return by_anchor.sum(), (counts > 0).sum()


def batch_hard(rows: Tensor, labels: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Return the summed triplet loss of Hermans et al. (arXiv 1703.07737), and the number of anchors with a triplet."""
    squares = (rows[:, None] - rows).square().sum(2)
    distances = squares.clamp(min=1e-12).sqrt()
    same, itself = labels[:, None] == labels, torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    farthest = distances.masked_fill(~same | itself, float("-inf")).amax(1)
    nearest = distances.masked_fill(same, float("inf")).amin(1)
    valid = farthest.isfinite() & nearest.isfinite()
    return (farthest[valid] - nearest[valid] + margin).relu().sum(), valid.sum()


def vicreg_loss(first: Tensor, second: Tensor, eps: float = 1e-4) -> Tensor:
    """Return invariance, variance and covariance of Bardes et al. (arXiv 2105.04906), weighted 25, 25 and 1."""
    n, width = first.shape
    loss = 25.0 * F.mse_loss(first, second)
    for view in (first, second):
        centred = view - view.mean(0)
        loss = loss + 25.0 / 2 * (1.0 - (view.var(0) + eps).sqrt()).relu().mean()
        covariance = centred.T @ centred / (n - 1)
        loss = loss + (covariance.square().sum() - covariance.diagonal().square().sum()) / width
    return loss


def barlow_twins(sums: dict[str, Tensor], weight: float = 5e-3) -> Tensor:
    """Return the loss of Zbontar et al. (arXiv 2103.03230) from sums over the samples alone."""
    n = sums["count"]
    means = [sums["first"] / n, sums["second"] / n]
    deviations = [
        (sums[name] / n - mean.square()).sqrt() for name, mean in zip(("squares_1", "squares_2"), means, strict=True)
    ]
    correlation = (sums["products"] / n - torch.outer(*means)) / torch.outer(*deviations)
    on_diagonal = (correlation.diagonal() - 1.0).square().sum()
    return on_diagonal + weight * (correlation.square().sum() - correlation.diagonal().square().sum())


def barlow_sums(first: Tensor, second: Tensor) -> dict[str, Any]:
    """Return the sums over samples that `barlow_twins` needs, marked as such."""
    sums = {
        "products": first.T @ second,
        "first": first.sum(0),
        "second": second.sum(0),
        "squares_1": first.square().sum(0),
        "squares_2": second.square().sum(0),
        "count": first.new_tensor(float(len(first))),
    }
    return {name: shoal.summed(tensor) for name, tensor in sums.items()}


def balance(counts: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return E times the sum over experts of assignments' share and mean probability (Fedus et al., arXiv 2101.03961).

    `counts`: assignments of each expert. `probabilities`: the router's, summed over tokens.
    """
    return len(counts) * (counts / counts.sum() * probabilities / tokens).sum()


def siglip_loss(images: Tensor, texts: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """Return the summed sigmoid loss of all pairs (Zhai et al., arXiv 2303.15343) for rows of norm 1."""
    signs = 2.0 * torch.eye(len(images), device=images.device) - 1.0
    return -F.logsigmoid(signs * (scale * images @ texts.T + bias)).sum()


def router_balance(router: Tensor, top_k: int) -> Tensor:
    """Return the load balance of Transformers' models, which pools the layers.

    `router`: logits of the routers, [samples, layers, tokens, experts].
    """
    rows = router.movedim(1, 0).flatten(0, 2)
    chosen = F.one_hot(rows.softmax(-1).topk(top_k, dim=-1).indices, rows.size(-1)).float()
    return rows.size(-1) * (chosen.mean(0) * rows.softmax(-1).mean(0)).sum()


# ---------------------------------------------------------------------------------------------------------------- jobs


def pairs(samples: int, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return two noisy views of class centres, float32 [N, width], and the classes, int64 [N]."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(8, (samples,), generator=draw)
    own = torch.randn(8, width, generator=draw)[labels] + 0.5 * torch.randn(samples, width, generator=draw)
    return own, own + 0.3 * torch.randn(samples, width, generator=draw), labels


class Encoder(nn.Module):
    """Two layers with dropout, and rows of norm 1 if `unit`."""

    def __init__(self, width: int = 16, unit: bool = True) -> None:
        super().__init__()
        self.first, self.drop, self.last, self.unit = nn.Linear(width, 32), nn.Dropout(0.1), nn.Linear(32, 8), unit

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, 8]."""
        out: Tensor = self.last(self.drop(self.first(x).relu()))
        return F.normalize(out, dim=1) if self.unit else out


class TwoTowers(nn.Module):
    """An encoder for each kind of view, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Encoder(), Encoder()
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """Return the rows of both towers, and the parameter that the loss alone uses."""
        return {"image": self.image(images), "text": self.text(texts), "log_scale": self.log_scale}


class Experts(nn.Module):
    """A classifier with four experts, two for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return class logits, router logits and the number of assignments of each expert."""
        logits = self.router(x)
        weights, chosen = logits.softmax(1).topk(2)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        out = (weights[:, :, None] * every.gather(1, chosen[:, :, None].expand(-1, -1, every.size(2)))).sum(1)
        return out, logits, F.one_hot(chosen, 4).sum((0, 1)).float()


def _job(batch: int, epochs: float, grains: int, lr: float = 0.1, **parts: Any) -> shoal.Job:
    return shoal.Job(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        train_data=pairs(256),
        eval_data=pairs(96),
        global_batch=batch,
        grains=grains,
        length=shoal.Epochs(epochs),
        **parts,
    )


def clip(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """Two towers and a learned temperature, which the outputs pass on as it is."""

    def loss(outputs: Any, data: Any) -> Any:
        n = len(outputs["image"])
        return clip_loss(outputs["image"], outputs["text"], outputs["log_scale"].exp()) * n, n

    return _job(batch, epochs, grains, model=TwoTowers, outputs=lambda model, data: model(data[0], data[1]), loss=loss)


def simclr(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """InfoNCE of two views by one encoder."""

    def loss(outputs: Any, data: Any) -> Any:
        return nt_xent(*outputs, 0.2) * len(outputs[0]), len(outputs[0])

    return _job(
        batch,
        epochs,
        grains,
        model=Encoder,
        outputs=lambda model, data: (model(data[0]), model(data[1])),
        loss=loss,
    )


def supcon(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """Supervised contrast; the weight is the number of anchors that have a positive in the whole batch."""
    return _job(
        batch,
        epochs,
        grains,
        model=Encoder,
        outputs=lambda model, data: model(data[0]),
        loss=lambda rows, data: sup_con(rows, data[2], 0.2),
    )


def triplets(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """The hardest positive and the hardest negative of the whole batch for each sample."""
    return _job(
        batch,
        epochs,
        grains,
        model=Encoder,
        outputs=lambda model, data: model(data[0]),
        loss=lambda rows, data: batch_hard(rows, data[2], 0.3),
    )


def vicreg(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """Variance and covariance of the whole batch, from its rows."""

    def loss(outputs: Any, data: Any) -> Any:
        return vicreg_loss(*outputs) * len(outputs[0]), len(outputs[0])

    return _job(
        batch,
        epochs,
        grains,
        lr=0.01,
        model=lambda: Encoder(unit=False),
        outputs=lambda model, data: (model(data[0]), model(data[1])),
        loss=loss,
    )


def barlow(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """Correlations of the whole batch, from sums over its samples: no row leaves its rank."""
    return _job(
        batch,
        epochs,
        grains,
        model=lambda: Encoder(unit=False),
        outputs=lambda model, data: barlow_sums(model(data[0]), model(data[1])),
        loss=lambda sums, data: (barlow_twins(sums) * sums["count"], sums["count"].detach()),
    )


def experts(batch: int = 64, epochs: float = 4.0, grains: int = 8, weight: float = 0.01) -> shoal.Job:
    """Cross entropy, the load balance of the whole batch, and the z loss of the router."""

    def outputs(model: Experts, data: Any) -> Any:
        logits, router, counts = model(data[0])
        return {
            "loss": F.cross_entropy(logits, data[2], reduction="none") + 1e-3 * router.logsumexp(1).square(),
            "counts": shoal.summed(counts),
            "probabilities": shoal.summed(router.softmax(1).sum(0)),
        }

    def loss(outputs: Any, data: Any) -> Any:
        n = len(outputs["loss"])
        return outputs["loss"].sum() + weight * n * balance(outputs["counts"], outputs["probabilities"], n), n

    return _job(batch, epochs, grains, model=Experts, outputs=outputs, loss=loss)


def clip_by_rows(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """As `clip`, where each rank computes the scores of its own rows and columns alone."""

    def loss(outputs: Any, data: Any, rows: slice) -> Any:
        scale, targets = outputs["log_scale"].exp(), torch.arange(rows.start, rows.stop)
        by_image = scale * outputs["image"][rows] @ outputs["text"].T
        by_text = scale * outputs["text"][rows] @ outputs["image"].T
        total = F.cross_entropy(by_image, targets, reduction="sum") + F.cross_entropy(by_text, targets, reduction="sum")
        return total / 2, len(targets)

    return _job(
        batch,
        epochs,
        grains,
        model=TwoTowers,
        outputs=lambda model, data: model(data[0], data[1]),
        loss=loss,
        loss_by_rows=True,
    )


def siglip(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """Two towers with the sigmoid loss of all pairs, whose scale and bias are learned."""

    class Towers(TwoTowers):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor(-3.0))

        def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
            return {**super().forward(images, texts), "bias": self.bias}

    def loss(outputs: Any, data: Any) -> Any:
        rows = outputs["image"], outputs["text"]
        return siglip_loss(*rows, outputs["log_scale"].exp(), outputs["bias"]), len(rows[0])

    return _job(batch, epochs, grains, model=Towers, outputs=lambda model, data: model(data[0], data[1]), loss=loss)


class RoutedTokens(nn.Module):
    """A classifier of 4 tokens with two layers of experts, which returns router logits as Transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(4, 16) for _ in range(2))
        self.last = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits [N, 8], and for each layer the router's logits, [N * tokens, experts]."""
        hidden, logits = x.view(-1, 4), []
        for router, experts in zip(self.routers, self.experts, strict=True):
            logits.append(router(hidden))
            weights, chosen = logits[-1].softmax(-1).topk(2)
            every = experts(hidden).view(-1, 4, 4)
            hidden = hidden + (weights[:, :, None] * every.gather(1, chosen[:, :, None].expand(-1, -1, 4))).sum(1)
        return self.last(hidden.view(len(x), -1, 4).mean(1)), tuple(logits)


def router_logits(batch: int = 64, epochs: float = 4.0, grains: int = 8, weight: float = 0.05) -> shoal.Job:
    """Cross entropy and Transformers' load balance, with logits by token made logits by sample for the gathering."""

    def outputs(model: RoutedTokens, data: Any) -> Any:
        logits, routers = model(data[0])
        by_sample = torch.stack([router.view(len(logits), -1, router.size(-1)) for router in routers], 1)
        return {"loss": F.cross_entropy(logits, data[2], reduction="none"), "router": by_sample}

    def loss(outputs: Any, data: Any) -> Any:
        n = len(outputs["loss"])
        return outputs["loss"].sum() + weight * n * router_balance(outputs["router"], 2), n

    return _job(batch, epochs, grains, model=RoutedTokens, outputs=outputs, loss=loss)


class SelfDistilled(nn.Module):
    """A student, and a teacher that follows it, whose outputs are centred (Caron et al., arXiv 2104.14294).

    The forward updates the teacher and the centre, and the values that the microbatches of a step leave become one.
    BYOL (Grill et al., arXiv 2006.07733) has such a teacher, and no centre.
    """

    def __init__(self, make: Any = lambda: Encoder(unit=False), width: int = 8) -> None:
        super().__init__()
        self.student, self.teacher = make(), make().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the cross entropy of each sample, [N]."""
        with torch.no_grad():
            target = self.teacher.eval()(second)
            goal = ((target - self.centre) / 0.5).softmax(1)
            if self.training:
                for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=False):
                    own.lerp_(other, 0.01)
                self.centre.lerp_(target.mean(0), 0.1)
        return -(goal * self.student(first).log_softmax(1)).sum(1)


def dino(batch: int = 64, epochs: float = 4.0, grains: int = 8) -> shoal.Job:
    """Self-distillation with a centre over the whole batch, whose loss is a sum over samples."""

    def loss(model: SelfDistilled, data: Any) -> Any:
        return model(data[0], data[1]).sum(), len(data[0])

    return _job(batch, epochs, grains, model=SelfDistilled, loss=loss)
