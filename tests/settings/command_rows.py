"""RUN_OPTIONS, VERIFY_OPTIONS and those of the other commands: each option of a command, and what was seen of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.settings.laboratory import Acts, Call, Ended, Refuses, Says, Table

PLAIN = Call()
BY_ITEM = Call(arguments=("--set", "change=by item"))
KEPT = PLAIN.with_("--checkpoint-every", "1", "--steps", "2")


def weights(ended: Ended) -> Any:
    """The hash of the weights at the end."""
    return ended.result["weights_sha256"]


def steps(ended: Ended) -> Any:
    """The steps of the whole run."""
    return ended.result["steps"]


def forwards(ended: Ended) -> Any:
    """The samples of the largest forward that had gradients."""
    return max(map(int, ended.told("forwards")))


def checkpoints(ended: Ended) -> Any:
    """The steps of which there is one."""
    return sorted(int(path.name[-8:]) for path in (ended.out / "checkpoints").glob("step-????????"))


def resumed(*arguments: str, after: Call = KEPT) -> Call:
    """A run that goes on."""
    return Call(arguments=("--resume", *arguments), after=after)


def read(path: Path) -> Any:
    """The JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def weights_in(folder: Path) -> Any:
    """The hash of the weights at the end of a run in another directory."""
    return read(folder / "result.json")["weights_sha256"]


# Settings by a file, and the same by `--set`.
BY_FILE: dict[str, Any] = {"files": {"half.toml": "lr = 0.5\n", "change.json": '{"change": "eval_data"}'}}
CONFIG = ("--config", "half.toml")

FROM_ONE = PLAIN.with_("--out", "other", "--init-from", "out", after=KEPT)
FROM_RENAMED = FROM_ONE.with_("--init-rename", "last.2.bias=last.3.bias")

MICRO = "--max-microbatch"

