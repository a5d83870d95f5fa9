"""State outside of buffers: attributes, counters, lists, closures, globals, teachers, weights that a forward writes."""

import copy
import dataclasses
import itertools
import math
import queue

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.habits.plain import Points, mlp, points
from benchmarks.habits.program import habit

CALLS = "how often a model is called in a step depends on the layout: once a grain, a microbatch or a batch"
CARRIED = "what a batch leaves for the next one depends on which samples a forward has seen, and so on the layout"


def total_of(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4), None

    def forward(self, x):
        fits = self.state is not None and self.state.shape[1] == len(x)
        y, s = self.cell(x.view(-1, 4, 4), self.state if fits else None)
        self.state = s.detach()
        return self.head(y[:, -1])


@habit("state", "refused", why=CARRIED, names=("state",))
def carried():
    """A recurrent net goes on from the hidden state of the batch before."""
    return {"model": Carried}


class CarriedByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.memory = nn.RNN(4, 8, batch_first=True), nn.Linear(8, 4), {}

    def forward(self, x):
        start = self.memory.get("h")
        if start is not None and start.shape[1] != len(x):
            start = start.mean(1, keepdim=True).expand(-1, len(x), -1).contiguous()
        y, s = self.cell(x.view(-1, 4, 4), start)
        self.memory["h"] = s.detach()
        return self.head(y[:, -1])


@habit("state", "refused", why=CARRIED, names=("memory",))
def carried_in_dict():
    """The hidden state is kept in a dict of the module."""
    return {"model": CarriedByName}


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.decode, self.calls = nn.Linear(16, 8), nn.Linear(8, 16), 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        z = self.mean(x)
        return self.decode(z), z, min(1.0, self.calls / 10)


@habit("state", "refused", why=CALLS, names=("calls",))
def kl_warmup():
    """The weight of the KL term grows with a counter of forwards."""

    def loss(model, batch):
        y, z, beta = model(batch[0])
        return (y - batch[0]).pow(2).sum() + beta * z.pow(2).sum(), len(y)

    return {"model": Variational, "loss": loss}


class Gumbel(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.temperature = nn.Linear(16, 8), nn.Linear(8, 4), 2.0

    def forward(self, x):
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.9)
        return self.b((self.a(x) / self.temperature).softmax(-1))


@habit("state", "refused", why=CALLS, names=("temperature",))
def gumbel_temperature():
    """A softmax temperature falls with each forward."""
    return {"model": Gumbel}


