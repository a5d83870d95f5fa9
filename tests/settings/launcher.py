"""A launcher of another make, as torchrun is: so many ranks of one command, which find each other by the environment.

    python launcher.py RANKS COMMAND...

What a rank says is in stdout-RANK and stderr-RANK; the exit codes are printed as JSON. One rank is told of no others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys


def main() -> None:
    """Starts the ranks and waits for them."""
    ranks, *command = sys.argv[1:]
    world = int(ranks)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as files:
        port = listener.getsockname()[1]
        processes = []
        for rank in range(world):
            variables = dict(os.environ)
            if world > 1:
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
                variables |= {name: str(number) for name, number in numbers.items()}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                if rank == 0:
                    variables["SHOAL_LISTEN_FD"] = str(listener.fileno())
            said = [files.enter_context(open(f"{name}-{rank}", "wb")) for name in ("stdout", "stderr")]
            passed = [listener.fileno()] if rank == 0 and world > 1 else []
            processes.append(
                subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=said[0], stderr=said[1], pass_fds=passed
                )
            )
        print(json.dumps([process.wait() for process in processes]))


if __name__ == "__main__":
    main()
