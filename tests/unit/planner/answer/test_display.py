"""What `shoal plan` prints: the numbers that are asked for first, and no line above the width of a narrow terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.unit.planner.models import facts, gpus, transformer

from shoal.errors import PlanError
from shoal.hardware import cluster
from shoal.planner.answer.answer import answer
from shoal.planner.answer.display import (
    BEST_HEAD,
    Answer,
    best_rows,
    curve_rows,
    front,
    hints,
    key_rows,
    show,
)
from shoal.planner.answer.outlook import MODES, Case, Change, Question, SearchResult
from shoal.planner.predict.workload import Workload, error_bar, likeness
from shoal.planner.search.search import Aim
from shoal.planner.search.space import Space, counts, illegal
from shoal.plans.plan import Plan, layout_name
from shoal.report.quantities import rate, seconds

COLUMNS = 80


def asked(hosts: int = 1, batch: int = 64, layers: int = 8, gib: float = 80.0) -> Question:
    """A transformer of 1,024 positions on hosts of eight devices."""
    profile = transformer(layers=layers, width=1024, ffn=4096, vocabulary=32_000, positions=1024, heads=16)
    cluster = gpus(hosts, 8, gib)
    base = Plan().with_sections(precision={"compute": "bfloat16"})
    space = Space(base, facts(batch, layers=layers, heads=16, positions=1024), counts(cluster))
    return Question(Case(Workload(profile, batch, batch), cluster, space), 100, sample_tokens=1024)


def answered(question: Question, hours: float | None = None) -> SearchResult:
    return answer(question, Aim(), "folder/of/jobs/file.py:job", hours, lambda: 0.0)


def printed(found: SearchResult, width: int = COLUMNS) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(found, console, more=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def row(found: SearchResult, name: str) -> str:
    """The value of one key figure; "" where there is none."""
    return next((value for key, value in key_rows(found) if key == name), "")


@pytest.fixture(scope="module")
def one() -> SearchResult:
    return answered(asked(), hours=1000.0)


@pytest.fixture(scope="module")
def wide() -> SearchResult:
    """Layouts with long names: little memory on several hosts."""
    found = answered(asked(hosts=4, layers=32, gib=6.0))
    long = "a/very/long/" * 10 + "name.py:job"
    named = replace(found.question.case.cluster, name="a-cluster-" * 12, notes=("word " * 40, "x" * 200))
    case = replace(found.question.case, cluster=named)
    return replace(found, job=long, question=replace(found.question, case=case))


@pytest.mark.parametrize("which", ["one", "wide"])
def test_no_line_is_above_80_columns_and_no_cell_is_broken(which: str, request: pytest.FixtureRequest) -> None:
    found: SearchResult = request.getfixturevalue(which)
    text = printed(found)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "…" not in text
    for cells in best_rows(found) + curve_rows(found):
        assert any(all(cell in line for cell in cells[:3]) for line in text.splitlines()), cells
    # A wide terminal breaks no text either, and has every column.
    broad = printed(found, 400).splitlines()
    assert any(all(name in line for name in BEST_HEAD) for line in broad)
    assert [line.rstrip() for line in broad[:11]] == text.splitlines()[:11]


@pytest.mark.parametrize("which", ["one", "wide"])
def test_the_first_thirteen_lines_are_the_answer(which: str, request: pytest.FixtureRequest) -> None:
    found: SearchResult = request.getfixturevalue(which)
    lines = str(Answer(**vars(found))).splitlines()
    names = [line[:10].strip() for line in lines]
    assert len(lines) <= 13
    assert names[:9] == ["layout", "run", "step", "mode", "training", "memory", "cost", "hosts", "links"]
    assert {"more", "fewer", "next best", "see"} >= set(names[9:])
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].split(" on ")[0].split(maxsplit=1)[1] == layout_name(found.plan)
    assert seconds(found.chosen.seconds) in lines[2]
    assert printed(found).startswith("\n".join(lines[:1]))


def test_the_hosts_links_and_prices_are_named(one: SearchResult) -> None:
    def said(**changes: Any) -> dict[str, str]:
        return dict(front(in_cluster(one, **changes)))

    l4 = cluster("16xL4")
    told = said(device=l4.device, within=l4.within, between=l4.between, num_hosts=2)
    assert told["hosts"] == "2 hosts of 8 L4; numbers of the catalogue, some assumed"
    assert told["links"] == "PCIe4-host 12.6 GB/s; between hosts Ethernet-100 7.5 GB/s"
    assert "at $0.81 a device-hour (list price of June 2024)" in told["cost"]
    assert said(device=l4.device, within=l4.within)["links"] == "PCIe4-host 12.6 GB/s"
    source = "measured by shoal bench on 2026-11-29, torch 2.13"
    assert said(device=replace(l4.device, sources={"flops": source}))["hosts"].endswith("; measured on 2026-11-29")
    by_hand = replace(l4.device, sources={"flops": "shoal bench on my machine"})
    assert said(device=by_hand)["hosts"].endswith("; measured, on a day that the file does not have")
    assert said(device=l4.device, name="mine.toml")["hosts"].endswith("; numbers of the file, some assumed")
    assert l4.within is not None
    guess = replace(l4.within, sources={"bytes_per_second": "assumed: nothing better"})
    assert said(within=guess)["links"] == "PCIe4-host 12.6 GB/s (assumed)"
    assert said(device=replace(l4.device, price_per_hour=None))["cost"].startswith("not known: write --price")


def test_tokens_where_samples_are_sequences(one: SearchResult) -> None:
    tokens = 64 * 1024 / one.chosen.seconds
    assert f"{tokens:,.0f} tokens/s, {tokens / one.chosen.devices:,.0f} a device" in row(one, "throughput")
    images = replace(one, question=replace(one.question, sample_tokens=None))
    assert "tokens" not in row(images, "throughput")
    assert f"{tokens / 1024:,.0f} samples/s" in row(images, "throughput")


def test_a_step_that_waits_for_samples_says_so(one: SearchResult) -> None:
    assert "samples (--workers)" not in dict(front(one))["step"]
    prediction = one.chosen.prediction
    waiting = replace(prediction, terms={**prediction.terms, "data": 0.8 * one.chosen.seconds})
    starved = replace(one, choice=replace(one.choice, chosen=replace(one.chosen, prediction=waiting)))
    assert "; 80% waits for samples (--workers)" in dict(front(starved))["step"]


def test_the_share_of_the_peak_says_which_and_what_the_rest_is(one: SearchResult) -> None:
    told = row(one, "of the peak")
    dtype, flops = one.peak
    assert dtype == "bfloat16"
    assert f"{flops / 1e12:,.4g} TFLOP/s, the dense bfloat16 peak" in told
    rest = sum(float(part.rsplit(" ", 1)[1].rstrip("%")) for part in told.split("the rest: ")[1].split(", "))
    assert one.chosen.prediction.mfu is not None
    assert rest == pytest.approx(100 - 100 * one.chosen.prediction.mfu, abs=5)


def test_a_price_has_its_source_or_is_not_known(one: SearchResult) -> None:
    case = one.question.case
    without = replace(case, cluster=replace(case.cluster, device=replace(case.cluster.device, price_per_hour=None)))
    told = row(replace(one, question=replace(one.question, case=without)), "price")
    assert told.startswith("not known")
    assert "--price" in told
    priced = replace(one, question=one.question.at_price(2.5))
    hours = 100 * one.chosen.seconds / 3600
    assert row(priced, "price") == f"${one.chosen.devices * hours * 2.5:,.2f} at $2.50 a device-hour (--price)"


def in_cluster(found: SearchResult, **changes: Any) -> SearchResult:
    case = found.question.case
    return replace(
        found, question=replace(found.question, case=replace(case, cluster=replace(case.cluster, **changes)))
    )


def with_device(found: SearchResult, name: str) -> SearchResult:
    return in_cluster(found, device=replace(found.question.case.cluster.device, name=name))


def test_the_step_has_the_errors_of_published_rows(one: SearchResult) -> None:
    plan = one.chosen.plan.with_sections(layout={"data": 8, "shard": 1, "tensor": 1, "context": 1, "pipeline": 1})
    copies = replace(one, choice=replace(one.choice, chosen=replace(one.chosen, plan=plan)))
    found = with_device(copies, "A100-80-SXM")
    case, taken = found.question.case, one.chosen.seconds
    parameters = case.work.profile.num_parameters
    bar = error_bar(likeness("A100-80-SXM", parameters, plan.layout), parameters)
    assert bar is not None
    told = row(found, "step")
    assert told.startswith(seconds(taken))
    assert f"{seconds(taken * bar.low)} to {seconds(taken * bar.high)}" in told
    assert f"{bar.num_rows:,} rows of language models of 0.2 to 0.36 B parameters on A100" in told
    # All of these took longer than predicted, and the estimate is outside: it is said.
    assert bar.low > 1.0
    assert f"took {bar.low - 1:.0%} to {bar.high - 1:.0%} more than predicted" in told


def test_no_errors_of_rows_that_are_unlike(one: SearchResult) -> None:
    told = row(with_device(one, "B200-SXM"), "step")
    assert told == f"{seconds(one.chosen.seconds)}; no published step is like it: none is of B200"
    small = row(with_device(one, "H100-SXM-80"), "step")
    assert small.endswith("is like it: they are of language models of 3.6 to 8.9 B parameters on H100")
    images = with_device(replace(one, question=replace(one.question, sample_tokens=None)), "A100-80-SXM")
    assert "like it (its samples are no sequences of tokens): they are of language" in row(images, "step")
    terms = {**one.chosen.prediction.terms, "launch": 0.8 * one.chosen.seconds}
    chosen = replace(one.chosen, prediction=replace(one.chosen.prediction, terms=terms))
    late = with_device(replace(one, choice=replace(one.choice, chosen=chosen)), "A100-80-SXM")
    assert "no published step is like it (most of it is launches)" in row(late, "step")


def test_no_error_bar_of_gpus_for_a_cpu(one: SearchResult) -> None:
    cpus = in_cluster(one, device=replace(one.question.case.cluster.device, kind="cpu"))
    assert row(cpus, "step") == seconds(one.chosen.seconds)


def test_the_margin_is_kept_free(one: SearchResult) -> None:
    size = one.question.case.cluster.device.memory_bytes / 2**30
    peak = one.chosen.prediction.peak_bytes / 2**30
    assert f"{peak:.1f} of {size:.1f} GiB, {size - peak:.1f} free" in row(one, "memory")
    assert f"{size / 4:.1f} are kept free (margin=25%)" in row(in_cluster(one, memory_margin=0.25), "memory")


def test_energy_is_at_the_power_limit_where_it_is_known(one: SearchResult) -> None:
    device = one.question.case.cluster.device
    hours = 100 * one.chosen.seconds / 3600 * one.chosen.devices
    assert f"at most {rate(hours * 0.5)} kWh" in row(in_cluster(one, device=replace(device, watts=500.0)), "energy")
    unknown = in_cluster(one, device=replace(device, watts=None))
    assert not row(unknown, "energy")


def test_the_length_is_that_of_so_many_tokens() -> None:
    question = asked()
    assert question.of_length(tokens=1e9).num_steps == -(-(10**9) // (64 * 1024))
    assert question.of_length(samples=1000).num_steps == 16
    assert question.of_length().num_steps == 100
    with pytest.raises(PlanError, match="--samples"):
        replace(question, sample_tokens=None).of_length(tokens=1e9)


def test_a_length_that_is_not_known_is_asked_for(one: SearchResult) -> None:
    unknown = replace(one, question=replace(one.question, num_steps=None))
    assert "--samples N or --tokens N" in row(unknown, "whole job")


def test_recomputation_and_the_batch_are_among_what_would_change_it(one: SearchResult) -> None:
    told = [change.what for change in one.changes]
    assert "recompute = full" in told
    assert "twice the batch (128 samples)" in told
    assert "half the batch (32 samples)" in told  # in half as many grains of one sample


def test_a_graph_is_among_it_where_one_gpu_waits_for_its_host() -> None:
    """Its seconds are the device's and the host's that is left; a large model's device is behind its host anyway."""
    small, one = asked(batch=2, layers=2), gpus(1, 1, 80.0)
    waiting = replace(one, device=replace(one.device, dispatch_seconds=1e-3))
    case = replace(small.case, cluster=waiting, space=replace(small.case.space, counts=(1,)))
    found = answered(replace(small, case=case))
    (change,) = [change for change in found.changes if change.what == MODES["graph"][1]]
    terms = found.chosen.prediction.terms
    assert change.seconds is not None
    assert terms["host"] == pytest.approx(2.1e-3)  # beside a device that waits nothing of it is hidden
    assert change.seconds < found.chosen.seconds - terms["launch"]
    assert row(found, "mode").startswith("eager; predicted: ")
    assert found.modes["graph"] == change.seconds
    document = found.plan.prediction
    assert (document["mode"], document["modes"]) == ("eager", found.modes)
    captured = found.chosen.plan.with_sections(execution={"cuda_graph": True})
    own = replace(case, space=replace(case.space, base=case.space.base.with_sections(execution={"cuda_graph": True})))
    assert own.search().bounds.predict(captured).step_seconds == change.seconds, "a plan's own mode is priced alike"
    several = answered(replace(small, case=replace(small.case, space=replace(small.case.space, counts=(8,)))))
    assert not {"graph", "compiled-graph"} & set(several.modes), "a graph is one process's"


