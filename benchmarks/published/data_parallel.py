"""From a row of ddp_scaling.csv to what the planner takes; all of them are data-parallel runs of one host, or a few."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch

from benchmarks.published import language, modules, speech, vision
from benchmarks.published.describe import Described, UnknownError, device_name
from benchmarks.published.rows import Row, integer
from shoal.hardware import cluster as named_cluster
from shoal.hardware.values import Cluster
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.profile.profiles import profile
from shoal.planner.profile.values import Profile
from shoal.plans.plan import Plan, PrecisionSection

RECIPES = {**vision.RECIPES, **language.RECIPES, **speech.RECIPES}

# The model of a row by the beginning of its name, in small letters and digits; BERT by its size and task.
_NAMES = (
    ("resnet50", "resnet50"),
    ("resnet152", "resnet152"),
    ("resnext10132x4d", "resnext101_32x4d"),
    ("seresnext101", "se_resnext101_32x4d"),
    ("inceptionv3", "inception_v3"),
    ("alexnet", "alexnet"),
    ("vgg16", "vgg16"),
    ("efficientnetb0", "efficientnet_b0"),
    ("efficientnetb4", "efficientnet_b4"),
    ("efficientnetwideseb0", "efficientnet_widese_b0"),
    ("efficientnetwideseb4", "efficientnet_widese_b4"),
    ("ssd", "ssd300"),
    ("nnunet2d", "unet2d"),
    ("nnunet3d", "unet3d"),
    ("gnmt", "gnmt"),
    ("transformerbig", "transformer_big"),
    ("transformerxlbase", "transformer_xl_base"),
    ("transformerxllarge", "transformer_xl_large"),
    ("ncf", "ncf"),
    ("jasper", "jasper"),
    ("quartznet", "quartznet"),
)
# Tokens of a sample, of models whose throughput counts them; GNMT's log counts both languages.
_TOKENS = {
    "gnmt": 2 * language.SENTENCE,
    "transformer_big": language.SENTENCE,
    "transformer_xl_base": 192,
    "transformer_xl_large": 384,
}
# Where a row does not tell the batch its program had one for the card's memory: the largest of these that fits.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def model(row: Row) -> str:
    """The key of a row's model. Raises: UnknownError."""
    name = re.sub(r"[^a-z0-9]", "", row.get("model", "").lower())
    if name.startswith("bert"):
        size = "large" if "large" in name else "base"
        length = integer(row, "seq_len", 0)
        return f"bert {size} squad 384" if "squad" in name or not length else f"bert {size} pretraining {length}"
    found = [key for beginning, key in _NAMES if name.startswith(beginning)]
    if not found:
        raise UnknownError(f"no module for {row.get('model')}")
    return found[-1]


def precision(row: Row) -> PrecisionSection:
    """autocast of float32 parameters where it is mixed."""
    text = row.get("precision", "").lower()
    if "pure" in text:
        return PrecisionSection(parameters="float16", compute="float16", reduce="float16")
    return PrecisionSection(compute="float16") if re.search(r"16|\bamp\b", text) else PrecisionSection()


@cache
def _profile(key: str, kinds: PrecisionSection) -> Profile:
    if key.startswith("bert "):
        _, size, task, length = key.split()
        made = modules.bert(size, task, int(length))
    else:
        made = RECIPES[key]()
    is_vision = key in vision.RECIPES

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if is_vision else torch.optim.AdamW(parameters)

    return profile(*made, precision=kinds, tensor=lambda _: {}, optimizer=optimizer)


def _cluster(row: Row) -> Cluster:
    num_devices, hosts = integer(row, "n_gpus"), integer(row, "n_nodes")
    return named_cluster(f"{hosts}x{num_devices // hosts}x{_device(row)}")


