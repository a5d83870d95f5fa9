"""Buffers that a forward moves, by their rule: what one process with the whole batch leaves in them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver
from torch.nn.utils import spectral_norm as old_spectral_norm

from benchmarks.habits.plain import mlp, points, train_by_grain
from benchmarks.habits.program import habit

MIXES = "a forward uses a statistic of the samples that it sees together, which depends on the layout"
NO_RULE = "no reduction over grains gives what one process with the whole batch leaves in the buffer"


def total_of(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), len(labels)


class Watched(nn.Module):
    """A net that calls `update` with its inputs while it trains."""

    def __init__(self, update, **buffers):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.update = update
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.update(self, x)
        return self.b(torch.relu(self.a(x)))


def load_of(m, x):
    m.load += F.one_hot(x[:, :4].argmax(1), 4).sum(0)


@habit("buffers")
def expert_load():
    """How many samples went to each expert so far: a sum."""
    return {"model": lambda: Watched(load_of, load=torch.zeros(4))}


@habit("buffers", declared={"buffers": {"load": "sum"}})
def expert_load_declared():
    """The same, declared by `Job(buffers=)`."""
    return {"model": lambda: Watched(load_of, load=torch.zeros(4))}


@habit("buffers")
def samples_seen():
    """A whole number of samples that a model has seen: a sum."""
    return {"model": lambda: Watched(lambda m, x: m.seen.add_(len(x)), seen=torch.zeros((), dtype=torch.long))}


@habit("buffers")
def forwards_counted():
    """A buffer counts the forwards: one a step."""
    return {"model": lambda: Watched(lambda m, x: m.calls.add_(1), calls=torch.zeros((), dtype=torch.long))}


class WarmsUp(Watched):
    def forward(self, x):
        return super().forward(x) * (self.calls / 10).clamp(max=1)


@habit("buffers")
def counter_buffer_that_matters():
    """A buffer counts the forwards and scales the outputs: one a step, for all of its samples."""
    return {"model": lambda: WarmsUp(lambda m, x: m.calls.add_(1), calls=torch.zeros(()))}


@habit("buffers")
def sums_of_moments():
    """An observation normaliser keeps a count, a sum and a sum of squares."""

    def update(m, x):
        m.count += len(x)
        m.total += x.sum(0)
        m.squares += x.pow(2).sum(0)

    zeros = torch.zeros
    return {"model": lambda: Watched(update, count=zeros(()), total=zeros(16), squares=zeros(16))}


@habit("buffers")
def extremes():
    """The largest and smallest input so far."""

    def update(m, x):
        m.high.copy_(torch.maximum(m.high, x.amax(0)))
        m.low.copy_(torch.minimum(m.low, x.amin(0)))

    return {"model": lambda: Watched(update, high=torch.full((16,), -1e9), low=torch.full((16,), 1e9))}


@habit("buffers")
def decaying_peak():
    """A peak that decays and is raised: a maximum, from what there was before the step."""

    def update(m, x):
        m.peak.copy_(torch.maximum(0.9 * m.peak, x.abs().max()))

    return {"model": lambda: Watched(update, peak=torch.zeros(()))}


@habit("buffers")
def classes_seen():
    """Flags of classes that were seen: any of them."""

    def update(m, x):
        m.seen |= F.one_hot(x[:, :8].argmax(1), 8).bool().any(0)

    return {"model": lambda: Watched(update, seen=torch.zeros(8, dtype=torch.bool)), "steps": 2}


@habit("buffers")
def histogram():
    """A histogram of inputs in whole numbers: a sum."""

    def update(m, x):
        m.bins += torch.histc(x, 10, -3, 3).long()

    return {"model": lambda: Watched(update, bins=torch.zeros(10, dtype=torch.long))}


@habit("buffers")
def last_row():
    """The last sample's inputs: of the step's last sample."""
    return {"model": lambda: Watched(lambda m, x: m.last.copy_(x[-1]), last=torch.zeros(16))}


class Centered(Watched):
    def forward(self, x):
        y = super().forward(x)
        used = self.center.clone()
        if self.training:
            self.center.lerp_(y.detach().mean(0), 0.1)
        return y - used


@habit("buffers")
def running_center():
    """A running mean of the outputs (DINO's centre): a mean, used as it was before the step."""
    return {"model": lambda: Centered(lambda m, x: None, center=torch.zeros(4))}


def assign(m, x):
    m.mean = 0.9 * m.mean + 0.1 * x.mean(0)


@habit("buffers")
def buffer_assigned():
    """A running mean is put in anew rather than changed in place."""
    return {"model": lambda: Watched(assign, mean=torch.zeros(16))}


class Scratch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("total", torch.zeros(16), persistent=False)
        self.register_buffer("shown", torch.zeros(16))

    def forward(self, x):
        if self.training:
            self.total += x.sum(0)
            self.shown.copy_(self.total)
        return self.net(x)


@habit("buffers")
def buffer_not_saved():
    """A sum in a buffer that is not persistent, beside one that is: a resume needs both."""
    return {"model": Scratch}


def confusion(m, x):
    y = m.b(torch.relu(m.a(x))).argmax(1)
    m.matrix.index_put_((y, x[:, :4].argmax(1)), torch.ones(len(x)), accumulate=True)


@habit("buffers")
def confusion_matrix():
    """A confusion matrix is summed in the forward by `index_put_`."""
    return {"model": lambda: Watched(confusion, matrix=torch.zeros(4, 4))}


def normed():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


@habit("buffers", reference=train_by_grain)
def batch_norm():
    """Batch norm: the batch of its statistics is a grain; running statistics are means over grains."""
    return {"model": normed, "global_batch": 32, "grains": 4, "eval_data": points}


@habit("buffers", reference=train_by_grain)
def batch_norm_by_grain_of_two():
    """Batch norm with the default of eight grains, four samples each."""
    return {"model": normed, "global_batch": 32, "grains": 8}


@habit("buffers")
def batch_norm_eval_mode():
    """Batch norm that is frozen: its modules stay in eval mode, as in fine-tuning of detectors."""

    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    return {"model": lambda: nn.Sequential(nn.Linear(16, 32), Frozen(32), nn.ReLU(), nn.Linear(32, 4))}


@habit("buffers")
def spectral_norm_hook():
    """The old spectral norm: its vectors move by the weight alone, once a step."""
    return {"model": lambda: nn.Sequential(old_spectral_norm(nn.Linear(16, 32)), nn.Tanh(), nn.Linear(32, 4))}


@habit("buffers", tolerance=2e-3)
def spectral_norm():
    """Spectral norm as a parametrization."""
    wrap = nn.utils.parametrizations.spectral_norm
    return {"model": lambda: nn.Sequential(wrap(nn.Linear(16, 32)), nn.Tanh(), nn.Linear(32, 4))}


class Welford(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                n, delta = len(x), x.mean(0) - self.mean
                total = self.count + n
                m2 = self.var * self.count + x.var(0, unbiased=False) * n + delta**2 * self.count * n / total
                self.mean += delta * n / total
                self.var.copy_(m2 / total)
                self.count.copy_(total)
        return self.net((x - self.mean) / (self.var + 1e-5).sqrt())


@habit(
    "buffers",
    "either",
    why=NO_RULE + "; the forward also uses the new value",
    names=("mean",),
    told="mixes samples of a batch, in the forward of Welford",
)
def observation_normaliser():
    """Running mean and variance by Welford's update, as in reinforcement learning."""
    return {"model": Welford}


class Codebook(nn.Module):
    def __init__(self, kmeans=False):
        super().__init__()
        self.encode, self.decode, self.kmeans = nn.Linear(16, 4), nn.Linear(4, 16), kmeans
        codes = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
        self.register_buffer("codes", codes)
        self.register_buffer("size", torch.ones(8))
        self.register_buffer("average", codes.clone())

    def forward(self, x):
        z = self.encode(x)
        chosen = torch.cdist(z.detach(), self.codes).argmin(1)
        q = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 8).type_as(z)
                if self.kmeans:
                    self.size += hot.sum(0)
                    self.average += hot.T @ z
                else:
                    self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.average.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                self.codes.copy_(self.average / self.size.clamp(min=0.1)[:, None])
        return self.decode(z + (q - z).detach()), (z - q).pow(2).sum()


def reconstruct(model, batch):
    y, commit = model(batch[0])
    return (y - batch[0]).pow(2).sum() + 0.25 * commit, len(y)


@habit("buffers", "either", why=NO_RULE, names=("codes",))
def codebook_ema():
    """A vector quantizer's codebook is averaged in the forward."""
    return {"model": Codebook, "loss": reconstruct, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01)}


