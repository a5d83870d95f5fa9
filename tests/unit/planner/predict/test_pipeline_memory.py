"""Bytes of activations: what a backward holds at once, and what recomputation and casts leave."""

from dataclasses import replace

import pytest
from tests.unit.planner.made import block, matmul

from shoal.planner.predict.pipeline import Sizes, kept_alternately
from shoal.planner.predict.workload import Program, Share
from shoal.planner.profile.values import Amount, Body, Operation, OperationKind, Phase, TensorCut

BACKWARD = Phase.BACKWARD_INPUT


def loss(*written: float) -> Body:
    """A body whose backward writes so many bytes, one operator after the other."""
    operations = tuple(
        Operation("o", "", OperationKind.MEMORY, BACKWARD, written_bytes=Amount(size)) for size in written
    )
    return replace(block(), operations=operations, repeated=False)


def test_a_backward_holds_the_gradient_that_it_reads_beside_the_one_it_writes():
    assert Sizes(Program()).body(loss(5.0, 8.0, 8.0, 2.0), Share(1.0), "none") == (0.0, 16.0)


def test_every_second_product_and_attention_are_kept():
    attention = Operation("attention", "", OperationKind.ATTENTION, Phase.FORWARD)
    products = [matmul(name, 10, 10, 10) for name in "qkvo"]
    after = matmul("o", 10, 10, 10, BACKWARD)
    kept = kept_alternately([*products[:3], attention, products[3], after])
    assert kept == [products[0], products[2], attention]


def of_layers(program: Program, recompute: str = "none", dtype: str = "bfloat16") -> float:
    body = block()
    operations = tuple(
        replace(o, dtype=dtype, saved_bytes=Amount(0, 100), selected_bytes=Amount(0, 100))
        if o.phase is Phase.FORWARD
        else o
        for o in body.operations
    )
    body = replace(body, operations=operations, input_bytes=Amount(0, 7.0))
    return Sizes(program).body(body, Share(1.0), recompute)[0]


def test_what_a_cast_layer_keeps_is_as_narrow_as_its_products():
    whole = of_layers(Program())
    assert of_layers(Program(layers="float8")) == whole
    assert of_layers(Program(layers="float8", keeps_cast=True)) == whole / 2
    assert of_layers(Program(layers="float8", keeps_cast=True), dtype="float32") == whole


def test_what_alternate_products_keep_is_the_block_input_and_half():
    all_products = of_layers(Program(), "selective")
    half = of_layers(Program(selective="alternate_products"), "selective")
    assert half == pytest.approx(all_products / 2 + 7.0)


def test_of_a_divided_product_what_is_selected_is_its_output():
    """A column-parallel layer's is a part, a row-parallel one's is whole, whatever autograd keeps as their inputs."""
    up, down = (replace(o, saved_bytes=Amount(0, 10_000)) for o in block().operations[:2])
    assert (up.cut, down.cut) == (TensorCut.N, TensorCut.K)
    chosen = replace(up, selected_bytes=Amount(0, 400)), replace(down, selected_bytes=Amount(0, 100))
    body = replace(block(), operations=chosen)
    assert Sizes(Program()).body(body, Share(1.0, tensor=4), "selective")[0] == 400 / 4 + 100
