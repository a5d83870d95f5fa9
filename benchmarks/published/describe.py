"""From a row of transformers.csv to what the planner takes: a module's profile, a plan, a cluster and a program.

Everything is read from the columns that describe a row, none from what was measured. What a framework is known to do
is in FRAMEWORKS, each fact with where it is told; nothing there is a number that was fitted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.published.modules import Latent, cut_in_pairs, transformer
from benchmarks.published.rows import Row, integer, number
from shoal.hardware import cluster as named_cluster
from shoal.hardware.catalogue import capped
from shoal.hardware.values import Cluster, Device, Link
from shoal.planner.predict.experts import ALL_GATHER, ALL_TO_ALL, DEEPEP
from shoal.planner.predict.programs import (
    DEEPSPEED_BUCKETS,
    MASTER_BYTES,
    MEGATRON,
    MEGATRON_CORE,
    OTHERS,
    TORCHTITAN,
    USUAL,
)
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.profile.profiles import profile
from shoal.planner.profile.values import Profile
from shoal.plans.plan import Plan, PrecisionSection


class UnknownError(Exception):
    """A row describes something for which there is no module, device or plan."""


@dataclass(frozen=True)
class Framework:
    """What a framework's program does that a row does not say.

    `fused_kernels`: bias and activation, bias and dropout and addition, scale and mask and softmax are one kernel each.
    `fused_attention`: where a row does not say. `time_first`: activations lie as [T, B, hidden].
    `vocab_multiple`: a tensor rank's part of the vocabulary is padded to a multiple of it.
    """

    fused_kernels: bool = False
    fused_loss: bool = False  # cross entropy reads logits as they are, and keeps no float32 copy
    metrics: int = 0  # times that the loss is computed once more
    dropout: float = 0.0
    fused_attention: bool = True
    time_first: bool = False
    vocab_multiple: int = 1
    program: Program = USUAL
    optimizer: Callable[[Any], Any] = torch.optim.AdamW
    reduce: str | None = None  # dtype of the gradients' sums; None: the compute dtype
    sustained: float | None = None  # share of a large product's rate that its steps reach on Hopper and Blackwell
    master: bool = True  # a float32 copy of parameters of a narrow dtype


class MuonAndAdamW:
    """Muon of the blocks' matrices and AdamW of the other parameters, as modded-nanogpt has them."""

    def __init__(self, parameters: Any) -> None:
        """Divide the parameters by their names."""
        named = [(p.ndim == 2 and name.startswith("blocks."), p) for name, p in parameters.named]
        of_blocks, others = ([p for is_matrix, p in named if is_matrix is wanted] for wanted in (True, False))
        self._parts = [torch.optim.Muon(of_blocks), torch.optim.AdamW(others)]
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of both."""
        return {parameter: state for part in self._parts for parameter, state in part.state.items()}

    def step(self) -> None:
        """Step both."""
        for part in self._parts:
            part.step()


# Megatron-LM: fused kernels (megatron/fused_kernels), dropout 0.1, a float32 copy of the parameters. It pads a
# vocabulary to a multiple of 128 x tensor (make_vocab_size_divisible_by in megatron/arguments.py), as DeepSpeed's does.
_MEGATRON = Framework(
    fused_kernels=True,
    dropout=0.1,
    fused_attention=False,  # there was none before 2023
    time_first=True,
    vocab_multiple=128,
    program=MEGATRON,
)
# Megatron-Core and what is built on it (NeMo, Megatron Bridge): no dropout.
# `sustained` is fitted to all sources of experts.csv (benchmarks/results/published_experts.md): kernels of Transformer
# Engine, where the catalogue has what eager torch sustained on another cluster.
_MEGATRON_CORE = dataclasses.replace(_MEGATRON, dropout=0.0, fused_attention=True, program=MEGATRON_CORE, sustained=0.8)
# NeMo AutoModel: fully_shard of torch, experts over DeepEP that fully_shard divides over the ranks with the same ones,
# kernels of Transformer Engine.
_AUTOMODEL = Framework(
    fused_kernels=True,
    program=dataclasses.replace(USUAL, attention="flash3", shards_context=True, shards_experts=True),
    reduce="float32",
    sustained=0.8,
)
FRAMEWORKS = (
    ("automodel", _AUTOMODEL),
    ("nemo", _MEGATRON_CORE),
    ("bridge", _MEGATRON_CORE),
    ("megatron-core", _MEGATRON_CORE),
    ("megatron core", _MEGATRON_CORE),
    ("megatron", _MEGATRON),
    # torchtitan: fully_shard sums gradients in float32 (MixedPrecisionPolicy(reduce_dtype=torch.float32)).
    ("torchtitan", Framework(reduce="float32", program=TORCHTITAN)),
    # nanotron: gradients are summed in float32 (FP32GradientAccumulator) beside DDP's buckets; a stage takes blocks
    # until the FLOPs pass its share (nanotron/models/base.py); gathered inputs are kept unless tp_recompute_allgather;
    # norm and rotation are fused kernels of flash-attn.
    (
        "nanotron",
        Framework(
            fused_kernels=True,
            program=Program(
                cut="thresholds",
                divides_ends=True,
                scatter_gradients=True,
                gradient_bytes=4.0,
                bucket_bytes=2.0,
                **OTHERS,
            ),
            reduce="float32",
        ),
    ),
    # llm-foundry: FSDP keeps float32 parameters; MP=PURE sums gradients in the compute dtype, DEFAULT in float32
    # (composer, mosaic_fsdp). Its release of these figures required flash-attn 1.0.x, whose fused cross entropy is
    # the model's default (modeling_mpt.py: loss_fn fused_crossentropy), and which computes cross entropy and perplexity
    # of each microbatch beside it (use_train_metrics).
    (
        "foundry",
        Framework(program=Program(attention="flash1", **OTHERS), master=False, fused_loss=True, metrics=2),
    ),
    # torch 2.5 chose cuDNN for attention on H100 (its release notes), which is as fast as FlashAttention-3 there.
    ("nanogpt, torch 2.5", Framework(optimizer=MuonAndAdamW, program=dataclasses.replace(USUAL, attention="flash3"))),
    ("nanogpt", Framework(optimizer=MuonAndAdamW)),
)


def framework(row: Row) -> Framework:
    """What is known of the row's framework; of an unknown one, what most do."""
    name = row.get("framework", "").lower()
    found = next((facts for word, facts in FRAMEWORKS if word in name), Framework())
    if "MP=DEFAULT" in row.get("sharding", ""):
        found = dataclasses.replace(found, reduce="float32")
    return found