RUN_OPTIONS: Table = {
    "job": Acts(Call(job="gpt"), PLAIN, steps, 2),
    "job: no such function": Refuses(Call(job="jop"), "did you mean 'job'"),
    "--plan": Acts(Call(plan={"execution": {"exact": True}}), PLAIN, forwards, 2),
    "--plan: not there": Refuses(PLAIN.with_("--plan", "gone.toml"), "the file cannot be read"),
    "--devices": Refuses(PLAIN.with_("--devices", "100"), "100 data ranks for a job of grains=8"),
    "--devices: of another plan": Refuses(
        Call(plan={"layout": {"data": 2}}, arguments=("--devices", "3")), "the plan's degrees make a world of 2"
    ),
    "--devices: between two limits": Says(PLAIN.with_("--devices", "1:16"), "the planner chose one device", PLAIN),
    "--devices: under a launcher": Refuses(Call(arguments=("--devices", "3"), ranks=2), "WORLD_SIZE=2"),
    "--devices: with variables left over": Refuses(
        Call(
            arguments=("--devices", "2"),
            environment={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        ),
        "unset RANK",
    ),
    "--devices: of a run with other degrees": Says(
        Call(
            arguments=("--resume", "--devices", "1", "--steps", "4"),
            after=Call(plan={"layout": {"shard": 2}}, arguments=("--steps", "2")),
        ),
        "the run's layout, shard 2, ZeRO-3, becomes one device",
        resumed("--steps", "4"),
    ),
    "--exact": Acts(PLAIN.with_("--exact"), PLAIN, forwards, 2),
    "--exact: over a plan": Acts(
        Call(plan={"batch": {}}, arguments=("--exact",)), PLAIN, lambda ended: ended.plan["execution"]["exact"], True
    ),
    "--precision": Acts(
        PLAIN.with_("--precision", "bf16"), PLAIN, lambda ended: ended.plan["precision"]["compute"], "bfloat16"
    ),
    "--precision: over a plan": Acts(
        Call(plan={"precision": {"compute": "float16"}}, arguments=("--precision", "bf16")),
        PLAIN,
        lambda ended: ended.plan["precision"]["compute"],
        "bfloat16",
    ),
    "--precision: none such": Refuses(PLAIN.with_("--precision", "fp6"), "no such precision"),
    "--set": Acts(PLAIN.with_("--set", "lr=0.5"), PLAIN, weights),
    "--set: none such": Refuses(PLAIN.with_("--set", "lt=0.5"), "did you mean 'lr'"),
    "--set: twice": Acts(PLAIN.with_("--set", "lr=0.5", "--set", "steps=1"), PLAIN.with_("--set", "lr=0.5"), steps, 1),
    "--config": Acts(PLAIN.with_(*CONFIG, **BY_FILE), PLAIN, weights),
    "--config: another kind": Refuses(PLAIN.with_("--config", "half.ini"), "is YAML, TOML or JSON"),
    "--set: the same twice": Refuses(PLAIN.with_("--set", "lr=0.5", "--set", "lr=0.7"), "lr is set twice"),
    "--out": Acts(
        PLAIN.with_("--out", "elsewhere"), PLAIN, lambda ended: (ended.folder / "elsewhere/result.json").exists(), True
    ),
    "--step": Acts(
        PLAIN.with_("--step", "eager"), PLAIN, lambda ended: ended.result["trial"]["reason"], "--step eager"
    ),
    "--step: on a CPU": Refuses(PLAIN.with_("--step", "graph"), "a CUDA device"),
    "--step: none such": Refuses(PLAIN.with_("--step", "5"), "--steps 5"),
    "--step: of no run": Refuses(PLAIN.with_("--step", "gone.json"), "there is no such file"),
    "--step: turns of another run": Refuses(resumed("--step", "gone.json"), "has its own turns"),
    "--step: another one than a plan's": Refuses(
        Call(plan={"execution": {"compile": "none"}}, arguments=("--step", "compiled")), "the plan file has"
    ),
    "--shares": Acts(
        PLAIN.with_("--shares", "5,3", "--devices", "2"),
        PLAIN.with_("--devices", "2"),
        lambda ended: ended.plan["layout"]["shares"],
        [5, 3],
    ),
    "--shares: by speed": Says(PLAIN.with_("--shares", "by-speed"), "one rank computes all grains", PLAIN),
    "--shares: none such": Refuses(PLAIN.with_("--shares", "fast"), "write --shares by-speed"),
    "--shares: other than a plan's": Refuses(
        Call(plan={"layout": {"data": 2, "shares": [5, 3]}}, arguments=("--shares", "1,2")), "the plan file has"
    ),
    "--shares: by speed, stages": Refuses(
        Call(job="gpt", plan={"layout": {"pipeline": 2, "data": 1}}, arguments=("--shares", "by-speed")),
        "a stage waits for its neighbours",
    ),
    "--shares: by speed, ZeRO-3": Refuses(
        Call(plan={"layout": {"shard": 2, "data": 1}}, arguments=("--shares", "by-speed")),
        "ranks wait for each other within a forward",
    ),
    "--max-microbatch": Acts(PLAIN.with_(MICRO, "5"), PLAIN, forwards, 4),
    "--max-microbatch: smaller than a grain": Refuses(PLAIN.with_(MICRO, "1"), "Job(grains=16)"),
    "--max-microbatch: under a plan": Acts(
        Call(plan={"batch": {"grains_per_microbatch": 4}}, arguments=(MICRO, "4")),
        Call(plan={"batch": {"grains_per_microbatch": 4}}),
        forwards,
        4,
    ),
    "--max-microbatch: exact": Acts(
        PLAIN.with_(MICRO, "1", "--exact", "--set", "change=one sample a grain"), PLAIN, forwards, 1
    ),
    "--share-gpu": Says(PLAIN.with_("--share-gpu"), "--share-gpu: no effect, since torch sees no GPU", PLAIN),
    "--share-gpu: a graph": Refuses(
        Call(plan={"layout": {"data": 2}, "execution": {"cuda_graph": True}}, arguments=("--share-gpu",)),
        "exchange tensors through the host, which no graph captures",
    ),
    "--share-gpu: of the planner": Refuses(
        PLAIN.with_("--share-gpu", "--devices", "auto"), "expects a GPU for each process"
    ),
    "--workers": Acts(
        BY_ITEM.with_("--workers", "2"),
        BY_ITEM,
        lambda ended: sorted(set(ended.told("readers")) - {"rank"}),
        ["0", "1"],
    ),
    "--workers: of a stream": Says(
        PLAIN.with_("--set", "change=stream", "--workers", "2"), "data.workers = 2: no effect"
    ),
    "--workers: none over a plan": Acts(
        BY_ITEM.with_("--workers", "0", plan={"data": {"workers": 2}}),
        BY_ITEM.with_(plan={"data": {"workers": 2}}),
        lambda ended: sorted(set(ended.told("readers"))),
        ["rank"],
    ),
    "--steps": Acts(PLAIN.with_("--steps", "2"), PLAIN, steps, 2),
    "--steps: beyond the job's length": Says(PLAIN.with_("--steps", "6"), "6 steps, beyond the job's own 4", PLAIN),
    "--steps: in words": Refuses(PLAIN.with_("--steps", "two"), "--steps takes a whole number"),
    "--steps: done already": Says(resumed("--steps", "2"), "nothing is left to do"),
    "--resume": Acts(resumed("--steps", "4"), PLAIN, lambda ended: ended.result["resumed_from"], 2),
    "--resume: of nothing": Refuses(Call(arguments=("--resume",)), "--resume"),
    "--resume: without it": Refuses(Call(after=KEPT), "holds"),
    "--resume: other settings": Refuses(resumed("--set", "change=seed"), "the run to resume has"),
    "--resume: a longer job": Says(
        resumed("--set", "steps=5", "--steps", "5"),
        "length: 4 steps, 5 steps from here on",
        resumed("--steps", "4"),
    ),
    "--resume: another optimizer": Refuses(resumed("--set", "lr=0.5"), "the run to resume has"),
    "--resume: another precision": Says(resumed("--precision", "bf16", "--steps", "4"), "compute bfloat16"),
    "--resume: another mode": Says(resumed("--exact", "--steps", "4"), "exact: grain by grain"),
    "--resume: other microbatches": Acts(resumed(MICRO, "4", "--steps", "4"), resumed("--steps", "4"), forwards, 4),
    "--resume: a changed job": Says(
        Call(arguments=("--resume", "--steps", "4"), after=KEPT, environment={"SUBJECT": "change"}),
        "weight_decay = 0.1 of the optimizer has no effect on a run that goes on",
        resumed("--steps", "4"),
    ),
    "--resume: a changed rate": Acts(
        Call(arguments=("--resume", "--steps", "4"), after=KEPT, environment={"SUBJECT": "change"}),
        resumed("--steps", "4"),
        lambda ended: [record["learning_rate"] for record in ended.records],
        [0.1, 0.1, 0.02, 0.02],
    ),
    "--resume-if-exists": Acts(
        Call(arguments=("--resume-if-exists", "--steps", "4"), after=KEPT),
        PLAIN.with_("--resume-if-exists", "--steps", "4"),
        lambda ended: ended.result["resumed_from"],
        2,
    ),
    "--accept-changes": Says(
        resumed("--steps", "4", "--set", "change=seed", "--accept-changes"), "the job was changed, as accepted: seed = "
    ),
    "--accept-changes: without --resume": Refuses(PLAIN.with_("--accept-changes"), "add --resume"),
    "--checkpoint-every": Acts(
        PLAIN.with_("--checkpoint-every", "2", "--steps", "3"), PLAIN.with_("--steps", "3"), checkpoints, [2, 3]
    ),
    "--keep-checkpoints": Acts(KEPT.with_("--keep-checkpoints", "1"), KEPT, checkpoints, [2]),
    "--checkpoint-every: more than the steps": Acts(
        PLAIN.with_("--checkpoint-every", "9"), PLAIN.with_("--checkpoint-every", "1"), checkpoints, [4]
    ),
    "--max-restarts": Refuses(PLAIN.with_("--max-restarts", "-1"), "--max-restarts"),
    "--evaluate-every": Acts(
        PLAIN.with_("--evaluate-every", "2"),
        PLAIN,
        lambda ended: [record["step"] for record in ended.records if record["metrics"]],
        [2, 4],
    ),
    "--evaluate-every: more than the steps": Says(PLAIN.with_("--evaluate-every", "9"), "evaluat"),
    "--on": Refuses(PLAIN.with_("--on", "locl"), "did you mean 'local'?"),
    "--on: options of this host": Refuses(PLAIN.with_("--on", "local:x", "--dry-run"), "takes no options"),
    "--dry-run": Acts(
        PLAIN.with_("--dry-run", "--devices", "2"),
        PLAIN,
        lambda ended: (ended.said.count(" WORLD_SIZE=2 "), (ended.out / "job.json").exists()),
        (2, False),
    ),
    "--require-certificate": Refuses(PLAIN.with_("--require-certificate", "gone.json"), "no certificate"),
    "--track": Refuses(PLAIN.with_("--track", "paper"), "trackers are tensorboard, mlflow, wandb, trackio"),
    "--bad-samples": Acts(
        PLAIN.with_("--set", "change=a bad sample", "--bad-samples", "1"),
        PLAIN.with_("--set", "change=by item"),
        lambda ended: (
            [json.loads(line)["kind"] for line in (ended.out / "events.jsonl").read_text().splitlines()]
            if (ended.out / "events.jsonl").exists()
            else []
        ),
        ["samples"],
    ),
    "--bad-samples: none": Refuses(PLAIN.with_("--set", "change=a bad sample"), "a bad sector"),
    "--bad-samples: of a stream": Says(
        PLAIN.with_("--set", "change=stream", "--bad-samples", "2"), "a stream has no other sample", PLAIN
    ),
    "--bad-samples: with servers": Refuses(
        Call(plan={"layout": {"data": 2}, "server": {"mode": "synchronous"}}, arguments=("--bad-samples", "2")),
        "workers compute parts of different steps",
    ),
    "--check-replicas": Acts(
        PLAIN.with_("--check-replicas", "2", "--devices", "2"),
        PLAIN.with_("--devices", "2"),
        lambda ended: read(ended.out / "job.json")["check_replicas"],
        2,
    ),
    "--check-replicas: one rank": Says(PLAIN.with_("--check-replicas", "2"), "no two ranks have the same", PLAIN),
    "--trace": Acts(
        PLAIN.with_("--trace", "2-3"), PLAIN, lambda ended: (ended.out / "trace-2-3.json.gz").exists(), True
    ),
    "--trace: in words": Refuses(PLAIN.with_("--trace", "second"), "--trace takes a step"),
    "--trace: with servers": Refuses(
        Call(plan={"layout": {"data": 2}, "server": {"mode": "synchronous"}}, arguments=("--trace", "2")),
        "workers compute parts of different steps",
    ),
    "--trace: never trained": Says(PLAIN.with_("--trace", "90"), "--trace 90: no such step was trained"),
    "--init-from": Acts(
        FROM_ONE, PLAIN.with_("--out", "other", after=KEPT), lambda ended: weights_in(ended.folder / "other")
    ),
    "--init-from: nothing there": Refuses(PLAIN.with_("--init-from", "gone"), "there is no such file or folder"),
    "--init-from: no weights": Refuses(PLAIN.with_("--init-from", "."), "no checkpoint is there"),
    "--init-from: another model": Refuses(FROM_ONE.with_(job="gpt"), "missing in the checkpoint: "),
    "--init-from: with --resume": Refuses(resumed("--init-from", "out"), "a run that goes on has its own weights"),
    "--init-allow": Acts(
        FROM_RENAMED.with_("--init-allow", "missing,unexpected"),
        FROM_ONE,
        lambda ended: len(read(ended.folder / "other/job.json")["initial_weights"]["missing"]),
        1,
    ),
    "--init-allow: none such": Refuses(FROM_ONE.with_("--init-allow", "all"), "missing, unexpected, mismatched"),
    "--init-allow: alone": Refuses(PLAIN.with_("--init-allow", "missing"), "add --init-from"),
    "--init-rename": Refuses(FROM_RENAMED, "missing in the checkpoint: "),
    "--init-rename: no such prefix": Refuses(FROM_ONE.with_("--init-rename", "gone=new"), "no name there begins so"),
    "--init-rename: in words": Refuses(FROM_ONE.with_("--init-rename", "gone"), "OLD=NEW"),
    "--init-rename: alone": Refuses(PLAIN.with_("--init-rename", "a=b"), "add --init-from"),
    "--no-telemetry": Acts(
        PLAIN.with_("--no-telemetry"), PLAIN, lambda ended: (ended.out / "records.jsonl").exists(), False
    ),
    "--no-source": Acts(PLAIN.with_("--no-source"), PLAIN, lambda ended: (ended.out / "source").exists(), False),
    "--private": Acts(PLAIN.with_("--private"), PLAIN, lambda ended: ended.out.stat().st_mode & 0o077, 0),
    "--records": Acts(
        PLAIN.with_("--records", "all"), PLAIN, lambda ended: read(ended.out / "job.json")["records"], "all"
    ),
    "--records: another word": Refuses(PLAIN.with_("--records", "some"), "--records takes blocks or all"),
    "--layout": Acts(
        PLAIN.with_("--layout", "data=2"), PLAIN, lambda ended: read(ended.out / "result.json")["world_size"], 2
    ),
    "--layout: no such axis": Refuses(PLAIN.with_("--layout", "dta=2"), "no axis is called dta"),
    "--layout: beside a plan": Refuses(PLAIN.with_("--layout", "data=2", "--plan", "auto"), "each of them is a plan"),
    "--cluster": Refuses(PLAIN.with_("--cluster", "2xcpu"), "only the planner asks for it"),
    "--verify": Acts(PLAIN.with_("--verify"), PLAIN, lambda ended: "verified" in ended.said, True),
}

# A verification takes a second or two: several options are seen in one.
VERIFIED = Call("verify", arguments=("--devices", "2", "--steps", "1"))


def certificate(ended: Ended) -> Any:
    """The document that it wrote."""
    found: dict[str, Any] = json.loads((ended.out / "certificate.json").read_text(encoding="utf-8"))
    return found


def certified(*keys: str) -> Any:
    """A value in the certificate."""

    def see(ended: Ended) -> Any:
        found = certificate(ended)
        for key in keys:
            found = found[key]
        return found

    return see


ALL = Call(
    "verify",
    arguments=(
        *("--devices", "3", "--steps", "2", "--exact", "--precision", "bf16", *CONFIG),
        *(MICRO, "7", "--workers", "1", "--set", "change=by item"),
    ),
    **BY_FILE,
)

LOOP = """import os, sys, torch
from torch import nn
net = nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    inputs = torch.ones(int(sys.argv[1]), 2) * (2 * step + int(os.environ.get("RANK", 0)))
    optimizer.zero_grad(), net(inputs).mean().backward(), optimizer.step()
"""
LOOPING = Call(
    "verify",
    ("--script", "loop.py {batch}", "--devices", "1", "--steps", "2"),
    job=None,
    files={"loop.py": LOOP},
)


def observed(*keys: str) -> Any:
    """A value in script.json."""

    def see(ended: Ended) -> Any:
        value = read(ended.out / "script.json")
        for key in keys:
            value = value[key]
        return value

    return see


VERIFY_OPTIONS: Table = {
    "job": Acts(Call("verify", ("--steps", "1", "--devices", "2"), job="gpt"), VERIFIED, certified("job", "function")),
    "--plan": Acts(
        Call("verify", ("--steps", "1"), plan={"layout": {"data": 2}, "batch": {"grains_per_microbatch": 2}}),
        VERIFIED,
        certified("plan", "batch", "grains_per_microbatch"),
        2,
    ),
    "--plan: what is left out": Says(
        Call("verify", ("--steps", "1"), plan={"layout": {"data": 2}, "collectives": {"compression": "int8"}}),
        "compress",
        VERIFIED,
    ),
    "--plan: ahead": Refuses(
        Call("verify", plan={"layout": {"data": 2}, "server": {"mode": "asynchronous"}}), "older parameters"
    ),
    "--plan: without effect": Says(
        Call("verify", ("--steps", "1"), plan={"layout": {"data": 2}, "pipeline": {"schedule": "gpipe"}}),
        'pipeline.schedule = "gpipe": no effect',
    ),
    "--devices": Acts(ALL, VERIFIED, certified("plan", "layout", "data"), 3),
    "--exact": Acts(ALL, VERIFIED, certified("plan", "execution", "exact"), True),
    "--precision": Acts(ALL, VERIFIED, certified("plan", "precision", "compute"), "bfloat16"),
    "--set": Acts(ALL, VERIFIED, lambda ended: certificate(ended)["job"]["settings"]["change"], "by item"),
    "--config": Acts(ALL, VERIFIED, lambda ended: certificate(ended)["job"]["settings"]["lr"], 0.5),
    "--share-gpu": Says(VERIFIED.with_("--share-gpu"), "--share-gpu: no effect, since torch sees no GPU", VERIFIED),
    "--steps": Acts(ALL, VERIFIED, certified("steps"), 2),
    "--steps: in words": Refuses(VERIFIED.with_("--steps", "all"), "--steps takes a whole number"),
    "--steps: beyond the job's length": Says(
        Call("verify", ("--devices", "2", "--steps", "3", "--set", "steps=1")), "the job ends after 1", VERIFIED
    ),
    "--out": Acts(
        VERIFIED.with_("--out", "elsewhere"),
        VERIFIED,
        lambda ended: (ended.folder / "elsewhere/certificate.json").exists(),
        True,
    ),
    "--out: of a run": Refuses(Call("verify", after=PLAIN), "holds"),
    "--script": Says(LOOPING, "no divergence", VERIFIED),
    "--script: beside a job": Refuses(replace(LOOPING, job="job"), "a job and a script"),
    "--batch": Acts(LOOPING.with_("--batch", "4"), LOOPING, observed("script", "batch"), 4),
    "--batch: of a job": Refuses(VERIFIED.with_("--batch", "4"), "--batch and the job"),
    "--launcher": Acts(LOOPING.with_("--launcher", "python"), LOOPING, observed("script", "launcher"), "python"),
    "--launcher: another": Refuses(LOOPING.with_("--launcher", "mpirun"), "invalid choice"),
    "--cpu": Acts(LOOPING.with_("--cpu"), LOOPING, observed("cpu"), True),
    "--cpu: of a job": Refuses(VERIFIED.with_("--cpu"), "--cpu and the job"),
    "--keep": Acts(LOOPING.with_("--keep"), LOOPING, lambda ended: (ended.out / "tensors").is_dir(), True),
    "--max-microbatch": Acts(
        VERIFIED.with_(MICRO, "3"), VERIFIED, certified("plan", "batch", "grains_per_microbatch"), 1
    ),
    "--max-microbatch: smaller than a grain": Refuses(VERIFIED.with_(MICRO, "1"), "Job(grains=16)"),
    "--workers": Acts(ALL, VERIFIED, certified("plan", "data", "workers"), 1),
}


def planned(*arguments: str, **changes: Any) -> Call:
    """A question to the planner about the perceptron."""
    return Call("plan", ("--cluster", "4xH100", *arguments), **changes)


ASKED = planned()


def table(ended: Ended) -> Any:
    """What it printed, without the seconds that the search itself took."""
    return re.sub(r"[0-9.]+ m?s", "", ended.said)


def written(name: str) -> Any:
    """Whether there is such a file."""
    return lambda ended: (ended.folder / name).exists()


PLANNED = replace(LOOPING, command="plan", arguments=("--script", "loop.py {batch}"))
PLAN_OPTIONS: Table = {
    "job": Acts(planned(job="gpt"), ASKED, table),
    "job: none": Refuses(Call("plan", job=None), "there is nothing to plan"),
    "--cluster": Acts(Call("plan", ("--cluster", "2xA100")), ASKED, table),
    "--cluster: none such": Refuses(Call("plan", ("--cluster", "8xH1OO")), "H100"),
    "--aim": Acts(planned("--more", "--aim", "cheapest"), planned("--more"), table),
    "--aim: none such": Refuses(planned("--aim", "quickest"), "fastest"),
    "--max-devices": Acts(planned("--max-devices", "1"), ASKED, table),
    "--max-devices: none": Refuses(planned("--max-devices", "0"), "a whole number"),
    "--script": Acts(PLANNED, ASKED, table),
    "--script: beside a job": Refuses(replace(PLANNED, job="job"), "a job and a script"),
    "--script: with settings": Refuses(PLANNED.with_("--set", "lr=1"), "--script with --set"),
    "--launcher": Acts(PLANNED.with_("--launcher", "python"), ASKED, table),
    "--launcher: of a job": Refuses(planned("--launcher", "python"), "--launcher and the job"),
    "--cpu": Acts(PLANNED.with_("--cpu"), ASKED, table),
    "--cpu: of a job": Refuses(planned("--cpu"), "--cpu and the job"),
    "--seq": Refuses(planned("--seq", "8"), "a job file says its own"),
    "--batch": Refuses(planned("--batch", "8"), "a job file says its own"),
    "--precision": Acts(planned("--precision", "bf16"), ASKED, table),
    "--set": Acts(planned("--set", "change=global_batch"), ASKED, table),
    "--config": Refuses(planned("--config", "gone.toml"), "it cannot be read"),
    "--mtbf": Acts(planned("--more", "--mtbf", "0.001"), planned("--more"), table),
    "--price": Acts(planned("--price", "2.5"), ASKED, table),
    "--price: none": Refuses(planned("--price", "0"), "a number of US dollars above zero"),
    "--tokens": Refuses(planned("--tokens", "1e9"), "no sequences of integer tokens"),
    "--samples": Acts(planned("--samples", "1e9"), ASKED, table),
    "--samples: and tokens": Refuses(planned("--samples", "1e9", "--tokens", "1e9"), "each of them is the length"),
    "--output": Acts(planned("-o", "found.toml"), ASKED, written("found.toml"), True),
    "--output: a folder": Refuses(planned("-o", "."), "that is a folder"),
    "--more": Acts(planned("--more"), ASKED, table),
    "--emit": Acts(planned("--emit", "deepspeed=ds.json"), ASKED, written("ds.json"), True),
    "--emit: none such": Refuses(planned("--emit", "deepsped"), "no configuration of that name"),
    "--emit: grains of two sizes": Refuses(
        planned("--emit", "deepspeed", "--set", "change=uneven grains"), "give the job grains=6"
    ),
    "--emit: a folder": Refuses(planned("--emit", "deepspeed=."), "that is a folder"),
    "--html": Acts(planned("--html", "page.html"), ASKED, written("page.html"), True),
    "--learn": Refuses(Call("plan", ("--learn", "gone"), job=None), "gone"),
    "--learn: with a job": Refuses(Call("plan", ("--learn", "gone")), "--learn gone with JOBFILE"),
    **{
        f"--learn: with {option}": Refuses(Call("plan", ("--learn", "gone", option, given), job=None), f"with {option}")
        for option, given in {
            "--cluster": "8xH100",
            "--aim": "cheapest",
            "--max-devices": "2",
            "--seq": "8",
            "--batch": "8",
            "--precision": "bf16",
            "--set": "lr=1",
            "--config": "a.toml",
            "--mtbf": "9",
            "--price": "2",
            "--tokens": "1e9",
            "--samples": "1e9",
            "--output": "plan.toml",
            "--html": "page.html",
            "--emit": "deepspeed",
        }.items()
    },
}


def export(*arguments: str, after: Call = KEPT) -> Call:
    """Weights of a run of two checkpoints."""
    return Call("export", ("out", *arguments), job=None, after=after)


def files(folder: str) -> Any:
    """The files in a folder, with their sizes."""
    return lambda ended: {path.name: path.stat().st_size for path in sorted((ended.folder / folder).glob("*"))}


def dtypes(ended: Ended) -> Any:
    """Those in the header of the file."""
    with (ended.folder / "found/model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def content(ended: Ended) -> Any:
    """Of the file."""
    return (ended.folder / "found/model.safetensors").read_bytes()


EXPORTED = export("-o", "found")

AVERAGED_RUN = KEPT.with_("--set", "change=callbacks")
AVERAGED = export("-o", "found", "--ema", after=AVERAGED_RUN)

EXPORT_OPTIONS: Table = {
    "run": Refuses(Call("export", ("gone",), job=None), "there is no such folder"),
    "--output": Acts(EXPORTED, export(), lambda ended: (ended.folder / "found/model.safetensors").exists(), True),
    "--output: a folder with files": Refuses(export("-o", "out"), "nothing is overwritten"),
    "--step": Acts(export("-o", "found", "--step", "1"), EXPORTED, content),
    "--ema": Acts(AVERAGED, export("-o", "found", after=AVERAGED_RUN), content),
    "--ema: of a run without": Refuses(export("--ema"), "no average of the weights is there"),
    "--step: best of none": Refuses(export("--step", "best"), "no checkpoint is kept as the best"),
    "--step: of none": Refuses(export("--step", "7"), "there are checkpoints of the steps 1, 2"),
    "--step: in words": Refuses(export("--step", "first"), "--step takes last, best, or the number"),
    "--max-shard-size": Acts(
        export("-o", "found", "--max-shard-size", "0.5KB"),
        EXPORTED,
        lambda ended: (ended.folder / "found/model.safetensors.index.json").exists(),
        True,
    ),
    "--max-shard-size: none": Refuses(export("--max-shard-size", "0"), "--max-shard-size takes a number of bytes"),
    "--dtype": Acts(export("-o", "found", "--dtype", "bfloat16"), EXPORTED, dtypes, {"BF16"}),
    "--dtype: none such": Refuses(export("--dtype", "int4"), "int4"),
    "--tokenizer": Acts(
        export("-o", "found", "--tokenizer", ".", after=KEPT).with_(files={"tokenizer.json": "{}"}),
        EXPORTED,
        lambda ended: "tokenizer.json" in files("found")(ended),
        True,
    ),
    "--tokenizer: none there": Refuses(export("--tokenizer", "out"), "it has none of tokenizer.json"),
}


def evaluate(*arguments: str, **changes: Any) -> Call:
    """The evaluation of a run of two checkpoints."""
    return Call("evaluate", ("out", *arguments), **{"after": KEPT, **changes})


def said(ended: Ended) -> Any:
    """What it printed."""
    return ended.said


EVALUATED = evaluate()

EVALUATE_OPTIONS: Table = {
    "job": Refuses(evaluate(job="gpt"), "a checkpoint of another model"),
    "run": Refuses(evaluate(after=None), "there is no such folder"),
    "--step": Acts(evaluate("--step", "1"), EVALUATED, said),
    "--ema": Acts(evaluate("--ema", after=AVERAGED_RUN), evaluate(after=AVERAGED_RUN), said),
    "--ema: of a run without": Refuses(evaluate("--ema"), "no average of the weights is there"),
    "--devices": Acts(evaluate("--devices", "2"), EVALUATED, lambda ended: "data 2" in ended.said, True),
    "--devices: too many": Refuses(evaluate("--devices", "9"), "9 data ranks for a job of grains=8"),
    "--set": Acts(evaluate("--set", "change=eval_data"), EVALUATED, lambda ended: "11 samples" in ended.said, True),
    "--config": Acts(
        evaluate("--config", "change.json", **BY_FILE), EVALUATED, lambda ended: "11 samples" in ended.said, True
    ),
    "--set: nothing to evaluate": Refuses(evaluate("--set", "change=no eval_data"), "the job has no eval_data"),
    "--json": Acts(evaluate("--json"), EVALUATED, lambda ended: '"samples": 21' in ended.said, True),
}


def predict(*arguments: str, **changes: Any) -> Call:
    """The predictions of a run of two checkpoints."""
    return Call("predict", ("out", *arguments), **{"after": KEPT, **changes})


def rows(ended: Ended) -> Any:
    """Sum and shape of the outputs that were written, by name."""
    import numpy as np

    ended.expect_done()
    arrays = np.load(ended.out / "predictions.npz")
    return {name: (arrays[name].shape, float(arrays[name].sum())) for name in arrays.files}


PREDICTED = predict()

PREDICT_OPTIONS: Table = {
    "job": Refuses(predict(job="gpt"), "a checkpoint of another model"),
    "run": Refuses(predict(after=None), "there is no such folder"),
    "--output": Acts(
        predict("-o", "mine.safetensors"), PREDICTED, lambda ended: (ended.folder / "mine.safetensors").exists(), True
    ),
    "--output: another kind": Refuses(predict("-o", "mine.csv"), "written as .npz or .safetensors"),
    "--output: a file that is there": Refuses(predict("-o", "out/job.json"), "written as .npz or .safetensors"),
    "--data": Acts(predict("--data", "train"), PREDICTED, lambda ended: rows(ended)["ids"][0], (64,)),
    "--data: one of several sets": Acts(
        predict("--data", "noisy", "--set", "change=several sets"),
        PREDICTED,
        lambda ended: rows(ended)["ids"][0],
        (11,),
    ),
    "--data: none such": Refuses(predict("--data", "others"), "the job has eval, train"),
    "--step": Acts(predict("--step", "1"), PREDICTED, rows),
    "--ema": Acts(predict("--ema", after=AVERAGED_RUN), predict(after=AVERAGED_RUN), rows),
    "--devices": Acts(
        predict("--devices", "2"), PREDICTED, lambda ended: (ended.out / "logs" / "rank-1.txt").exists(), True
    ),
    "--devices: too many": Refuses(predict("--devices", "9"), "9 data ranks for a job of grains=8"),
    "--set": Acts(predict("--set", "change=eval_data"), PREDICTED, lambda ended: rows(ended)["ids"][0], (11,)),
    "--config": Acts(
        predict("--config", "change.json", **BY_FILE), PREDICTED, lambda ended: rows(ended)["ids"][0], (11,)
    ),
    "--set: no data": Refuses(predict("--set", "change=no eval_data"), "write --data train"),
}


def report(*arguments: str, **changes: Any) -> Call:
    """The report on a run."""
    return Call("report", ("out", *arguments), **{"after": KEPT, "job": None, **changes})


def watch(*arguments: str) -> Call:
    """The terminal's view of a run that has ended."""
    return Call("watch", ("out", *arguments), after=KEPT, job=None)


REPORT_OPTIONS: Table = {
    "runs": Refuses(report(after=None), "no run began there"),
    "--json": Acts(report("--json"), report(), lambda ended: '"wall": {' in ended.said, True),
    "--output": Acts(report("-o", "found.html"), report(), written("found.html"), True),
    "--output: no such folder": Refuses(report("-o", "no/found.html"), "html conflicts with: it cannot be written"),
}


def runs(*arguments: str) -> Call:
    """What is done with a folder of runs."""
    return Call("runs", arguments, after=KEPT, job=None)


RUNS_OPTIONS: Table = {
    "words": Refuses(runs("show", "gone"), "no run began there"),
    "words: none such": Refuses(runs("remove", "out"), "remove is none of list, compare"),
    "--sort": Refuses(runs(".", "--sort", "colour"), "no column is called colour"),
    "--filter": Acts(runs(".", "--filter", "state=failed"), runs("."), lambda ended: "let through" in ended.said, True),
    "--keep-best": Refuses(runs("prune", ".", "--keep-best", "0"), "a whole number of at least 1"),
    "--metric": Refuses(runs("prune", ".", "--keep-best", "1", "--metric", "loss"), "which value is best"),
    "--yes": Refuses(runs("--yes"), "--yes is for delete and prune"),
    "--json": Acts(runs(".", "--json"), runs("."), lambda ended: ended.said.startswith("["), True),
}

RESIZE_OPTIONS: Table = {
    "run": Refuses(Call("resize", ("gone", "2"), job=None), "no run began there"),
    # Of a run that trains: tests/faults/test_resize.py.
    "devices": Refuses(Call("resize", ("out", "2"), after=KEPT, job=None), "no run trains there now"),
    "devices: none": Refuses(Call("resize", ("out", "0"), after=KEPT, job=None), "a whole number of at least 1"),
}

WATCH_OPTIONS: Table = {
    "run": Refuses(Call("watch", ("gone",), job=None), "no run began there"),
    "--once": Acts(watch("--once"), watch(), lambda ended: "wall clock" in ended.said, True),
    "--openmetrics": Acts(watch("--openmetrics", "found.prom"), watch(), written("found.prom"), True),
    "--openmetrics: no such folder": Refuses(watch("--openmetrics", "no/found.prom"), "it cannot be written"),
}


LONGER = PLAIN.with_("--steps", "8")


def doctor(*arguments: str, after: Call | None = LONGER) -> Call:
    """An examination of a run."""
    return Call("doctor", ("out", *arguments), job=None, after=after)


CLOCKED = Call(
    "doctor",
    ("--script", "loop.py {batch}", "--devices", "1", "--steps", "12"),
    job=None,
    files={"loop.py": LOOP.replace("range(3)", "range(12)")},
)


def diagnosed(*keys: str) -> Any:
    """A value in doctor.json."""

    def see(ended: Ended) -> Any:
        value = read(ended.folder / "runs/loop-doctor/doctor.json")
        for key in keys:
            value = value[key]
        return value

    return see


DOCTOR_OPTIONS: Table = {
    "run": Refuses(doctor(after=None), "no run began there"),
    "run: too short": Refuses(doctor(after=PLAIN.with_("--steps", "2")), "fewer than four steps"),
    "--job": Refuses(doctor("--try"), "add --job"),
    "--job: of the machine": Refuses(Call("doctor", ("--job", "job.py"), job=None), "is about a run"),
    "--set": Refuses(doctor("--set", "lr=0.1"), "no job is given"),
    "--try": Refuses(Call("doctor", ("--try",), job=None), "is about a run"),
    "--hosts": Refuses(Call("doctor", ("--hosts", "one,one"), job=None), "between two hosts or more"),
    "--hosts: of a run": Refuses(doctor("--hosts", "a,b", after=None), "a run is given"),
    "--steps": Refuses(doctor("--steps", "3"), "--steps takes a whole number of at least 10"),
    "--folder": Acts(
        Call("doctor", ("--json", "--folder", ".."), job=None),
        Call("doctor", ("--json",), job=None),
        lambda ended: '"seen": ".. (' in ended.said,
        True,
    ),
    "--json": Acts(doctor("--json"), doctor(), lambda ended: '"causes": [' in ended.said, True),
    "--script": Says(CLOCKED, "waiting for data"),
    "--script: beside a run": Refuses(replace(CLOCKED, arguments=(*CLOCKED.arguments, "out")), "a run and a script"),
    "--script: with --try": Refuses(CLOCKED.with_("--try"), "--script with --try"),
    "--batch": Acts(CLOCKED.with_("--batch", "4"), CLOCKED, diagnosed("script", "batch"), 4),
    "--batch: of a run": Refuses(doctor("--batch", "4"), "--batch and the run"),
    "--launcher": Acts(CLOCKED.with_("--launcher", "python"), CLOCKED, diagnosed("script", "launcher"), "python"),
    "--cpu": Acts(CLOCKED.with_("--cpu"), CLOCKED, diagnosed("cpu"), True),
    "--devices": Acts(CLOCKED.with_("--devices", "2"), CLOCKED, diagnosed("devices"), 2),
    "--out": Acts(
        CLOCKED.with_("--out", "elsewhere"), CLOCKED, lambda ended: (ended.folder / "elsewhere").is_dir(), True
    ),
    "--out: of a machine": Refuses(Call("doctor", ("--out", "elsewhere"), job=None), "--out and no run"),
}


def bench(*arguments: str) -> Call:
    """A measurement of this machine."""
    return Call("bench", arguments, job=None)


COMPARED = bench("collectives", "--ranks", "2", "--sizes", "1K", "-o", "found.json")

BENCH_OPTIONS: Table = {
    "what": Acts(COMPARED, bench("collectives", "--ranks", "2", "--sizes", "1K"), written("found.json"), True),
    "what: none such": Refuses(bench("colectives"), "colectives"),
    "--ranks": Refuses(bench("--ranks", "0"), "no number of processes"),
    "--ranks: one": Refuses(bench("collectives", "--ranks", "1"), "a collective needs at least two processes"),
    "--sizes": Refuses(bench("collectives", "--sizes", "1X", "--ranks", "2"), "1X"),
    "--sizes: of a machine": Refuses(bench("--sizes", "1K"), "--sizes with shoal bench machine"),
    "--quick: of collectives": Refuses(bench("collectives", "--quick"), "--quick with shoal bench collectives"),
    "--quick": Acts(bench("--quick", "--ranks", "1", "--out", "found.toml"), COMPARED, written("found.toml"), True),
    "--out": Refuses(bench("-o", "no/such/folder.toml"), "is no directory"),
}
# Each of these takes the machine for some seconds.
SLOW = {"what", "--quick"}