def test_what_the_host_does_is_hidden_beside_a_device_that_is_behind(one: SearchResult) -> None:
    assert one.chosen.prediction.terms["host"] == 0.0


@pytest.mark.parametrize(("batch", "grains", "wanted"), [(64, 8, 32), (8, 8, None)])
def test_no_more_grains_are_advised_than_a_step_has_samples(batch: int, grains: int, wanted: int | None) -> None:
    question = asked(hosts=4, batch=batch)
    case = question.case
    few = replace(case.space.facts, num_grains=grains, grain_size=batch // grains)
    case = replace(case, work=replace(case.work, num_grains=grains), space=replace(case.space, facts=few))
    found = answered(replace(question, case=case))
    found = replace(found, finer=None, curve=replace(found.curve, pays_until=32))
    advised = [text.partition("Job(grains=")[2].partition(")")[0] for text in hints(found) if "Job(" in text]
    assert advised == ([] if wanted is None else [str(wanted)])
    (left_out,) = [i.reason for i in illegal(case.space) if i.what == f"data x shard > {grains}"]
    assert (f"Job(grains={wanted})" if wanted else "a larger batch") in left_out


def test_a_plan_says_which_torch_it_needs(one: SearchResult) -> None:
    def needs(**sections: dict[str, Any]) -> str:
        plan = one.chosen.plan.with_sections(layout={"data": 1, "shard": 8}, **sections)
        return row(replace(one, choice=replace(one.choice, chosen=replace(one.chosen, plan=plan))), "needs")

    assert needs(shard={"level": "optimizer"}) == ""
    assert needs(shard={"level": "parameters"}) == 'torch 2.13 or newer, for shard.level = "parameters"'


def test_the_peak_and_the_price_name_the_device_of_the_plans_ranks(one: SearchResult) -> None:
    device = replace(one.question.case.cluster.device, name="a core, 2 threads", price_per_hour=None)
    found = in_cluster(one, device=replace(device, name="a core, 1 thread"), alternatives={one.ranks_per_host: device})
    assert "peak of a core, 2 threads" in row(found, "of the peak")
    assert "has none of a core, 2 threads" in row(found, "price")


def test_the_model_without_a_number_of_heads_is_told_what_to_write(one: SearchResult) -> None:
    space = one.question.case.space
    found = illegal(replace(space, facts=replace(space.facts, num_heads=None)))
    assert "no number of heads: name the attribute num_heads" in {i.what: i.reason for i in found}["context > 1"]


def test_amounts_too_small_to_print_and_losses_are_no_advice(one: SearchResult) -> None:
    device = replace(one.question.case.cluster.device, watts=1.0, price_per_hour=1e-6)
    short = in_cluster(one, device=device)
    assert row(short, "energy").startswith("under 0.001 kWh")
    assert row(short, "price").startswith("under $0.01")
    slower = Change("--precision bf16, which changes the run", 1.0, "-36% samples a second")
    assert not any("bf16" in hint for hint in hints(replace(one, changes=(slower,))))
    quicker = replace(slower, effect="+36% samples a second")
    assert any("bf16" in hint for hint in hints(replace(one, changes=(quicker,), finer=None)))
