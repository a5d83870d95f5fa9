"""Linear layers in float8: what is rounded, by which scales, and that a cut or other tokens change none of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics import float8
from shoal.numerics.float8 import Float8, Float8Linear, make_float8
from shoal.numerics.precision import Precision
from shoal.parallel.blocks.narrow_products import float8_layers, in_precision
from shoal.plans.plan import PrecisionSection


def factors(tokens: int = 24, inputs: int = 256, outputs: int = 128) -> tuple[Tensor, Tensor]:
    """Activations [tokens, inputs] with rows of very different sizes, and a weight, both exact in bfloat16."""
    torch.manual_seed(0)
    sizes = 2.0 ** torch.arange(tokens).sub(tokens // 2)[:, None]
    return (torch.randn(tokens, inputs) * sizes).bfloat16().float(), torch.randn(outputs, inputs).bfloat16().float()


def in_steps(values: Tensor, largest: Tensor) -> Tensor:
    """Values rounded to e4m3 by arithmetic: three bits of mantissa, and steps of 2^-9 below 2^-6."""
    scale = 2.0 ** torch.ceil(torch.log2(largest / 448.0))
    scaled = values / scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6)))
    step = 2.0 ** (exponent - 3.0)
    return torch.round(scaled / step) * step * scale


@pytest.mark.parametrize("blocks", [False, True])
def test_factors_are_rounded_by_their_own_scales(blocks: bool) -> None:
    x, w = (t.double() for t in factors())
    a, b = Float8(blocks).rounded(x, w, None)
    if blocks:
        of_x = x.view(24, 2, 128).abs().amax(2, keepdim=True).expand(24, 2, 128).reshape(24, 256)
        of_w = w.view(128, 2, 128).abs().amax((0, 2)).repeat_interleave(128).expand(128, 256)
    else:
        of_x, of_w = x.abs().amax(1, keepdim=True), w.abs().amax(1, keepdim=True)
    assert torch.equal(a.wide(torch.float64), in_steps(x, of_x))
    assert torch.equal(b.wide(torch.float64), in_steps(w, of_w))
    assert torch.equal(a.wide(torch.bfloat16).double(), a.wide(torch.float64))  # powers of two: exact
    assert 0.01 < float((a.wide(torch.float64) - x).norm() / x.norm()) < 0.04


def layer(blocks: bool = False, **further: Any) -> Float8Linear:
    torch.manual_seed(1)
    module = nn.Linear(256, 128)
    make_float8(module, Float8(blocks, **further))
    assert isinstance(module, Float8Linear)
    return module


def computed(module: nn.Module, x: Tensor, by: Tensor) -> list[Tensor]:
    """Output and gradients of input and parameters, under autocast."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], by)]


@pytest.mark.parametrize("blocks", [False, True])
def test_the_product_and_the_gradient_of_the_input_have_rounded_factors_the_weights_gradient_has_not(
    blocks: bool,
) -> None:
    module, (x, _), how = layer(blocks), factors(), Float8(blocks)
    by = torch.randn(24, 128).bfloat16()
    y, of_x, of_w, of_bias = computed(module, x, by)
    weight = module.weight.detach().bfloat16().float()
    a, b = (one.wide(torch.float32) for one in how.rounded(x, weight, None))
    assert torch.equal(y, (a @ b.t() + module.bias.detach().bfloat16().float()).bfloat16())
    c, d = (one.wide(torch.float32) for one in how.rounded(by.float(), weight.t().contiguous(), None))
    assert torch.equal(of_x, (c @ d.t()).bfloat16().float())
    assert torch.equal(of_w, (by.float().t() @ x).bfloat16().float())
    torch.testing.assert_close(of_bias, by.float().sum(0), rtol=0.01, atol=0.01)


def test_other_tokens_change_no_bit() -> None:
    module, (x, _) = layer(), factors()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        whole = module(x)
        huge = torch.cat([x[:12], x[12:] * 1e6])
        assert torch.equal(module(huge)[:12], whole[:12])


