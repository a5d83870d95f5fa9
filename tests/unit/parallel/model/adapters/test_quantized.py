"""Quantized linear layers: the same products as bitsandbytes computes, whole and cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.usual import parametrize
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.adapters.quantized import Quantization, QuantizedLinear, notes_on
from shoal.parallel.tensor.layers import input_runs, kind, num_features, output_dims

INPUTS, OUTPUTS = 256, 96


def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'shoal[qlora]'")


def int8(inputs: int = INPUTS, outputs: int = OUTPUTS) -> QuantizedLinear:
    """A layer as `adapted` makes it of a Linear8bitLt, without bitsandbytes."""
    layer = nn.Linear(inputs, outputs)
    scales = layer.weight.detach().abs().amax(1, keepdim=True)
    layer.__class__ = QuantizedLinear
    rounded = (layer.weight.detach() / scales * 127).round().to(torch.int8)
    values = {"weight": rounded, "absmax": scales.view(torch.int32)}
    for name, value in values.items():
        setattr(layer, name, nn.Parameter(value, requires_grad=False))
    layer.quantization, layer.compute_dtype = Quantization("int8", inputs, (outputs, inputs)), None
    return layer


def part(layer: QuantizedLinear, dims: dict[str, tuple[int, int, int]]) -> QuantizedLinear:
    """A copy with [start, stop) of a dim of each parameter that is named."""
    own = copy.deepcopy(layer)
    for name, (dim, start, stop) in dims.items():
        value = getattr(layer, name).detach().narrow(dim, start, stop - start).clone()
        setattr(own, name, nn.Parameter(value, requires_grad=False))
    return own


def quantized(bits: int, inputs: int = INPUTS, **options: Any) -> Any:
    bnb = bitsandbytes()
    torch.manual_seed(0)
    if bits == 8:
        return bnb.nn.Linear8bitLt(inputs, OUTPUTS, has_fp16_weights=False).requires_grad_(False).to("cpu")
    return bnb.nn.Linear4bit(inputs, OUTPUTS, **options).requires_grad_(False).to("cpu")


@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize(
    "options",
    [
        {"bits": 8},
        {"bits": 4, "quant_type": "nf4", "compress_statistics": False},
        {"bits": 4, "quant_type": "fp4", "compress_statistics": True},
        {"bits": 4, "quant_type": "nf4", "quant_storage": torch.bfloat16},
        {"bits": 4, "quant_type": "nf4", "inputs": 72},
    ],
)
def test_the_bits_of_bitsandbytes(options: dict[str, Any], dtype: torch.dtype) -> None:
    """In forward and backward; the state of the layer is plain tensors, and no conversion rounds the scales."""
    given = quantized(**options)
    inputs = given.in_features
    if options["bits"] == 4:
        given.compute_dtype = dtype
    value = torch.randn(5, inputs, dtype=dtype, requires_grad=True)
    wanted = given(value)
    gradient = torch.randn(wanted.shape, dtype=dtype)
    (of_input,) = torch.autograd.grad(wanted, value, gradient)
    model = adapted(nn.Sequential(given))
    layer = model[0]
    assert isinstance(layer, QuantizedLinear)
    result = layer(value)
    assert torch.equal(result, wanted)
    if options["bits"] == 4 or dtype is torch.float32:  # bitsandbytes multiplies an 8-bit gradient in float16
        (ours,) = torch.autograd.grad(result, value, gradient)
        torch.testing.assert_close(ours, of_input, rtol=0.0 if options["bits"] == 4 else 1e-3, atol=1e-3)
    before = layer.dequantize()
    assert torch.equal(model.bfloat16()[0].dequantize(), before)
    notes = "\n".join(notes_on(model))
    assert ("double quantization is undone" in notes) == (options["bits"] == 4 and layer.quantization.was_nested)


def test_a_flat_weight_stays_whole() -> None:
    layer = adapted(quantized(4, inputs=72))
    assert kind(layer) is None
    assert kind(adapted(quantized(4))) == "linear"


@parametrize("bits", [4, 8])
def test_cuts_add_up(bits: int) -> None:
    """Rows are outputs; columns are inputs in whole blocks, and their products add up."""
    layer = adapted(quantized(4)) if bits == 4 else int8()
    assert num_features(layer) == (INPUTS, OUTPUTS)
    value = torch.randn(3, INPUTS)
    whole = layer(value)
    halves: list[Tensor] = []
    for start in (0, OUTPUTS // 2):
        own = part(layer, {n: (dim, start, start + OUTPUTS // 2) for n, dim in output_dims(layer).items()})
        halves.append(own(value))
    assert torch.equal(torch.cat(halves, 1), whole)
    total: Any = 0.0
    for start, stop in ((0, 64), (64, INPUTS)):
        runs = input_runs(layer, ((start, stop),))
        own = part(layer, {name: (1, *run) for name, (run,) in runs.items()})
        assert num_features(own) == (stop - start, OUTPUTS)
        total = total + own.product(value[:, start:stop], None)
    torch.testing.assert_close(total + layer.bias, whole)
    assert layer.keeps_blocks(((0, 128), (128, 256)))
    assert layer.keeps_blocks(((0, 32),)) == (bits == 8)


def test_a_backward_saves_no_dequantized_weight() -> None:
    layer, saved = int8(), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    value = torch.randn(3, INPUTS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(value)
    assert not any(tensor.is_floating_point() for tensor in saved)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    wanted = F.linear(torch.ones(3, OUTPUTS), layer.dequantize().T)
    torch.testing.assert_close(gradient, wanted)


def test_others_are_refused() -> None:
    bnb = bitsandbytes()
    table = bnb.nn.Embedding4bit(64, 64).to("cpu")
    trained = bnb.nn.Linear8bitLt(64, 64)
    for module, word in ((table, "Embedding4bit"), (trained, "has_fp16_weights=True")):
        with pytest.raises(JobError) as raised:
            adapted(nn.Sequential(nn.Linear(64, 64), module))
        assert word in raised.value.given
        assert "1" in raised.value.given


def test_stacked_experts_are_named() -> None:
    model = nn.ModuleDict({"dense": int8()})
    model.experts = nn.Parameter(torch.zeros(4, 8, 8), requires_grad=False)
    assert any("experts [4, 8, 8]: stays in float32" in note for note in notes_on(model))
    assert not notes_on(nn.Linear(2, 2))