@habit("buffers", "either", why="codes are a quotient of two sums: " + NO_RULE, names=("codes",))
def codebook_kmeans():
    """A codebook is the quotient of two sums."""
    return {"model": lambda: Codebook(True), "loss": reconstruct, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01)}


class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        queue = torch.randn(32, 8, generator=torch.Generator().manual_seed(6))
        self.register_buffer("queue", F.normalize(queue, dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for k, p in zip(self.key.parameters(), self.query.parameters(), strict=True):
                k.lerp_(p, 0.1)
            keys = F.normalize(self.key(x.flip(0).flip(0) * 1.1), dim=1)
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ self.queue.clone().T], 1)
        with torch.no_grad():
            at = int(self.at)
            self.queue[(at + torch.arange(len(x))) % 32] = keys
            self.at.fill_((at + len(x)) % 32)
        return logits


@habit("buffers", "either", why="the queue is of samples in their order, with a pointer: " + NO_RULE, names=("queue",))
def momentum_contrast():
    """MoCo: a momentum encoder and a queue of keys in a buffer."""

    def loss(model, batch):
        logits = model(batch[0]) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="sum"), len(logits)

    return {"model": Momentum, "loss": loss}


class Quantized(nn.Module):
    def __init__(self, observer):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.fake = FakeQuantize(observer=observer, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.fake(x))))


