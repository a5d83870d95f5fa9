"""The index of what was measured: claim, last run, command and hardware of each benchmark, and its record.

A claim is the first sentence of its benchmark's docstring. Repeat with `python -m benchmarks.index`, which writes
benchmarks/results/README.md. Whoever runs a benchmark again changes its row here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "README.md"

TWO_CORES = "2 CPU cores"
EPYC = "2 cores of an AMD EPYC (Milan)"
XEON = "2 cores of an Intel Xeon"
H200 = "NVIDIA H200"


class Row(NamedTuple):
    """One benchmark's last run and the files that it left in benchmarks/results."""

    benchmark: str  # a module of benchmarks
    last_run: str
    hardware: str
    records: tuple[str, ...] = ()
    command: str = ""


GROUPS = {
    "Same results": (
        Row("matrix", "2026-11-21", TWO_CORES, ("matrix.md", "matrix.json")),
        Row("coupled", "2026-11-30", TWO_CORES, ("coupled.md", "coupled.json")),
        Row("coupled_cost", "2026-11-30", TWO_CORES, ("coupled_cost.md", "coupled_cost.json")),
        Row("coupled_metrics", "2026-11-30", TWO_CORES, ("coupled_metrics.md", "coupled_metrics.json")),
        Row("coupled_closures", "2026-11-30", TWO_CORES, ("coupled_closures.md", "coupled_closures.json")),
        Row("coupled_rows", "2026-11-30", TWO_CORES, ("coupled_rows.md", "coupled_rows.json")),
        Row("float8_losses", "2026-11-30", TWO_CORES, ("float8_losses.md", "float8_losses.json")),
        Row("divided_experts", "2026-11-30", TWO_CORES, ("divided_experts.md", "divided_experts.json")),
        Row("owners", "2026-11-30", TWO_CORES, ("owners.md", "owners.json")),
        Row("corpus", "2026-11-28", TWO_CORES, ("corpus.md", "corpus.jsonl")),
        Row("habits", "2026-12-01", TWO_CORES, ("habits/README.md", "habits/results.json")),
        Row("peers", "2026-11-30", "any", ("peers.md",)),
        Row("shipped", "2026-11-29", TWO_CORES, ("shipped.md", "shipped.json")),
        Row("planted_scripts", "2026-11-29", TWO_CORES, ("planted_scripts.md", "planted_scripts.json")),
        Row("verification", "2026-11-21", TWO_CORES, ("verify_results.md",)),
        Row("loss_curves", "2026-11-21", TWO_CORES, ("loss_curves.md", "loss_curves.svg", "loss_curves.json")),
        Row("samplers", "2026-11-30", TWO_CORES, ("samplers.md", "samplers.json")),
        Row("gradient_norm", "2026-11-22", "2 cores with AVX-512"),
        Row("verify_cost", "2026-11-21", "2 cores with AVX2"),
    ),
    "Steps": (
        Row("dropout", "2026-11-29", TWO_CORES, ("dropout.json",)),
        Row("cpu_step", "2026-11-26", f"{EPYC}; {XEON}", ("cpu_steps.md", "cpu_step.json", "one_copy_step.json")),
        Row("step_time", "2026-11-21", TWO_CORES, ("step_time.json",)),
        Row("overhead", "2026-11-26", XEON, ("cpu_steps.md",)),
        Row("memory_format", "2026-11-26", XEON, ("memory_format.json", "memory_format_step.json")),
        Row(
            "unequal",
            "2026-11-30",
            TWO_CORES,
            ("unequal.md", "unequal.json", "unequal_predicted.md", "unequal_predicted.json"),
        ),
        Row("many_grains", "2026-11-23", TWO_CORES, ("many_grains.md", "many_grains.json")),
        Row("gpu", "2026-11-26", H200, ("gpu_steps.md", "gpu/README.md", "gpu/earlier.json"), "scripts/gpu"),
        Row("compression", "2026-11-22", TWO_CORES, ("compression.md", "compression.json")),
        Row("parameter_server", "2026-11-22", TWO_CORES, ("parameter_server.md", "parameter_server.json")),
        Row("two_hosts", "2026-11-22", "2 cores, two network namespaces, 1 Gbit/s"),
    ),
    "Start and recovery": (
        Row("start_up", "2026-11-22", EPYC, ("start_up.json",)),
        Row("engine_start", "2026-11-24", TWO_CORES, ("engines_first_step.md",)),
        Row(
            "recovery",
            "2026-11-24",
            TWO_CORES,
            ("recovery.md", "recovery_2.json", "recovery_4.json", "recovery_cost.json", "recovery_hosts.json"),
        ),
        Row("checkpoints", "2026-11-23", TWO_CORES, ("recovery.md", "decisions.md")),
        Row("one_copy_checkpoint", "2026-11-25", TWO_CORES, ("recovery.md", "decisions.md")),
        Row("chaos", "2026-11-24", TWO_CORES, ("faults.md",), "python -m benchmarks.chaos --mtbf 60"),
        Row("simulated", "2026-11-24", "simulated", ("faults.md",)),
    ),
    "Memory": (
        Row("sharded_memory", "2026-11-21", TWO_CORES, ("sharded_memory.md", "sharded_memory.json")),
        Row("one_copy_memory", "2026-11-24", TWO_CORES, ("cpu_steps.md",)),
    ),
    "Planner and doctor": (
        Row("questions", "2026-12-01", XEON, ("questions.md", "questions.json")),
        Row("emitted", "2026-11-29", TWO_CORES, ("emitted.md", "emitted.json")),
        Row(
            "published_experts", "2026-11-30", "none: the catalogue", ("published_experts.md", "published_experts.json")
        ),
        Row("plan_search", "2026-11-26", TWO_CORES, ("plan_search.json",)),
        Row("decoders", "2026-11-26", TWO_CORES, ("decoders.md",)),
        Row("small_steps", "2026-11-26", XEON, ("small_steps.md", "small_steps.csv")),
        Row("planted", "2026-11-23", TWO_CORES, ("planted.md",)),
    ),
    "The package itself": (Row("walks", "2026-11-28", TWO_CORES, ("walks/README.md", "walks/results.json")),),
}
OTHER = {  # beside pages, which have a title
    "faults.md": "faults that are tested; `python -m tests.faults.matrix` prints the table",
    "published.md": "predictions beside published steps; `python -m benchmarks.published`",
    "engines_wrong_set_ups.md": "messages of wrong set-ups of engines; `python -m tests.engines.wrong_table`",
    "report_pages.md": "size and loading time of reports in a browser; `tests/pages`",
    "collectives.md": "all-reduces of `shoal bench collectives` beside Gloo and MPI",
    "collectives_2.json": "all-reduces of `shoal bench collectives` on two ranks, 2026-11-22, AMD EPYC",
    "collectives_4.json": "the same on four ranks",
}


