"""Claim: `shoal plan` answers each of 22 questions about public models in 60 s of processor time.

Each is `shoal plan` in a process of its own, with nothing but the model, the batch, the length, the cluster and the
precision that such models are trained in. The table has the processor seconds of the answer, the plan, its share
of the peak beside the best published row like it, and what keeps it lower. The aim is 60 s an answer, and 10 % of the
published share; where no row is published the plan is argued for in a sentence.

A share of the peak beside a published row counts the same FLOPs as that row's: of a language model 6 a parameter and
token and 12 x layers x width x length of attention, of others what the planner counts of one sample.

Repeat with `python -m benchmarks.questions [--only NAME ...]`; answers are kept in benchmarks/results/questions.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.hardware import cluster
from shoal.plans.plan import Plan, described

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "questions.json"
PAGE = ROOT / "benchmarks" / "results" / "questions.md"
BEGIN, END = "<!-- written by benchmarks/questions.py -->", "<!-- end of what it writes -->"
PUBLISHED = ROOT / "benchmarks" / "published" / "data"
JOBS = "benchmarks/question_jobs.py"
NAMES = ("job", "grains", "plan", "step", "mode", "throughput", "of the peak", "memory", "whole job", "price", "energy",
         "needs", "note")  # fmt: skip
LIMIT_SECONDS = 900  # by the clock: processor seconds are what counts, and others may be at work
GIB = 1 << 30


@dataclass(frozen=True)
class Like:
    """Published rows to compare with: columns that are equal, and the table that has them."""

    table: str = "transformers"
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One question: a job function with its settings, a cluster and a precision.

    `length`: tokens of a sample, 0 of other samples. `why`: the argument where nothing is published of it.
    """

    name: str
    function: str
    cluster: str
    batch: int
    precision: str = "bf16"
    config: str = ""
    length: int = 0
    like: Like | None = None
    why: str = ""

    @property
    def command(self) -> list[str]:
        """Arguments of `shoal`."""
        settings = {"config": self.config, "length": self.length, "batch": self.batch}
        given = [text for key, value in settings.items() if value for text in ("--set", f"{key}={value}")]
        precision = ["--precision", self.precision] if self.precision != "fp32" else []
        return ["plan", f"{JOBS}:{self.function}", *given, "--cluster", self.cluster, *precision]


def _mpt(size: str, gib: str = "80") -> Like:
    return Like(columns={"source_key": "llm-foundry", "model": f"MPT-{size}", "gpu": "A100-SXM", "gpu_mem_gb": gib})


def _playbook(devices: int) -> Like:
    return Like(columns={"source_key": "ultrascale-playbook", "model": "Llama-style-8B", "n_gpus": str(devices)})


def _ddp(model: str, **columns: str) -> Like:
    return Like("ddp_scaling", {"model": model, "gpu": "V100-SXM", "precision": "mixed fp16/amp", **columns})


