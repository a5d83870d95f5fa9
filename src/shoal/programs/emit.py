"""Layouts as configurations of other frameworks: `shoal plan --emit`.

Each framework is a row of `FRAMEWORKS`: which axes, levels and schedules its configuration has, and a function that
writes it. Keys are those of the releases named there. What a framework leaves to the training script is a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import CommandError, nearest
from shoal.plans.plan import Plan

_NARROW = {"float32": None, "bfloat16": "bf16", "float16": "fp16"}
_AXES = ("tensor", "pipeline", "context", "shard", "expert")
_CHECKPOINTING = "Recomputation is the model's: model.gradient_checkpointing_enable()."
_IN_BFLOAT16 = "The script makes the model in bfloat16."


@dataclass(frozen=True)
class Facts:
    """Facts beside the plan that a configuration names: the batch in samples, hosts, device, blocks of the model."""

    global_batch: int
    num_grains: int
    hosts: int = 1
    device: str = "cuda"
    sequence: int | None = None
    blocks: tuple[str, ...] = ()
    pure: bool = False  # parameters are in 16 bits, without a copy in float32

    def batch(self, plan: Plan) -> tuple[int, int]:
        """Return the samples of a microbatch and the microbatches of a rank, both equal on all ranks.

        The first is 0 if no such numbers make the global batch.
        """
        ranks, per = plan.layout.divides_grains, plan.batch.grains_per_microbatch
        grains, uneven = divmod(self.num_grains, ranks)
        size, rest = divmod(self.global_batch, self.num_grains)
        if uneven or rest or grains % per:
            return 0, 0
        return per * size, grains // per

    @property
    def kinds(self) -> dict[str, str]:
        """Pattern of the names of each list of blocks, with the first name."""
        kinds: dict[str, str] = {}
        for name in self.blocks:
            kinds.setdefault(re.sub(r"\b\d+\b", r"\\d+", re.escape(name)), name)
        return kinds


@dataclass(frozen=True)
class Framework:
    """Row of a framework: what its configuration expresses, and what it leaves to the script.

    Attributes:
        title: Its name in sentences, with the release whose keys these are.
        write: Returns the configuration of a plan, and notes on what the file cannot say of it.
        limit: Returns why it cannot run a plan within the other fields, or nothing.
        axes: Axes of a layout.
        levels: Of a shard axis.
        schedules: Of a pipeline, and what it calls them.
        recompute: Kinds of recomputation.
        precisions: Dtypes of the products.
        comment: What begins a comment in its files; none in JSON.
    """

    title: str
    write: Callable[[Plan, Facts], tuple[str, list[str]]]
    limit: Callable[[Plan, Facts], str]
    axes: tuple[str, ...]
    levels: tuple[str, ...] = ("gradients", "parameters")
    schedules: Mapping[str, str] = field(default_factory=dict)
    recompute: tuple[str, ...] = ("none", "full")
    precisions: tuple[str, ...] = ("float32", "bfloat16", "float16")
    comment: str = "# "

    def beyond(self, plan: Plan, facts: Facts) -> str:
        """Return the reason why this framework's configuration cannot say a plan, or nothing."""
        layout, lacks = plan.layout, ""
        axis = next((one for one in _AXES if layout.degree(one) > 1 and one not in self.axes), None)
        if axis is not None:
            lacks = f"{axis} axis in its configuration"
        elif layout.shard > 1 and plan.shard.level not in self.levels:
            lacks = f"shard.level = {plan.shard.level}"
        elif layout.pipeline > 1 and plan.pipeline.schedule not in self.schedules:
            lacks = f"schedule {plan.pipeline.schedule}"
        elif plan.memory.recompute not in self.recompute:
            lacks = f"recompute = {plan.memory.recompute}"
        elif plan.precision.compute not in self.precisions:
            lacks = plan.precision.compute
        elif not facts.batch(plan)[0]:
            return f"{self.title} needs microbatches of one size on all ranks"
        return f"{self.title} has no {lacks}" if lacks else self.limit(plan, facts)

    def configuration(self, plan: Plan, facts: Facts, *heads: str) -> tuple[str, list[str]]:
        """Return the text of a plan's configuration, and notes on what it leaves to the script.

        The first lines of the text are `heads` and the notes, except in JSON.
        """
        text, notes = self.write(plan, facts)
        if lacking := [axis for axis in _AXES if axis not in self.axes]:
            notes.append(f"It has no axis for {', '.join(lacking)}: such layouts were not considered.")
        head = "".join(f"{self.comment}{line}\n" for line in (*heads, *notes)) if self.comment else ""
        return head + text, notes