def source(benchmark: str) -> Path:
    """Return the file whose docstring has the benchmark's claim."""
    single = ROOT / "benchmarks" / f"{benchmark}.py"
    return single if single.exists() else ROOT / "benchmarks" / benchmark / "__main__.py"


def claim(benchmark: str) -> str:
    """Return the sentence after "Claim:" in the benchmark's docstring."""
    text = ast.get_docstring(ast.parse(source(benchmark).read_text(encoding="utf-8"))) or ""
    found = re.search(r"Claim: (.+?)(?:\.\s|\.?$)", text.replace("\n", " "))
    if found is None:
        raise ValueError(f"the docstring of {source(benchmark).relative_to(ROOT)} has no sentence after 'Claim:'")
    return found[1][:1].upper() + found[1][1:]


def others() -> dict[str, str]:
    """Return what is in each record without a row: of a page its title."""
    named = {name for rows in GROUPS.values() for row in rows for name in row.records}
    pages = {str(path.relative_to(RESULTS)): path for path in RESULTS.rglob("*.md") if path != PAGE}
    titles = {name: path.read_text(encoding="utf-8").split("\n", 1)[0] for name, path in pages.items()}
    return dict(sorted({**{n: t.removeprefix("# ") for n, t in titles.items() if n not in named}, **OTHER}.items()))


def page() -> str:
    """Return the index as Markdown."""
    lines = [
        "# What was measured",
        "",
        "Generated by `python -m benchmarks.index`. CPUs are those of virtual machines. Each record has its",
        "versions. Run a command in a checkout: it writes its records here.",
    ]
    for title, rows in GROUPS.items():
        lines += ["", f"## {title}", "", "| Claim | Last run | Command | Hardware | Records |", "|---|---|---|---|---|"]
        for row in rows:
            command = row.command or f"python -m benchmarks.{row.benchmark}"
            records = ", ".join(f"[{name}]({name})" for name in row.records) or "in the benchmark's docstring"
            lines.append(
                f"| {claim(row.benchmark)} | {row.last_run} | [`{command}`]"
                f"(../{source(row.benchmark).relative_to(ROOT / 'benchmarks')}) | {row.hardware} | {records} |"
            )
    lines += ["", "## Other records", "", *(f"- [{name}]({name}): {text}" for name, text in others().items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
