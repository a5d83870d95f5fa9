"""Hooks on parameters, modules and activations, and masks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from benchmarks.habits.plain import mlp
from benchmarks.habits.program import habit

WHOLE = "a hook that is not linear gives another value for each grain's gradient than for the whole gradient"


def total_of(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


def rows(weight):
    return (torch.arange(len(weight)) % 2 == 0).float()[:, None]


@habit("hooks")
def gradient_mask():
    """Half of a weight's rows are frozen by a hook on the parameter."""

    def model():
        net = mlp()
        net[0].weight.register_hook(lambda g: g * rows(g))
        return net

    return {"model": model}


@habit("hooks")
def gradient_scaled():
    """A hook makes one layer learn ten times slower."""

    def model():
        net = mlp()
        for p in net[2].parameters():
            p.register_hook(lambda g: 0.1 * g)
        return net

    return {"model": model}


@habit("hooks", "either", why=WHOLE, names=("0.weight",))
def gradient_clamped():
    """A hook clamps each element of the gradient."""

    def model():
        net = mlp()
        net[0].weight.register_hook(lambda g: g.clamp(-0.005, 0.005))
        return net

    return {"model": model}


@habit("hooks")
def post_accumulate_mask():
    """Frozen rows by a hook after accumulation: zero twice is zero once."""

    def model():
        net = mlp()

        def keep(p):
            p.grad[1::2] = 0

        net[0].weight.register_post_accumulate_grad_hook(keep)
        return net

    return {"model": model}


@habit("hooks", "either", why=WHOLE, names=("0.weight",))
def post_accumulate_norm():
    """A hook after accumulation divides the gradient by its norm."""

    def model():
        net = mlp()

        def unit(p):
            p.grad /= p.grad.norm() + 1e-3

        net[0].weight.register_post_accumulate_grad_hook(unit)
        return net

    return {"model": model}


@habit(
    "hooks",
    "either",
    why="a step for each backward: a batch has as many as the layout has microbatches",
    names=("weight",),
)
def step_in_backward():
    """A hook after accumulation updates its parameter and drops the gradient."""

    def model():
        net = mlp()

        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        return net

    return {"model": model}


@habit("hooks")
def pruned():
    """`torch.nn.utils.prune`: a mask in a buffer, applied before each forward."""

    def model():
        net = mlp()
        prune.l1_unstructured(net[0], "weight", 0.5)
        return net

    return {"model": model}


@habit("hooks")
def mask_by_forward_hook():
    """A hook before the forward multiplies a weight's data by a fixed mask of zeros and ones."""

    def model():
        net = mlp()

        def mask(module, inputs):
            module.weight.data.mul_(rows(module.weight))

        net[0].register_forward_pre_hook(mask)
        return net

    return {"model": model}


@habit("hooks")
def gradient_reversed():
    """A hook on an activation turns its gradient round (domain adversarial training)."""

    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 2)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            turned = h.view_as(h)
            if turned.requires_grad:
                turned.register_hook(lambda g: -0.3 * g)
            return self.label(h), self.domain(turned)

    def loss(model, batch):
        y, d = model(batch[0])
        total, weight = total_of(y, batch[1])
        return total + F.cross_entropy(d, batch[1] % 2, reduction="sum"), weight

    return {"model": Reversed, "loss": loss}


@habit("hooks")
def activations_by_hook():
    """A forward hook keeps an activation in a dict, from which the same loss takes a penalty."""
    kept = {}

    def model():
        net = mlp()
        net[1].register_forward_hook(lambda module, inputs, output: kept.update(h=output))
        return net

    def loss(model, batch):
        total, weight = total_of(model(batch[0]), batch[1])
        return total + 0.1 * kept["h"].abs().sum(), weight

    return {"model": model, "loss": loss}


@habit("hooks")
def module_backward_hook():
    """A full backward hook halves the gradient that goes into a layer."""

    def model():
        net = mlp()
        net[2].register_full_backward_hook(lambda module, gin, gout: tuple(g if g is None else 0.5 * g for g in gin))
        return net

    return {"model": model}


@habit("hooks")
def forward_hook_replaces_output():
    """A forward hook replaces a layer's output."""

    def model():
        net = mlp()
        net[0].register_forward_hook(lambda module, inputs, output: output + inputs[0].mean(1, keepdim=True))
        return net

    return {"model": model}
