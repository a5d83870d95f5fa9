"""Claim: none: loops of one job on one device, which the parts of `scripts/gpu` time: shoal's, and its peers'.

Repeat with `scripts/gpu --parts lenet` on a machine with a GPU. shoal's loop is `shoal run` as a user starts it, in a
process of its own, timed by the records that it writes once a trial of step modes is over. Each peer is a plain loop
over the same model, loss and optimizer in this process: eager, with model and loss under torch.compile or its
"reduce-overhead", with the whole step as one CUDA graph by hand, or by Lightning Fabric. A block of a plain loop is
timed between two synchronisations, after a fifth as many steps that are not counted. The plain loops copy pinned
batches without waiting, and read the loss once a block. On a CPU nothing is captured, and the peers that compile take
the backend aot_eager: their figures mean nothing there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `shoal run` loads this file
import shoal
from benchmarks import small_jobs
from shoal.distributed.mesh import open_mesh
from shoal.launch.environment import Environment
from shoal.plans.plan import plan_text
from shoal.plans.resolve import STEPS, Wishes, apply_wishes
from shoal.runs.directory import read_json
from shoal.runs.records import StepRecord
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged

CONFIGURATIONS = Path(__file__).resolve().parent / "configurations"
PEERS = ("eager", "compiled", "reduce-overhead", "graph", "fabric")
# `--step` by the names of shoal's loops.
MODES = {"shoal": "auto"} | {f"shoal {mode}": mode for mode in STEPS}
_WARM_UP = 3  # steps before a capture


class GPT2(small_jobs.GPT):
    """The examples' GPT with a vocabulary of its own."""

    def __init__(self, layers: int, width: int, heads: int, block: int, tokens: int) -> None:
        super().__init__(layers, width, heads, block, 0.0)
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight


class Logits(nn.Module):
    """A model of Transformers that returns its logits."""

    def __init__(self, name: str, **sizes: Any) -> None:
        import transformers

        super().__init__()
        self.body = getattr(transformers, name)(getattr(transformers, _CONFIGURATIONS[name])(**sizes))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.body(inputs).logits
        return out


_CONFIGURATIONS = {
    "LlamaForCausalLM": "LlamaConfig",
    "BertForMaskedLM": "BertConfig",
    "ViTForImageClassification": "ViTConfig",
}


def course(dry: bool) -> shoal.Steps:
    """A length at which each step mode pays, though loops end long before; in tiny one that has no trial of modes."""
    return shoal.Steps(100 if dry else 100_000)


def lenet(dry: bool = False) -> shoal.Job:
    return replace(small_jobs.lenet(8 if dry else 256), length=course(dry))


def resnet18(dry: bool = False, grains: int | None = None) -> shoal.Job:
    """ResNet-18 of images of 28 x 28; in tiny one of its blocks."""
    job = replace(small_jobs.resnet18(8 if dry else 256), length=course(dry), grains=grains)
    return replace(job, model=small_jobs.residual) if dry else job


def texts(samples: int, length: int, tokens: int) -> TensorDataset:
    """Two int64 [samples, length]."""
    text = torch.randint(tokens, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())


