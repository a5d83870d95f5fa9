"""Claim: `shoal verify --script` finds all nineteen silent bugs of released frameworks that could be repeated.

One of the sixteen mended releases ends as "nothing seen".
Each row is a release with a bug and a later one without, in environments of their own over one torch, and a training
of a few lines that has the bug. Each release runs twice on two ranks: under `shoal verify --script`, and beside a loop
by hand that computes the same gradients (`watch.py`). Only a row whose broken release also differs from the loop by
hand counts. Repeat with `python -m benchmarks.shipped [--environments DIR] [--only NAME ...] [--again]`. Environments
and answers are kept: a second run asks only for what is missing. `torch` is installed once, and each environment sees
it by a .pth file; each release takes about 100 MB beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "shipped.json"
PAGE = RESULTS.with_suffix(".md")
TORCH = "torch==2.13.0"
_SECONDS = 600


@dataclass(frozen=True)
class Bug:
    """A bug with a release that has it, a release without (None: the newest has it), and a training.

    `phases` are those in which shoal may place it.
    """

    name: str
    said: str
    broken: str
    mended: str | None
    training: str
    phases: tuple[str, ...]
    steps: int = 4


# What a release is installed with: the Accelerate of its days, the setuptools that still has pkg_resources.
PARTNERS = {
    "transformers==4.45.2": "accelerate==1.0.1",
    "transformers==4.46.2": "accelerate==1.1.1",
    "transformers==4.46.3": "accelerate==1.1.1",
    "transformers==4.47.1": "accelerate==1.1.1",
    "transformers==4.48.0": "accelerate==1.2.1",
    "transformers==4.48.3": "accelerate==1.2.1",
    "transformers==4.49.0": "accelerate==1.6.0",
    "transformers==4.51.3": "accelerate==1.6.0",
    "transformers==4.52.4": "accelerate==1.6.0",
    "transformers==4.53.3": "accelerate==1.6.0",
    "transformers==4.54.1": "accelerate==1.10.1",
    "transformers==5.0.0": "accelerate==1.12.0",
    "transformers==5.24.0": "accelerate==1.15.0",
    "lightning-fabric==2.0.1": "setuptools<80",
    "lightning-fabric==2.0.2": "setuptools<80",
    "pytorch-lightning==2.0.9": "setuptools<80",
    "pytorch-lightning==2.1.0": "setuptools<80",
}
BUGS = (
    Bug(
        "microbatch means",
        "accumulation averages microbatches, whatever their tokens",
        "transformers==4.45.2",
        "transformers==4.46.3",
        "trainer.py --model llama",
        ("loss",),
    ),
    Bug(
        "no synchronisation",
        "the last microbatch runs under no_sync: gradients are never reduced",
        "transformers==4.46.2",
        "transformers==4.46.3",
        "trainer.py --model own --whole --accumulate 1",
        ("reduction",),
    ),
    Bug(
        "sum over microbatches",
        "the loss of a model without loss arguments is not divided by the microbatches",
        "transformers==4.47.1",
        "transformers==4.48.3",
        "trainer.py --model own --whole",
        ("loss",),
    ),
    Bug(
        "count not passed on",
        "the model gets no count of tokens, and nothing divides by the microbatches",
        "transformers==4.48.0",
        "transformers==4.48.3",
        "trainer.py --model llama",
        ("loss",),
    ),
    Bug(
        "own loss divided twice",
        "with compute_loss_func the loss is divided by the ranks once more",
        "transformers==4.48.3",
        "transformers==4.49.0",
        "trainer.py --model own --own-loss --batch {batch}",
        ("loss",),
    ),
    Bug(
        "last batches of an epoch",
        "the last update of an epoch counts its microbatches by samples; they leak into the next epoch",
        "transformers==4.51.3",
        "transformers==4.52.4",
        "trainer.py --model llama --accumulate 4 --samples 54",
        ("loss", "reduction"),
    ),
    Bug(
        "tokens of a rank",
        "each rank divides by its own tokens",
        "transformers==4.53.3",
        "transformers==4.54.1",
        "trainer.py --model llama --default",
        ("loss",),
    ),
    Bug(
        "label smoothing",
        "the loss with label smoothing is multiplied by ranks and microbatches",
        "transformers==5.0.0",
        "transformers==5.24.0",
        "trainer.py --model llama --whole --smoothing 0.1 --batch {batch}",
        ("loss",),
    ),
    Bug(
        "first token",
        "GPT-2's loss is divided by labels that have none: the first of each row",
        "transformers==5.24.0",
        None,
        "trainer.py --model gpt2 --first",
        ("loss",),
    ),
    Bug(
        "BERT classifier",
        "the loss is multiplied by ranks and microbatches",
        "transformers==5.24.0",
        "transformers==4.54.1",
        "trainer.py --model classifier --batch {batch}",
        ("loss",),
    ),
    Bug(
        "BERT masked words",
        "the loss is multiplied by ranks and microbatches, and averages microbatches",
        "transformers==5.24.0",
        None,
        "trainer.py --model bert",
        ("loss",),
    ),
    Bug(
        "order of epochs",
        "each epoch has the same order",
        "accelerate==0.24.1",
        "accelerate==0.25.0",
        "loaders.py",
        ("data",),
        steps=6,
    ),
    Bug(
        "own sampler",
        "a sampler's set_epoch is not called with several ranks: each epoch has the same order",
        "accelerate==1.6.0",
        "accelerate==1.8.1",
        "loaders.py --sampler own",
        ("data",),
        steps=6,
    ),
    Bug(
        "own batches",
        "set_epoch of a batch sampler is not called with several ranks: each epoch has the same order",
        "accelerate==1.15.0",
        None,
        "loaders.py --sampler batches",
        ("data",),
        steps=6,
    ),
    Bug(
        "sampler in Fabric",
        "set_epoch of a wrapped sampler is not called: each epoch has the same order",
        "lightning-fabric==2.6.0",
        "lightning-fabric==2.6.1",
        "fabric.py --devices {devices}",
        ("data",),
        steps=6,
    ),
    Bug(
        "step in Fabric",
        "a module's training_step goes past DistributedDataParallel",
        "lightning-fabric==2.0.1",
        "lightning-fabric==2.0.2",
        "fabric.py --step --devices {devices}",
        ("reduction",),
    ),
    Bug(
        "static graph",
        "manual optimization under static_graph=True does not reduce gradients",
        "pytorch-lightning==2.5.6",
        "pytorch-lightning==2.6.0",
        "lightning.py --how static --devices {devices}",
        ("reduction",),
    ),
    Bug(
        "step without index",
        "a training_step without batch_idx switches accumulation off",
        "pytorch-lightning==2.0.9",
        "pytorch-lightning==2.1.0",
        "lightning.py --how no-index --devices {devices}",
        ("backward",),
        steps=2,
    ),
    Bug(
        "validation while accumulating",
        "a validation between two microbatches erases their gradients",
        "pytorch-lightning==2.0.9",
        "pytorch-lightning==2.1.0",
        "lightning.py --how validated --devices {devices}",
        ("backward",),
        steps=2,
    ),
)
# Bugs without a row, with the reason.
NOT_TRIED = (
    "DeepSpeed before 0.15.2 accumulates wrongly under ZeRO-2 with offload: it is refused as offloaded.",
    "Lightning before 2.6.2 begins FSDP with mixed precision from weights in half precision.",
    "Lightning before 2.0.8 shares parameters between the processes of `ddp_spawn` on CPU.",
    "torch gives a DDP model that is moved to another device new parameters, which are not reduced: needs a GPU.",
    "torch before 2.10: other than the one torch that all environments share.",
    "Transformers 4.46.0 is no longer on PyPI.",
)


def interpreter_of(folder: Path, packages: tuple[str, ...]) -> Path:
    """Return the Python of an environment with some packages, which is made if it is not there."""
    environment = folder / "-".join(name.replace("==", "-").replace("<", "-") for name in packages)
    python = environment / "bin" / "python"
    if not (environment / "done").exists():
        print(f"environment        {environment}", flush=True)
        venv.create(environment, clear=True)
        if packages != (TORCH,):
            base = interpreter_of(folder, (TORCH,)).parents[1]
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            own = Path("lib", version, "site-packages")
            (environment / own / "torch.pth").write_text(f"{base / own}\n")
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *packages]
        subprocess.run([*command, "numpy"], check=True)
        (environment / "done").touch()
    return python


def verified(python: Path, bug: Bug) -> dict[str, Any]:
    """Return what `shoal verify --script` says of a training in an environment."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "shoal", "verify", "--script", f"{python} {HERE}/{bug.training}"]
        options = ["--devices", "2", "--batch", "4", "--steps", str(bug.steps), "--out", out]
        run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=_SECONDS)
        path = Path(out, "script.json")
        if not path.exists():
            return {"verdict": "did not run", "findings": [], "said": (run.stdout + run.stderr)[-1500:]}
        document = json.loads(path.read_text())
    kept = ("verdict", "coverage", "findings", "seconds", "libraries")
    return {name: document[name] for name in kept}


