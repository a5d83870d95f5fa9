"""Watch that closes connections to lost hosts within seconds. By default such connections last for 15 minutes or more.

A host that loses its power or its network sends no message. The kernel repeats sent data for 15 minutes, and a process
that only waits for the host waits forever. Here the kernel probes each idle connection, and a thread closes connections
on which the other kernel has acknowledged nothing for some seconds. A stopped process does not count as lost, since its
kernel answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_AFTER_SECONDS = 4.0
_LOOK_SECONDS = 0.5
# The kernel probes an idle connection after 2 s and then each second; this watch gives up earlier than the kernel.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 9}
# struct tcp_info of Linux: eight bytes of states and counts, then numbers of 32 bits.
_TCP_INFO = struct.Struct("=8B13I")
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK = 2, 3, 8 + 4, 8 + 12
# Living hosts lose packets too: this many in a row must stay without acknowledgement.
_LEAST_REPEATED = 3


class HostWatch:
    """Watch over this process's connections to the hosts to which it has connected at the end of `opening`.

    The watch includes later connections to the same hosts. Only on Linux.
    """

    def __init__(self, after_seconds: float = _AFTER_SECONDS) -> None:
        self._after = after_seconds
        self._hosts: set[str] = set()
        self._watched: dict[int, tuple[str, socket.socket]] = {}  # by descriptor, with the socket's name
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Record the hosts to which the code in the context connects, and start the watch afterwards."""
        before = _sockets()
        yield
        for descriptor, name in _sockets().items():
            if before.get(descriptor) != name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
                    self._hosts |= {_peer(own)} - {""}
        if self._hosts:
            self._thread = threading.Thread(target=self._look, name="hosts", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the watch without closing the connections."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for _, own in self._watched.values():
            own.close()
        self._watched.clear()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            now = _sockets()
            for descriptor, (name, own) in list(self._watched.items()):
                if now.get(descriptor) != name:  # closed
                    own.close()
                    del self._watched[descriptor]
            duplicates = {own.fileno() for _, own in self._watched.values()}
            for descriptor in now.keys() - self._watched.keys() - duplicates:
                with contextlib.suppress(OSError):
                    own = socket.socket(fileno=os.dup(descriptor))
                    if _peer(own) not in self._hosts:
                        own.close()
                        continue
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in _KEEPALIVE.items():
                        own.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
                    self._watched[descriptor] = now[descriptor], own
            for descriptor, (_, own) in list(self._watched.items()):
                if not self._is_lost(own):
                    continue
                del self._watched[descriptor]
                with contextlib.suppress(OSError):
                    where, seconds = own.getpeername()[0], self._after
                    with contextlib.suppress(OSError, ValueError):
                        print(
                            f"note: {where} has not answered for {seconds:.0f} s: it is taken for lost", file=sys.stderr
                        )
                    own.shutdown(socket.SHUT_RDWR)  # a process that waits on the connection gets an error at once
                own.close()

    def _is_lost(self, own: socket.socket) -> bool:
        try:
            info = _TCP_INFO.unpack(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except (OSError, struct.error):
            return False
        silent = bool(info[_LAST_ACK] > 1000.0 * self._after)
        repeated = bool(info[_UNACKED] > 0 and info[_RETRANSMITS] >= _LEAST_REPEATED)
        return silent and (repeated or bool(info[_PROBES] >= _LEAST_REPEATED))


def _peer(own: socket.socket) -> str:
    """Return the address of the other host to which a socket is connected; else an empty text. Raises: OSError."""
    if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
        return ""
    try:
        there = str(own.getpeername()[0])
    except OSError:  # the socket listens
        return ""
    return "" if there == own.getsockname()[0] else there


def _sockets() -> dict[int, str]:
    """Return the descriptors of this process's sockets, each with a unique name; empty without Linux's /proc."""
    sockets = {}
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(path)
                if name.startswith("socket:"):
                    sockets[int(path.name)] = name
    return sockets
