"""PLAN: every key of every section, and what was seen of it: alone, and in layouts in which it means nothing."""

from __future__ import annotations

from typing import Any

from tests.settings.laboratory import Acts, Call, Ended, Refuses, Row, Says, Table

GPT = "gpt"


def planned(ranks: int = 1, *arguments: str, job: str = "job", **sections: dict[str, Any]) -> Call:
    """A run under these sections of a plan."""
    compiled = {"TORCHINDUCTOR_CACHE_DIR": "inductor"} if "compile" in sections.get("execution", {}) else {}
    return Call(job=job, plan=sections, ranks=ranks, arguments=arguments, environment=compiled)


def layout(ranks: int, job: str = "job", /, *, data: int = 1, **degrees: Any) -> Call:
    """A run of a layout on so many ranks; other sections by their names."""
    axes = {name: degree for name, degree in degrees.items() if not isinstance(degree, dict)}
    others = {name.rstrip("_"): section for name, section in degrees.items() if isinstance(section, dict)}
    return planned(ranks, job=job, layout={"data": data} | axes, **others)


def launched(*arguments: str, **sections: Any) -> Call:
    """A run whose ranks the local launcher starts."""
    return planned(1, *arguments, **sections)


ONE = planned()
TWO = layout(2, data=2)
ZERO1 = {"level": "optimizer"}
FLOAT8 = {"compute": "bfloat16", "products": "float8_rows"}
IMAGES = ("--set", "change=images")


def weights(ended: Ended) -> Any:
    """The hash of the weights at the end."""
    return ended.result["weights_sha256"]


def forwards(ended: Ended) -> Any:
    """Forwards with gradients, and the samples of the largest."""
    told = ended.told("forwards")
    return len(told), max(map(int, told))


def held(ended: Ended) -> Any:
    """The bytes of parameters, gradients and state that rank 0 holds."""
    found = ended.result["memory"]["ranks"][0]["measured"]
    return {name: found[name] for name in ("parameters", "gradients", "optimizer")}


def activations(ended: Ended) -> Any:
    """The bytes that rank 0 keeps for the backward."""
    return ended.result["memory"]["ranks"][0]["measured"]["activations"]


def sent(ended: Ended) -> Any:
    """What rank 0 sends in a step, by kind."""
    return ended.result["traffic"]["ranks"][0]["measured"]


def handed_on(ended: Ended) -> Any:
    """What rank 0 and its neighbour on the pipeline hand each other in a step."""
    return sent(ended)["pipeline"]


def heard(words: str) -> Any:
    """Whether the run says them."""
    return lambda ended: words in ended.expect_done().said


def degree(ended: Ended) -> Any:
    """The layout that it told of."""
    return ended.said.partition("  layout ")[2].partition(" batch ")[0] or ended.said.partition(" layout ")[2][:40]


def idle(words: str, ranks: int = 1, job: str = "job", **sections: dict[str, Any]) -> Says:
    """A run that warns that a setting has no effect."""
    return Says(Call(job=job, plan=sections, ranks=ranks), words)


def refused(words: str, job: str = "job", **sections: dict[str, Any]) -> Refuses:
    """A plan that is refused before any rank is started."""
    return Refuses(Call(job=job, plan=sections), words)


