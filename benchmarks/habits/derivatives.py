"""Losses, models and metrics that differentiate."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from benchmarks.habits.plain import mlp, points
from benchmarks.habits.program import habit


def total_of(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


def grid():
    """64 points (t, x) of a rectangle."""
    return (torch.rand(64, 2, generator=torch.Generator().manual_seed(3)),)


def atoms():
    """64 arrangements of four atoms in space, and forces of springs."""
    at = torch.randn(64, 4, 3, generator=torch.Generator().manual_seed(4))
    return at, -(at - at.mean(1, keepdim=True))


def scalar_net(width=2):
    return nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, 1))


@habit("derivatives")
def gradient_penalty():
    """The squared gradient of the outputs by the inputs is part of the loss."""

    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        y = model(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        total, weight = total_of(y, batch[1])
        return total + g.pow(2).sum(), weight

    return {"loss": loss, "eval_data": points}


@habit("derivatives")
def critic_penalty():
    """A critic of Wasserstein GANs: gradients at points between real and other samples have norm one."""

    def loss(model, batch):
        real, other = batch[0], batch[0].flip(1)
        between = (0.3 * real + 0.7 * other).requires_grad_()
        (g,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return (model(other) - model(real)).sum() + 10 * (g.norm(dim=1) - 1).pow(2).sum(), len(real)

    return {"loss": loss, "model": lambda: scalar_net(16), "optimizer": lambda p: torch.optim.SGD(p, lr=0.01)}


@habit("derivatives")
def physics_informed():
    """Burgers' equation: first and second derivatives of the net by its inputs."""

    def loss(model, batch):
        at = batch[0].clone().requires_grad_()
        u = model(at)
        (d,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        (dd,) = torch.autograd.grad(d[:, 1].sum(), at, create_graph=True)
        residual = d[:, 0] + u[:, 0] * d[:, 1] - 0.1 * dd[:, 1]
        start = model(torch.stack([torch.zeros_like(at[:, 1]), at[:, 1]], 1))[:, 0] + torch.sin(torch.pi * at[:, 1])
        return residual.pow(2).sum() + start.pow(2).sum(), len(at)

    return {"loss": loss, "model": scalar_net, "train_data": grid, "eval_data": grid}


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = scalar_net(12)

    def forward(self, at):
        return self.net(at.flatten(1))[:, 0]


def forces(model, at, create_graph):
    at = at.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(at).sum(), at, create_graph=create_graph)
    return -g


@habit("derivatives")
def force_field():
    """Forces are gradients of an energy, in training and in evaluation."""

    def loss(model, batch):
        return (forces(model, batch[0], model.training) - batch[1]).pow(2).sum(), len(batch[0])

    def error(model, batch):
        return (forces(model, batch[0], False) - batch[1]).abs().sum(), batch[1].numel()

    return {"model": Energy, "loss": loss, "train_data": atoms, "eval_data": atoms, "metrics": {"error": error}}


class Forces(Energy):
    def forward(self, at):
        with torch.enable_grad():
            at = at.detach().requires_grad_()
            energy = self.net(at.flatten(1))[:, 0]
            (g,) = torch.autograd.grad(energy.sum(), at, create_graph=self.training)
        return energy, -g


@habit("derivatives")
def model_gives_forces():
    """The model itself differentiates, with gradients enabled by itself."""

    def loss(model, batch):
        energy, force = model(batch[0])
        return (force - batch[1]).pow(2).sum() + 0.1 * energy.pow(2).sum(), len(energy)

    return {"model": Forces, "loss": loss, "train_data": atoms, "eval_data": atoms}


@habit("derivatives")
def maml():
    """Each sample is a task: one step on its first half by `torch.func`, the loss on its second half."""

    def task(parameters, model, x, y):
        def inner(p):
            return (functional_call(model, p, (x[:8],)) - y[:8]).pow(2).mean()

        step = {
            name: p - 0.1 * g for (name, p), g in zip(parameters.items(), grad(inner)(parameters).values(), strict=True)
        }
        return (functional_call(model, step, (x[8:],)) - y[8:]).pow(2).mean()

    def loss(model, batch):
        parameters = dict(model.named_parameters())
        x = batch[0][:, :, None]
        return vmap(lambda a: task(parameters, model, a, a.sin()))(x).sum(), len(x)

    return {"model": lambda: scalar_net(1), "loss": loss}


