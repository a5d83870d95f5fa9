"""One rank of MPI's all_reduce under mpirun, for comparison. It needs mpi4py and writes one JSON file.

Arguments: the file, the number of samples, the seconds of one sample, and the sizes in bytes.
"""

from __future__ import annotations

import array
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure, and write the slowest rank's seconds on rank 0."""
    from mpi4py import MPI

    file, samples, seconds, *sizes = sys.argv[1:]
    world: Any = MPI.COMM_WORLD
    rows = []
    for size in map(int, sizes):
        numel = max(1, size // 4)
        own, result = (array.array("f", bytes(4 * numel)) for _ in range(2))

        def call(own: Any = own, result: Any = result) -> None:
            world.Allreduce([own, MPI.FLOAT], [result, MPI.FLOAT], op=MPI.SUM)

        call()
        began = time.perf_counter()
        call()
        once = world.allreduce(time.perf_counter() - began) / world.size
        count = max(1, min(200, int(float(seconds) / once)))
        rounds = []
        for _ in range(int(samples)):
            world.Barrier()
            call()
            began = time.perf_counter()
            for _ in range(count):
                call()
            rounds.append(world.allreduce((time.perf_counter() - began) / count, op=MPI.MAX))
        rows.append({"size": size, "seconds": rounds})
    if world.rank == 0:
        name = MPI.Get_library_version().splitlines()[0].split(",")[0][:40]
        Path(file).write_text(json.dumps({"library": name, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