@habit("buffers", "either", why=MIXES, names=("fake",), told="mixes samples of a batch, in module 'fake'")
def qat_min_max():
    """Quantisation-aware training with an observer of extremes: the scale is that of all samples so far."""
    return {"model": lambda: Quantized(MinMaxObserver)}


@habit("buffers", "either", why=MIXES, names=("fake",), told="mixes samples of a batch, in module 'fake'")
def qat_moving_average():
    """Quantisation-aware training with moving averages of a batch's extremes."""
    return {"model": lambda: Quantized(MovingAverageMinMaxObserver)}


def balance(m, x):
    load = F.one_hot(x[:, :4].argmax(1), 4).float().sum(0)
    m.bias += 0.01 * (load.mean() - load).sign()


@habit("buffers", "either", why="the sign of a sum over the batch: " + NO_RULE, names=("bias",))
def bias_by_sign_of_load():
    """A router's bias moves by the sign of its load (balancing without a loss)."""
    return {"model": lambda: Watched(balance, bias=torch.zeros(4))}


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        x = self.a(x)
        mean = x.mean(0) if self.training else self.mean
        if self.training:
            self.mean.lerp_(mean.detach(), 0.1)
        return self.b(torch.relu(x - mean))


@habit("buffers", "either", reference=train_by_grain, why="by grain as batch norm, or: " + MIXES)
def batch_norm_by_hand():
    """A user's own batch norm."""
    return {"model": OwnNorm, "global_batch": 32, "grains": 4}


def dead_codes(m, x):
    m.codes[0] = x[torch.randint(len(x), ())][:4]


@habit(
    "buffers", "either", reference=None, why="one draw a batch; no rule keeps one of several draws", names=("codes",)
)
def dead_codes_replaced_at_random():
    """A code is replaced by a random sample of the batch."""
    return {"model": lambda: Watched(dead_codes, codes=torch.zeros(8, 4))}


def seen_up_to_limit(m, x):
    m.seen.add_(len(x)).clamp_(max=60)


@habit(
    "buffers", "either", why="a limit that a part of the batch reaches before the others: " + NO_RULE, names=("seen",)
)
def count_with_limit():
    """Samples are counted up to a limit."""
    return {"model": lambda: Watched(seen_up_to_limit, seen=torch.zeros(()))}


class GradientRange(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("amax", torch.zeros(()))

    def forward(self, x):
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(self.observed)
        return self.b(torch.relu(y))

    def observed(self, gradient):
        self.amax.copy_(torch.maximum(self.amax, gradient.abs().amax()))


@habit(
    "buffers",
    "refused",
    why="each microbatch has a backward of its own, of gradients of its own scale",
    names=("amax",),
)
def range_of_gradients():
    """The largest gradient of an activation is kept in a buffer, as in training with 8-bit floats."""
    return {"model": GradientRange}