def pictures(samples: int, side: int) -> TensorDataset:
    """Float32 [samples, 3, side, side] and int64 [samples]."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 3, side, side, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def large(model: Callable[[], nn.Module], data: Callable[[], TensorDataset], batch: int, **changes: Any) -> shoal.Job:
    """A job with a fused AdamW; of tokens unless `changes` has another loss."""
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    job = replace(small_jobs.gpt(batch), model=model, train_data=data, optimizer=optimizer, clip_norm=None)
    return replace(job, **changes)


def gpt2(dry: bool = False, batch: int = 16, tokens: int = 50_257) -> shoal.Job:
    """GPT-2 of 124 M parameters with a context of 1024."""
    layers, width, heads, block = (2, 32, 2, 16) if dry else (12, 768, 12, 1024)
    batch, tokens = (4, 250) if dry else (batch, tokens)
    data = partial(texts, 8 * batch, block, tokens)
    return large(partial(GPT2, layers, width, heads, block, tokens), data, batch, length=course(dry))


def llama(dry: bool = False) -> shoal.Job:
    """Llama 3.2 1B, 8 x 2048."""
    sizes = json.loads((CONFIGURATIONS / "llama-3.2-1b" / "config.json").read_text())
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= tiny | {"num_key_value_heads": 1, "vocab_size": 64, "head_dim": 16} if dry else {}
    batch, length = (4, 16) if dry else (8, 2048)
    model = partial(Logits, "LlamaForCausalLM", **sizes, use_cache=False)
    return large(model, partial(texts, 8 * batch, length, sizes["vocab_size"]), batch, length=course(dry))


def bert(dry: bool = False) -> shoal.Job:
    """BERT-base, 32 x 512; each token is predicted from the tokens before and after it."""
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    batch, length, tokens = (4, 16, 64) if dry else (32, 512, 30_522)
    model = partial(Logits, "BertForMaskedLM", vocab_size=tokens, **(tiny if dry else {}))
    return large(model, partial(texts, 8 * batch, length, tokens), batch, length=course(dry))


def vit(dry: bool = False) -> shoal.Job:
    """ViT-S/16, 256 images of 224 x 224."""
    width, layers, heads, side, batch = (32, 2, 2, 32, 4) if dry else (384, 12, 6, 224, 256)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    model = partial(
        Logits, "ViTForImageClassification", **sizes, intermediate_size=4 * width, image_size=side, num_labels=10
    )
    data = partial(pictures, 4 * batch, side)
    return large(model, data, batch, loss=small_jobs.classified, length=course(dry))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def batches(job: shoal.Job, device: torch.device) -> Iterator[list[Tensor]]:
    """Rows of the job's tensors in an order that is drawn once, on the device."""
    tensors = job.train_data().tensors
    while True:
        for rows in torch.randperm(len(tensors[0])).split(job.global_batch):
            found = [tensor[rows] for tensor in tensors]
            pinned = [tensor.pin_memory() for tensor in found] if device.type == "cuda" else found
            yield [tensor.to(device, non_blocking=True) for tensor in pinned]


@dataclass(frozen=True)
class Loop:
    """How a job is trained: `name` is one of PEERS or MODES.

    `channels_last`: None leaves the choice to shoal, and to a peer channels first.
    """

    name: str
    half: bool = False
    channels_last: bool | None = None

    @property
    def format(self) -> dict[str, bool]:
        """The key of shoal's plan that sets the memory format, if anything does."""
        return {} if self.channels_last is None else {"channels_last": self.channels_last}


def execution(mode: str) -> dict[str, Any]:
    """Keys of a plan whose steps are computed in a mode; "auto" is eager before its trial."""
    cuda_graph, compiled = STEPS.get(mode, STEPS["eager"])
    return {"cuda_graph": cuda_graph, "compile": compiled}


def plain(job: shoal.Job, device: torch.device, loop: Loop) -> Callable[[], Tensor]:
    """A step of a loop without shoal, which returns its loss on the device."""
    formats = torch.channels_last if loop.channels_last else torch.contiguous_format
    model = job.model().to(device, memory_format=formats)
    optimizer = job.optimizer(list(model.parameters()))
    source, backward = batches(job, device), Tensor.backward
    if loop.name == "fabric":
        from lightning_fabric import Fabric

        precision = "bf16-mixed" if loop.half else "32-true"
        fabric = Fabric(accelerator=device.type, devices=1, precision=precision)
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward

    def computed(batch: list[Tensor]) -> Tensor:
        kept = loop.name != "graph"  # autocast's cache outlives a capture
        half = loop.half and loop.name != "fabric"  # which casts by itself
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=kept):
            total, weight = job.loss(model, batch)
            return total / weight

    compute: Callable[[list[Tensor]], Tensor] = computed
    if loop.name in ("compiled", "reduce-overhead"):
        how = {"mode": "default" if loop.name == "compiled" else "reduce-overhead"}
        compute = torch.compile(computed, dynamic=False, **(how if device.type == "cuda" else {"backend": "aot_eager"}))

    def fetched() -> list[Tensor]:
        batch = next(source)
        return [t.to(memory_format=formats) if t.ndim == 4 else t for t in batch]

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = compute(fetched())
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step if loop.name != "graph" else captured(optimizer, compute, fetched, device)


def captured(
    optimizer: torch.optim.Optimizer,
    compute: Callable[[list[Tensor]], Tensor],
    fetched: Callable[[], list[Tensor]],
    device: torch.device,
) -> Callable[[], Tensor]:
    """A step as one CUDA graph, after torch's notes on graphs; on a CPU the same calls without one."""
    held = [tensor.clone() for tensor in fetched()]
    for group in optimizer.param_groups:
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True

    def whole() -> Tensor:
        loss = compute(held)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def warm() -> None:
        for _ in range(_WARM_UP):
            optimizer.zero_grad()
            whole()
        optimizer.zero_grad()

    def filled() -> None:
        for tensor, new in zip(held, fetched(), strict=True):
            tensor.copy_(new)

    if device.type != "cuda":
        warm()

        def step() -> Tensor:
            filled()
            optimizer.zero_grad()
            return whole()

        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = whole()

    def replayed() -> Tensor:
        filled()
        graph.replay()
        return loss

    return replayed


