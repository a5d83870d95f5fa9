"""Parameter groups of fully_shard, in which a unit gathers and scatters, for each release of torch."""

from __future__ import annotations

from typing import Any


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