def framework(name: str) -> Framework:
    """Return the row of a framework. Raises: CommandError for an unknown name."""
    if name not in FRAMEWORKS:
        raise CommandError(
            given=f"--emit {name}",
            conflict="shoal writes no configuration of that name",
            remedy=f"write one of {', '.join(FRAMEWORKS)}{nearest(name, list(FRAMEWORKS))}",
        )
    return FRAMEWORKS[name]


def _yaml(document: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            text = value if isinstance(value, str) and value not in ("no", "NO") else json.dumps(value)
            lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)


_COPY = "it keeps a float32 copy of narrow parameters: write --precision bf16"


class Name(str):
    """Python expression, written as it is."""


def _call(function: str, values: Mapping[str, Any], indent: str = "", more: str = "") -> str:
    """Return a call with these keywords, one a line, but those that are None; `more`: a last argument."""
    rows = [
        f"{key}={value if isinstance(value, Name) else repr(value)}"
        for key, value in values.items()
        if value is not None
    ]
    rows += [more] if more else []
    return f"{function}(" + "".join(f"\n{indent}    {row}," for row in rows) + (f"\n{indent})" if rows else ")")


def _dtype(dtype: str) -> Name:
    return Name(f"torch.{dtype}")


def _accelerate(plan: Plan, facts: Facts) -> tuple[str, list[str]]:
    layout, (size, number) = plan.layout, facts.batch(plan)
    divided, several = layout.world_size > layout.data, "MULTI_CPU" if facts.device == "cpu" else "MULTI_GPU"
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if divided else several if layout.world_size > 1 else "NO",
        "num_processes": layout.world_size,
        "num_machines": facts.hosts,
        "machine_rank": 0,
        "mixed_precision": "no" if facts.pure else _NARROW[plan.precision.compute] or "no",
        "use_cpu": facts.device == "cpu",
    }
    if divided:
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan.shard.level == "parameters",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": plan.memory.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        document["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.data,
            "parallelism_config_dp_shard_size": layout.shard,
            "parallelism_config_tp_size": layout.tensor,
            "parallelism_config_cp_size": layout.context,
        }
    lines = [f"In the script: Accelerator(gradient_accumulation_steps={number}), and batch_size={size} in the loader."]
    if divided:
        lines.append("For a model without _no_split_modules add fsdp_config.fsdp_transformer_layer_cls_to_wrap.")
    elif plan.memory.recompute == "full":
        lines.append(_CHECKPOINTING)
    if facts.pure:
        lines.append(_IN_BFLOAT16)
    if layout.tensor > 1:
        lines.append("The tensor axis needs a model with a tp_plan, loaded with the mesh of the Accelerator.")
    if layout.context > 1:
        lines.append("The context axis needs accelerator.maybe_context_parallel around the step.")
    return _yaml(document), lines


def _fsdp_limit(plan: Plan, facts: Facts) -> str:
    layout = plan.layout
    if layout.world_size > layout.data and layout.shard == 1:
        return "its tensor and context axes need a shard axis beside them"
    return "it shards on GPUs only" if facts.device == "cpu" and layout.shard > 1 else ""


_ZERO = {"optimizer": 1, "gradients": 2, "parameters": 3}


def _deepspeed(plan: Plan, facts: Facts) -> tuple[str, list[str]]:
    size, number = facts.batch(plan)
    document: dict[str, Any] = {
        "train_batch_size": facts.global_batch,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": number,
        "zero_optimization": {"stage": _ZERO[plan.shard.level] if plan.layout.shard > 1 else 0},
    }
    if plan.precision.compute == "bfloat16":
        document["bf16"] = {"enabled": True}
    elif plan.precision.compute == "float16":
        scale = plan.precision.loss_scale
        document["fp16"] = {"enabled": True, "loss_scale": scale if isinstance(scale, float) else 0}
    if plan.layout.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": plan.layout.tensor}
    lines = [f"Launch {plan.layout.world_size} processes with deepspeed; the optimizer is the script's."]
    lines += [_CHECKPOINTING] if plan.memory.recompute == "full" else []
    return json.dumps(document, indent=2) + "\n", lines


