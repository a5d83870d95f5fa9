"""Claim: `shoal plan --emit` writes configurations that their frameworks load, of six public models on three clusters.

Each is the best layout that the framework can express, with its habits, beside shoal's own. A configuration counts as
loaded if the real package reads it, with each key among the package's own, for as many ranks as it is for. The
packages need not be installed beside shoal: `--packages` names a folder of them. Repeat with
`python -m benchmarks.emitted [--packages DIR] [--only MODEL ...]`; answers are kept in benchmarks/results/emitted.json.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "emitted.json"
PAGE = RESULTS.with_suffix(".md")
CLUSTERS = ("A100", "8xH100", "4x8xA100")


# Of benchmarks/configurations, with the tokens of a sequence and the sequences of a step.
MODELS = {
    "gpt2-124m": (1024, 512),
    "bert-large": (512, 256),
    "llama-3.2-1b": (4096, 256),
    "mistral-7b": (4096, 256),
    "qwen3-8b": (4096, 256),
    "llama-3-8b": (4096, 256),
}

# ------------------------------------------------------------------------------------- loading with the real package


def _world(ranks: int) -> None:
    """Start a process group that has so many ranks, and sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def _names(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "emitted", "exec"), names)
    return names


def _refuse_others(keys: Any, known: Any) -> None:
    others = set(keys) - set(known)
    if others:
        raise ValueError(f"unknown keys: {sorted(others)}")


def _blocks() -> nn.Module:
    """A module with blocks under the names that the six models have."""
    model = nn.Module()
    for path in ("model.layers", "transformer.h", "bert.encoder.layer", "layers"):
        module = model
        *parents, last = path.split(".")
        for part in parents:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.add_module(last, nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
    return model


def _accelerate(text: str, ranks: int) -> None:
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "accelerate.yaml")
        path.write_text(text)
        config = load_config_from_file(str(path))  # refuses unknown keys, but not below them
    arguments = {action.dest for action in launch_command_parser()._actions}
    _refuse_others([*config.fsdp_config, *config.parallelism_config], arguments)
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in config.parallelism_config.items()}
    if config.num_processes != ranks or (sizes and ParallelismConfig(**sizes).total_size != ranks):
        raise ValueError("another number of ranks")


