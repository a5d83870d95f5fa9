"""Lazy modules, complex parameters, parametrizations, recomputation, autocast of one's own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.habits.plain import mlp, points, train_by_grain
from benchmarks.habits.program import habit


def even(weight):
    """Values that need no generator."""
    with torch.no_grad():
        weight.copy_(torch.linspace(-3, 3, weight.numel()).sin().view_as(weight) * 0.2)


class LazyEven(nn.LazyLinear):
    def reset_parameters(self):
        if self.bias is not None and self.bias.numel() and not self.has_uninitialized_params():
            even(self.weight)
            even(self.bias)


@habit("lazy")
def lazy_linear():
    """Linear layers find their inputs' width at the first batch; their values need no generator."""
    return {"model": lambda: nn.Sequential(LazyEven(32), nn.Tanh(), LazyEven(4)), "eval_data": points}


@habit("lazy", reference=None)
def lazy_and_random():
    """The same with random initial values: those of the job's seed."""
    return {"model": lambda: nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(4))}


class LazyConvEven(nn.LazyConv1d):
    def reset_parameters(self):
        if self.bias is not None and self.bias.numel() and not self.has_uninitialized_params():
            even(self.weight)
            even(self.bias)


@habit("lazy")
def lazy_convolution():
    """A lazy convolution before an ordinary layer."""

    def model():
        return nn.Sequential(nn.Unflatten(1, (2, 8)), LazyConvEven(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))

    return {"model": model}


@habit("lazy")
def lazy_made_whole():
    """A lazy model that its own function calls once."""

    def model():
        net = nn.Sequential(LazyEven(32), nn.Tanh(), LazyEven(4))
        net(torch.zeros(1, 16))
        return net

    return {"model": model}


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 9, dtype=torch.cfloat) * 0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=16)) + x)


@habit("complex")
def spectral_layer():
    """A layer of complex weights between two Fourier transforms."""
    return {"model": Spectral}


@habit("complex")
def spectral_layer_by_adam():
    """The same by Adam, which torch steps as two reals."""
    return {"model": Spectral, "optimizer": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3), "clip_norm": 0.5}


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)
        self.local, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        f = torch.fft.rfft(x)
        f = torch.cat([f[:, :5] * self.modes, torch.zeros_like(f[:, 5:])], 1)
        return self.head(torch.tanh(torch.fft.irfft(f, n=16) + self.local(x)))


@habit("complex")
def fourier_operator():
    """A Fourier neural operator of one block."""
    return {"model": Operator, "eval_data": points}


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.linspace(0, 1, 8)))

    def forward(self, x):
        return self.net(torch.view_as_real(torch.view_as_complex(x.reshape(-1, 8, 2)) * self.turn).flatten(1))


@habit("complex")
def complex_buffer():
    """A rotary table is a complex buffer."""
    return {"model": Rotary}


@habit("parametrizations")
def weight_norm():
    """Weight norm as a parametrization."""
    wrap = parametrizations.weight_norm
    return {"model": lambda: nn.Sequential(wrap(nn.Linear(16, 32)), nn.Tanh(), wrap(nn.Linear(32, 4)))}


@habit("parametrizations")
def weight_norm_hook():
    """The old weight norm."""

    def model():
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(old_weight_norm(nn.Linear(16, 32)), nn.Tanh(), nn.Linear(32, 4))

    return {"model": model}


@habit("parametrizations", tolerance=5e-3)
def orthogonal():
    """An orthogonal parametrization by Householder reflections."""

    def model():
        return nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4))

    return {"model": model}


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


@habit("parametrizations")
def symmetric():
    """A parametrization of the user's own."""

    def model():
        net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        parametrize.register_parametrization(net[0], "weight", Symmetric())
        return net

    return {"model": model}


@habit("parametrizations")
def tied_weights():
    """Encoder and decoder share one weight."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    def loss(model, batch):
        return (model(batch[0]) - batch[0]).pow(2).sum(), len(batch[0])

    return {"model": Tied, "loss": loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.02)}


class Recomputed(nn.Module):
    def __init__(self, norm=False, count=False, reentrant=False):
        super().__init__()
        self.first, self.head, self.reentrant = nn.Linear(16, 16), nn.Linear(16, 4), reentrant
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16) if norm else nn.Identity()
        if count:
            self.register_buffer("calls", torch.zeros(()))

    def block(self, x):
        if hasattr(self, "calls") and self.training:
            self.calls += 1
        return x + torch.tanh(self.inner(self.norm(x)))

    def forward(self, x):
        return self.head(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@habit("recomputation")
def own_checkpoint():
    """A block is recomputed by the user's own `checkpoint`."""
    return {"model": Recomputed}


@habit("recomputation")
def reentrant_checkpoint():
    """The same, reentrant."""
    return {"model": lambda: Recomputed(reentrant=True)}


@habit("recomputation", reference=train_by_grain)
def checkpoint_around_batch_norm():
    """Recomputation around batch norm moves its statistics twice, in plain torch too."""
    return {"model": lambda: Recomputed(norm=True), "global_batch": 32, "grains": 4}


@habit("recomputation")
def checkpoint_around_a_counter():
    """Recomputation around a counter in a buffer: two a step, in plain torch too."""
    return {"model": lambda: Recomputed(count=True)}


BF16 = 3e-2  # a bfloat16 has 8 bits: gradients of weights are rounded once a grain or once a batch, to 2**-9 each


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.tanh(self.a(x))
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(self.b(h.float()))
        return self.c(h)


@habit("autocast", tolerance=BF16)
def autocast_with_an_island():
    """A part of the model in bfloat16 and one in float32 by the user's own autocast."""
    return {"model": Cast}


@habit("autocast", tolerance=BF16)
def autocast_in_the_loss():
    """The loss calls its model under autocast, and computes in float32."""

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch[0])
        return F.cross_entropy(y.float(), batch[1], reduction="sum"), len(y)

    return {"loss": loss, "eval_data": points}