def compared(python: Path, bug: Bug) -> list[dict[str, float]]:
    """Return how far each gradient of a training is from that of a loop by hand; empty if it did not run."""
    with tempfile.TemporaryDirectory() as out, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        path = Path(out, "rows.json")
        common = {"SHIPPED": str(path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
        common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        sock.close()
        words = f"{HERE}/{bug.training}".format(batch=4, devices=2).split()
        ranks = [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        processes = [
            subprocess.Popen([python, *words], env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for own in ranks
        ]
        for process in processes:
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        return list(json.loads(path.read_text())) if path.exists() else []


def _release(package: str, folder: Path, bug: Bug) -> dict[str, Any]:
    python = interpreter_of(folder, tuple(filter(None, (package, PARTNERS.get(package)))))
    return {"release": package, "by_hand": compared(python, bug)[: bug.steps], **verified(python, bug)}


def finding_of(bug: Bug, release: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first finding of a release that may be the bug's: the first divergence, else a note of its phase."""
    findings = release["findings"]
    failing = [one for one in findings if one["fails"]]
    return failing[0] if failing else next((one for one in findings if one["phase"] in bug.phases), None)


def worst_of(release: dict[str, Any]) -> dict[str, float]:
    """Return the comparison by hand that is farthest from it."""
    return max(release["by_hand"], key=lambda row: row["error"], default={"ratio": 0.0, "error": 0.0})


def page(results: dict[str, Any]) -> str:
    """The table of results."""
    lines = [
        "# Bugs of releases, as they were shipped\n",
        "Two ranks on CPU, torch 2.13. *By hand*: the gradient's ratio to that of a loop by hand, and its distance "
        "from it, relative to its size, in the step that is farthest away. *Found* has the phase and step of the first "
        "divergence; a note is no divergence. Written by `python -m benchmarks.shipped`.\n",
        "| bug | broken | by hand | found | mended | by hand | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    shown = lambda one: f"{worst_of(one)['ratio']:.3g}, {worst_of(one)['error']:.2g}"  # noqa: E731
    count = caught = 0
    for bug in BUGS:
        row = results.get(bug.name)
        if row is None:
            continue
        broken, mended = row["broken"], row["mended"]
        finding = finding_of(bug, broken)
        if not broken["by_hand"] or worst_of(broken)["error"] < 0.01:
            continue
        count += 1
        placed = finding is not None and finding["phase"] in bug.phases
        caught += placed
        words = "**missed**" if finding is None else f"{finding['phase']}, step {finding['step']}: {finding['said']}"
        if finding is not None:
            words = words if finding["fails"] else f"note: {words}"
            words = words if placed else f"**wrong phase**: {words}"
        after = ["none yet", "", ""] if mended is None else [mended["release"], shown(mended), mended["verdict"]]
        cells = [f"{bug.name}: {bug.said}", broken["release"], shown(broken), words, *after]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\n{caught} of {count} bugs are found in their phase.\n\n## Not tried\n")
    lines += [f"- {bug.name} ({bug.broken})" for bug in BUGS if bug.name not in results]
    lines += [f"- {what}" for what in NOT_TRIED]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path.home() / ".cache" / "shoal" / "shipped"
    parser.add_argument("--environments", type=Path, default=default, help="folder of the environments")
    parser.add_argument("--only", nargs="*", default=[bug.name for bug in BUGS])
    parser.add_argument("--again", action="store_true", help="run what is answered already, too")
    given = parser.parse_args()
    folder = given.environments.absolute()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for bug in BUGS:
        if bug.name not in given.only or (bug.name in results and not given.again):
            continue
        results[bug.name] = {
            "training": bug.training,
            "broken": _release(bug.broken, folder, bug),
            "mended": _release(bug.mended, folder, bug) if bug.mended else None,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
        print(page({bug.name: results[bug.name]}).split("\n\n")[2], flush=True)


if __name__ == "__main__":
    main()
