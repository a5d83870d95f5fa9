"""Habits of other programs, as far as they change a step's seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.planner.predict.workload import Program
from shoal.plans.plan import Dtype, Plan

# Most send gradients in equal buckets; what passes over them before the update is not known.
OTHERS: dict[str, Any] = {"own_buckets": False, "gradient_passes": 0.0}
# Most scatter the gradients that a shard axis divides.
USUAL = Program(scatter_gradients=True, divides_ends=True, **OTHERS)
# Megatron-LM has stages of equal blocks. Its selective recomputation is that of attention's core: Korthikanti et al.,
# arXiv 2205.05198.
MEGATRON = Program(
    cut="equal",
    selective="all_but_attention",
    scatter_gradients=True,
    scatter_messages=True,  # arXiv 2104.04473, section 4.1; DeepSpeed's pipeline does it too
    divides_ends=True,
    keeps_gathered=False,  # arXiv 2205.05198, section 4.2.2
    **OTHERS,
)
# Megatron-Core has cuDNN's attention, which is as fast as FlashAttention-3 on Hopper (arXiv 2407.08608, figure 5), and
# divides messages under sequence parallelism only.
MEGATRON_CORE = replace(
    MEGATRON,
    attention="flash3",
    scatter_messages=False,
    keeps_cast=True,
    casts_experts=True,  # GroupedLinear of Transformer Engine
    shards_context=True,  # its distributed optimizer's group is that of data and context ranks
    overlaps_exchanges=True,  # tp_comm_overlap of Transformer Engine, and its ring of keys and values
)
# torchtitan's selective recomputation keeps attention and every second product, and its shard axis is that of data and
# context ranks (torchtitan/distributed/parallel_dims.py). Its float8 is torchao's dynamic scaling, which saves inputs
# in 16 bits (torchao/float8/float8_linear.py).
TORCHTITAN = replace(USUAL, selective="alternate_products", shards_context=True, scales_anew=True)
# Adam of a narrow dtype is traced with two moments of that dtype, 4 bytes; these programs keep both, and a copy of the
# parameters, in float32: 12.
MASTER_BYTES = 8.0
# DeepSpeed's reduce_bucket_size and allgather_bucket_size, each 5e8 elements of 16 bits (docs/config-json).
DEEPSPEED_BUCKETS = 2 * 5e8 * 2


@dataclass(frozen=True)
class Habits:
    """Habits of one program, and its dtypes where products are in 16 bits.

    `reduce`: dtype of the gradients' sums; None for that of the products.
    `casts_whole`: parameters that no axis divides are cast by autocast too. Else they are float32 in every product.
    """

    program: Program
    reduce: Dtype | None = None
    casts_whole: bool = True

    def plan(self, base: Plan, *, whole: bool = False) -> Plan:
        """Return a base plan with the dtypes that this program has; `whole`: of plans that divide no parameters."""
        precision = base.precision
        if precision.compute == "float32" or (whole and not self.casts_whole):
            return base
        dtypes = {"parameters": precision.compute, "reduce": self.reduce or precision.compute}
        return base.with_sections(precision=dtypes)

    def of(self, own: Plan, base: Plan, host_seconds: float) -> Program:
        """Return the program for a base plan that `plan` made of shoal's `own`, with its copy of the parameters."""
        has_copy = base.precision.parameters != own.precision.parameters
        return replace(self.program, master_bytes=MASTER_BYTES if has_copy else 0.0, host_seconds=host_seconds)


HABITS = {
    # AdamW is torch's own, over whole gradients.
    "accelerate": Habits(replace(USUAL, gradient_passes=Program.gradient_passes), casts_whole=False),
    "deepspeed": Habits(replace(USUAL, buffer_bytes=DEEPSPEED_BUCKETS, fused_optimizer=True)),
    "torchtitan": Habits(replace(TORCHTITAN, fused_optimizer=True), "float32"),
    "megatron": Habits(replace(MEGATRON_CORE, fused_optimizer=True)),
    "lightning": Habits(replace(USUAL, gradient_passes=Program.gradient_passes), casts_whole=False),
    "fsdp2": Habits(replace(USUAL, gradient_passes=Program.gradient_passes), "float32"),
}
