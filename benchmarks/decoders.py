"""Claim: decoders of 7 to 405 billion parameters are ready for a search from their configurations in 20 s and 5 GB.

    python -m benchmarks.decoders > benchmarks/results/decoders.md

Traced, cut and proven; seconds are of the processor, without imports: what else runs does not count. Each row is
a process of its own, memory is its peak. Sizes are published ones, in sequences of 4,096 tokens, bfloat16.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Published sizes: layers, width, heads, heads of keys, width of the feed-forward, vocabulary; others are defaults.
_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
MODELS: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", "Llama", (32, 4096, 32, 8, 14336, 128256), {}),
    "Llama 3.1 70B": ("llama", "Llama", (80, 8192, 64, 8, 28672, 128256), {}),
    "Llama 3.1 405B": ("llama", "Llama", (126, 16384, 128, 8, 53248, 128256), {}),
    "Mistral 7B": ("mistral", "Mistral", (32, 4096, 32, 8, 14336, 32000), {}),
    "Gemma 2 27B": ("gemma2", "Gemma2", (46, 4608, 32, 16, 36864, 256000), {"head_dim": 128}),
    "Qwen 2 72B": ("qwen2", "Qwen2", (80, 8192, 64, 8, 29568, 152064), {}),
    "Qwen 3 32B": ("qwen3", "Qwen3", (64, 5120, 64, 8, 25600, 151936), {"head_dim": 128}),
    "Falcon 180B": (
        "falcon",
        "Falcon",
        (80, 14848, 232, 8, 59392, 65024),
        {"num_kv_heads": 8, "new_decoder_architecture": True, "bias": False},
    ),
    "GPT-NeoX 20B": ("gpt_neox", "GPTNeoX", (44, 6144, 64, 64, 24576, 50432), {}),
    "OPT 175B": (
        "opt",
        "OPT",
        (96, 12288, 96, 96, 49152, 50272),
        {"ffn_dim": 49152, "word_embed_proj_dim": 12288, "max_position_embeddings": 4096},
    ),
    "Phi-3 medium 14B": ("phi3", "Phi3", (40, 5120, 40, 10, 17920, 32064), {}),
    "Mixtral 8x22B": ("mixtral", "Mixtral", (56, 6144, 48, 8, 16384, 32768), {}),
    "Qwen 3 235B-A22B": (
        "qwen3_moe",
        "Qwen3Moe",
        (94, 4096, 64, 4, 12288, 151936),
        {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    ),
}


def configuration(name: str) -> dict[str, Any]:
    """A config.json of a model."""
    kind, family, sizes, more = MODELS[name]
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    sized = dict(zip(_NAMES, sizes, strict=True))
    return {"model_type": kind, "architectures": [f"{family}ForCausalLM"], **sized, **tokens, **more}


def row(name: str) -> str:
    """A line of the table, measured in this process."""
    from shoal.jobs.configured_job import configured_job
    from shoal.planner.answer.answer import question
    from shoal.plans.plan import Plan
    from shoal.plans.resolve import Wishes, apply_wishes

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(configuration(name)))
        job = configured_job(f"hf:{folder}", 4096, 512)
    base = apply_wishes(Plan(), Wishes(precision="bf16"), from_file=False)
    began = time.process_time()
    asked = question(job, base, "64x8xH100", None)
    seconds = time.process_time() - began
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    profile, places = asked.case.work.profile, asked.case.space.facts.places or ()
    weights = [weight for unit in profile.units for weight in unit.body.weights]
    cut = sum(w.numel for w in weights if w.tensor_dim is not None) / profile.num_parameters
    kinds = {e.kind for unit in profile.units if unit.body.repeated for e in unit.body.exchanges}
    tensor = f"{cut:.0%}" if kinds == {"all_reduce"} else f"{cut:.0%}, some gathered"
    numbers = f"{profile.num_parameters / 1e9:.1f} | {seconds:.1f} | {gigabytes:.1f}"
    return f"| {name} | {numbers} | {tensor} | {profile.heads} | {len(places)} |"


def main() -> None:
    """Prints the table, or with a name its line."""
    if len(sys.argv) > 1:
        print(row(sys.argv[1]))
        return
    print("| model | billion parameters | s | GB | cut by tensor | heads for context | places for stages |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.decoders", name]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        last = [line for line in found.stdout.splitlines() if line.startswith("|")]
        print(last[-1] if last else f"| {name} | {found.stderr.strip().splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
