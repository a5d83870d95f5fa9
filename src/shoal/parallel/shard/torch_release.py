"""Releases of torch's fully_shard: the oldest for ZeRO stages 2 and 3, and parameter groups under each release's names.

A parameter group is a set of parameters that a unit gathers and scatters together.
"""

from __future__ import annotations

from typing import Any

import torch

OLDEST = (2, 13)
OLDEST_TEXT = "2.13"


def missing() -> str:
    """Return why this process's torch cannot divide gradients and parameters; empty if it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST:
        return ""
    return f"before {OLDEST_TEXT} its fully_shard adds other parameters' gradients to those that a rank has none of"


def param_groups(unit: Any) -> list[Any]:
    """Return the parameter groups of an FSDPModule. torch 2.10 has at most one, under another name."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def release_gathered(group: Any) -> None:
    """Free what a group's units keep of the last all-gather. torch 2.15 has a method for it on the group's context."""
    context = group.comm_ctx
    if hasattr(context, "release_all_gather_state_for_comm_reuse"):
        context.release_all_gather_state_for_comm_reuse()
    elif context.all_gather_state is not None:
        group._wait_all_gather_streams_on_event(context.all_gather_state.event)
        context.all_gather_state = None