def _deepspeed_limit(plan: Plan, facts: Facts) -> str:
    layout = plan.layout
    if layout.shard > 1 and layout.data > 1:
        return "its ZeRO shards over all ranks of the data axis"
    if layout.tensor > 1 and layout.shard > 1 and plan.shard.level == "parameters":
        return "its automatic tensor axis goes with ZeRO-1 and ZeRO-2"
    return _COPY if facts.pure else ""


def _torchtitan(plan: Plan, facts: Facts) -> tuple[str, list[str]]:
    layout, precision, (size, number) = plan.layout, plan.precision, facts.batch(plan)
    piped = layout.pipeline > 1
    parallel = {
        "data_parallel_replicate_degree": layout.data,
        "data_parallel_shard_degree": layout.shard,
        "fsdp_reshard_after_forward": "always" if plan.shard.level == "parameters" else "never",
        "tensor_parallel_degree": layout.tensor,
        "enable_sequence_parallel": plan.tensor.sequence if layout.tensor > 1 else None,
        "pipeline_parallel_degree": layout.pipeline,
        "pipeline_parallel_schedule": _TORCHTITAN_SCHEDULES[plan.pipeline.schedule] if piped else None,
        "pipeline_parallel_microbatch_size": size if piped else None,
        "context_parallel_degree": layout.context,
    }
    training = {
        "local_batch_size": size * number if piped else size,
        "global_batch_size": facts.global_batch,
        "seq_len": facts.sequence,
        "dtype": "bfloat16" if facts.pure else "float32",
        "mixed_precision_param": precision.compute,
        "mixed_precision_reduce": "float32",
    }
    lines = ["Put both into the Trainer.Config that a function of your config_registry returns."]
    if plan.memory.recompute == "full":
        lines.append("Recomputation is the model's configuration, as its registry has it: every block.")
    text = "from torchtitan.config import ParallelismConfig, TrainingConfig\n\n"
    text += f"parallelism = {_call('ParallelismConfig', parallel)}\n"
    return text + f"training = {_call('TrainingConfig', training)}\n", lines


_TORCHTITAN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}


def _torchtitan_limit(plan: Plan, facts: Facts) -> str:
    return "it has one or two stages on a rank" if plan.pipeline.stages_per_rank > 2 else ""


def _megatron(plan: Plan, facts: Facts) -> tuple[str, list[str]]:
    layout, precision, (size, _) = plan.layout, plan.precision, facts.batch(plan)
    stages = plan.pipeline.stages_per_rank
    state = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": stages if layout.pipeline > 1 and stages > 1 else None,
        "context_parallel_size": layout.context,
    }
    full, sequence = plan.memory.recompute == "full", plan.tensor.sequence and layout.tensor > 1
    transformer = {
        **state,
        "sequence_parallel": sequence,
        "tp_comm_overlap": True if sequence else None,
        "bf16": precision.compute == "bfloat16",
        "fp16": precision.compute == "float16",
        "params_dtype": _dtype(precision.compute),
        "pipeline_dtype": _dtype(precision.compute) if layout.pipeline > 1 else None,
        "recompute_granularity": None if plan.memory.recompute == "none" else plan.memory.recompute,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
        "recompute_modules": ["core_attn"] if plan.memory.recompute == "selective" else None,
    }
    sharded, strategies = layout.shard > 1, {"gradients": "optim_grads", "parameters": "optim_grads_params"}
    strategy = strategies.get(plan.shard.level) if sharded else None
    instances = layout.data if sharded and layout.data > 1 else None
    groups = {**state, "num_distributed_optimizer_instances": instances}
    ddp = {
        "use_distributed_optimizer": sharded,
        "num_distributed_optimizer_instances": instances,
        "overlap_grad_reduce": True,
        "overlap_param_gather": sharded,
        "grad_reduce_in_fp32": precision.reduce == "float32",
        "use_megatron_fsdp": True if strategy else None,
        "data_parallel_sharding_strategy": strategy,
    }
    lines = ["The model is written with megatron.core's modules; its sizes go to transformer(...)."]
    if sequence:
        lines.append("tp_comm_overlap needs Transformer Engine; without it leave the line out.")
    return (
        "import torch\n"
        "from megatron.core.distributed import DistributedDataParallelConfig\n"
        "from megatron.core.parallel_state import initialize_model_parallel\n"
        "from megatron.core.transformer import TransformerConfig\n\n"
        f"micro_batch_size, global_batch_size = {size}, {facts.global_batch}\n\n\n"
        "def initialize() -> None:\n"
        f"    {_call('initialize_model_parallel', groups, '    ')}\n\n\n"
        "def transformer(**sizes) -> TransformerConfig:  # num_layers, hidden_size, num_attention_heads, ...\n"
        f"    return {_call('TransformerConfig', transformer, '    ', '**sizes')}\n\n\n"
        "def ddp() -> DistributedDataParallelConfig:\n"
        f"    return {_call('DistributedDataParallelConfig', ddp, '    ')}\n"
    ), lines


