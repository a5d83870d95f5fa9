"""Parameter groups of fully_shard, which a unit gathers and scatters, in each release of torch."""

from __future__ import annotations

from typing import Any


def param_groups(unit: Any) -> list[Any]:
    """Parameter groups of an FSDPModule. In torch 2.10 that has one at most, and its state another name for it."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
