"""JOB and SESSION: every field of a Job and of a Session's training, and what was seen of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.settings.laboratory import Acts, Call, Ended, Refuses, Says, Table

PLAIN = Call()
TWO = Call(ranks=2)


def changed(name: str) -> Call:
    """The job with one change, see subject.py."""
    return PLAIN.with_("--set", f"change={name}")


def weights(ended: Ended) -> Any:
    """The hash of the weights at the end."""
    return ended.result["weights_sha256"]


def losses(ended: Ended) -> Any:
    """The loss of each step."""
    return [record["loss"] for record in ended.records]


def ids(ended: Ended) -> Any:
    """The digest of all samples that were read."""
    return ended.result["sample_digest"]


def metrics(ended: Ended) -> Any:
    """The names of what was evaluated."""
    return sorted(ended.result["metrics"])


def forwards(ended: Ended) -> Any:
    """The samples of the largest forward that had gradients."""
    return max(map(int, ended.told("forwards")))


def samples(ended: Ended) -> Any:
    """Steps and samples of the run."""
    return ended.result["steps"], ended.result["samples"]


NO_DATA = changed("no eval_data, no metrics")

JOB: Table = {
    "model": Acts(changed("model"), PLAIN, weights),
    "loss": Acts(changed("loss"), PLAIN, losses),
    "optimizer": Acts(changed("optimizer"), PLAIN, weights),
    "train_data": Acts(changed("train_data"), PLAIN, losses),
    "train_data: a stream": Acts(changed("stream"), PLAIN, losses),
    "global_batch": Acts(changed("global_batch"), PLAIN, samples, (4, 88)),
    "eval_data": Acts(changed("eval_data"), PLAIN, lambda ended: ended.result["eval_samples"], 11),
    "eval_data: several sets": Acts(
        changed("several sets"), PLAIN, metrics, ["clean/accuracy", "clean/loss", "noisy/accuracy", "noisy/loss"]
    ),
    "eval_data: without metrics": Acts(changed("no metrics"), NO_DATA, metrics, ["loss"]),
    "metrics": Acts(changed("metrics"), PLAIN, metrics, ["loss", "one"]),
    "metrics: without eval_data": Says(changed("no eval_data"), "metrics (accuracy) have no effect", NO_DATA),
    "metrics: named as what records count": Acts(
        changed("metrics named as what is counted"), PLAIN, metrics, ["loss", "samples", "step", "steps"]
    ),
    "metrics: named loss": Refuses(changed("metrics named loss"), "the job's own loss is reported under that name"),
    "metrics: several from one function": Acts(changed("metrics together"), PLAIN, metrics, ["loss", "one"]),
    "metrics: a name without value": Refuses(
        changed("metrics together, one lost"), "a dict with a value for each name"
    ),
    "metrics: a name twice": Refuses(changed("metrics twice"), "metrics with one twice"),
    "metrics: over all predictions": Acts(
        changed("metrics over all"), PLAIN, lambda ended: ended.result["metrics"].get("rows"), 42.0
    ),
    "grains": Acts(changed("grains"), PLAIN, lambda ended: "4 (4 samples each; as the job says)" in ended.said, True),
    "grains: more than samples": Says(changed("more grains than samples"), "grains = 64: no effect beyond 16", PLAIN),
    "grains: fewer than data ranks": Refuses(
        Call(arguments=("--set", "change=grains"), plan={"layout": {"data": 5}}), "5 data ranks for a job of grains=4"
    ),
    "length": Acts(changed("length"), PLAIN, samples, (2, 32)),
    "length: epochs": Acts(changed("length in epochs"), PLAIN, samples, (2, 32)),
    "length: samples": Acts(changed("length in samples"), PLAIN, samples, (3, 40)),
    "length: epochs of a stream": Refuses(changed("stream in epochs"), "a stream has no length, and so no epochs"),
    "schedule": Acts(changed("schedule"), PLAIN, lambda ended: [r["learning_rate"] for r in ended.records]),
    "schedule: torch's": Acts(
        changed("schedule of torch"), PLAIN, lambda ended: [r["learning_rate"] for r in ended.records]
    ),
    "schedule: of a metric": Refuses(changed("schedule of a metric"), "that follows from the step alone"),
    "clip_norm": Acts(changed("clip_norm"), PLAIN, weights),
    "clip_norm: and clip_value": Refuses(changed("clip_norm and clip_value"), "keep one of clip_norm and clip_value"),
    "clip_value": Acts(changed("clip_value"), PLAIN, weights),
    "seed": Acts(changed("seed"), PLAIN, ids),
    "collate": Acts(changed("collate by item"), changed("by item"), losses),
    "collate: of tensors": Acts(changed("collate"), PLAIN, losses),
    "collate: of a stream": Acts(changed("collate of a stream"), changed("stream"), losses),
    "shuffle": Acts(changed("shuffle"), PLAIN, ids),
    "sampler": Acts(changed("sampler"), PLAIN, ids),
    "sampler: of tokens": Acts(changed("sampler of tokens"), PLAIN, samples, (2, 24)),
    "sampler: of tokens, and global_batch": Refuses(
        changed("sampler of tokens, global_batch"), "leave global_batch out"
    ),
    "sampler: and shuffle": Refuses(changed("sampler, shuffle"), "both set the order of the samples"),
    "sampler: of other data": Refuses(changed("sampler of other data"), "63 samples, and a dataset of 64"),
    "on_nonfinite: skip": Acts(changed("skip"), PLAIN, lambda ended: ended.result["skipped_steps"], 1),
    "on_nonfinite": Acts(changed("skip"), changed("rollback"), lambda ended: "rolled back" in ended.said, False),
    "fuse": Acts(changed("fuse"), PLAIN, forwards, 2),
    "fuse: with grains_per_microbatch": Says(
        Call(arguments=("--set", "change=fuse"), plan={"batch": {"grains_per_microbatch": 4}}),
        "batch.grains_per_microbatch = 4: no effect, since Job(fuse=False)",
        changed("fuse"),
    ),
    "watch": Acts(changed("watch"), PLAIN, lambda ended: (ended.out / "checkpoints/best").is_dir(), True),
    "callbacks": Acts(changed("callbacks"), PLAIN, metrics, ["accuracy", "ema_accuracy", "ema_loss", "loss"]),
    "callbacks: the best": Acts(
        changed("callbacks: best"), PLAIN, lambda ended: (ended.out / "checkpoints/best").is_dir(), True
    ),
    "callbacks: no object": Refuses(changed("callbacks: no object"), "a callback is an object with hooks"),
    "callbacks: nothing to evaluate": Says(changed("callbacks: of nothing"), "EarlyStopping has no effect", NO_DATA),
    "buffers": Acts(changed("buffers: declared"), PLAIN, lambda e: e.result["computation"]["rules"], {"seen": "max"}),
    "buffers: of nothing": Refuses(changed("buffers"), "the model has no such buffer; its buffers are seen"),
    "allow_state": Acts(changed("allow_state"), PLAIN, lambda e: e.result["computation"]["kept_state"], ["calls"]),
    "allow_state: state": Refuses(changed("state"), "state that a forward leaves in calls"),
    "allow_state: of nothing": Refuses(changed("allow_state of nothing"), "no attribute of a module"),
    "allow_state: a text": Refuses(changed("allow_state as a text"), "it lists names"),
    "outputs": Acts(changed("outputs"), PLAIN, losses),
    "loss_by_rows": Acts(changed("loss_by_rows"), PLAIN, losses),
    "loss_by_rows: alone": Refuses(changed("loss_by_rows alone"), "rows are those of the outputs"),
    "batch_norm": Acts(changed("batch_norm"), changed("batch_norm by grain"), losses),
    "batch_norm: no norm": Says(changed("batch_norm without any"), 'batch_norm = "batch": no effect', PLAIN),
    "batch_norm: with fuse": Refuses(changed("batch_norm and fuse"), "have no common statistics"),
    "batch_norm: no such": Refuses(changed("batch_norm: no such"), 'write "grain" or "batch"'),
    "predict": Acts(
        Call("predict", ("out", "--set", "change=predict"), after=PLAIN),
        Call("predict", ("out",), after=PLAIN),
        lambda ended: ended.expect_done() and sorted(np.load(ended.out / "predictions.npz").files),
        ["class", "ids"],
    ),
    "watch: nothing to evaluate": Says(changed("watch nothing"), "watch = 'loss:min' has no effect", NO_DATA),
    "watch: no such metric": Refuses(changed("watch another"), "watch names a metric (loss, accuracy)"),
    "fuse: with a pipeline": Acts(
        Call(arguments=("--set", "change=fuse"), plan={"layout": {"pipeline": 2}}, ranks=2),
        Call(plan={"layout": {"pipeline": 2}}, ranks=2),
        lambda ended: max(ended.told("forwards"), default=None),
    ),
}


def loop(name: str) -> Call:
    """A loop of one's own with one change."""
    return Call(job=None, loop=name)


