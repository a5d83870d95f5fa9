"""Linear layers that bitsandbytes has quantized to 4 or 8 bits, as frozen tensors that every layout can divide.

bitsandbytes keeps scales and shapes as attributes of a parameter. A shard of that parameter has lost them: under FSDP2
users have trained on wrong weights. Here weights and scales are two frozen parameters, with rows as outputs. A product
dequantizes the weight, and so does its backward, which saves no dequantized copy (Dettmers et al., arXiv 2305.14314).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.parallel.model.sharded_model import Runs

_LAYERS = {"Linear4bit", "Linear8bitLt"}
_PARAMETERS = {"Params4bit", "Int8Params"}
# Attributes of the layers of bitsandbytes that describe weights or the last call.
_OF_WEIGHTS = ("quant_state", "quant_storage", "state", "compute_type_is_set", "support_avx512bf16_for_cpu")
_FLOATS = torch.float32, torch.bfloat16, torch.float16
_STACKED_DIMS = 3


@dataclass(frozen=True)
class Quantization:
    """Quantization of a weight of `shape`: consecutive elements of a row share a scale, `block` of them.

    `code`: "nf4" or "fp4", two elements a byte, or "int8", one scale a row. `is_flat`: blocks go on over the ends of
    rows, so that the weight is a list of bytes. `was_nested`: the scales were quantized too.
    """

    code: str
    block: int
    shape: tuple[int, int]
    is_flat: bool = False
    was_nested: bool = False

    def dequantized(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight, or this rank's rows and columns of it, in a floating dtype."""
        if self.code == "int8":
            return weight.to(dtype).mul_(scales.view(torch.float32).mul(1.0 / 127.0))
        shape = self.shape if self.is_flat else (weight.shape[0], 2 * weight.shape[1])
        kind = dtype if dtype in _FLOATS else torch.float32
        dequantize = torch.ops.bitsandbytes.dequantize_4bit
        arguments = weight.reshape(-1, 1), scales.view(torch.float32).reshape(-1), self.block, self.code
        whole: Tensor = dequantize(*arguments, shape, kind)
        return whole.to(dtype)


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen quantized weight. It replaces a layer of bitsandbytes in place.

    `weight`: uint8 [out, in / 2] or int8 [out, in]. `absmax`: the scales' float32 bits as int32, so that no conversion
    of a model to another dtype rounds them; [out, in / block] or [out, 1]. Of a flat weight both have one dim.
    `compute_dtype`: dtype of the products, or None for the dtype of autocast or, without autocast, of the input.
    """

    absmax: Tensor
    quantization: Quantization
    compute_dtype: torch.dtype | None

    @property
    def can_be_cut(self) -> bool:
        """True if each row has its own blocks."""
        return not self.quantization.is_flat

    @property
    def features(self) -> tuple[int, int]:
        """Input and output features, on this rank if the weight is cut."""
        if self.weight.is_floating_point():
            return self.weight.shape[1], self.weight.shape[0]
        return self.weight.shape[1] * (1 if self.quantization.code == "int8" else 2), self.weight.shape[0]

    def keeps_blocks(self, bounds: Runs) -> bool:
        """Return True if a cut of the inputs at these bounds divides no block; an int8 row's scale is on each rank."""
        block = 1 if self.quantization.code == "int8" else self.quantization.block
        return not any(edge % block for run in bounds for edge in run)

    def input_runs(self, runs: Runs) -> dict[str, Runs]:
        """Return the columns of each parameter for runs of the inputs."""
        if self.quantization.code == "int8":
            return {"weight": runs}
        per_column = {"weight": 2, "absmax": self.quantization.block}
        return {name: tuple((a // n, b // n) for a, b in runs) for name, n in per_column.items()}

    def product_dtype(self, input: Tensor) -> torch.dtype:
        """Return the dtype in which the layer multiplies this input."""
        if self.compute_dtype is not None:
            return self.compute_dtype
        device = input.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the dequantized weight, in the input's dtype if `compute_dtype` is set."""
        return self.product(input, self.bias)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the forward with another bias."""
        if self.weight.is_floating_point():  # a trial of a layout has made it dense
            return F.linear(input, self.weight, bias)
        dtype = self.product_dtype(input)
        with torch.autocast(input.device.type, enabled=False):
            output = self.multiplied(input.to(dtype), bias, dtype)
        return output if self.compute_dtype is None else output.to(input.dtype)

    def multiplied(self, input: Tensor, bias: Tensor | None, rounded: torch.dtype) -> Tensor:
        """Return the product in the input's dtype, with a weight and a bias that are rounded to `rounded`."""
        own = None if bias is None else bias.to(rounded).to(input.dtype)
        stored, how = (self.weight, self.absmax), (self.quantization, rounded)
        output: Tensor = _DequantizedProduct.apply(input, own, stored, how)  # type: ignore[no-untyped-call]
        return output

    def dequantize(self) -> Tensor:
        """Return the weight in float32. DoRA of peft calls this function if there is an attribute `W_q`, as HQQ has."""
        return self.quantization.dequantized(self.weight.detach(), self.absmax.detach(), torch.float32)

    def extra_repr(self) -> str:
        """Return the description of the layer in the model's."""
        return f"{super().extra_repr()}, code={self.quantization.code}, block={self.quantization.block}"


class _DequantizedProduct(torch.autograd.Function):
    """Product with a dequantized weight, which forward and backward each make anew."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        stored: tuple[Tensor, Tensor],
        how: tuple[Quantization, torch.dtype],
    ) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.quantization, ctx.rounded = how
        return F.linear(input, ctx.quantization.dequantized(*stored, ctx.rounded).to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient @ ctx.quantization.dequantized(*ctx.saved_tensors, ctx.rounded).to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).sum(0) if gradient.ndim > 1 else gradient
        return of_input, of_bias, None, None


def replace_layers(model: nn.Module) -> None:
    """Replace each quantized linear layer of bitsandbytes by a `QuantizedLinear`, in place.

    Raises: JobError for other quantized modules and for weights that are quantized anew in each forward.
    """
    for name, module in model.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("bitsandbytes.")}
        if kinds & _LAYERS:
            _replace(name, module)
            continue
        own = [key for key, p in module._parameters.items() if type(p).__name__ in _PARAMETERS]
        if own or "Parametrization" in " ".join(kinds):
            what = f"{name}.{own[0]}" if own else name
            raise JobError(
                given=f"{what.lstrip('.')}, quantized by bitsandbytes in a {type(module).__name__}",
                conflict="shoal divides the quantized weights of Linear4bit and Linear8bitLt; a part of other ones "
                "would lose its scales",
                remedy="leave this module out of the quantization (llm_int8_skip_modules of a BitsAndBytesConfig)",
            )


def _replace(name: str, module: Any) -> None:
    """Make a `QuantizedLinear` of a layer of bitsandbytes. The layer keeps its hooks."""
    weight, is_int8 = module.weight, hasattr(module, "state")
    shape = module.out_features, module.in_features
    if is_int8 and module.state.has_fp16_weights:
        raise JobError(
            given=f"{name}: Linear8bitLt(has_fp16_weights=True)",
            conflict="it trains 16-bit weights and quantizes them in each forward, with outliers that depend on the "
            "samples of a microbatch",
            remedy="use has_fp16_weights=False with adapters, or nn.Linear",
        )
    if is_int8:
        quantization, dtype = Quantization("int8", shape[1], shape), torch.int8
        sizes: list[tuple[int, ...]] = [shape, (shape[0], 1)]
    else:
        block, dtype = weight.blocksize, torch.uint8
        flat, nested = bool(shape[1] % block), bool(weight.compress_statistics)
        quantization = Quantization(weight.quant_type, block, shape, flat, nested)
        numel = shape[0] * shape[1]
        sizes = [(-(-numel // 2),), (-(-numel // block),)]
        sizes = sizes if flat else [(shape[0], shape[1] // 2), (shape[0], shape[1] // block)]
    if weight.is_meta:
        values, scales = (
            weight.new_empty(size, dtype=kind) for size, kind in zip(sizes, (dtype, torch.float32), strict=True)
        )
    else:
        # bitsandbytes quantizes a layer when it moves to a device.
        if not (weight.dtype == torch.int8 if is_int8 else weight.bnb_quantized):
            weight = weight.to("cpu")
        state = module.state if is_int8 else weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):
            raise JobError(
                given=f"{name}: a 4-bit layer that has computed outside of a training",
                conflict="bitsandbytes has packed its weight for inference on this processor",
                remedy="load the model anew in model(), and call it only in the loss",
            )
        values = weight.detach().view(dtype)
        if is_int8:
            scales = weight.SCB if weight.SCB is not None else state.SCB  # the first forward moves them there
        elif state.nested:
            # Their blocks of 256 scales would be cut. The values stay: the sum is what each product used.
            dequantize, of_scales = torch.ops.bitsandbytes.dequantize_blockwise, state.state2
            scales = dequantize(state.absmax, of_scales.absmax, of_scales.code, of_scales.blocksize, torch.float32)
            scales = scales + state.offset
        else:
            scales = state.absmax
    for attribute in _OF_WEIGHTS:
        module.__dict__.pop(attribute, None)
    module.compute_dtype = getattr(module, "compute_dtype", None)
    module.__class__ = QuantizedLinear
    module.quantization, module.W_q = quantization, True
    bits = scales.detach().float().reshape(sizes[1]).contiguous().view(torch.int32)
    module.weight = nn.Parameter(values.reshape(sizes[0]).contiguous(), requires_grad=False)
    module.absmax = nn.Parameter(bits, requires_grad=False)


def notes_on(model: nn.Module) -> list[str]:
    """Return sentences about quantized layers: what differs from bitsandbytes' own, and what is not quantized."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not layers:
        return []
    notes = []
    counts = Counter(layer.quantization.code for layer in layers)
    kinds = " and ".join(f"{count} linear layers in {code}" for code, count in counts.items())
    notes.append(f"quantized: {kinds}, frozen; each product dequantizes its weight")
    if any(layer.quantization.was_nested for layer in layers):
        nested = (layer.quantization for layer in layers if layer.quantization.was_nested)
        more = sum(3 * q.shape[0] * q.shape[1] // q.block for q in nested)
        notes.append(
            f"quantized: double quantization is undone, since a cut would change it; the scales take {more / 1e6:.3g} "
            "MB more, and the weights stay the same"
        )
    if counts["int8"]:
        notes.append("quantized: activations stay unquantized, since LLM.int8 picks outliers by microbatch")
    for name, parameter in model.named_parameters():
        if parameter.ndim >= _STACKED_DIMS and not parameter.requires_grad and parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            notes.append(
                f"{name} {list(parameter.shape)}: stays in {dtype}, since bitsandbytes quantizes linear layers alone"
            )
    return notes
