"""Authenticated messages between a run's processes: a JSON header and tensors as raw bytes, nothing else.

Received data is never executed, and a peer's data is read only after the peer has proven that it knows the secret. The
bytes are not encrypted. `multiprocessing.connection` does not fit: it copies messages twice, its handshake has no time
limit, and the handshake is HMAC-MD5 before Python 3.12 (benchmarks/results/experiments.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.state import raw
from shoal.checkpoint.tensor_file import DTYPE_NAMES

# Magic, bytes of the header, bytes of the tensors.
_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"shl1"
_NONCE_BYTES, _PROOF_BYTES = 32, 32
MAX_HEADER_BYTES = 16 << 20
MAX_TENSOR_BYTES = 1 << 40
_HANDSHAKE_SECONDS = 10.0


class ClosedError(ConnectionError):
    """Error for a peer that is gone, or belongs to another run."""


class Channel:
    """Connection to an authenticated peer. Several threads may send, one thread receives.

    `sent_bytes` and `received_bytes` count the bytes of tensors.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self.sent_bytes = self.received_bytes = 0

    def send(self, header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send one message. Raises: ClosedError; TimeoutError after the time of `limit`."""
        flat = [t.detach().cpu().contiguous() for t in tensors]
        text = json.dumps({**header, "tensors": [[_name(t.dtype), list(t.shape)] for t in flat]}).encode()
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(text)} bytes; the limit is {MAX_HEADER_BYTES}")
        size = sum(t.nbytes for t in flat)
        try:
            with self._sending:
                self._socket.sendall(_PREFIX.pack(_MAGIC, len(text), size) + text)
                for tensor in flat:
                    self._socket.sendall(raw(tensor))
        except TimeoutError:
            raise
        except OSError as error:
            raise ClosedError(f"the peer is gone: {error}") from error
        self.sent_bytes += size

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Receive the next message. Raises: ClosedError, also for an invalid message; TimeoutError, as in `send`."""
        magic, length, size = _PREFIX.unpack(self._read(_PREFIX.size))
        if magic != _MAGIC or length > MAX_HEADER_BYTES or size > MAX_TENSOR_BYTES:
            raise ClosedError("the peer sent what is no message")
        try:
            header = json.loads(self._read(length))
            shapes = [(_DTYPES[name], tuple(shape)) for name, shape in header.pop("tensors")]
            if any(type(size) is not int or size < 0 for _, shape in shapes for size in shape):
                raise ValueError("a shape that is no list of sizes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ClosedError(f"the peer sent what is no message: {error}") from None
        if sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes) != size:
            raise ClosedError("the peer sent tensors of another size than it said")
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
        for tensor in tensors:
            self._fill(raw(tensor))
        self.received_bytes += size
        return header, tensors

    def ask(self, header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> tuple[dict[str, Any], list[Tensor]]:
        """Send one message and receive the next."""
        self.send(header, tensors)
        return self.receive()

    def limit(self, seconds: float | None) -> None:
        """Set the maximum silence of the peer in seconds; None: no limit."""
        self._socket.settimeout(seconds)

    def limit_sending(self, seconds: float) -> None:
        """Set the maximum time in seconds for which the peer may accept no data; its silence is not limited."""
        limit = struct.pack("@ll", int(seconds), 0)  # struct timeval
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _read(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                raise
            except OSError as error:
                raise ClosedError(f"the peer is gone: {error}") from error
            if not count:
                raise ClosedError("the peer is gone")
            view = view[count:]

    def close(self) -> None:
        """Close the connection; a thread that waits in it raises ClosedError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listen() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface."""
    return socket.create_server(("127.0.0.1", 0))


def connect(address: str, port: int, key: bytes) -> Channel:
    """Connect to a listener. Raises: ClosedError if no process there knows the key."""
    try:
        return _proven(socket.create_connection((address, port), _HANDSHAKE_SECONDS), key, b"client", b"server")
    except OSError as error:
        raise ClosedError(f"nobody of this run answers at {address}:{port}: {error}") from error


def admit(connected: socket.socket, key: bytes) -> Channel:
    """Return a channel to a connected peer. Raises: ClosedError if the peer does not prove at once to know the key."""
    return _proven(connected, key, b"server", b"client")


def accept_each(listener: socket.socket, key: bytes, attend: Callable[[Channel], None]) -> None:
    """Serve each peer that has the key in a separate thread, until the listener closes."""

    def admitted(connected: socket.socket) -> None:
        with contextlib.suppress(ClosedError):  # a peer of another run, or one that has left
            attend(admit(connected, key))

    while True:
        try:
            connected, _ = listener.accept()
        except OSError:
            return  # closed
        threading.Thread(target=admitted, args=(connected,), daemon=True).start()


def _proven(connected: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> Channel:
    """Exchange nonces, and prove in both directions by HMAC-SHA256 over the nonces that both sides know the key."""
    wire = Channel(connected)
    try:
        connected.settimeout(_HANDSHAKE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(own)
        other = wire._read(_NONCE_BYTES)
        connected.sendall(_proof(key, mine, own, other))
        if not hmac.compare_digest(wire._read(_PROOF_BYTES), _proof(key, theirs, other, own)):
            raise ClosedError("the peer does not know this run's key")
        connected.settimeout(None)
    except OSError as error:
        wire.close()
        raise error if isinstance(error, ClosedError) else ClosedError(f"no handshake: {error}") from error
    return wire


def _proof(key: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.new(key, role + own + other, hashlib.sha256).digest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(dtype): dtype for dtype in DTYPE_NAMES}
