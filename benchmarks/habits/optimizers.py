"""Optimizers that hold optimizers, that keep a state of their own, and that do without a schedule."""

import torch
from torch import nn

from benchmarks.habits.plain import mlp, points
from benchmarks.habits.program import habit

Opt = torch.optim.Optimizer


class Ortho(Opt):
    """Momentum made orthogonal by Newton-Schulz, as in Muon."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                x = m / (m.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 1.5 * x - 0.5 * a @ x
                p.sub_(x, alpha=g["lr"])


class Both(Opt):
    """One object with two optimizers within, whose state is theirs."""

    def __init__(self, params):
        params = list(params)
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        self.parts = [Ortho(matrices), torch.optim.AdamW(others, lr=1e-2, eps=1e-3)]
        super().__init__(params, {"lr": 1.0})

    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state):
        for part, of in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(of)


@habit("optimizers in optimizers")
def muon_and_adamw():
    """Muon for matrices and AdamW for the rest in one optimizer with its own state_dict."""
    return {"optimizer": Both}


class Forgetful(Both):
    state_dict = Opt.state_dict
    load_state_dict = Opt.load_state_dict


@habit(
    "optimizers in optimizers",
    "either",
    why="its state_dict is empty: a resume in plain torch forgets too",
    names=("Forgetful",),
)
def two_without_state_dict():
    """The same without a state_dict of its own: what its parts keep is in no checkpoint."""
    return {"optimizer": Forgetful}


class Groups(Opt):
    """Shares the groups of the two within, as a chained optimizer does."""

    def __init__(self, params):
        params = list(params)
        self.parts = [torch.optim.SGD([p for p in params if p.ndim == 2], lr=0.1, momentum=0.9)]
        self.parts.append(torch.optim.Adam([p for p in params if p.ndim != 2], lr=1e-2, eps=1e-3))
        super().__init__([g for part in self.parts for g in part.param_groups], {})
        self.param_groups = [g for part in self.parts for g in part.param_groups]
        for part in self.parts:
            part.state = self.state

    def step(self, closure=None):
        for part in self.parts:
            part.step()


@habit("optimizers in optimizers")
def chained():
    """Two optimizers within share groups and state with the one outside."""
    return {"optimizer": Groups}


class Lookahead(Opt):
    def __init__(self, base, k=2, alpha=0.5):
        self.base, self.k, self.alpha = base, k, alpha
        super().__init__(base.param_groups, {"calls": 0})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for g in self.param_groups:
            g["calls"] += 1
            for p in g["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if g["calls"] % self.k == 0:
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)

    def state_dict(self):
        return {"base": self.base.state_dict(), "slow": super().state_dict()}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        super().load_state_dict(state["slow"])
        self.param_groups = self.base.param_groups


@habit("optimizers in optimizers")
def lookahead():
    """Lookahead over SGD with momentum: slow weights beside the base's state."""
    return {"optimizer": lambda p: Lookahead(torch.optim.SGD(p, lr=0.1, momentum=0.9))}