def _megatron_limit(plan: Plan, facts: Facts) -> str:
    layout, stages = plan.layout, plan.layout.pipeline * plan.pipeline.stages_per_rank
    if layout.shard > 1 and plan.shard.level != "optimizer" and (layout.pipeline > 1 or layout.data > 1):
        return "its division of gradients and parameters goes with no pipeline, and over all data ranks"
    if stages > 1 and len(facts.blocks) % stages:
        return f"it cuts {len(facts.blocks)} blocks into stages of equally many"
    if plan.tensor.sequence is False and layout.tensor > 1 and layout.context > 1:
        return "its tensor axis beside a context axis is meant with sequence parallelism"
    return _COPY if facts.pure else ""


def _lightning(plan: Plan, facts: Facts) -> tuple[str, list[str]]:
    layout, (size, number) = plan.layout, facts.batch(plan)
    sharded, full = layout.shard > 1, plan.memory.recompute == "full"
    names = list(facts.kinds.values())
    if layout.tensor > 1:
        kind = "ModelParallelStrategy"
        values: dict[str, Any] = {"data_parallel_size": layout.shard, "tensor_parallel_size": layout.tensor}
    elif sharded:
        kind, whole = "FSDPStrategy", plan.shard.level == "parameters"
        strategy = ("HYBRID_SHARD" if whole else "_HYBRID_SHARD_ZERO2") if layout.data > 1 else ""
        values = {
            "sharding_strategy": strategy or ("FULL_SHARD" if whole else "SHARD_GRAD_OP"),
            "auto_wrap_policy": Name("blocks") if names else None,
            "activation_checkpointing_policy": Name("blocks") if full else None,
            "state_dict_type": "sharded",
            "device_mesh": (layout.data, layout.shard) if layout.data > 1 else None,
        }
    else:
        kind, values = "DDPStrategy", {}
    precisions = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}
    trainer = {
        "accelerator": "cpu" if facts.device == "cpu" else "gpu",
        "devices": layout.world_size // facts.hosts,
        "num_nodes": facts.hosts,
        "strategy": Name("strategy(model)") if layout.world_size > 1 else "auto",
        "precision": "bf16-true" if facts.pure else precisions[plan.precision.compute],
        "accumulate_grad_batches": number,
    }
    wrapped = kind == "FSDPStrategy" and names
    lines = ["Give strategy(model) the module whose blocks are named there; trainer(model) makes the Trainer."]
    if layout.tensor > 1:
        lines.append("configure_model divides the layers itself: parallelize_module and fully_shard on its mesh.")
    if full and kind != "FSDPStrategy":
        lines.append("Recomputation is the model's: torch.utils.checkpoint in each block.")
    return (
        "from lightning.pytorch import Trainer\n"
        f"from lightning.pytorch.strategies import {kind}\n\n"
        f"batch_size = {size}  # of the DataLoader\n\n\n"
        f"def strategy(model) -> {kind}:\n"
        + (f"    blocks = {{type(model.get_submodule(name)) for name in {names}}}\n" if wrapped else "")
        + f"    return {_call(kind, values, '    ')}\n\n\n"
        "def trainer(model, **more) -> Trainer:\n"
        f"    return {_call('Trainer', trainer, '    ', '**more')}\n"
    ), lines


