"""Claim: on two ranks `layout.expert = 2` halves the bytes of experts, with gradients within 1e-6 of one process's.

Transformers' own expert parallelism (`DistributedConfig(fsdp_size=2, ep_size=2)`) computes the same batch beside it,
and ZeRO-3 the same job. Each of five families has its gradients compared with those of the model on one process: the
largest difference of a parameter, relative to its largest element. Transformers has no plan of experts for Llama 4.
Bytes are a rank's peak in the second step by category; seconds are medians over all rounds, layouts in turn.

    python -m benchmarks.divided_experts        # three minutes; writes the page and its numbers
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.test_experts import FAMILIES, cut, loss, transformers_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from benchmarks.sharded_memory import CATEGORIES, mega, of_each_rank
from shoal.distributed.mesh import Mesh, open_mesh
from shoal.launch.environment import Environment
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.experts.blocks import expert_blocks
from shoal.parallel.experts.exchange import divide_block
from shoal.plans.plan import Layout, Plan
from shoal.training.observe.metering import StepMeter
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.verification.forked import forked

RESULTS = Path(__file__).resolve().parent / "results" / "divided_experts.json"
LAYOUTS = {
    "data 2": Plan().with_sections(layout={"data": 2}),
    "data 2, expert 2": Plan().with_sections(layout={"data": 2, "expert": 2}),
    "ZeRO-3": Plan().with_sections(layout={"shard": 2}),
}
ROUNDS, STEPS, WARM = 3, 12, 4
VOCABULARY, LENGTH, BATCH = 1024, 64, 8


# ---------------------------------------------------------------------------------------------------------- agreement


def difference(found: dict[str, Tensor], whole: nn.Module) -> float:
    """The largest difference of a gradient, relative to the largest of its parameter, or 1 % of the model's."""
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return max(
        float((found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=0.01 * largest))
        for name, gradient in wanted.items()
    )


def of_shoal(model: nn.Module, tokens: Tensor, mesh: Mesh) -> dict[str, Tensor]:
    """Whole gradients of the model with divided experts, from a rank's half of the tokens."""
    axis = TensorAxis(2, mesh.rank)
    blocks = expert_blocks(model)
    for block in blocks:
        divide_block(model, block, axis)
        cut(model, block, axis)
    loss(model, tokens.chunk(2)[mesh.rank]).backward()  # type: ignore[no-untyped-call]
    experts = {name for block in blocks for name in block.parameters}
    found = {}
    for name, parameter in model.named_parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name in experts:
            found[name] = axis.all_gather(own, 0)
        else:
            found[name] = axis.all_reduce(own)
    return found


def of_transformers(kind: Any, folder: Path, tokens: Tensor, rank: int) -> dict[str, Tensor]:
    """The same from Transformers' expert parallelism, whose gradients are means over the ranks."""
    from transformers.distributed import DistributedConfig

    model = kind.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2))
    loss(model, tokens.chunk(2)[rank]).backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            found[name] = 2 * (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
    return found


def agreement() -> dict[str, dict[str, float]]:
    """The differences of both programs by family."""

    def rank(environment: Environment) -> None:
        logging.disable(logging.WARNING)  # of DTensor, about the order of its gathers
        os.environ |= {"RANK": str(environment.rank), "LOCAL_RANK": str(environment.rank), "WORLD_SIZE": "2"}
        told: dict[str, dict[str, float]] = {}
        with open_mesh(environment, Layout(data=2)) as mesh:
            for family in names:
                kind = type(models[family])
                whole, own = (kind.from_pretrained(folder / family) for _ in range(2))
                tokens = torch.randint(96, (8, 9), generator=torch.Generator().manual_seed(2))
                loss(whole, tokens).backward()  # type: ignore[no-untyped-call]
                told[family] = {
                    "shoal": difference(of_shoal(own, tokens, mesh), whole),
                    "Transformers": difference(of_transformers(kind, folder / family, tokens, mesh.rank), whole),
                }
            dist.barrier()
        (folder / f"told-{environment.rank}.json").write_text(json.dumps(told))

    names = [family for family in FAMILIES if family != "Llama4"]
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out)
        torch.manual_seed(5)
        models: dict[str, Any] = {family: transformers_model(family) for family in names}
        for family, model in models.items():
            model.save_pretrained(folder / family)
        with forked(2, rank, folder / "ranks") as wait:
            wait()
        found: dict[str, dict[str, float]] = json.loads((folder / "told-0.json").read_text())
        return found