LAYOUT: Table = {
    "layout.data": Acts(TWO, ONE, lambda ended: ended.result["world_size"], 2),
    "layout.shard": Acts(layout(2, shard=2), layout(2, data=2), held),
    "layout.tensor": Acts(layout(2, GPT, tensor=2), layout(2, GPT, data=2), held),
    "layout.pipeline": Acts(layout(2, GPT, pipeline=2), layout(2, GPT, data=2), held),
    "layout.context": Acts(layout(2, GPT, context=2), layout(2, GPT, data=2), sent),
    "layout.expert": Acts(layout(2, "experts", data=2, expert=2), layout(2, "experts", data=2), held),
    "layout.expert: no divisor": refused("data x shard x context x tensor = 2", layout={"data": 2, "expert": 4}),
    "layout.expert: a model without experts": refused("no mixture of experts", layout={"data": 2, "expert": 2}),
    "layout.expert: an uneven number": refused("3 in a layer", "three", layout={"data": 2, "expert": 2}),
    "layout.shares": Acts(layout(2, data=2, shares=(5, 3)), TWO, forwards),
    "layout.shares: of another number of ranks": refused(
        "each rank that divides grains", layout={"data": 2, "shares": [5, 3, 1]}
    ),
    "layout.shares: with servers": refused(
        "a worker asks for its next grains", layout={"data": 2, "shares": [5, 3]}, server={"mode": "synchronous"}
    ),
    "layout.shares: grains too large for them": Says(
        Call(plan={"layout": {"data": 2, "shares": [2, 1]}}, ranks=2), "Job(grains=16) divides them better"
    ),
    "layout.data: of another world": Refuses(layout(1, data=2).with_("--devices", "3"), "--devices 3"),
    "schema": refused("schema", schema=2),
    "schema: an unknown section": refused("did you mean 'execution'", executions={"exact": True}),
    "schema: an unknown key": refused("did you mean 'exact'", execution={"exakt": True}),
}

BATCH: Table = {
    "batch.grains_per_microbatch": Acts(planned(batch={"grains_per_microbatch": 2}), ONE, forwards, (16, 4)),
    "batch.grains_per_microbatch: more than a rank has": idle(
        "batch.grains_per_microbatch = 8: no effect beyond 4", 2, layout={"data": 2}, batch={"grains_per_microbatch": 8}
    ),
    "batch.grains_per_microbatch: exact": idle(
        "batch.grains_per_microbatch has no effect: exact mode",
        batch={"grains_per_microbatch": 4},
        execution={"exact": True},
    ),
    "batch.grains_per_microbatch: too few for the schedule": refused(
        "it needs a microbatch for every rank", GPT, layout={"pipeline": 2}, batch={"grains_per_microbatch": 8}
    ),
}

SHARD: Table = {
    "shard.level": Acts(layout(2, shard=2, shard_=ZERO1), layout(2, shard=2), held),
    "shard.level: without an axis": idle("shard.level", shard={"level": "gradients"}),
    "shard.level: parameters, exact": refused(
        "a reduce-scatter adds in an order of its own", layout={"shard": 2}, execution={"exact": True}
    ),
    "shard.reduce": Acts(
        layout(2, shard=2, batch={"grains_per_microbatch": 1}, shard_={"reduce": "last_microbatch"}),
        layout(2, shard=2, batch={"grains_per_microbatch": 1}),
        sent,
    ),
    "shard.reduce: without an axis": idle("shard.reduce", shard={"reduce": "last_microbatch"}),
    "shard.reduce: level optimizer": idle(
        "shard.reduce", 2, layout={"shard": 2}, shard={"level": "optimizer", "reduce": "last_microbatch"}
    ),
    "shard.reduce: one microbatch": idle(
        "a rank computes one microbatch a step", 2, layout={"shard": 2}, shard={"reduce": "last_microbatch"}
    ),
    "shard.sizes": Acts(layout(2, shard=2, shard_={**ZERO1, "sizes": (3, 1)}), layout(2, shard=2, shard_=ZERO1), held),
    "shard.sizes: of another number of ranks": refused(
        "each rank of the shard axis has a shard", layout={"shard": 2}, shard={**ZERO1, "sizes": [3, 2, 1]}
    ),
    "shard.sizes: level parameters": refused(
        "cuts gradients and parameters into equal parts", layout={"shard": 2}, shard={"sizes": [3, 1]}
    ),
    "shard.offload": idle("shard.offload = true: no effect", 2, layout={"shard": 2}, shard={"offload": True}),
    "shard.offload: without an axis": idle("shard.offload = true: no effect", shard={"offload": True}),
    "shard.offload: level optimizer": refused(
        "every rank holds the parameters", layout={"shard": 2}, shard={"level": "optimizer", "offload": True}
    ),
}

