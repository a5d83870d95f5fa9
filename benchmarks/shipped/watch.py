"""Comparison of a training's gradients with those of a loop by hand, in the training's own processes.

A training calls `watch` with its model. If the variable SHIPPED names a file, the gradient of each optimizer step is
computed again from the same weights: the sum of the losses of all samples of all ranks, divided by the number of what
has a loss. Rank 0 writes to the file how far the optimizer's gradient is from that. Else nothing is done.
"""

import copy
import json
import os

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook


def watch(model, summed, expected=None, steps=6):
    """Compare the gradients of a model's first steps with those of a loop by hand.

    `summed(model, inputs)` returns a sum of losses and their count. `expected(step)` returns the samples of a step, all
    ranks', as a loop by hand reads them; without it these are the samples that the model gets.
    """
    path = os.environ.get("SHIPPED")
    if not path:
        return
    twin, inputs, rows = copy.deepcopy(model), [], []

    def called(module, args, kwargs):
        if torch.is_grad_enabled():
            inputs.append(copy.deepcopy(kwargs or args[0]))

    def flat_gradient(of):
        gradients = (p.grad if p.grad is not None else torch.zeros_like(p) for p in of.parameters())
        return torch.cat([gradient.detach().flatten() for gradient in gradients]).double()

    def before_step(optimizer, *_):
        got = flat_gradient(model)
        with torch.no_grad():
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.copy_(mine)
        twin.zero_grad()
        count = torch.zeros((), dtype=torch.float64)
        with torch.enable_grad():
            for one in inputs if expected is None else [expected(len(rows))]:
                loss, number = summed(twin, one)
                loss.backward()
                count += number
        inputs.clear()
        by_hand = flat_gradient(twin)
        if dist.is_initialized():
            dist.all_reduce(count)
            dist.all_reduce(by_hand)
        by_hand /= count
        ratio, error = got @ by_hand / (by_hand @ by_hand), (got - by_hand).norm() / by_hand.norm()
        rows.append({"ratio": round(float(ratio), 4), "error": round(float(error), 4)})
        if not dist.is_initialized() or dist.get_rank() == 0:
            with open(path, "w") as file:
                json.dump(rows, file)
        if len(rows) == steps:
            if dist.is_initialized():
                dist.barrier()
            os._exit(0)

    def before(optimizer, args, kwargs):
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return before_step(optimizer)

        def watched():
            loss = closure()
            before_step(optimizer)
            return loss

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    model.register_forward_pre_hook(called, with_kwargs=True)
    register_optimizer_step_pre_hook(before)