def test_with_the_maximum_over_ranks_parts_add_up_to_the_whole() -> None:
    """Two ranks of a tensor axis that cuts the inputs: x has its largest elements on one of them."""
    x, w = factors()
    x[:, :128] *= 2.0**20
    parts = slice(128), slice(128, 256)
    largest = [torch.cat([x[:, part].abs().amax(1), w[:, part].abs().amax(1)]) for part in parts]
    seen: list[Tensor] = []

    def over(own: Tensor) -> Tensor:
        seen.append(own)
        return torch.maximum(*largest)

    whole = Float8().rounded(x, w, None)
    for number, part in enumerate(parts):
        own = Float8(inputs=over).rounded(x[:, part], w[:, part], over)
        assert torch.equal(seen[number], largest[number])
        for mine, all_of_it in zip(own, whole, strict=True):
            assert torch.equal(mine.wide(torch.float32), all_of_it.wide(torch.float32)[:, part])
    alone = Float8().rounded(x[:, 128:], w[:, 128:], None)[0]  # a rank's own maximum is another rounding
    assert not torch.equal(alone.wide(torch.float32), whole[0].wide(torch.float32)[:, 128:])


def test_torchs_kernel_is_within_a_rounding_of_the_reference() -> None:
    a, b = Float8().rounded(*factors(), None)
    found = float8._scaled_product(a, b)
    wanted = F.linear(a.wide(torch.float32), b.wide(torch.float32))
    assert found.dtype == torch.bfloat16
    size = wanted.abs().amax(1, keepdim=True)
    assert float(((found.float() - wanted).abs() / size).max()) < 2.0**-8


def test_what_is_not_finite_stays_so_and_zeros_stay_zeros() -> None:
    module, x = layer(), torch.ones(4, 256)
    x[0], x[1, 3], x[2, 3] = 0.0, float("inf"), float("nan")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = module(x)
    assert torch.equal(y[0].float(), module.bias.bfloat16().float())
    assert not y[1:3].isfinite().any()
    assert y[3].isfinite().all()


def test_without_autocast_a_layer_computes_as_its_class() -> None:
    module, (x, _) = layer(), factors()
    plain = nn.Linear(256, 128)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x), plain(x))
    assert torch.equal(copy.deepcopy(module)(x), plain(x))


class Experts(nn.Module):
    """A block with a router, experts, and layers that are too small or odd."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.small, self.odd = nn.Linear(128, 256), nn.Linear(128, 64), nn.Linear(128, 136)
        self.gate, self.experts = nn.Linear(128, 128), nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
        self.attention = nn.MultiheadAttention(128, 2)


def model() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Experts() for _ in range(2)), "head": nn.Linear(128, 256)})


def test_the_layers_of_blocks_are_chosen_but_for_routers_and_small_ones() -> None:
    whole = model()
    names = {id(module): name for name, module in whole.named_modules()}
    chosen = {names[id(module)] for module in float8_layers(whole, 16)}
    wanted = {"up", "experts.0", "experts.1"}
    assert chosen == {f"blocks.{n}.{name}" for n in (0, 1) for name in wanted}


def test_a_model_without_such_layers_is_refused() -> None:
    precision = Precision.of(PrecisionSection(compute="bfloat16", products="float8_blocks"), torch.device("cpu"))
    assert isinstance(in_precision(model(), precision)["blocks"][0].up, Float8Linear)  # type: ignore[index]
    with pytest.raises(JobError, match="multiples of 128"):
        in_precision(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), precision)


def test_the_weights_gradient_may_come_after_the_inputs() -> None:
    module, (x, _) = layer(), factors()
    x.requires_grad_()
    by = torch.randn(24, 128).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    (of_x,) = torch.autograd.grad(y, [x], by, retain_graph=True)
    (of_w,) = torch.autograd.grad(y, [module.weight], by)
    both = computed(module, x.detach(), by)
    assert torch.equal(of_x, both[1])
    assert torch.equal(of_w, both[2])
