"""Claim: under ZeRO-3 an owner's step of Muon has the bits of one process; stock Muon on FSDP2 computes another step.

2 CPU cores, torch 2.13.0; the table is benchmarks/results/owners.md.

Repeat with `python -m benchmarks.owners`, or with `python -m benchmarks.coupled`. The GPT of examples/gpt.py, 2 layers
of width 128, 24 steps of 16 samples on 2 and on 4 ranks that share 2 cores. Both optimizers run in the same layout in
turn; a number is the median of the last 16 steps. Bytes are those that a rank hands to the exchange for other ranks.
Stock Muon steps parameters that are cut as fully_shard cuts them, with one gradient on one and on two processes.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from tests.launching import EXAMPLES, Run, run
from tests.ranks.test_matrix_owners import job
from tests.ranks.test_relayout import plan as written
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.launch.environment import Environment
from shoal.plans.plan import Layout
from shoal.training.setup.job_model import seeded_model
from shoal.training.setup.preflight import judged
from shoal.training.update.matrix_owners import MatrixOwners
from shoal.verification.forked import forked, trace_forked
from shoal.verification.judge import judge_traces

RESULTS = Path(__file__).parent / "results"
STEPS, MEASURED = 24, 16
SETTINGS = {"steps": STEPS, "width": 128, "layers": 2, "batch": 16}


def zero3(ranks: int) -> dict[str, dict[str, Any]]:
    """The layout."""
    return {"layout": {"shard": ranks}, "shard": {"level": "parameters"}}


def timed(name: str, ranks: int, folder: Path) -> dict[str, float]:
    """Median milliseconds of a step and of its update."""
    out = folder / f"{name}-{ranks}"
    arguments = written(folder / f"{name}-{ranks}.toml", zero3(ranks))
    ended = run(Run(f"{EXAMPLES / 'gpt.py'}:{name}", out, None, settings=SETTINGS, arguments=arguments), 300).expect(0)
    last = ended.records[-MEASURED:]
    return {
        "step_ms": statistics.median(1e3 * record["seconds"] for record in last),
        "optimizer_ms": statistics.median(1e3 * record["spans"].get("optimizer", 0.0) for record in last),
    }


def verified(ranks: int, folder: Path) -> dict[str, float]:
    """Distance of the owners' values and states from one process, bytes of an update by rank, and the owned bytes."""
    wanted, exchange, sizes = job(), MatrixOwners._exchange, folder / "sizes"
    plan = judged(wanted, shoal.Plan().with_sections(**zero3(ranks))).plan

    def counted(self: MatrixOwners, sent: Any, expected: Any) -> None:
        others = sum(t.nbytes for rank, tensors in sent.items() if rank != self._mesh.rank for t in tensors)
        owned = sum(whole.nbytes for whole in self._wholes.values())
        with sizes.open("a", encoding="utf-8") as file:
            file.write(f"{self._mesh.rank} {others} {owned}\n")
        exchange(self, sent, expected)

    with mock.patch.object(MatrixOwners, "_exchange", counted):
        trace_forked(lambda: wanted, plan, folder, 1)
    verdict = judge_traces(wanted, plan, folder)
    assert verdict.verified, verdict.render()
    rows = [tuple(map(int, line.split())) for line in sizes.read_text().splitlines()]
    of_rank = [sum(sent for rank, sent, _ in [r for r in rows if r[0] == number][1:]) for number in range(ranks)]
    exact = [check.error for check in verdict.checks if check.phase == "update" and check.tolerance == 0.0]
    return {"apart": max(exact), "sent_bytes": sum(of_rank), "owned_bytes": rows[0][2], "checks": len(exact)}


def stock(folder: Path) -> dict[str, float]:
    """How far stock Muon's step on DTensors is from one process with the same gradient, and its collectives."""
    made = job()
    model = seeded_model(made)
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and len(p) > 1 and n[:6] == "blocks"}
    draw = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(p.shape, generator=draw) for name, p in matrices.items()}

    def stepped(parameters: dict[str, Any], own: dict[str, Any]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = own[name]
        torch.optim.Muon(list(parameters.values()), lr=0.02, weight_decay=0.0).step()

    def rank(environment: Environment) -> None:
        with open_mesh(environment, Layout(shard=2)) as opened:
            mesh = DeviceMesh.from_group(opened.groups["shard"], "cpu")
            cut = {n: nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for n, p in matrices.items()}
            own = {n: distribute_tensor(g, mesh, [Shard(0)]) for n, g in gradients.items()}
            with CommDebugMode() as debug:
                stepped(cut, own)
            values = {n: p.full_tensor().detach() for n, p in cut.items()}  # type: ignore[attr-defined]
            if environment.rank == 0:
                save_file(values, folder / "stock.safetensors")
                (folder / "stock.json").write_text(json.dumps(debug.get_total_counts()))

    with forked(2, rank, folder / "ranks") as wait:
        wait()
    whole = {n: nn.Parameter(p.detach().clone()) for n, p in matrices.items()}
    stepped(whole, gradients)
    values, collectives = load_file(folder / "stock.safetensors"), json.loads((folder / "stock.json").read_text())

    def size(tensors: dict[str, Tensor]) -> float:
        return math.sqrt(math.fsum(float(t.square().sum()) for t in tensors.values()))

    off = {n: values[n] - whole[n].detach() for n in whole}
    moved = {n: whole[n].detach() - matrices[n].detach() for n in whole}
    return {"apart": size(off) / size(moved), "collectives": collectives, "matrices": len(matrices)}


def page(found: dict[str, Any]) -> str:
    """The record as Markdown."""
    two, four, other = found["2"], found["4"], found["stock"]
    lines = [
        "# Muon with owners",
        "",
        "Generated by `python -m benchmarks.owners`; numbers in owners.json. The GPT of examples/gpt.py (2 layers of "
        f"width 128, 16 samples a step) under ZeRO-3 on 2 CPU cores, torch {torch.__version__}, 1 thread a rank. "
        "The owners' update is checked on the same layers of width 32.",
        "",
        "An owner's update has the bits of one process; stock Muon on FSDP2's parameters, with the same gradient, is "
        f"{100 * other['apart']:.1f} % of the update away and needs {other['collectives'] / other['matrices']:.0f} "
        "collectives a matrix.",
        "",
        "| ranks | distance from one process | bytes sent in an update / owned bytes | step, Muon and AdamW | step, "
        "AdamW alone | of it update, Muon and AdamW | AdamW alone |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks, one in (("2", two), ("4", four)):
        lines.append(
            f"| {ranks} | {one['apart']:g} | {one['sent_bytes'] / one['owned_bytes']:.2f} "
            f"| {one['muon']['step_ms']:.0f} ms | {one['job']['step_ms']:.0f} ms "
            f"| {one['muon']['optimizer_ms']:.1f} ms | {one['job']['optimizer_ms']:.1f} ms |"
        )
    lines += [
        "",
        "Bytes are summed over the ranks: values and gradients to the owners, and values back. Other programs used "
        "the cores too; times compare columns of a row only.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the records."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found["stock"] = stock(folder)
        for ranks in (2, 4):
            (folder / f"verified-{ranks}").mkdir()
            found[str(ranks)] = verified(ranks, folder / f"verified-{ranks}")
            found[str(ranks)] |= {name: timed(name, ranks, folder) for name in ("job", "muon")}
            print(json.dumps(found), flush=True)
    (RESULTS / "owners.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "owners.md").write_text(page(found))


if __name__ == "__main__":
    main()