def trained(job: shoal.Job, num_steps: int, loop: Loop, on_step: Callable[[StepRecord, int], None]) -> None:
    """Trains through shoal in this process. Raises: PlanError where the plan is refused."""
    base = shoal.Plan().with_sections(execution=execution(MODES[loop.name]) | loop.format)
    plan = judged(job, apply_wishes(base, Wishes(precision="bf16" if loop.half else None), from_file=False)).plan
    with tempfile.TemporaryDirectory() as folder, open_mesh(Environment(), plan.layout) as mesh:
        engine = build(job, plan, mesh, Options(Path(folder)))
        writer = RecordWriter(Path(folder) / "records.jsonl")
        engine.trainer(None, num_steps, Surroundings(lambda text: None, on_step, lambda: False), writer).train()
        writer.close()
        engine.close()


def plain_blocks(job: shoal.Job, loop: Loop, turns: int, steps: int) -> list[float]:
    """Seconds of a step in each block of a plain loop; a first block, in which kernels are compiled, is left out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    uncounted, found, step = max(2, steps // 5), list[float](), plain(job, device, loop)
    for _ in range(turns + 1):
        for _ in range(uncounted):
            loss = step()
        loss.item()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        synchronize(device)
        found.append((time.perf_counter() - began) / steps)
    return found[1:]


class FailedRunError(Exception):
    """A run that has trained too few steps, with its last words."""


def run_blocks(
    net: Sequence[str], loop: Loop, turns: int, steps: int, seconds: float
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of a step in each block of `shoal run`, of its last ones, and what else it has to say.

    `net`: the name of a job function of this module, and its settings. The run is ended once so many blocks have
    followed its trial of step modes, or after `seconds`. Raises: FailedRunError.
    """
    device = {} if torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "run", Path(folder) / "said"
        words = ["run", f"{Path(__file__)}:{net[0]}", *(word for pair in net[1:] for word in ("--set", pair))]
        words += ["--out", str(out), "--devices", "1", "--records", "all", "--no-source", "--step", MODES[loop.name]]
        words += ["--precision", "bf16"] if loop.half else []
        if loop.format:
            plan = Path(folder) / "plan.toml"
            plan.write_text(plan_text(shoal.Plan().with_sections(execution=loop.format)), encoding="utf-8")
            words += ["--plan", str(plan)]
        with said.open("w") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "shoal", *words],
                env={**os.environ, **device},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        began, records, trial, runs = time.monotonic(), list[str](), dict[str, Any](), True
        try:
            while runs and time.monotonic() - began < seconds:
                time.sleep(0.2)
                runs = child.poll() is None  # what it has left is read once more
                trial = read_json(out / "trial.json") or {}
                records = whole_lines(out / "records.jsonl")
                until = max((turn["until"] for turn in trial.get("turns", ())), default=steps // 5)
                if trial.get("chosen", "") is not None and len(records) > until + turns * steps:
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        lines = said.read_text(errors="replace").splitlines()
    edges = [json.loads(record)["at"] for record in records[::-1][::steps][: turns + 1]][::-1]
    if len(edges) < 2:
        raise FailedRunError(f"{len(records)} steps: " + "\n".join(lines[-8:])[-500:])
    about: dict[str, Any] = {"steps": len(records), "said": [line for line in lines if line.startswith("note")][:6]}
    if trial:
        about |= {"chosen": trial["chosen"] or "the trial is not over", "trial": trial["verdicts"]}
    return [(later - earlier) / steps for earlier, later in pairwise(edges)], about


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process may be writing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def flops(job: shoal.Job) -> float | None:
    """Of a sample of a model of tokens: 6 a parameter and token, but for positions, and 12 of attention; else None."""
    with torch.device("meta"):
        model = job.model()
    counted = float(sum(p.numel() for p in model.parameters()))
    if isinstance(model, GPT2):
        length, width = model.positions.weight.shape
        counted, layers = counted - length * width, len(model.blocks)
    elif isinstance(model, Logits) and job.loss is small_jobs.continued:
        length, layers = job.train_data().tensors[0].shape[1], model.body.config.num_hidden_layers
        width = model.body.config.hidden_size
    else:
        return None
    return length * (6.0 * counted + 12.0 * layers * length * width)