class Later(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        y = self.net(x)
        return y * 2 if self.calls > 3 else y


@habit("state", "refused", why=CALLS, names=("calls",), late=True)
def counter_that_matters_later():
    """A counter of forwards has an effect from the fourth on."""
    return {"model": Later}


class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.history = mlp(), []

    def forward(self, x):
        y = self.net(x)
        if self.history:
            y = y - torch.stack(self.history).mean(0)
        if self.training:
            self.history.append(y.detach().mean(0))
        return y


@habit("state", "refused", why=CARRIED, names=("history",))
def list_that_grows():
    """Means of earlier outputs are kept in a list and subtracted."""
    return {"model": Grown}


class BeginsLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.kept = mlp(), []

    def forward(self, x):
        y = self.net(x)
        if self.net[0].weight.detach().abs().max() > 0.26:  # the weights reach this after some steps
            y = y * (1 + 0.1 * sum(self.kept))
            self.kept.append(min(1.0, float(y.detach().abs().mean())))
        return y


@habit("state", "refused", why=CARRIED, names=("kept",), late=True)
def list_that_begins_later():
    """A list begins to grow when the weights have become large."""
    return {"model": BeginsLate, "steps": 12}


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.bank = nn.Linear(16, 8), torch.zeros(16, 8)

    def forward(self, x):
        z = F.normalize(self.encode(x), dim=1)
        logits = z @ self.bank.T
        self.bank = torch.cat([self.bank, z.detach()])[-16:]
        return logits


@habit("state", "refused", why=CARRIED, names=("bank",))
def memory_bank():
    """Features of the batches before are negatives; they are kept in a tensor attribute."""

    def loss(model, batch):
        return model(batch[0]).logsumexp(1).sum(), len(batch[0])

    return {"model": Bank, "loss": loss}


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.mean = mlp(), torch.zeros(16)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.net(x - self.mean)


@habit("state", "refused", why=CARRIED, names=("mean",))
def running_mean_in_attribute():
    """A running mean of the inputs is a tensor attribute instead of a buffer."""
    return {"model": Detached}


class Balanced(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two, self.last = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 2), [1.0, 1.0]

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.one(h), self.two(h)


@habit("state", "refused", why=CARRIED, names=("last",))
def dynamic_weight_average():
    """Two losses are weighted by what they were in the call before; the loss writes an attribute of the model."""

    def loss(model, batch):
        a, b = model(batch[0])
        parts = [F.cross_entropy(a, batch[1], reduction="sum"), (b - batch[0][:, :2]).pow(2).sum()]
        total = sum(p / w for p, w in zip(parts, model.last, strict=True))
        model.last = [float(p.detach()) / len(a) for p in parts]
        return total, len(a)

    return {"model": Balanced, "loss": loss}


@habit("state", "refused", why=CALLS, names=("step",))
def closure_counter():
    """A counter in a closure of the loss warms a term up."""
    step = 0

    def loss(model, batch):
        nonlocal step
        step += 1
        y = model(batch[0])
        total, weight = total_of(y, batch)
        return total + min(1.0, step / 10) * y.pow(2).sum(), weight

    return {"loss": loss}


SEEN = {"calls": 0}


def loss_with_global(model, batch):
    SEEN["calls"] += 1
    y = model(batch[0])
    total, weight = total_of(y, batch)
    return total + min(1.0, SEEN["calls"] / 10) * y.pow(2).sum(), weight


@habit("state", "refused", why=CALLS, names=("SEEN",))
def global_of_the_loss():
    """A dict of the module counts the calls of the loss, which uses the count."""
    SEEN["calls"] = 0
    return {"loss": loss_with_global}


def loss_with_attribute(model, batch):
    loss_with_attribute.scale = loss_with_attribute.scale * 0.95
    total, weight = total_of(model(batch[0]), batch)
    return total * loss_with_attribute.scale, weight


@habit("state", "refused", why=CALLS, names=("scale",))
def function_attribute():
    """A function attribute of the loss decays with each call."""
    loss_with_attribute.scale = 1.0
    return {"loss": loss_with_attribute}


class LossWithState:
    def __init__(self):
        self.best = math.inf

    def __call__(self, model, batch):
        total, weight = total_of(model(batch[0]), batch)
        self.best = min(self.best, float(total.detach()) / weight)
        return total * (1 + self.best), weight


@habit("state", "refused", why=CARRIED, names=("best",))
def object_as_loss():
    """The loss is an object that scales by the best loss that it has seen."""
    return {"loss": LossWithState()}


class CountingRows(Points):
    def __init__(self):
        super().__init__()
        self.reads = 0

    def __getitem__(self, i):
        self.reads += 1
        return self.x[i] * min(1.0, self.reads / 64), self.y[i]


@habit(
    "state",
    "either",
    why="each rank and each data worker counts its own reads; exact mode refuses that, fast mode says so",
    names=("reads",),
    told="other values when it is read again",
)
def curriculum_by_reads():
    """A dataset scales its samples by how many were read."""
    return {"train_data": CountingRows}


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.9).add_(s, alpha=0.1)
        return self.student(x), self.teacher(x)


def distil(model, batch):
    y, t = model(batch[0])
    total, weight = total_of(y, batch)
    return total + (y - t).pow(2).sum(), weight


@habit("state")
def teacher_in_forward():
    """A teacher without gradient is averaged in the forward: once a step, whatever the layout."""
    return {"model": Teacher, "loss": distil}


class BufferTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("slow", self.net[2].weight.detach().clone())

    def forward(self, x):
        if self.training:
            self.slow.lerp_(self.net[2].weight.detach(), 0.1)
        return self.net(x) + F.linear(torch.tanh(self.net[0](x)), self.slow)


@habit("state")
def teacher_in_buffer():
    """The average of a weight is a buffer, which the forward moves and uses."""
    return {"model": BufferTeacher}


class AfterStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for a, p in zip(self.average.parameters(), self.net.parameters(), strict=True):
            a.lerp_(p, 0.2)

    def forward(self, x):
        return self.net(x)


@habit("state")
def teacher_updated_by_the_loss():
    """The loss calls the model's own update of its average once before it uses it."""

    def loss(model, batch):
        if model.training:
            model.update()
        y = model(batch[0])
        total, weight = total_of(y, batch)
        return total + (y - model.average(batch[0])).abs().sum(), weight

    return {"model": AfterStep, "loss": loss}


class Renormalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, max_norm=0.5), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.table((x.abs() * 8).long().clamp(0, 19)).sum(1))


WRITES = (
    "a trainable parameter that the forward writes: one process with the whole batch has a value, other layouts may not"
)


@habit("state", "either", why=WRITES, names=("table",))
def embedding_max_norm():
    """An embedding renormalises the rows that it looks up."""
    return {"model": Renormalized}


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        self.scale.data = torch.clamp(self.scale.data, max=1.02)
        return self.net(x) * self.scale.exp()