QUESTIONS = (
    Asked("LeNet", "lenet", "V100", 256, "fp32",
          why="a step of 4 ms on one device; more would wait for each other longer than they compute"),
    Asked("ResNet-50", "images", "8xV100", 2048, "fp16", "resnet-50", like=_ddp("ResNet-50 v1.5", n_gpus="8")),
    Asked("LSTM (Zaremba et al., large)", "recurrent", "V100", 2048, "fp16", length=35,
          why="66 M parameters on one device: cuDNN's LSTM over large batches is bound by its products"),
    Asked("BERT-large", "text", "64xV100-SXM2-32", 4096, "fp16", "bert-large", 512,
          like=_ddp("BERT-large", n_gpus="8", seq_len="512")),
    Asked("wav2vec 2.0 large", "speech", "64xV100-SXM2-32", 512, "fp16", "wav2vec2-large",
          why="the model is small beside a device and sound is long: its kernels are bound by memory"),
    Asked("ViT-L/16", "images", "64xA100-80", 4096, "bf16", "vit-large",
          why="0.3 B parameters leave products small, and sequences of 197 too"),
    Asked("GPT-2 124M", "text", "8xA100-80", 512, "bf16", "gpt2-124m", 1024, _mpt("125m")),
    Asked("Pythia-1B", "text", "64xA100-40-SXM", 1024, "bf16", "pythia-1b", 2048, _mpt("1b", "40")),
    Asked("Llama-3.2-1B", "text", "64xH100", 256, "bf16", "llama-3.2-1b", 8192,
          why="1.2 B parameters, a fifth of them a vocabulary of 128,256 whose loss is bound by memory"),
    Asked("Llama-2-7B", "text", "64xA100-80", 1024, "bf16", "llama-2-7b", 4096, _mpt("7b")),
    Asked("Mistral-7B", "text", "8xH100", 256, "bf16", "mistral-7b", 4096, _playbook(8)),
    Asked("Qwen3-8B", "text", "64xH100", 1024, "bf16", "qwen3-8b", 4096, _playbook(64)),
    Asked("Llama-3-8B", "text", "512xH100", 512, "bf16", "llama-3-8b", 8192, _playbook(512)),
    Asked("Gemma-2-9B", "text", "512xH200", 512, "bf16", "gemma-2-9b", 8192,
          why="its attention caps scores, which no fused kernel of torch does: scores go through memory"),
    Asked("Llama-2-13B", "text", "64xA100-80", 1024, "bf16", "llama-2-13b", 4096, _mpt("13b")),
    Asked("GPT-NeoX-20B", "text", "512xA100-40-SXM", 1536, "bf16", "gpt-neox-20b", 2048,
          why="its authors report 117 TFLOP/s a device, 38 %, on 96 such A100 (arXiv:2204.06745)"),
    Asked("Mixtral-8x7B", "text", "512xH100", 1024, "bf16", "mixtral-8x7b", 4096,
          why="two experts of eight compute a token, and all are stored and updated"),
    Asked("DeepSeek-V3 on 1,024", "text", "1024xH100", 4096, "bf16", "deepseek-v3", 4096,
          why="published are 630 to 865 tokens/s a device in bfloat16 on 512 and 1,024 H100, with expert 64"),
    Asked("DeepSeek-V3 on 2,048", "text", "2048xH100", 8192, "bf16", "deepseek-v3", 4096,
          why="its authors report 1,543 tokens/s a device in float8 on 2,048 H800 (arXiv:2412.19437)"),
    Asked("Llama-3-70B", "text", "4096xH100", 2048, "bf16", "llama-3-70b", 8192,
          why="Llama 3's authors report 38 to 43 % for 405 B on 8,192 and 16,384 H100 (arXiv:2407.21783)"),
    Asked("OPT-175B", "text", "4096xA100-80", 2048, "bf16", "opt-175b", 2048,
          why="its authors report up to 147 TFLOP/s a device, 47 %, on 992 A100-80 (arXiv:2205.01068)"),
    Asked("Llama-3.1-405B", "text", "16384xH100", 2048, "bf16", "llama-3.1-405b", 8192,
          why="its authors report 41 % on 16,384 H100 with tensor 8, pipeline 16, data 128 (arXiv:2407.21783) and"
          " nothing recomputed, for which this engine keeps too much"),
)  # fmt: skip


def answered(asked: Asked) -> dict[str, Any]:
    """Asks in a child process: its seconds, the plan it wrote and the lines it began with; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        command = [sys.executable, "-m", "shoal", *asked.command]
        began, used = time.perf_counter(), _used()
        try:
            done = subprocess.run(
                [*command, "--more", "-o", str(plan)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
            text, error = done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            text, error = "", f"no answer in {LIMIT_SECONDS} s"
        found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1), "used": round(_used() - used, 1)}
        if not plan.is_file():
            return {**found, "error": error.strip()[-600:]}
        return {**found, "plan": tomllib.loads(plan.read_text(encoding="utf-8")), "says": said(text)}


def _used() -> float:
    """Seconds of the processor that children which ended have used."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def said(text: str) -> dict[str, str]:
    """The part "In short" of an answer with `--more`, by name; wrapped lines are joined."""
    entries: dict[str, str] = {}
    name = ""
    for line in text.partition("\nIn short\n")[2].partition("\n\n")[0].partition("\naim ")[0].splitlines():
        key, sign, value = line.partition(": ")
        if sign and key in NAMES:
            name, line = key, value
        entries[name] = f"{entries[name].rstrip()} {line}" if name in entries else line
    return entries


# ------------------------------------------------------------------------------------------------- published rows


def _flops_per_token(parameters: float, layers: int, width: int, length: int) -> float:
    return 6.0 * parameters + 12.0 * layers * width * length


@dataclass(frozen=True)
class Best:
    """The best published row like a question: its share of the peak and where it is from."""

    share: float
    what: str
    source: str