@habit("derivatives")
def unrolled_inner_step():
    """An inner step by `autograd.grad(create_graph=True)` on shared weights of a sample's own."""

    def loss(model, batch):
        code = torch.zeros(len(batch[0]), 16, requires_grad=True)
        for _ in range(2):
            fit = (model(code) - batch[0][:, :4]).pow(2).sum()
            (g,) = torch.autograd.grad(fit, code, create_graph=True)
            code = code - 0.1 * g
        return (model(code) - batch[0][:, :4]).pow(2).sum(), len(code)

    return {"loss": loss}


@habit("derivatives")
def directional():
    """`torch.func.jvp` of the model in a fixed direction."""

    def loss(model, batch):
        y, slope = jvp(model, (batch[0],), (torch.ones_like(batch[0]),))
        total, weight = total_of(y, batch[1])
        return total + slope.pow(2).sum(), weight

    return {"loss": loss}


@habit("derivatives")
def per_sample_gradients():
    """`vmap(grad)` over samples: norms of each sample's gradient are penalised."""

    def loss(model, batch):
        parameters = dict(model.named_parameters())

        def of_one(p, x, y):
            return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

        grads = vmap(grad(of_one), (None, 0, 0))(parameters, *batch)
        total, weight = total_of(model(batch[0]), batch[1])
        return total + 0.01 * sum(g.pow(2).sum() for g in grads.values()), weight

    return {"loss": loss}


@habit("derivatives")
def laplacian():
    """The trace of the Hessian of a potential, by `torch.func.hessian` under `vmap`."""

    def loss(model, batch):
        def potential(at):
            return model(at)[0]

        trace = vmap(lambda at: hessian(potential)(at).diagonal().sum())(batch[0])
        return (trace + batch[0].sum(1)).pow(2).sum(), len(trace)

    return {"model": scalar_net, "loss": loss, "train_data": grid}


@habit("derivatives")
def contractive():
    """The Jacobian of an encoder by `jacrev` under `vmap`."""

    def loss(model, batch):
        jacobian = vmap(jacrev(model))(batch[0])
        total, weight = total_of(model(batch[0]), batch[1])
        return total + 0.1 * jacobian.pow(2).sum(), weight

    return {"loss": loss}


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.inject, self.again, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.inject(x)

        def f(z):
            return torch.tanh(0.5 * self.again(z) + x)

        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z = f(z)
        if not torch.is_grad_enabled():
            return self.head(z)
        z0 = z.clone().requires_grad_()
        again = f(z0)
        z = f(z)

        def solve(g):
            total = g
            for _ in range(30):
                total = g + torch.autograd.grad(again, z0, total, retain_graph=True)[0]
            return total

        z.register_hook(solve)
        return self.head(z)


@habit("derivatives")
def implicit():
    """A fixed point in the forward, its implicit derivative in a hook of the backward (deep equilibrium)."""
    return {"model": Equilibrium, "eval_data": points}


@habit("derivatives")
def adversarial():
    """The loss looks for a worse input by the sign of its gradient (FGSM), and trains on that."""

    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        total, _ = total_of(model(x), batch[1])
        (g,) = torch.autograd.grad(total, x)
        return total_of(model((x + 0.05 * g.sign()).detach()), batch[1])

    return {"loss": loss, "eval_data": points}


@habit("derivatives")
def score_matching():
    """The divergence of a learned score by a fixed probe."""
    probe = torch.where(torch.arange(16) % 3 == 0, 1.0, -1.0)

    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        s = model(x)
        (v,) = torch.autograd.grad((s * probe).sum(), x, create_graph=True)
        return (v * probe).sum() + 0.5 * s.pow(2).sum(), len(x)

    return {
        "model": lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)),
        "loss": loss,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.01),
    }


@habit("derivatives")
def gradient_norm_metric():
    """A metric is the norm of each input's gradient."""

    def loss(model, batch):
        return total_of(model(batch[0]), batch[1])

    def saliency(model, batch):
        x = batch[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(total_of(model(x), batch[1])[0], x)
        return g.norm(dim=1).sum(), len(x)

    return {"loss": loss, "model": mlp, "eval_data": points, "metrics": {"saliency": saliency}}
