"""The `shoal export` command: writes a checkpoint's weights to files for other programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch

from shoal.checkpoint.export import Exported, ExportFormat
from shoal.checkpoint.export import export as export_weights
from shoal.checkpoint.weights import CheckpointWeights, find, with_checkpoint
from shoal.cli.options import ExportOptions
from shoal.errors import CommandError, ExitCode
from shoal.runs.address import is_address
from shoal.runs.directory import RunDirectory

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(options: ExportOptions) -> ExitCode:
    """Export a checkpoint's weights and print the file names. Raises: ShoalError."""
    folder, summary, step = exported(options)
    which = f"step {step}{', averaged' if options.ema else ''}"
    print(f"exported {options.run} {which}: {summary.num_tensors} tensors, {summary.num_bytes:,} bytes")
    for name in summary.files:
        print(f"  {folder / name}")
    if summary.has_config:
        print("Transformers' from_pretrained reads this folder")
    if summary.adapter:
        print("the adapter alone: peft's PeftModel.from_pretrained(base, folder) reads it")
    return ExitCode.DONE


def exported(options: ExportOptions) -> tuple[Path, Exported, int]:
    """Export a checkpoint's weights. Return the folder, a description of it, and the step. Raises: ShoalError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)?", options.max_shard_size.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2] or "", 2**40)) if match else 0
    if size < 1:
        raise CommandError(
            given=f"--max-shard-size {options.max_shard_size}",
            conflict="--max-shard-size takes a number of bytes, with or without KB, MB, GB, KiB, MiB or GiB",
            remedy="write --max-shard-size 5GB, say",
        )
    form = ExportFormat(size, getattr(torch, options.dtype) if options.dtype else None)
    step, folder = step_of(options.step), output_of(options.run, options.output, "export")
    with with_checkpoint(options.run, step) as path:
        weights = CheckpointWeights(find(path, step), ema=options.ema)
        tokenizer = Path(options.tokenizer) if options.tokenizer else None
        summary = export_weights(weights, folder, form, config=run_of(path).model, tokenizer=tokenizer)
        return folder, summary, weights.step


def output_of(run: str, given: str | None, name: str) -> Path:
    """Return a command's output path: the given one, else `name` in the run directory or, for an address, here."""
    if given:
        return Path(given)
    return Path(name) if is_address(run) else Path(run) / name


def run_of(path: Path) -> RunDirectory:
    """Return the run directory at a path, or the one that contains the checkpoint or checkpoints at this path."""
    places = (path, path.absolute().parent, path.absolute().parent.parent)
    return RunDirectory(next((place for place in places if RunDirectory(place).job.exists()), path))


def step_of(text: str) -> int | Literal["last", "best"]:
    """Parse a step from the command line. Raises: CommandError."""
    if text in ("last", "best"):
        return "best" if text == "best" else "last"
    if text.isascii() and text.isdecimal():
        return int(text)
    raise CommandError(
        given=f"--step {text}",
        conflict="--step takes last, best, or the number of steps after which a checkpoint was taken",
        remedy="write --step last",
    )
