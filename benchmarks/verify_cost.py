"""Claim: `shoal verify` of the examples takes under 30 s (LeNet, GPT) and under 90 s (ResNet-18) on 2 CPU cores.

At 2 and 3 processes, fast and exact, float32 and bfloat16. Seconds, on cores that have no instructions for bfloat16
(AVX2): LeNet 5 to 7, GPT 17 to 28, ResNet-18 37 to 63. Repeat with `python -m benchmarks.verify_cost`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time

JOBS = ("fashion_mnist.py", "gpt.py", "fashion_mnist.py:resnet18")


def main() -> None:
    """Prints a line for each command: seconds from start to end, its exit code."""
    modes = itertools.product(JOBS, ("fp32", "bf16"), ((), ("--exact",)), (2, 3))
    for job, precision, mode, ranks in modes:
        with tempfile.TemporaryDirectory() as out:
            settings = ("--devices", str(ranks), "--precision", precision, *mode, "--out", out)
            began = time.monotonic()
            command = [sys.executable, "-m", "shoal", "verify", f"examples/{job}", *settings]
            ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            seconds = time.monotonic() - began
        print(f"{job} {' '.join(settings[:-2])}: {seconds:.1f} s, exit code {ended.returncode}", flush=True)


if __name__ == "__main__":
    main()