# ----------------------------------------------------------------------------------------------------- memory and time


def mixtral() -> nn.Module:
    """A Mixtral of four layers, nine tenths of whose parameters are in its eight experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False))  # type: ignore[arg-type]


def job() -> shoal.Job:
    """AdamW on random tokens."""
    tokens = torch.randint(VOCABULARY, (256, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return shoal.Job(
        model=mixtral,
        loss=lambda model, batch: shoal.cross_entropy(
            model(input_ids=batch[0][:, :-1]).logits.flatten(0, 1), batch[0][:, 1:].flatten()
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train_data=lambda: TensorDataset(tokens),
        global_batch=BATCH,
        grains=2,
        length=shoal.Steps(STEPS),
    )


def measured(job: shoal.Job, plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """Peak bytes of a second step, and the seconds of the later steps of another run, on this rank."""
    meter, seconds = StepMeter(), list[float]()
    for observer, steps in ((meter, 2), (None, STEPS)):
        options = Options(telemetry=False, eval_samples=1, **({} if observer is None else {"observer": observer}))
        engine = build(job, plan, mesh, options)
        try:
            if observer is not None:
                observer.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
            around = Surroundings(lambda line: None, lambda record, rank: seconds.append(record.seconds), lambda: False)
            engine.trainer(None, steps, around, RecordWriter(None)).train()
        finally:
            engine.close()
    told: Any = meter.to_json()
    meter.close()
    experts = [p.nbytes for n, p in engine.sharded_model.parameters() if "experts" in n]
    return {"memory": told["memory"], "seconds": seconds[2 + WARM :], "expert_bytes": sum(experts)}


def main() -> None:
    """Measure both and write the page."""
    same = agreement()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    for _ in range(ROUNDS):
        for name, plan in LAYOUTS.items():
            rounds[name].append(of_each_rank(plan, (job(),), measured, lean=True)[0])
    results = {"agreement": same, "rounds": rounds}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        "# Divided experts",
        "",
        "Generated by `python -m benchmarks.divided_experts`, on two CPU processes of one thread.",
    ]
    lines += ["", "Largest difference of a gradient from one process's:", "", "| Family | shoal | Transformers |"]
    lines += ["|---|---:|---:|"]
    lines += [f"| {family} | {one['shoal']:.1e} | {one['Transformers']:.1e} |" for family, one in same.items()]
    lines += ["", "A Mixtral of 14 M parameters, AdamW, 8 sequences of 64 tokens. MB are a rank's peaks:", ""]
    lines += ["| Layout | experts | " + " | ".join(CATEGORIES) + " | step |"]
    lines += ["|---|" + "---:|" * (len(CATEGORIES) + 2)]
    usual = median(s for one in rounds["data 2"] for s in one["seconds"])
    for name, ones in rounds.items():
        memory = ones[0]["memory"]
        each = [mega(memory[category]) for category in CATEGORIES]
        seconds = median(s for one in ones for s in one["seconds"])
        experts = mega(ones[0]["expert_bytes"])
        lines.append(f"| {name} | {experts} | {' | '.join(each)} | {1e3 * seconds:.0f} ms ({seconds / usual:.2f}) |")
    lines += ["", "In brackets: the step's time relative to that of whole models on two data ranks, in the same run."]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