def best_like(asked: Asked, flops_per_sample: float) -> Best | None:
    """The row with the highest share of the peak among those like the question."""
    if asked.like is None:
        return None
    with (PUBLISHED / f"{asked.like.table}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if asked.like.columns.items() <= row.items()]
    shares = _of_text if asked.like.table == "transformers" else _of_samples
    found = [best for row in rows for best in shares(row, asked, flops_per_sample)]
    return max(found, key=lambda best: best.share, default=None)


def _peak(asked: Asked, gpu: str | None = None) -> float:
    device = cluster(gpu or asked.cluster).device
    return device.flops[{"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[asked.precision]]


def _of_text(row: dict[str, str], asked: Asked, _: float) -> Iterator[Best]:
    seconds = float(row["step_time_s"] or row["derived_step_time_s"] or 0)
    if row["status"] != "ok" or row["trust"] == "C" or not seconds:
        return
    length, devices = int(row["seq_len"]), int(row["n_gpus"])
    if not asked.length / 2 <= length <= 2 * asked.length:
        return
    flops = _flops_per_token(float(row["n_params"]), int(row["n_layers"]), int(row["hidden"]), length)
    rate = float(row["global_batch"]) * length / seconds / devices
    layout = ", ".join(f"{axis} {row[axis]}" for axis in ("dp", "tp", "pp") if row[axis] not in ("", "1"))
    what = f"{row['model']}, {devices} x {row['gpu']}-{row['gpu_mem_gb']}, {row['global_batch']} x {length:,}, {layout}"
    what += f", ZeRO-{row['zero_stage']}" if row["zero_stage"] not in ("", "0") else ""
    yield Best(flops * rate / _peak(asked), what, row["source"])


def _of_samples(row: dict[str, str], asked: Asked, flops: float) -> Iterator[Best]:
    rate = float(row["throughput"]) / int(row["n_gpus"])
    what = f"{row['model']}, {row['n_gpus']} x {row['gpu']}-{row['gpu_mem_gb']}, {row['framework']}"
    yield Best(flops * rate / _peak(asked), what, row["source"])


def share(asked: Asked, prediction: dict[str, Any]) -> float:
    """The plan's share of the peak by the count of FLOPs that the published row has."""
    if asked.like is None or asked.like.table != "transformers":
        return float(prediction.get("mfu", 0.0))
    values = json.loads((ROOT / "benchmarks" / "configurations" / asked.config / "config.json").read_text())
    layers = values.get("num_hidden_layers", values.get("n_layer"))
    width = values.get("hidden_size", values.get("n_embd"))
    flops = _flops_per_token(prediction["parameters"], layers, width, asked.length)
    rate = asked.batch * asked.length / prediction["step_seconds"] / prediction["devices"]
    return flops * rate / _peak(asked)


# ---------------------------------------------------------------------------------------------------------- page


def row(asked: Asked, found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    samples = f"{asked.batch:,}" + (f" x {asked.length:,}" if asked.length else "")
    head = [asked.name, samples, asked.cluster, f"{found['used']:.0f} s"]
    if "error" in found:
        last = found["error"].splitlines()[-1].strip()
        return [*head, f"no answer: {last}", "", "", "", asked.why]
    plan = Plan.from_mapping(found["plan"], source="plan")
    prediction, says = found["plan"]["prediction"], found["says"]
    head[0] += f", {_count(prediction['parameters'])}"
    micro = says.get("plan", "").rpartition("; ")[2].removeprefix("a rank has ").removesuffix(" in a step")
    layout = f"{described(plan)}; {micro}" + (
        f"; {prediction['devices']:,} devices" if prediction["devices"] != cluster(asked.cluster).num_devices else ""
    )
    best = best_like(asked, prediction["flops_per_sample"])
    own = share(asked, prediction)
    beside = f"**{best.share:.0%}** {best.what} (`{best.source.partition(' (')[0]}`)" if best is not None else asked.why
    keeps = says.get("of the peak", "").partition("the rest: ")[2]
    rate = says.get("throughput", "").partition(" (")[0]
    return [*head, layout, rate, f"{own:.0%}", says.get("memory", ""), beside, keeps]


def _count(value: float) -> str:
    return f"{value / 1e9:.3g} B" if value >= 1e9 else f"{value / 1e6:.3g} M"


HEAD = ["model", "batch", "devices", "answer", "plan", "throughput", "of peak", "memory", "beside it", "the rest"]


def page(results: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows = [HEAD, ["---"] * len(HEAD)]
    rows += [row(asked, results[asked.name]) for asked in QUESTIONS if asked.name in results]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in rows)


def write(results: dict[str, Any]) -> None:
    """Keeps the answers, and writes the table into the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(results)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Asks what is wanted, one after the other, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=[asked.name for asked in QUESTIONS], help="these questions")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept, ask nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for asked in QUESTIONS if not options.page else ():
        if options.only is None or asked.name in options.only:
            results[asked.name] = answered(asked)
            print(f"shoal {' '.join(asked.command)}", row(asked, results[asked.name]), sep="\n  ", flush=True)
            write(results)
    write(results)


if __name__ == "__main__":
    main()
