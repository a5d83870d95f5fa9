"""Parameter groups of fully_shard, which a unit gathers and scatters, in each release of torch."""

from __future__ import annotations

from typing import Any


def param_groups(unit: Any) -> list[Any]:
    """Parameter groups of an FSDPModule. In torch 2.10 that has one at most, and its state another name for it."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def release_gathered(group: Any) -> None:
    """Frees what a group's units have left of the last all-gather. torch 2.15 has a method for it, of its context."""
    context = group.comm_ctx
    if hasattr(context, "release_all_gather_state_for_comm_reuse"):
        context.release_all_gather_state_for_comm_reuse()
    elif context.all_gather_state is not None:
        group._wait_all_gather_streams_on_event(context.all_gather_state.event)
        context.all_gather_state = None