def kind(row: Row) -> str:
    """fp32, tf32, fp16, bf16, fp8 or fp4: in what the row's products are computed."""
    told = (row.get("precision_kind") or row.get("precision", "")).lower()
    found = re.search(r"(bf|fp|tf|f)(?:loat)?(\d+)", told)
    if found is None:
        return "fp16" if "amp" in told else "fp32"
    return ("fp" if found[1] == "f" else found[1]) + found[2]


def precision(row: Row, facts: Framework) -> PrecisionSection:
    """Parameters and products of one narrow dtype, as all of these programs have them by the time they multiply."""
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16", "fp4": "bfloat16"}.get(kind(row), "float32")
    return PrecisionSection(parameters=dtype, compute=dtype, reduce=facts.reduce or dtype)  # type: ignore[arg-type]


def workload(row: Row) -> Workload:
    """The row's model on its global batch; a grain is a sample."""
    batch = integer(row, "global_batch")
    family, dimensions = _dimensions(row)
    facts = framework(row)
    made = _profile(family, tuple(dimensions.items()), precision(row, facts), facts.optimizer)
    return Workload(made, batch, batch)


def _dimensions(row: Row) -> tuple[str, dict[str, Any]]:
    facts, told = framework(row), row.get("arch_family", "").lower()
    hidden, name = integer(row, "hidden"), row.get("model", "").lower()
    heads = integer(row, "n_heads", max(1, hidden // 128))
    family = next((f for f in ("mpt", "llama", "bert", "gpt") if f in told or f in name), "gpt")
    if any(word in told or word in name for word in ("swiglu", "mistral", "qwen", "rmsnorm")):
        family = "llama"
    attention = row.get("attention_kind")
    multiple = facts.vocab_multiple * integer(row, "tp") if facts.vocab_multiple > 1 else 1
    dimensions: dict[str, Any] = {
        "layers": integer(row, "n_layers"),
        "hidden": hidden,
        "ffn": integer(row, "ffn_hidden", 4 * hidden),
        "heads": heads,
        "kv_heads": integer(row, "n_kv_heads", heads),
        "vocab": -(-integer(row, "vocab", 51200) // multiple) * multiple,
        "seq_len": integer(row, "seq_len"),
        "tied": row.get("tied_embeddings") != "0",
        "fused_attention": attention != "unfused" if attention else facts.fused_attention,
        "fused_kernels": facts.fused_kernels,
        "fused_loss": facts.fused_loss,
        "metrics": facts.metrics,
        "time_first": facts.time_first,
        "dropout": facts.dropout,
    }
    if family == "bert":
        dimensions |= {"head": "masked"}
    if "num_experts" in row and not integer(row, "hidden", 0):
        raise UnknownError("the row does not tell the width of the model")
    if row.get("peft"):
        raise UnknownError("adapters are not described")
    if "num_experts" in row and not (row.get("dp") and row.get("global_batch")):
        raise UnknownError("the row does not tell the layout or the batch")
    if integer(row, "num_experts", 0):
        if "transformers" in row.get("framework", ""):
            raise UnknownError("Transformers of that time computed experts in a loop, which is not described")
        family = "llama"
        dimensions |= _mixture(row, name)
    return family, dimensions


# Widths of a head where it is not hidden / heads, by the public configurations of the models.
_HEAD_WIDTH = {"qwen3": 128, "gpt-oss": 64}
_LATENT = Latent(query=1536, key=512, plain=128, rotated=64, value=128)  # DeepSeek-V3 and Kimi-K2


def _mixture(row: Row, name: str) -> dict[str, Any]:
    """The dimensions of a model with mixtures of experts. The other blocks are the first ones, or every other one."""
    layers, mixtures = integer(row, "n_layers"), integer(row, "n_moe_layers")
    alternates = "every other" in row.get("arch_family", "")
    return {
        "experts": integer(row, "num_experts"),
        "chosen": integer(row, "top_k"),
        "expert_ffn": integer(row, "moe_hidden"),
        "shared": integer(row, "shared_experts", 0),
        "dense_first": 0 if alternates else layers - mixtures,
        "every": layers // mixtures if alternates else 1,
        "latent": _LATENT if "deepseek-v3" in name or "kimi" in name else None,
        "head_width": next((width for word, width in _HEAD_WIDTH.items() if word in name), None),
        "tied": False,
    }


# What a row's column `dispatcher` says, as the planner calls it. Megatron-Core's default is an all-to-all.
_DISPATCHERS = {"deepep": DEEPEP, "own kernels": DEEPEP, "hybridep": DEEPEP, "allgather": ALL_GATHER}


@cache
def _profile(
    family: str, dimensions: tuple[tuple[str, Any], ...], kinds: PrecisionSection, optimizer: Callable[[Any], Any]
) -> Profile:
    made = transformer(family, **dict(dimensions))
    return profile(made.model, made.loss, made.batch, precision=kinds, tensor=cut_in_pairs, optimizer=optimizer)


def plan(row: Row) -> Plan:
    """The row's layout. Raises: UnknownError where it is none that a plan can say."""
    data, stage = integer(row, "dp"), integer(row, "zero_stage", 0)
    if not row.get("zero_stage") and "FSDP2" in row.get("sharding", ""):
        # torchtitan and what is built on it keep parameters gathered between the microbatches of a pipeline.
        stage = 2 if integer(row, "pp") > 1 else 3
    layout = {
        "data": data if stage == 0 else 1,
        "shard": 1 if stage == 0 else data,
        "tensor": integer(row, "tp"),
        "pipeline": integer(row, "pp"),
        "context": integer(row, "cp"),
        "expert": integer(row, "ep"),
    }
    virtual = integer(row, "vpp")
    blocks = integer(row, "n_layers")
    if layout["pipeline"] * virtual > blocks + 2:
        raise UnknownError(f"{layout['pipeline'] * virtual} stages of {blocks} blocks")
    facts = framework(row)
    return Plan().with_sections(
        layout=layout,
        batch={"grains_per_microbatch": microbatches(row)[0]},
        shard={"level": {1: "optimizer", 2: "gradients"}.get(stage, "parameters")},
        tensor={"sequence": row.get("sequence_parallel") in ("1", "True", "true")},
        pipeline={"schedule": "interleaved_1f1b" if virtual > 1 else "1f1b", "stages_per_rank": virtual},
        precision=precision(row, facts).model_dump(),
        memory={"recompute": row.get("recompute_kind") or "none"},
        execution={"compile": "default" if row.get("compile") in ("1", "True") else "none"},
    )


def expert_degrees(row: Row) -> tuple[int, ...]:
    """Degrees of experts that a row may mean: one, or where it tells a dispatcher alone all that divide."""
    if row.get("ep") or not row.get("dispatcher"):
        return (integer(row, "ep"),)
    ranks, experts = integer(row, "n_gpus") // integer(row, "pp"), integer(row, "num_experts")
    return tuple(size for size in range(2, experts + 1) if experts % size == 0 and ranks % size == 0)


def microbatches(row: Row) -> tuple[int, ...]:
    """Samples of a microbatch that a row may mean, the fewest first: one, or where it tells none all that divide.

    A rank's share is never meant as one microbatch where nothing says so: who measures a cluster takes the best.
    """
    told, times = integer(row, "micro_batch", 0), integer(row, "grad_accum", 0)
    share = max(1, integer(row, "global_batch") // integer(row, "dp"))
    if told or times:
        return (told or max(1, share // times),)
    return tuple(size for size in range(1, share + 1) if share % size == 0 and size & (size - 1) == 0)


# DeepSpeed's ZeRO-3 of 2021 (runtime/zero/partition_parameters.py, _allgather_param): an all_gather for each parameter,
# into a list with a tensor a rank, which torch copies one by one. That takes the host a few operators' time for each.
_DEEPSPEED_PARAMETERS: dict[str, Any] = {"gathers_apart": True, "slice_seconds": 15e-6}
# nanotron's runs on pipelines gather again what tensor parallelism gathered (as tp_recompute_allgather says); those
# on one stage keep it. What its allocator holds beside the activations there: ultrascale-playbook, 362 rows.
_NANOTRON_PIPELINE: dict[str, Any] = {"keeps_gathered": False, "pipeline_fragmentation": 0.4}


def program(row: Row) -> Program:
    """How the row's framework executes its plan."""
    facts = framework(row)
    narrow = precision(row, facts).parameters != "float32"
    found = dataclasses.replace(facts.program, master_bytes=MASTER_BYTES if narrow else 0.0, fused_optimizer=True)
    found = dataclasses.replace(found, fuses=row.get("compile") in ("1", "True"))
    layers = {"fp8": "float8", "fp4": "float4"}.get(kind(row))
    if layers is not None:
        found = dataclasses.replace(found, layers=layers)
    if row.get("gradient_overlap") == "0":
        found = dataclasses.replace(found, overlap=False)
    if integer(row, "num_experts", 0):
        dispatch = _DISPATCHERS.get(row.get("dispatcher", ""), ALL_TO_ALL)
        # Megatron-Core's distributed optimizer divides experts over the ranks with the same ones too.
        found = dataclasses.replace(found, dispatch=dispatch, shards_experts=True, expert_tensor=integer(row, "etp"))
    name = row.get("framework", "").lower()
    if "deepspeed" in name and integer(row, "zero_stage", 0):
        found = dataclasses.replace(found, buffer_bytes=DEEPSPEED_BUCKETS)
    if integer(row, "zero_stage", 0) == 3 and _by_deepspeed(row):
        found = dataclasses.replace(found, **_DEEPSPEED_PARAMETERS)
    if "nanotron" in name and integer(row, "pp") > 1:
        found = dataclasses.replace(found, **_NANOTRON_PIPELINE)
    return found


def _by_deepspeed(row: Row) -> bool:
    """Whether DeepSpeed divides the parameters: Megatron-LM had no such division of its own."""
    told = " ".join(row.get(key, "") for key in ("framework", "sharding")).lower()
    return "fsdp" not in told and ("deepspeed" in told or "megatron" in told)


# A row's `gpu` as the catalogue calls it.
_PCIE = re.compile(r"pcie", re.IGNORECASE)
_NVL = re.compile(r"nvl(?!ink)", re.IGNORECASE)
_HBM2E = re.compile(r"hbm2e|9[4-6] ?gb", re.IGNORECASE)


def cluster(row: Row, sustained: float | None = None) -> Cluster:
    """The catalogue's hosts of the row's devices, with the row's own network where it is told.

    `sustained`: replaces the share that the row's framework sustains.
    """
    gpu, gib = row.get("gpu", ""), row.get("gpu_mem_gb", "")
    num_devices = integer(row, "n_gpus")
    told = re.match(r"\d+ per \w+", row.get("gpus_per_node", ""))  # "4 per tray"
    per_host = min(int(told[0].split()[0]) if told else integer(row, "gpus_per_node", 8), num_devices)
    if gpu.upper().startswith(("GB200", "GB300")):  # told by trays of four: what they share is an NVLink domain of 72
        per_host = max(size for size in range(1, min(72, num_devices) + 1) if num_devices % size == 0)
    hosts = -(-num_devices // per_host)
    found = named_cluster(f"{hosts}x{per_host}x{device_name(gpu, gib)}")
    if gpu[1:4] == "800" and found.within is not None:  # the same device with links of 400 GB/s, both ways together
        within = found.within.bytes_per_second * 400 / {"H": 900, "A": 600}[gpu[0]]
        found = dataclasses.replace(found, within=dataclasses.replace(found.within, bytes_per_second=within))
    sustained = sustained or framework(row).sustained
    if sustained is not None and found.device.sustained == _HOPPER:
        found = dataclasses.replace(found, device=with_sustained(found.device, sustained))
    watts = cap(row)
    if watts is not None and found.device.watts is not None and watts < found.device.watts:
        found = dataclasses.replace(found, device=capped(found.device, watts))
    gbps = number(row, "inter_node_gbps_per_node")
    if gbps and found.between is not None:
        found = dataclasses.replace(found, between=_at_rate(found.between, gbps))
    return found


_HOPPER = named_cluster("H100").device.sustained


def with_sustained(device: Device, share: float) -> Device:
    """The device whose products reach this share in whole steps, and those in float8 as much more, at most all."""
    times = share / device.sustained
    dtypes = {dtype: min(1.0, of_dtype * times) for dtype, of_dtype in device.sustained_dtypes.items()}
    return dataclasses.replace(device, sustained=share, sustained_dtypes=dtypes)


def cap(row: Row) -> float | None:
    """The power limit in watts that a row tells of its devices, None where it tells none."""
    told = " ".join(row.get(key, "") for key in ("gpu", "notes", "framework"))
    found = re.search(r"\b(\d{3,4}) ?W(?:atts?)?\b", told)
    return float(found[1]) if found else None


def device_name(gpu: str, gib: str) -> str:
    """The catalogue's name of a device."""
    family = re.split(r"[-_ ]", gpu)[0].upper().replace("H800", "H100").replace("A800", "A100")
    form = "PCIE" if _PCIE.search(gpu) else "SXM"
    if family == "A100":
        return f"A100-{'40' if gib == '40' else '80'}-{form}"
    if family == "V100":
        return f"V100-SXM2-{'16' if gib == '16' else '32'}"
    if family == "P100":
        return "P100-PCIe" if form == "PCIE" else "P100-SXM2"
    if family != "H100":
        return family
    if _NVL.search(gpu):
        return "H100-NVL"
    is_large = _HBM2E.search(gpu) or gib.partition(".")[0] in ("94", "95", "96")
    return "H100-SXM-96-HBM2e" if is_large and form == "SXM" else f"H100-{form}"


# Of a host's printed rate, what a collective reaches: nccl-tests on InfiniBand HDR and NDR reach 0.85 to 0.95 of it.
_ACHIEVED = 0.85


def _at_rate(link: Link, gbps: float) -> Link:
    return dataclasses.replace(link, name=f"{gbps:g} Gbit/s a host", bytes_per_second=gbps * 1e9 / 8 * _ACHIEVED)


Described = tuple[Workload, Plan, Cluster, Program]


def describe(row: Row) -> Described:
    """All four. Raises: UnknownError."""
    return workload(row), plan(row), cluster(row), program(row)