TENSOR: Table = {
    "tensor.sequence": Acts(layout(2, GPT, tensor=2, tensor_={"sequence": True}), layout(2, GPT, tensor=2), sent),
    "tensor.sequence: without an axis": idle("tensor.sequence = true: no effect", tensor={"sequence": True}),
    "tensor.sequence: with a pipeline": Acts(
        layout(4, GPT, tensor=2, pipeline=2, tensor_={"sequence": True}),
        layout(4, GPT, tensor=2, pipeline=2),
        handed_on,
    ),
    "tensor.sequence: with context": refused(
        "both divide the positions", layout={"tensor": 2, "context": 2}, tensor={"sequence": True}
    ),
    "tensor.sequence: without sequences": Says(
        layout(2, tensor=2, tensor_={"sequence": True}), "no block computes parts of a sequence", layout(2, tensor=2)
    ),
}

PIPELINE: Table = {
    "pipeline.schedule": Acts(
        layout(2, GPT, pipeline=2, pipeline_={"schedule": "gpipe"}, batch={"grains_per_microbatch": 1}),
        layout(2, GPT, pipeline=2, batch={"grains_per_microbatch": 1}),
        activations,
    ),
    "pipeline.schedule: without an axis": idle('pipeline.schedule = "gpipe"', pipeline={"schedule": "gpipe"}),
    "pipeline.schedule: interleaved, one stage": refused(
        "several stages in turn", layout={"pipeline": 2}, pipeline={"schedule": "interleaved_1f1b"}
    ),
    "pipeline.stages_per_rank": Acts(
        layout(2, "deep", pipeline=2, pipeline_={"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
        layout(2, "deep", pipeline=2),
        sent,
    ),
    "pipeline.stages_per_rank: without an axis": idle("pipeline.stages_per_rank = 2", pipeline={"stages_per_rank": 2}),
    "pipeline.stages_per_rank: 1f1b": refused(
        "one stage on each rank", layout={"pipeline": 2}, pipeline={"stages_per_rank": 2}
    ),
    "pipeline.split": Acts(
        layout(2, "deep", pipeline=2, pipeline_={"split": ["blocks.1"]}), layout(2, "deep", pipeline=2), held
    ),
    "pipeline.split: without an axis": idle('pipeline.split = ["blocks.1"]', pipeline={"split": ["blocks.1"]}),
    "pipeline.split: no such module": refused(
        "no stage can begin with", GPT, layout={"pipeline": 2}, pipeline={"split": ["block.1"]}
    ),
    "pipeline.split: too many": refused(
        "it names the first module", GPT, layout={"pipeline": 2}, pipeline={"split": ["blocks.0", "blocks.1"]}
    ),
}

PRECISION: Table = {
    "precision.parameters": Acts(planned(precision={"parameters": "bfloat16", "compute": "bfloat16"}), ONE, held),
    "precision.compute": Acts(planned(precision={"compute": "bfloat16"}), ONE, weights),
    "precision.products": Acts(
        planned(job="wide", precision=FLOAT8), planned(job="wide", precision={"compute": "bfloat16"}), weights
    ),
    "precision.products: blocks": Acts(
        planned(job="wide", precision={**FLOAT8, "products": "float8_blocks"}),
        planned(job="wide", precision={"compute": "bfloat16"}),
        weights,
    ),
    "precision.products: no wide layer": refused("float8 is for linear layers of repeated blocks", precision=FLOAT8),
    "precision.products: of float32": refused("layers in float8 keep", precision={"products": "float8_rows"}),
    "precision.products: whole tensors": refused(
        "depends on how the layout cuts", precision={**FLOAT8, "products": "float8_tensor"}
    ),
    "precision.products: compiled, tensor axis": refused(
        "a maximum over the tensor axis",
        "wide",
        layout={"tensor": 2},
        precision=FLOAT8,
        execution={"compile": "default"},
    ),
    "precision.products: blocks cut": refused(
        "a part of a block of 128", "wide", layout={"tensor": 2}, precision={**FLOAT8, "products": "float8_blocks"}
    ),
    "precision.reduce": Acts(layout(2, data=2, precision={"reduce": "bfloat16"}), TWO, weights),
    "precision.reduce: sharded": Acts(
        layout(2, shard=2, precision={"reduce": "bfloat16"}), layout(2, shard=2), weights
    ),
    "precision.reduce: sharded optimizer": Acts(
        layout(2, shard=2, shard_=ZERO1, precision={"reduce": "bfloat16"}), layout(2, shard=2, shard_=ZERO1), weights
    ),
    "precision.reduce: exact": Acts(
        planned(precision={"reduce": "bfloat16"}, execution={"exact": True}),
        planned(execution={"exact": True}),
        weights,
    ),
    "precision.reduce: on one rank": Acts(planned(precision={"reduce": "bfloat16"}), ONE, weights),
    "precision.reduce: servers": Acts(
        launched(layout={"data": 2}, server={"mode": "synchronous"}, precision={"reduce": "bfloat16"}),
        launched(layout={"data": 2}, server={"mode": "synchronous"}),
        weights,
    ),
    "precision.loss_scale": Acts(
        planned(precision={"compute": "float16", "loss_scale": 8.0}),
        planned(precision={"compute": "float16"}),
        lambda ended: ended.records[0]["loss_scale"],
        8.0,
    ),
    "precision.loss_scale: of wider compute": idle(
        "precision.loss_scale = 'dynamic' has no effect on bfloat16 compute",
        precision={"compute": "bfloat16", "loss_scale": "dynamic"},
    ),
    "precision.loss_scale: servers": refused(
        "scales no loss", server={"mode": "synchronous"}, precision={"compute": "float16", "loss_scale": "dynamic"}
    ),
}

MEMORY: Table = {
    "memory.recompute": Acts(planned(job=GPT, memory={"recompute": "full"}), planned(job=GPT), activations),
    "memory.recompute: selective": Acts(
        planned(job="counted", memory={"recompute": "selective"}),
        planned(job="counted", memory={"recompute": "full"}),
        lambda ended: len(ended.told("products")),
    ),
    "memory.recompute: with tensor": Acts(
        layout(2, GPT, tensor=2, memory={"recompute": "full"}), layout(2, GPT, tensor=2), activations
    ),
    "memory.recompute: with a pipeline": Acts(
        layout(2, GPT, pipeline=2, memory={"recompute": "full"}), layout(2, GPT, pipeline=2), activations
    ),
    "memory.recompute: with shards": Acts(
        layout(2, GPT, shard=2, memory={"recompute": "full"}), layout(2, GPT, shard=2), activations
    ),
    "memory.recompute: nothing to recompute": Says(
        planned(1, "--set", "change=images", memory={"recompute": "full"}), "memory.recompute = 'full' has no effect"
    ),
    "memory.recompute: selective, compiled": refused(
        "does not show its products", memory={"recompute": "selective"}, execution={"compile": "default"}
    ),
    "memory.shared": Acts(
        layout(2, data=2, memory={"shared": True}, collectives={"all_reduce": "shared_memory"}),
        layout(2, data=2, collectives={"all_reduce": "shared_memory"}),
        held,
    ),
    "memory.shared: on one rank": idle("memory.shared = true: no effect", memory={"shared": True}),
    "memory.shared: over sockets": refused(
        "each rank updates its part of the shared parameters", layout={"data": 2}, memory={"shared": True}
    ),
    "memory.shared: divided": refused(
        "one copy serves ranks that hold the same of the model",
        layout={"shard": 2},
        shard={"level": "optimizer"},
        memory={"shared": True},
        collectives={"all_reduce": "shared_memory"},
    ),
    "memory.shared: compressed": refused(
        "nothing is sent that could be compressed",
        layout={"data": 2},
        memory={"shared": True},
        collectives={"all_reduce": "shared_memory", "compression": "bfloat16"},
    ),
    "memory.shared: servers": refused(
        "parameters of a version of its own",
        layout={"data": 2},
        memory={"shared": True},
        server={"mode": "synchronous"},
    ),
}

COLLECTIVES: Table = {
    "collectives.all_reduce": Acts(
        layout(2, data=2, collectives={"all_reduce": "ring"}), TWO, heard("ring all-reduce"), True
    ),
    "collectives.all_reduce: on one rank": idle("collectives.all_reduce", collectives={"all_reduce": "ring"}),
    "collectives.all_reduce: with shards": refused(
        "fully_shard's own reduce-scatter", layout={"shard": 2}, collectives={"all_reduce": "tree"}
    ),
    "collectives.all_reduce: exact": refused(
        "a tree of its own", layout={"data": 2}, collectives={"all_reduce": "ring"}, execution={"exact": True}
    ),
    "collectives.compression": Acts(layout(2, data=2, collectives={"compression": "int8"}), TWO, weights),
    "collectives.compression: on one rank": idle("collectives.compression", collectives={"compression": "int8"}),
    "collectives.compression: with shards": refused(
        "compresses nothing", layout={"shard": 2}, collectives={"compression": "int8"}
    ),
    "collectives.compression: with servers": refused(
        "pushes carry whole gradients",
        layout={"data": 2},
        server={"mode": "synchronous"},
        collectives={"compression": "int8"},
    ),
    "collectives.compression: exact": refused(
        "exact mode promises", layout={"data": 2}, collectives={"compression": "int8"}, execution={"exact": True}
    ),
    **{
        f"collectives.compression: with {axis}": refused(
            f"on the {axis} axis", layout={"data": 2, axis: 2}, collectives={"compression": "int8"}
        )
        for axis in ("tensor", "pipeline", "context")
    },
}


def compressed(scheme: str, **values: Any) -> Call:
    """Two ranks that compress."""
    return layout(2, data=2, collectives={"compression": scheme}, compression=values)


def of_scheme(key: str, scheme: str, given: Any) -> dict[str, Row]:
    """A number of one scheme: with it, and with another."""
    other = "powersgd" if scheme != "powersgd" else "topk"
    return {
        f"compression.{key}": Acts(compressed(scheme, **{key: given}), compressed(scheme), weights),
        f"compression.{key}: of another scheme": Says(compressed(other, **{key: given}), f"compression.{key} = "),
    }


COMPRESSION: Table = {
    **of_scheme("block", "int8", 7),
    **of_scheme("density", "topk", 0.05),
    **of_scheme("rank", "powersgd", 1),
    "compression.feedback": Acts(compressed("topk", feedback=False), compressed("topk"), weights),
    "compression.feedback: of a cast": Says(compressed("bfloat16", feedback=False), "compression.feedback = false"),
    "compression.guard_every": Acts(
        compressed("topk", guard_every=1),
        compressed("topk"),
        lambda ended: [record["compression"] is not None for record in ended.records],
        [True] * 4,
    ),
    "compression.guard_every: without compression": idle("compression.guard_every = 7", compression={"guard_every": 7}),
    "compression.guard_lost": Acts(
        compressed("topk", guard_every=1, guard_lost=0.001, feedback=False),
        compressed("topk", guard_every=1, feedback=False),
        lambda ended: ended.result["compression"]["fell_back"] is not None,
        True,
    ),
    "compression.guard_lost: nothing compared": Says(
        compressed("topk", guard_every=0, guard_lost=0.001), "compression.guard_lost = 0.001"
    ),
    "compression.block: without compression": idle("compression.block = 7", compression={"block": 7}),
}


def served(mode: str = "synchronous", *arguments: str, **sections: Any) -> Call:
    """Two workers, servers and a conductor; `server_` has more of that section."""
    more = sections.pop("server_", {})
    return launched(*arguments, layout={"data": 2}, server={"mode": mode, **more}, **sections)


def warned(words: str, **sections: dict[str, Any]) -> Refuses:
    """A plan with servers that the launcher warns of, before it refuses as many workers as no job here has grains."""
    return refused(words, layout={"data": 100}, **sections)


SERVER: Table = {
    "server.mode": Acts(served(), TWO, lambda ended: ended.result["server"] is not None, True),
    "server.staleness": Acts(
        served("bounded", server_={"staleness": 3}),
        served("bounded"),
        heard("(staleness 3)"),
        True,
    ),
    "server.staleness: not bounded": warned(
        "server.staleness = 3: no effect", server={"mode": "synchronous", "staleness": 3}
    ),
    "server.num_servers": Acts(served(server_={"num_servers": 2}), served(), heard("2 servers and a conductor")),
    "server.num_servers: without servers": idle("server.num_servers = 2: no effect", server={"num_servers": 2}),
    "server.mode: clip_norm": Acts(served("synchronous", "--set", "change=clip_norm"), served(), weights),
    "server.mode: clip_value": Acts(served("synchronous", "--set", "change=clip_value"), served(), weights),
    "server.mode: schedule": Acts(served("synchronous", "--set", "change=schedule"), served(), weights),
    "server.mode: on_nonfinite": Says(served("synchronous", "--set", "change=skip"), "loss is not finite"),
    "server.mode: grains_per_microbatch": Acts(
        served(batch={"grains_per_microbatch": 1}), served(), lambda ended: forwards(ended)[0]
    ),
    "server.mode: all_reduce": warned(
        'collectives.all_reduce = "ring": no effect', server={"mode": "synchronous"}, collectives={"all_reduce": "ring"}
    ),
    "server.mode: memory": Acts(
        served(job="counted", memory={"recompute": "full"}),
        served(job="counted"),
        lambda ended: len(ended.told("products")),
    ),
    "server.mode: channels_last": Acts(
        served("synchronous", *IMAGES, execution={"channels_last": True}),
        served("synchronous", *IMAGES),
        lambda ended: set(ended.told("strides")),
    ),
    "server.mode: compile": refused(
        "compile nothing", layout={"data": 2}, server={"mode": "synchronous"}, execution={"compile": "default"}
    ),
    "server.mode: exact, ahead": refused(
        "no two runs have the same bits", layout={"data": 2}, server={"mode": "bounded"}, execution={"exact": True}
    ),
    **{
        f"server.mode: with {axis}": refused(
            "a worker computes whole grains", layout={axis: 2}, server={"mode": "synchronous"}
        )
        for axis in ("shard", "tensor", "pipeline", "context")
    },
}

BY_ITEM = ("--set", "change=by item")

DATA: Table = {
    "data.workers": Acts(
        planned(1, *BY_ITEM, data={"workers": 2}),
        planned(1, *BY_ITEM),
        lambda ended: sorted(set(ended.told("readers")) - {"rank"}),
        ["0", "1"],
    ),
    "data.workers: of tensors": Says(planned(data={"workers": 2}), "2 worker processes a rank"),
    "data.workers: of a stream": Says(
        planned(1, "--set", "change=stream", data={"workers": 2}), "data.workers = 2: no effect"
    ),
    "data.workers: servers": refused(
        "nothing can be read ahead", layout={"data": 2}, server={"mode": "synchronous"}, data={"workers": 1}
    ),
}

EXECUTION: Table = {
    "execution.exact": Acts(planned(execution={"exact": True}), ONE, forwards, (32, 2)),
    **{
        f"execution.exact: with {axis}": refused(
            "bits are fixed along the data and expert axes", layout={axis: 2}, execution={"exact": True}
        )
        for axis in ("tensor", "pipeline", "context")
    },
    "execution.channels_last": Acts(
        planned(1, *IMAGES, execution={"channels_last": True}),
        planned(1, *IMAGES),
        lambda ended: set(ended.told("strides")),
    ),
    "execution.channels_last: without images": Says(
        planned(execution={"channels_last": True}), "execution.channels_last = true: no effect"
    ),
    "execution.channels_last: exact": refused(
        "kernels for channels last", execution={"channels_last": True, "exact": True}
    ),
    # On a CPU nothing is to be seen of it but words: its effect is in tests/unit/training/loop/test_captured_step.py.
    "execution.cuda_graph": refused("a CUDA device", execution={"cuda_graph": True}),
    "execution.cuda_graph: with ZeRO-3": refused(
        "that of the whole model",
        layout={"shard": 2},
        shard={"level": "parameters"},
        execution={"cuda_graph": True},
    ),
    "execution.cuda_graph: servers": refused(
        "the update is the servers'", layout={"data": 2}, server={"mode": "bounded"}, execution={"cuda_graph": True}
    ),
    **{
        f"execution.cuda_graph: {word}": refused(said, **{section: values}, execution={"cuda_graph": True})
        for word, said, section, values in (
            ("recomputed", "recomputation puts back", "memory", {"recompute": "full"}),
            ("narrow", "masked by torch's fused kernels", "precision", {"parameters": "bfloat16"}),
        )
    },
    "execution.cuda_graph: exact": refused("on the host", execution={"cuda_graph": True, "exact": True}),
    "execution.cuda_graph: compiled": refused(
        "graphs of its own", execution={"cuda_graph": True, "compile": "reduce-overhead"}
    ),
    "execution.compile": Acts(
        planned(job=GPT, execution={"compile": "default"}),
        planned(job=GPT),
        lambda ended: any((ended.folder / "inductor").rglob("*.so")),
        True,
    ),
    "execution.compile: on a CPU": Says(
        planned(job=GPT, execution={"compile": "reduce-overhead"}), "has no effect on cpu beyond 'default'"
    ),
    "execution.compile: exact, tuned": refused(
        "measured to be fastest", execution={"compile": "max-autotune", "exact": True}
    ),
    "execution.compile: with context": refused("compiler", layout={"context": 2}, execution={"compile": "default"}),
    "execution.compile: with positions": refused(
        "compiler", layout={"tensor": 2}, tensor={"sequence": True}, execution={"compile": "default"}
    ),
    "execution.compile: with two halves": refused(
        "it does not come in two halves",
        layout={"pipeline": 2},
        pipeline={"schedule": "zero_bubble"},
        execution={"compile": "default"},
    ),
}

TERMS = {"compute": 0.01, "gradients": 0.0}

PREDICTION: Table = {
    "prediction": Acts(
        planned(prediction={"step_seconds": 0.01, "terms": TERMS}),
        ONE,
        lambda ended: (ended.result["prediction"] is not None, ended.plan["prediction"].get("terms")),
    ),
    "prediction: of another layout": Says(
        planned(1, "--precision", "bf16", prediction={"step_seconds": 0.01, "terms": TERMS}), "prediction"
    ),
    "prediction: not the planner's": refused("terms is a table of numbers", prediction={"terms": "many"}),
}

PLAN: Table = {
    **LAYOUT,
    **BATCH,
    **SHARD,
    **TENSOR,
    **PIPELINE,
    **PRECISION,
    **MEMORY,
    **COLLECTIVES,
    **COMPRESSION,
    **SERVER,
    **DATA,
    **EXECUTION,
    **PREDICTION,
}
# These compile for some seconds; or they say of one more axis what the conformance suite verifies there.
SLOW = {
    "memory.recompute: with a pipeline",
    "memory.recompute: with shards",
    "memory.recompute: with tensor",
    "server.mode: channels_last",
    "server.mode: memory",
    "tensor.sequence: without sequences",
    "execution.compile",
    "execution.compile: on a CPU",
    "server.mode: clip_value",
    "tensor.sequence: with a pipeline",
}
