"""Process on a host that tests whether it can reach other hosts at ports like those that ranks listen on.

The process listens on two ports that the system chooses and reports them. It receives the ports of the other hosts,
tries each and reports the results. It listens until its input ends.
"""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

NUM_PORTS = 2
_LIMIT_SECONDS = 4.0


def main() -> None:
    """Exchange JSON lines with the process that started this one."""
    listening = [_listening() for _ in range(NUM_PORTS)]
    print(json.dumps([found.getsockname()[1] for found in listening]), flush=True)
    places = json.loads(sys.stdin.readline() or "[]")
    if places:
        with ThreadPoolExecutor(min(32, len(places))) as pool:
            print(json.dumps(list(pool.map(tried, places))), flush=True)
    sys.stdin.read()


def _listening() -> socket.socket:
    """Listen on all interfaces without answering connections."""
    both = socket.has_dualstack_ipv6()
    family, place = (socket.AF_INET6, "::") if both else (socket.AF_INET, "0.0.0.0")  # noqa: S104  (that is asked)
    return socket.create_server((place, 0), family=family, backlog=128, dualstack_ipv6=both)


def tried(place: tuple[str, int]) -> str:
    """Return the reason why an address and port cannot be reached, or an empty text if they can."""
    try:
        socket.create_connection((place[0], place[1]), _LIMIT_SECONDS).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    main()