OWN = loop("")
STOPPED = loop("; poisoned")


def steps(ended: Ended) -> Any:
    """Loss and norm of each step."""
    return ended.result["steps"]


def num_kept(ended: Ended) -> int:
    """Checkpoints that a loop has left."""
    return len(list((ended.folder / "kept").glob("step-*")))


SESSION: Table = {
    "global_batch": Acts(loop("global_batch"), OWN, steps),
    "grains": Acts(loop("grains, fuse"), loop("fuse"), forwards, 4),
    "grains: more than samples": Says(loop("more grains than samples"), "grains = 64: no effect beyond 16", OWN),
    "seed": Acts(loop("seed"), OWN, steps),
    "clip_norm": Acts(loop("clip_norm"), OWN, weights),
    "clip_value": Acts(loop("clip_value"), OWN, weights),
    "schedule": Acts(loop("schedule"), OWN, lambda ended: ended.result["learning_rates"]),
    "collate": Acts(loop("collate"), OWN, steps),
    "shuffle": Acts(loop("shuffle"), OWN, steps),
    "sampler": Acts(loop("sampler"), OWN, steps),
    "fuse": Acts(loop("fuse"), OWN, forwards, 2),
    "fuse: with grains_per_microbatch": Says(
        loop("fuse, plan"), "batch.grains_per_microbatch = 2: no effect, since fuse=False", loop("fuse")
    ),
    "buffers": Acts(loop("buffers"), OWN, weights),
    "buffers: without": Refuses(loop("; buffer"), "buffer seen, which a forward changes, in a Session"),
    "allow_state": Acts(loop("allow_state"), OWN, steps),
    "allow_state: state": Refuses(loop("; state"), "state that a forward leaves in calls"),
    "skip_nonfinite": Acts(
        loop("skip_nonfinite; poisoned"), OWN, lambda ended: len(steps(ended)) == 4 and steps(ended)
    ),
    "skip_nonfinite: without": Refuses(STOPPED, "Session(skip_nonfinite=True)"),
    "callbacks": Acts(loop("callbacks"), OWN, lambda ended: len(ended.result["steps"]), 2),
    "callbacks: no object": Refuses(loop("callbacks: no object"), "a callback is an object with hooks"),
    "callbacks: the best": Refuses(loop("callbacks: KeepBest"), "KeepBest without checkpoints"),
    "checkpoints": Acts(loop("checkpoints"), OWN, lambda ended: (ended.folder / "kept").exists(), True),
    "checkpoint_every": Acts(loop("checkpoint_every"), loop("checkpoints"), num_kept, 3),
    "checkpoint_every: none": Refuses(loop("checkpoint_every 0"), "checkpoint_every is a whole number of at least 1"),
    "checkpoint_every: without checkpoints": Refuses(
        loop("checkpoint_every without checkpoints"), "checkpoint_every=1 without checkpoints"
    ),
    "keep_checkpoints": Acts(loop("keep_checkpoints"), loop("checkpoint_every"), num_kept, 4),
    "no_source": Acts(
        loop("no_source"), loop("checkpoints"), lambda ended: (ended.folder / "kept" / "source").exists(), False
    ),
    "keep_checkpoints: none": Refuses(loop("keep_checkpoints 0"), "keep_checkpoints is a whole number of at least 1"),
    "resume": Acts(
        Call(job=None, loop="resume", after=loop("checkpoints in out")),
        loop("checkpoints"),
        lambda ended: len(ended.result["steps"]),
        0,
    ),
    "resume: without checkpoints": Refuses(loop("resume without checkpoints"), "resume=True without checkpoints"),
    "exact": Acts(loop("exact"), OWN, forwards, 2),
    "precision": Acts(loop("precision"), OWN, steps),
    "plan": Acts(loop("plan"), OWN, forwards, 4),
    "plan: without effect": Says(loop("plan without effect"), 'pipeline.schedule = "gpipe": no effect', OWN),
    "plan: with servers": Refuses(loop("plan with servers"), "a Session with server.mode"),
    "plan: with a captured step": Refuses(
        loop("plan with a captured step"), "a Session with execution.cuda_graph = true"
    ),
    "plan: that divides the model": Refuses(loop("plan, divided"), "a Session with tensor = 2"),
}