def _deepspeed(text: str, ranks: int) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime import config as reader
    from deepspeed.runtime import constants, precision_config
    from deepspeed.runtime.zero import config as zero

    document = json.loads(text)
    tensor_ranks = document.get("tensor_parallel", {}).get("autotp_size", 1)
    replicas = SimpleNamespace(get_data_parallel_world_size=lambda: ranks // tensor_ranks)
    modules = (constants, precision_config, reader, zero)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    _refuse_others(document, known | {"tensor_parallel"})  # the reader accepts unknown ones
    with mock.patch.object(reader.dist, "get_rank", return_value=0):  # else it takes one rank
        read = reader.DeepSpeedConfig(document, mpu=replicas)
    for section, model in (("zero_optimization", read.zero_config), ("tensor_parallel", read.tensor_parallel_config)):
        _refuse_others(document.get(section, {}), type(model).model_fields)
    stage = document["zero_optimization"]["stage"]
    if read.zero_optimization_stage != stage or max(read.tensor_parallel_config.autotp_size, 1) != tensor_ranks:
        raise ValueError("another stage, or another tensor axis")


def _torchtitan(text: str, ranks: int) -> None:
    from torchtitan.distributed.parallel_dims import ParallelDims

    names = _names(text)
    parallel, training = names["parallelism"], names["training"]
    ParallelDims(
        dp_replicate=parallel.data_parallel_replicate_degree,
        dp_shard=parallel.data_parallel_shard_degree,
        cp=parallel.context_parallel_degree,
        tp=parallel.tensor_parallel_degree,
        pp=parallel.pipeline_parallel_degree,
        ep=1,
        world_size=ranks,
    )
    from torch.distributed.pipelining.schedules import get_schedule_class

    get_schedule_class(parallel.pipeline_parallel_schedule)
    replicas = parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree
    if training.global_batch_size % (training.local_batch_size * replicas):
        raise ValueError("another global batch")
    if training.local_batch_size % parallel.pipeline_parallel_microbatch_size:
        raise ValueError("another microbatch")


def _megatron(text: str, ranks: int) -> None:
    from megatron.core import parallel_state

    names = _names(text)
    _world(ranks)
    parallel_state.destroy_model_parallel()
    start = parallel_state.initialize_model_parallel
    names["initialize_model_parallel"] = partial(start, create_gloo_process_groups=False)  # the world has no Gloo
    names["initialize"]()
    names["transformer"](num_layers=32 * 7, hidden_size=32 * 28 * 128, num_attention_heads=32 * 28 * 3)
    names["ddp"]()
    replicas = parallel_state.get_data_parallel_world_size()
    if names["global_batch_size"] % (names["micro_batch_size"] * replicas):
        raise ValueError("another global batch")


def _lightning(text: str, ranks: int) -> None:
    from lightning.fabric.connector import _PRECISION_INPUT_STR
    from lightning.pytorch import Trainer

    names = _names(text)
    made: dict[str, Any] = {}
    names["Trainer"] = made.update  # the Trainer itself looks for the devices
    names["trainer"](_blocks())
    inspect.signature(Trainer).bind(**made)
    if made["precision"] not in typing.get_args(_PRECISION_INPUT_STR):
        raise ValueError(f"unknown precision {made['precision']}")
    if made["devices"] * made["num_nodes"] != ranks:
        raise ValueError("another number of ranks")


def _fsdp2(text: str, ranks: int) -> None:
    from torch.distributed.tensor import DTensor

    _world(ranks)
    model = _names(text.replace('"cuda"', '"cpu"'))["parallelize"](_blocks())
    if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("a parameter is whole")


LOADERS: dict[str, tuple[str, Callable[[str, int], None]]] = {
    "accelerate": ("accelerate", _accelerate),
    "deepspeed": ("deepspeed", _deepspeed),
    "torchtitan": ("torchtitan", _torchtitan),
    "megatron": ("megatron", _megatron),
    "lightning": ("lightning", _lightning),
    "fsdp2": ("torch", _fsdp2),
}


def load(name: str, text: str, ranks: int) -> None:
    """Read a configuration with its framework's own package. Raises: what the package raises; ValueError."""
    import torch.distributed as dist

    try:
        with mock.patch.dict(os.environ):
            LOADERS[name][1](text, ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- answers


def _answers(model: str, cluster: str) -> dict[str, Any]:
    """The predicted layouts of a model on a cluster: shoal's own, and those of each framework."""
    from shoal.cli.options import PlanOptions
    from shoal.cli.plan import answered, configuration_for
    from shoal.errors import ShoalError
    from shoal.planner.predict.workload import Workload
    from shoal.plans.plan import Plan, layout_name

    length, batch = MODELS[model]
    target = f"hf:{ROOT / 'benchmarks' / 'configurations' / model}"
    try:
        answer = answered(PlanOptions(target, cluster=cluster, seq=length, batch=batch))
    except ShoalError as error:
        return {"shoal": {"refused": error.conflict}}
    traced = answer.question.traced
    workloads: dict[str, Workload] = {}
    assert traced is not None

    def once(plan: Plan) -> Workload:
        key = str(plan.precision)
        if key not in workloads:
            workloads[key] = traced(plan)
        return workloads[key]

    answer = replace(answer, question=replace(answer.question, traced=once), job=f"hf:{model}")
    row: dict[str, Any] = {"shoal": {"layout": layout_name(answer.chosen.plan), "seconds": answer.chosen.seconds}}
    for name in LOADERS:
        try:
            emission = configuration_for(answer, name)
        except ShoalError as error:
            row[name] = {"refused": error.conflict}
            continue
        best = emission.candidate
        row[name] = {
            "layout": layout_name(best.plan),
            "seconds": best.seconds,
            "ranks": best.devices,
            "text": emission.text,
        }
    return row


def _loaded(results: dict[str, Any]) -> None:
    for row in results.values():
        for name, one in row.items():
            if "text" in one:
                try:
                    load(name, one["text"], one["ranks"])
                    one["loads"] = "yes"
                except ImportError as error:
                    one["loads"] = f"not installed: {error}"
                except Exception as error:  # the package's own refusals are of every kind
                    one["loads"] = f"no: {type(error).__name__}: {error}"


def page(results: dict[str, Any]) -> str:
    """The table of results."""
    lines = ["# Configurations of other frameworks\n", "| model | cluster | shoal | " + " | ".join(LOADERS) + " |"]
    lines.append("|" + "---|" * (3 + len(LOADERS)))
    shown = lambda one: (  # noqa: E731
        "nothing fits" if "refused" in one else f"{one['layout']}: {1000 * one['seconds']:,.0f} ms"
    )
    ranked = [one for row in results.values() for one in row.values() if "text" in one]
    for key, row in results.items():
        cells = [shown(row["shoal"])]
        for name in LOADERS:
            one = row.get(name, {"refused": ""})
            cells.append(shown(one) + ("" if one.get("loads", "yes") == "yes" else f" ({one['loads']})"))
        lines.append(f"| {' | '.join([*key.split(' on '), *cells])} |")
    loaded = sum(one.get("loads") == "yes" for one in ranked)
    lines.append(f"\n{loaded} of {len(ranked)} configurations were loaded by their framework.")
    about = (
        "Predicted seconds of a step, each with the habits of its program. Written by `python -m benchmarks.emitted`."
    )
    lines.insert(1, about + "\n")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Answer, load and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", default="", help="folder with the frameworks")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--load", action="store_true", help="load what was written, and write the page")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.load:
        _loaded(results)
    else:
        for model in given.only:
            for cluster in CLUSTERS:
                results[f"{model} on {cluster}"] = _answers(model, cluster)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), given.packages]))
        command = [sys.executable, "-m", "benchmarks.emitted", "--load"]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        return
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
