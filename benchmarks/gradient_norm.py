"""Claim: the norm of all gradients is right to 2e-8 at random values, in about the time of torch's own.

In float32 0.4 to 1.3 times torch's processor time (medians of four runs of one thread, two of them beside much other
work; torch 2.13.0, a virtual machine of 2 cores with AVX-512): least where there are many small tensors, 3 us more for
each of some ten thousand elements (LeNet 3 us in all, a GPT of 3.3 M 30 us), at millions 0.95 to 1.13. In bfloat16 0.2
to 1.1 times. torch's float32 norm is off by 4e-5 at 2.4 M elements and by 2.7e-3 at 38.6 M.

Repeat with `python -m benchmarks.gradient_norm`: each call of `shoal.numerics.gradient_norm.global_norm` takes turns
with its peer, what `torch.nn.utils.get_total_norm` does: `torch._foreach_norm` and the norm of these norms. A line for
each set of gradients: medians over the turns of the processor's microseconds on one thread, the median of the ratios of
one turn, and both errors relative to float64.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from shoal.numerics.gradient_norm import global_norm

Shapes = list[tuple[int, ...]]


def gpt(width: int, num_layers: int, num_words: int) -> Shapes:
    """The parameters of a GPT without biases in its attention."""
    layer: Shapes = [(3 * width, width), (width, width), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(num_words, width), *(shape for _ in range(num_layers) for shape in [*layer, *[(width,)] * 4])]


def resnet() -> Shapes:
    """The parameters of ResNet-18."""
    found: Shapes = [(64, 3, 7, 7), (1000, 512), (1000,), *[(64, 64, 3, 3)] * 4]
    for width in (128, 256, 512):
        found += [(width, width // 2, 3, 3), (width, width // 2, 1, 1), *[(width, width, 3, 3)] * 3]
    return [*found, *[(n,) for n in (64, 128, 256, 512) for _ in range(10)]]


SETS: dict[str, Shapes] = {
    "LeNet, 44 k": [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 256), (120,), (84, 120), (84,), (10, 84), (10,)],
    "300 tensors of 64": [(64,)] * 300,
    "4 of 65,536": [(256, 256)] * 4,
    "GPT, 3.3 M": gpt(256, 4, 512),
    "ResNet-18, 11 M": resnet(),
    "one of 2.4 M": [(2_400_000,)],
    "one of 38.6 M": [(50_257, 768)],
}


def torchs(gradients: list[Tensor]) -> float:
    """As torch.nn.utils.get_total_norm, without its grouping by device and dtype; 16 bits in float32."""
    wide = [g.float() if g.itemsize < 4 else g for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide))))


def seconds(gradients: list[Tensor], num_turns: int) -> tuple[list[float], list[float]]:
    """Of each turn what shoal's took, and torch's; the order changes."""
    found: dict[object, list[float]] = {global_norm: [], torchs: []}
    for turn in range(num_turns + 1):
        for norm in (global_norm, torchs) if turn % 2 else (torchs, global_norm):
            began = time.thread_time()
            norm(gradients)
            found[norm].append(time.thread_time() - began)
    return found[global_norm][1:], found[torchs][1:]


def main() -> None:
    """Prints a line for each set and dtype."""
    torch.set_num_threads(1)
    print(f"{'gradients':<18} {'dtype':<9} {'shoal us':>9} {'torch us':>9} {'ratio':>6}  error of shoal's, of torch's")
    for name, shapes in SETS.items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(1)
            gradients = [torch.randn(shape).to(dtype) for shape in shapes]
            size = sum(g.numel() for g in gradients)
            mine, theirs = seconds(gradients, max(11, min(501, 4_000_000_000 // (size * 40 + 100_000))))
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            true = float(torch.cat([g.flatten() for g in gradients]).double().norm())
            errors = [abs(norm(gradients) - true) / true for norm in (global_norm, torchs)]
            print(
                f"{name:<18} {str(dtype).removeprefix('torch.'):<9} {statistics.median(mine) * 1e6:>9.1f} "
                f"{statistics.median(theirs) * 1e6:>9.1f} {ratio:>6.2f}  {errors[0]:.1e}, {errors[1]:.1e}"
            )


if __name__ == "__main__":
    main()