class Sam(Opt):
    def __init__(self, params, rho=0.05):
        super().__init__(params, {"rho": rho, "lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"


@habit(
    "optimizers in optimizers",
    "refused",
    reference=None,
    why="its step needs a closure that computes the gradient anew, which the loop does not give",
    names=("closure",),
)
def sharpness_aware():
    """SAM as it is published: its step takes a closure."""
    return {"optimizer": Sam}


class NotAnOptimizer:
    def __init__(self, params):
        self.base = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def state(self):
        return self.base.state

    def step(self, closure=None):
        self.base.step()

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)


@habit("optimizers in optimizers", "either", why="it is no torch.optim.Optimizer", names=("NotAnOptimizer",))
def wrapper_that_is_none():
    """A wrapper that has an optimizer's methods and is no Optimizer."""
    return {"optimizer": NotAnOptimizer}


class Averaging(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p].setdefault("ema", p.detach().clone()).lerp_(p, 0.1)
                p.lerp_(self.state[p]["ema"], 0.05)


@habit("optimizers in optimizers")
def average_in_the_state():
    """SGD pulls weights towards their own average, which is in its state."""
    return {"optimizer": lambda p: Averaging(p, lr=0.1, momentum=0.9)}


class Tuned(torch.optim.SGD):
    """Its learning rate is an attribute of its own that falls with each step."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.factor = 1.0

    def step(self, closure=None):
        self.factor *= 0.8
        for g in self.param_groups:
            g["lr"] = 0.1 * self.factor
        super().step(closure)


@habit(
    "optimizers in optimizers",
    "either",
    why="its state_dict lacks the attribute: a resume in plain torch forgets it too",
    names=("factor",),
)
def factor_in_attribute():
    """The optimizer keeps a number in an attribute that its state_dict lacks."""
    return {"optimizer": Tuned}


class InGroup(torch.optim.SGD):
    def step(self, closure=None):
        for g in self.param_groups:
            g["steps"] = g.get("steps", 0) + 1
            g["momentum"] = min(0.9, 0.3 * g["steps"])
        super().step(closure)


@habit("optimizers in optimizers")
def counter_in_group():
    """A counter in the parameter group decides the momentum: it is in the state_dict."""
    return {"optimizer": lambda p: InGroup(p, lr=0.05, momentum=0.1)}


class Normed(Opt):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (float(norm) + 1e-6))


@habit("optimizers in optimizers")
def step_by_global_norm():
    """The step size follows from the norm of all gradients together."""
    return {"optimizer": Normed}


@habit("optimizers in optimizers")
def clamped_after_step():
    """A hook after the optimizer's step clamps the weights."""

    def optimizer(params):
        made = torch.optim.SGD(params, lr=0.1)

        @torch.no_grad()
        def box(opt, *_):
            for g in opt.param_groups:
                for p in g["params"]:
                    p.clamp_(-0.2, 0.2)

        made.register_step_post_hook(box)
        return made

    return {"optimizer": optimizer}


MOST = {"logit": 0.0}


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        y = self.net(x)
        if self.training:
            MOST["logit"] = max(MOST["logit"], float(y.detach().abs().max()))
        return y


class ClipByLogit(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        f = min(1.0, 0.5 / MOST["logit"])
        MOST["logit"] = 0.0
        for g in self.param_groups:
            for p in g["params"]:
                p.mul_(f)


@habit(
    "optimizers in optimizers",
    "refused",
    why="the largest logit is that of a rank's own samples",
    names=("MOST",),
    late=True,
    alone_trains=True,
)
def clipped_by_largest_logit():
    """The optimizer scales weights by the largest logit that this process has seen, kept in a global."""
    MOST["logit"] = 0.0
    return {"model": Logits, "optimizer": lambda p: ClipByLogit(p, lr=0.1)}


class ScheduleFree(Opt):
    """SGD without a schedule: the parameters are y while it trains, the average x is what is evaluated."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self):
        for g in self.param_groups:
            if g["train_mode"]:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / g["beta"])
                g["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for g in self.param_groups:
            if not g["train_mode"]:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - g["beta"])
                g["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            if not g["train_mode"]:
                raise RuntimeError("call optimizer.train() before a step")
            c = 1 / (g["k"] + 1)
            for p in g["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=g["lr"] * (g["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=g["lr"])
            g["k"] += 1


@habit("schedule-free")
def schedule_free():
    """A schedule-free optimizer is evaluated at its average."""
    return {"optimizer": ScheduleFree, "eval_data": points, "steps": 8}


class Swapping(torch.optim.SGD):
    """Evaluates at an average of the weights: `eval` and `train` swap them."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.param_groups[0]["evaluating"] = False

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p, 0.3)

    def _swap(self, evaluating):
        if self.param_groups[0]["evaluating"] == evaluating:
            return
        self.param_groups[0]["evaluating"] = evaluating
        for g in self.param_groups:
            for p in g["params"]:
                if "mean" in self.state[p]:
                    kept = p.detach().clone()
                    p.data.copy_(self.state[p]["mean"])
                    self.state[p]["mean"].copy_(kept)

    def eval(self):
        self._swap(True)

    def train(self):
        self._swap(False)


@habit("schedule-free")
def swapped_for_evaluation():
    """An optimizer swaps its average in by `eval()` and out by `train()`."""

    def correct(model, batch):
        return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])

    return {"optimizer": Swapping, "eval_data": points, "metrics": {"correct": correct}}


class Scheduled(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self, lambda step: 0.8**step)

    def step(self, closure=None):
        super().step()
        self.schedule.step()


@habit("optimizers")
def scheduler_in_optimizer():
    """An optimizer steps its own learning-rate scheduler."""
    return {"optimizer": Scheduled}


@habit("optimizers")
def warmed_up_by_hook():
    """A hook before each step of the optimizer counts the steps and raises the rate."""

    def optimizer(params):
        made, steps = torch.optim.SGD(params, lr=0.1, momentum=0.9), {"taken": 0}

        def warm_up(optimizer, args, kwargs):
            steps["taken"] += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, steps["taken"] / 5)

        made.register_step_pre_hook(warm_up)
        return made

    return {"optimizer": optimizer}
