"""Rows of data-parallel measurements are described as their sources have them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.published import data_parallel, modules
from benchmarks.published.describe import UnknownError
from tests.usual import parametrize

from shoal.planner.profile.profiles import profile
from shoal.planner.profile.values import Phase
from shoal.plans.plan import PrecisionSection

DATA = Path(data_parallel.__file__).parent / "data" / "ddp_scaling.csv"
# Of 1,122 rows, those of models without a module: HiFi-GAN, FastPitch, Tacotron2, WaveGlow, TFT.
UNKNOWN = 33
# Multiply-adds of a forward, in units of 1e9, and parameters in millions, as papers and their programs print them.
PRINTED = {
    "resnet50": (4.1, 25.6),
    "resnet152": (11.5, 60.2),
    "resnext101_32x4d": (8.0, 44.2),
    "alexnet": (0.71, 61.1),
    "vgg16": (15.5, 138.4),
    "inception_v3": (5.7, 27.2),
    "efficientnet_b0": (0.39, 5.3),
    "jasper": (None, 333.0),
    "quartznet": (None, 18.9),
    "transformer_xl_base": (None, 192.0),
}


def rows() -> list[dict[str, str]]:
    with DATA.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_row_has_a_module_or_says_that_it_has_none() -> None:
    unknown = 0
    for row in rows():
        try:
            key = data_parallel.model(row)
        except UnknownError:
            unknown += 1
            continue
        assert key in data_parallel.RECIPES or key.startswith("bert ")
    assert unknown == UNKNOWN


def test_batches_are_read_as_their_sources_mean_them() -> None:
    bert = {"model": "BERT-large", "seq_len": "128", "batch_per_gpu": "4096", "grad_accum": "128", "n_gpus": "8"}
    assert data_parallel.samples({**bert, "precision": "fp32", "unit": "seq/s"}) == 4096 * 8
    quartz = {"model": "QuartzNet", "batch_per_gpu": "24", "grad_accum": "6", "n_gpus": "8", "unit": "seq/s"}
    assert data_parallel.samples({**quartz, "precision": "fp32"}) == 24 * 6 * 8
    big = {"model": "Transformer-big", "batch_per_gpu": "5120/2560", "n_gpus": "1", "unit": "tok/s"}
    assert data_parallel.samples({**big, "precision": "mixed fp16/amp"}) == pytest.approx(5120, rel=0.01)
    assert data_parallel.samples({**big, "precision": "fp32"}) == pytest.approx(2560, rel=0.01)


@parametrize("name", PRINTED, usual=["resnet50", "transformer_xl_base"])
def test_modules_have_the_sizes_that_are_printed(name: str) -> None:
    products, parameters = PRINTED[name]
    found = profile(*data_parallel.RECIPES[name]())
    assert found.num_parameters / 1e6 == pytest.approx(parameters, rel=0.01)
    if products is not None:
        forward = sum(o.flops.at(1) for u in found.units for o in u.body.operations if o.phase is Phase.FORWARD)
        assert forward / 2e9 == pytest.approx(products, rel=0.02)


def test_what_megatron_keeps_of_a_layer_is_what_its_paper_says() -> None:
    """sbh (34 + 5 as / h) bytes: Korthikanti et al., arXiv 2205.05198, equation 1."""
    s, h, a = 256, 256, 4
    made = modules.transformer(
        "gpt",
        layers=2,
        hidden=h,
        heads=a,
        vocab=512,
        seq_len=s,
        fused_attention=False,
        fused_kernels=True,
        time_first=True,
    )
    found = profile(*made, precision=PrecisionSection(parameters="float16", compute="float16"))
    body = next(u.body for u in found.units if u.body.repeated)
    kept = sum(o.saved_bytes.at(1) for o in body.operations)
    statistics = 2 * 2 * s * 4  # of two norms, which the equation leaves out
    assert kept == pytest.approx(s * h * (34 + 5 * a * s / h), abs=statistics)