@habit("state")
def temperature_clamped_in_forward():
    """A trainable temperature is clamped by `.data`, as CLIP's code does: clamped twice is clamped once."""
    return {"model": Clamped}


class ClippedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        with torch.no_grad():
            for p in self.net.parameters():
                p.clamp_(-0.2, 0.2)
        return self.net(x)


@habit("state")
def weights_clipped_in_forward():
    """A critic clips its weights in each forward: clipped twice is clipped once."""
    return {"model": ClippedWeights}


class Decayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        if self.training:
            self.net[0].weight.data.mul_(0.9)
        return self.net(x)


@habit("state", "either", why=WRITES, names=("weight",))
def weights_decayed_in_forward():
    """The forward multiplies a trainable weight by 0.9."""
    return {"model": Decayed}


class UnitRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.prototypes = nn.Linear(16, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        return self.prototypes(F.normalize(self.encode(x), dim=1)) * 4


@habit("state", "either", why=WRITES + "; normalised twice it differs in its last bits", names=("prototypes.weight",))
def prototypes_normalised_in_forward():
    """Prototypes are put back to unit length in each forward, as in SwAV."""
    return {"model": UnitRows}


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.ones(16))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if self.training and not self.ready:
            self.scale.data.copy_(1 / x.std(0))
            self.ready.fill_(True)
        return self.net(x * self.scale)


@habit("state", "either", why="the first batch decides the initial value: " + WRITES, names=("scale",))
def actnorm():
    """A scale is set from the first batch that comes (ActNorm)."""
    return {"model": DataDependent}


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.previous = mlp(), None

    def reset(self):
        self.previous = None

    def forward(self, x):
        out = []
        for part in x.split(4, 1):
            self.previous = part if self.previous is None else 0.5 * self.previous + part
            out.append(self.previous)
        return self.net(torch.cat(out, 1))


@habit("state")
def state_reset_in_each_forward():
    """A state is carried through the parts of a sample, and the loss resets it before each batch."""

    def loss(model, batch):
        model.reset()
        return total_of(model(batch[0]), batch)

    return {"model": Frames, "loss": loss, "train_data": points}


class CentredByLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.center = mlp(), torch.zeros(16)

    def forward(self, x):
        if self.training:
            self.center = x.detach().mean(0)
            return self.net(x)
        return self.net(x - self.center)


@habit("state", "refused", why=CARRIED, names=("center",))
def read_in_evaluation_alone():
    """Training keeps the mean of its last batch, which only evaluation subtracts."""
    return {"model": CentredByLast, "eval_data": Points}


class CountedEvaluations(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("evaluated", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            self.evaluated += 1
        return self.net(x) * (1 if self.training else self.evaluated)


@habit("state", "refused", why="how many batches a process evaluates depends on the layout", names=("evaluated",))
def counted_evaluations():
    """A buffer counts the batches of evaluations, and their outputs are multiplied by it."""
    return {"model": CountedEvaluations, "eval_data": Points}


class Queued(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.outputs = mlp(), queue.Queue()
        self.outputs.put(torch.zeros(4))

    def forward(self, x):
        y, before = self.net(x), self.outputs.get()
        self.outputs.put(y.detach().mean(0))
        return y - before


@habit("state", "refused", why=CARRIED, names=("outputs",))
def carried_in_queue():
    """The mean output of the batch before lies in a queue of the standard library."""
    return {"model": Queued}


class Alternating(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scales = mlp(), itertools.cycle([1.0, 0.5, 2.0])

    def forward(self, x):
        return self.net(x) * next(self.scales)


@habit("state", "refused", why=CALLS, names=("scales",))
def cycled_scales():
    """Each forward takes the next of three scales."""
    return {"model": Alternating}


@dataclasses.dataclass
class Progress:
    calls: int = 0


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.progress = mlp(), Progress()

    def forward(self, x):
        self.progress.calls += 1
        return self.net(x) * (2 if self.progress.calls > 40 else 1)


@habit("state", "refused", why=CALLS, names=("progress",))
def counter_in_dataclass():
    """A dataclass counts forwards, and the output changes after forty of them."""
    return {"model": Decaying}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = mlp(), 1.0

    def forward(self, x):
        y = self.net[0](x)
        if y.requires_grad:
            y.register_hook(self.scaled)
        return self.net[2](torch.relu(y))

    def scaled(self, gradient):
        self.norm = 0.5 * self.norm + 0.5 * float(gradient.norm())
        return gradient / self.norm


@habit("state", "refused", why="each microbatch has a backward of its own", names=("norm",))
def gradient_norm_in_hook():
    """Gradients of activations are divided by a moving average of their norm."""
    return {"model": Scaled}
