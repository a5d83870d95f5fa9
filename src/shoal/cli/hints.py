"""Suggestions for misspelt commands and options, from the options of the parsers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal.errors import nearest
from shoal.jobs.job_file import parameters_of

# Options of other tools by the equivalent options here. The first one that a command has is suggested.
_SAME: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--devices", "--max-devices"): (
        *("gpus", "ngpus", "n-gpus", "num-gpus", "nproc", "nproc-per-node", "np", "processes", "num-processes"),
        *("world-size", "num-devices", "ranks", "devices", "cpus"),
    ),
    ("--plan",): ("plan-file",),
    ("--config",): ("config-file", "config-path", "config-name", "cfg", "settings", "params", "hparams"),
    ("--out", "--output"): (
        *("output", "output-dir", "out", "out-dir", "save-dir", "run-dir", "rundir", "log-dir", "logdir", "workdir"),
        *("work-dir", "default-root-dir", "checkpoint-dir"),
    ),
    ("--precision",): ("dtype", "mixed-precision", "amp-dtype"),
    ("--workers",): ("num-workers", "dataloader-num-workers", "data-workers"),
    ("--steps",): ("max-steps", "num-steps", "iters", "iterations", "max-iters", "train-iters"),
    ("--resume",): ("resume-from-checkpoint", "resume-from", "resume-path", "ckpt-path", "load"),
    ("--checkpoint-every",): ("save-steps", "save-every", "save-interval", "checkpoint-interval", "save-freq"),
    ("--max-microbatch",): (
        *("micro-batch-size", "microbatch", "microbatch-size", "per-device-train-batch-size"),
        "per-device-batch-size",
    ),
    ("--exact",): ("deterministic", "reproducible", "bitwise"),
    ("--cluster",): ("hardware", "machine"),
}
# Flags of other tools that are values of --precision here.
_PRECISIONS = {
    "fp16": "fp16",
    "bf16": "bf16",
    "fp32": "fp32",
    "fp8": "fp8",
    "float16": "fp16",
    "bfloat16": "bf16",
    "amp": "bf16",
}
# Options of other tools for degrees, which are in a plan here.
_DEGREES = {
    **dict.fromkeys(("tp", "tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size"), "tensor"),
    **dict.fromkeys(("pp", "pipeline-parallel", "pipeline-parallel-size", "pipeline-model-parallel-size"), "pipeline"),
    **dict.fromkeys(("cp", "context-parallel", "context-parallel-size", "sequence-parallel-size"), "context"),
    **dict.fromkeys(("dp", "data-parallel", "data-parallel-size"), "data"),
    **dict.fromkeys(("fsdp", "zero", "zero-stage", "shard"), "shard"),
}
# Synonyms of settings that belong to a job. The first is the suggested parameter name.
_OF_JOBS: tuple[tuple[str, ...], ...] = (
    ("lr", "learning-rate", "learningrate"),
    ("epochs", "num-epochs", "max-epochs", "num-train-epochs", "epoch"),
    ("batch", "batch-size", "global-batch", "global-batch-size", "train-batch-size", "bs"),
    ("seed", "random-seed"),
    ("weight-decay", "wd"),
    ("warmup", "warmup-steps", "warmup-ratio"),
)
_COMMANDS = {**dict.fromkeys(("train", "fit", "launch", "start"), "run"), **dict.fromkeys(("check", "test"), "verify")}


def hints(command: str | None, options: Mapping[str, Sequence[str]], given: Sequence[str]) -> str:
    """Return suggestions for unknown words in `given`, to append to a remedy. `options`: options of each command."""
    if command is None or command not in options:
        word = next((word for word in given if not word.startswith("-")), "")
        meant = _COMMANDS.get(word)
        return f"; did you mean 'shoal {meant}'?" if meant else nearest(word, list(options))
    known = set(options[command])
    words = [
        number for number, word in enumerate(given) if word.startswith("--") and word.partition("=")[0] not in known
    ]
    return "".join(dict.fromkeys(_of(command, options, given, number) for number in words))


def meant(name: str, known: Sequence[str]) -> str:
    """Return a hint with the keyword of a Python call that another tool's word means, or the nearest keyword."""
    word = name.replace("_", "-").lower()
    for same, words in _SAME.items():
        own = (option[2:].replace("-", "_") for option in same)
        own_name = next((option for option in own if option in known), None)
        if word in words and own_name is not None:
            return f"; for {name} write {own_name}="
    return nearest(name, list(known))


def _of(command: str, options: Mapping[str, Sequence[str]], given: Sequence[str], number: int) -> str:
    option, equals, value = given[number].partition("=")
    if not equals:
        value = next((word for word in given[number + 1 : number + 2] if not word.startswith("-")), "")
    value = "" if value.endswith(".py") else value
    name = option.lstrip("-").replace("_", "-").lower()
    direct = next(_direct(command, options, name, value), "")
    if not direct:
        direct = next(_setting(given, name, value), "") if "--set" in options[command] else ""
    if direct:
        return f"; for {option} write {direct}"
    others = [f"shoal {other}" for other, own in options.items() if option in own]
    if others:
        return f"; {option} is an option of {' and '.join(others)}"
    return nearest(name, [known.lstrip("-") for known in options[command]]).replace("mean '", "mean '--")


def _direct(command: str, options: Mapping[str, Sequence[str]], name: str, value: str) -> Iterator[str]:
    own = options[command]
    for same, words in _SAME.items():
        if name in words:
            placeholder = "" if same[0] in ("--resume", "--exact") else f" {value or 'N'}"
            yield from (f"{option}{placeholder}" for option in same if option in own)
    if name in _PRECISIONS and "--precision" in own:
        yield f"--precision {_PRECISIONS[name]}"
    if name == "layout" and "--plan" in own:
        degrees = value.replace("=", " = ").replace(",", " and ")
        yield f"--plan FILE, in which [layout] says {degrees or 'data = N'}"
    if name in _DEGREES and "--plan" in own:
        degree = f"{_DEGREES[name]}={value if value.isdigit() else 'N'}"
        yield f"--layout {degree}" if "--layout" in own else f"--plan FILE, in which [layout] says {degree}"


def _setting(given: Sequence[str], name: str, value: str) -> Iterator[str]:
    """Yield `--set` hints for parameters of the job function that match a name."""
    words = (word for word in given[1:] if not word.startswith("-"))
    parameters = next((names for names in map(parameters_of, words) if names), [])
    alike = next((words for words in _OF_JOBS if name in words), ())
    wanted = [name, *alike]
    for parameter in parameters:
        if parameter.replace("_", "-") in wanted:
            yield f"--set {parameter}={value or 'VALUE'}"
    if alike:
        word = alike[0].replace("-", "_")
        yield f"it in the job: give the job function a parameter {word}, then --set {word}={value or 'VALUE'}"