def _device(row: Row) -> str:
    gpu = row.get("gpu", "")
    name = {"H100": "H100-SXM-80", "P100": "P100-SXM2", "GH200": "GH200-96"}.get(re.split(r"[-_ ]", gpu)[0])
    if name is None or "pcie" in gpu.lower():
        name = device_name(gpu, row.get("gpu_mem_gb", "")).replace("PCIE", "PCIe")
    return name


def _program(row: Row) -> Program:
    tf32 = "tf32" in row.get("precision", "").lower() and not row.get("gpu", "").startswith(("V100", "P100"))
    return Program(
        fast_float32=tf32,
        fast_convolutions=tf32,
        channels_first=not _is_channels_last(row),
        fuses=is_compiled(row),
        fused_optimizer=True,
        own_buckets=False,
        gradient_passes=0.0,
    )


def is_compiled(row: Row) -> bool:
    """Whether a row's program is compiled: its source says `with xla`."""
    return re.search(r"\bwith ?xla\b", row.get("notes", "").lower()) is not None


def _is_channels_last(row: Row) -> bool:
    """Whether images lie as tensor cores multiply them.

    NVIDIA's examples of PyTorch do so in mixed precision (`memory_format: nhwc` in ConvNets/configs.yml) and those of
    MXNet in pure float16 (`--input-layout NHWC`). XLA lays convolutions out so where they run on tensor cores
    (gpu_layout_assignment.cc).
    """
    by_torch = "PyTorch" in row.get("framework", "") and precision(row).compute == "float16"
    return by_torch or "pure" in row.get("precision", "").lower() or is_compiled(row)


def _told_batch(row: Row, key: str) -> tuple[int, int] | None:
    """(samples of a microbatch, microbatches) of one rank; None where the row does not tell."""
    text, times = row.get("batch_per_gpu", "").strip(), integer(row, "grad_accum")
    numbers = [int(found) for found in re.findall(r"\d+", text)] if re.fullmatch(r"[\d/ ]+", text) else []
    if not numbers:
        return None
    is_wide = precision(row).compute == "float32"
    given = numbers[-1] if is_wide else numbers[0]  # "fp16/fp32"
    if key == "transformer_big":
        given //= _TOKENS[key]  # it is told in tokens
    if key.startswith("bert") and "pretraining" in key:
        given //= times  # it is told of all microbatches
    return max(1, given), times


@cache
def _fitting(key: str, kinds: PrecisionSection, device: str, program: Program) -> int:
    """The largest batch of one rank that fits."""
    cluster, found = named_cluster(f"1x1x{device}"), 1
    for size in _SIZES:
        work = Workload(_profile(key, kinds), size, size)
        if not Predictor(work, cluster, program).predict(_plan(1, size, kinds)).fits:
            break
        found = size
    return found


def _plan(data: int, microbatch: int, kinds: PrecisionSection) -> Plan:
    return Plan().with_sections(
        layout={"data": data}, batch={"grains_per_microbatch": microbatch}, precision=kinds.model_dump()
    )


def _batch(row: Row) -> tuple[int, int]:
    key = model(row)
    told = _told_batch(row, key)
    if told is not None:
        return told
    return _fitting(key, precision(row), _device(row), _program(row)), 1


def describe(row: Row) -> Described:
    """Workload, plan, cluster and program of a row. Raises: UnknownError."""
    kinds, data = precision(row), integer(row, "n_gpus")
    microbatch, times = _batch(row)
    batch = microbatch * times * data
    work = Workload(_profile(model(row), kinds), batch, batch)
    return work, _plan(data, microbatch, kinds), _cluster(row), _program(row)


def samples(row: Row) -> float | None:
    """What a step computes, in the unit of the row's throughput; None where there is no module for it."""
    try:
        key = model(row)
        microbatch, times = _batch(row)
    except UnknownError:
        return None
    each = _TOKENS.get(key, 1) if row.get("unit", "").startswith("tok") else 1
    return float(microbatch * times * integer(row, "n_gpus") * each)
