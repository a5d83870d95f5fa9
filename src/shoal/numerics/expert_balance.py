"""Balance of experts without a loss: after each step a router's bias moves against the load of the whole batch.

The bias takes part in the selection of experts alone. It rises for experts with fewer tokens than the mean and falls
for experts with more: Wang et al., arXiv 2408.15664, as in DeepSeek-V3, arXiv 2412.19437. Tokens are counted over all
ranks and microbatches of a step by a buffer with the rule "sum".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.buffer_names import balance_rate, matches
from shoal.numerics.operators import tensors_in

COUNTS = "num_chosen"  # buffer of a router: int64 [experts], zero between steps


def count_choices(model: nn.Module, rules: Mapping[str, str]) -> None:
    """Make the routers whose bias has a rule "balance:RATE" count the tokens that choose each expert. Idempotent.

    `rules`: rules by patterns of buffer names. Raises: JobError for a buffer that is no bias by expert.
    """
    for name, buffer in list(model.named_buffers()):
        rates = [rate for pattern, rule in rules.items() if matches(pattern, name) and (rate := balance_rate(rule))]
        if not rates:
            continue
        home, _, key = name.rpartition(".")
        router = model.get_submodule(home)
        if hasattr(router, "balanced_bias"):
            continue
        if hasattr(router, COUNTS):
            raise _not_a_bias(name, f"is in a module that has a {COUNTS} of its own: rename that")
        if buffer.ndim != 1 or not buffer.is_floating_point():
            raise _not_a_bias(name, f"is {buffer.dtype} of shape {list(buffer.shape)}".replace("torch.", ""))
        router.register_buffer(COUNTS, torch.zeros_like(buffer, dtype=torch.int64), persistent=False)
        router.balanced_bias = name, key, rates[-1]  # type: ignore[assignment]
        router.register_forward_hook(_count)


def _count(router: Any, _: Any, output: Any) -> None:
    """Add a forward's choices to the router's counts, in training. Raises: JobError for a router without indices."""
    if not router.training:
        return
    counts = router._buffers[COUNTS]
    chosen = next((t for t in tensors_in(output) if not t.is_floating_point() and t.dtype != torch.bool), None)
    if chosen is None:
        raise _not_a_bias(router.balanced_bias[0], "is in a module that returns no indices of the chosen experts")
    if hasattr(router, "own_positions"):
        chosen = router.own_positions(chosen)
    flat = chosen.detach().flatten().long()
    counts += torch.zeros_like(counts).scatter_add_(0, flat, torch.ones_like(flat))


@torch.no_grad()
def move_biases(routers: Iterable[nn.Module]) -> None:
    """Move the biases by the counts of a step, and set the counts to zero. Without counts nothing moves."""
    for router in routers:
        bound: Any = router
        _, key, rate = bound.balanced_bias
        counts, bias = router._buffers[COUNTS], router._buffers[key]
        if counts is None or bias is None or bias.is_meta:
            continue
        load = counts.double()
        bias += (rate * (load.mean() - load).sign()).to(bias.dtype)
        counts.zero_()


def balanced_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that `count_choices` has changed."""
    return (module for module in model.modules() if COUNTS in module._buffers and hasattr(module, "balanced_bias"))


def count_positions(router: Any, own_positions: Callable[[Tensor], Tensor]) -> None:
    """Make a router count a part of what it chooses: `own_positions` of its indices [..., k]."""
    router.own_positions = own_positions


def _not_a_bias(name: str, what: str) -> JobError:
    return JobError(
        given=f'buffers={{"{name}": "balance:..."}}',
        conflict=f"the buffer {what}",
        remedy="name the bias of a router, float [experts], whose forward returns the indices of the chosen experts, "
        'such as "model.layers.*.mlp.gate.e_score_correction_bias"',
    )