def _lightning_limit(plan: Plan, facts: Facts) -> str:
    if plan.memory.recompute == "full" and plan.layout.shard > 1 and not facts.blocks:
        return "its recomputation needs the names of the blocks"
    if plan.layout.tensor > 1 and plan.layout.data > 1:
        return "its tensor axis goes with one shard axis, without a data axis"
    if plan.layout.tensor > 1 and plan.precision.compute == "float16":
        return "its tensor axis goes without a scaled loss"
    return _fsdp_limit(plan, facts)


def _fsdp2(plan: Plan, facts: Facts) -> tuple[str, list[str]]:
    layout, precision, (size, number) = plan.layout, plan.precision, facts.batch(plan)
    full, patterns = plan.memory.recompute == "full", list(facts.kinds)
    dtypes = {"param_dtype": _dtype(precision.compute), "reduce_dtype": _dtype(precision.reduce)}
    options = {"mesh": Name("mesh"), "reshard_after_forward": plan.shard.level == "parameters"}
    options["mp_policy"] = Name("policy")
    lines = [f"Launch {layout.world_size} processes with torchrun, and call parallelize before the optimizer."]
    lines += [_IN_BFLOAT16] if facts.pure else []
    lines += ["The loop scales the loss: torch.amp.GradScaler."] if precision.compute == "float16" else []
    wrapper = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n"
    return (
        "import re\n\nimport torch\n"
        + (wrapper if full else "")
        + "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n\n"
        f"batch_size, accumulate = {size}, {number}  # samples of a microbatch, and microbatches of a step\n"
        f"BLOCKS = re.compile({'|'.join(patterns)!r})\n\n\n"
        "def parallelize(model: torch.nn.Module) -> torch.nn.Module:\n"
        f'    mesh = init_device_mesh("{facts.device}", ({layout.data}, {layout.shard}), '
        'mesh_dim_names=("replicate", "shard"))\n'
        f"    policy = {_call('MixedPrecisionPolicy', dtypes, '    ')}\n"
        f"    options = {_call('dict', options, '    ')}\n"
        "    for name in [name for name, _ in model.named_modules() if BLOCKS.fullmatch(name)]:\n"
        + ("        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))\n" if full else "")
        + "        fully_shard(model.get_submodule(name), **options)\n"
        "    return fully_shard(model, **options)\n"
    ), lines


def _fsdp2_limit(plan: Plan, facts: Facts) -> str:
    return "" if facts.blocks else "the model shows no blocks to shard one by one"


_MEGATRON_SCHEDULES = {"1f1b": "", "interleaved_1f1b": ""}
_EVERY = ("shard", "tensor", "pipeline", "context")
FRAMEWORKS = {
    "accelerate": Framework("Accelerate 1.15", _accelerate, _fsdp_limit, ("shard", "tensor", "context")),
    "deepspeed": Framework(
        "DeepSpeed 0.19", _deepspeed, _deepspeed_limit, ("shard", "tensor"), tuple(_ZERO), comment=""
    ),
    "torchtitan": Framework(
        *("torchtitan 0.3", _torchtitan, _torchtitan_limit, _EVERY),
        schedules=_TORCHTITAN_SCHEDULES,
        precisions=("float32", "bfloat16"),
    ),
    "megatron": Framework(
        *("megatron-core 0.16", _megatron, _megatron_limit, _EVERY, tuple(_ZERO), _MEGATRON_SCHEDULES),
        recompute=("none", "selective", "full"),
    ),
    "lightning": Framework("Lightning 2.6", _lightning, _lightning_limit, ("shard", "tensor")),
    "fsdp2": Framework("torch's fully_shard", _fsdp2, _fsdp2_limit, ("shard",)),
}
