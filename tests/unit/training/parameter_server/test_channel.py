"""Messages on a wire, and who is let in."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from shoal.training.parameter_server.channel import Channel, ClosedError, admit, connect, listen

KEY, OTHER = b"k" * 32, b"x" * 32


@pytest.fixture
def wires() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    pair = Channel(left), Channel(right)
    yield pair
    for wire in pair:
        wire.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_what_is_sent_arrives(wires: tuple[Channel, Channel], dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, 2).to(dtype), torch.ones((), dtype=dtype), torch.empty(0, 4, dtype=dtype)]
    wires[0].send({"kind": "push", "n": 1.5}, [*tensors, tensors[0].t()])
    header, held = wires[1].receive()
    assert header == {"kind": "push", "n": 1.5}
    for sent, got in zip([*tensors, tensors[0].t()], held, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)
    assert wires[0].sent_bytes == wires[1].received_bytes == sum(t.nbytes for t in held)


def test_a_peer_that_is_gone(wires: tuple[Channel, Channel]) -> None:
    wires[0].close()
    with pytest.raises(ClosedError, match="gone"):
        wires[1].receive()


def test_a_message_that_was_cut_short(wires: tuple[Channel, Channel]) -> None:
    raw = wires[0]._socket
    raw.sendall(struct.pack("<4sIQ", b"shl1", 100, 0) + b"{")
    wires[0].close()
    with pytest.raises(ClosedError, match="gone"):
        wires[1].receive()


def test_a_peer_that_takes_nothing_is_taken_for_gone(wires: tuple[Channel, Channel]) -> None:
    """As one that is stopped. A limit on sending is none on waiting for what it says."""
    wires[0].limit_sending(1)
    with pytest.raises(ClosedError, match="gone"):
        wires[0].send({"kind": "welcome"}, [torch.zeros(4 << 20)])
    assert wires[0]._socket.gettimeout() is None


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<4sIQ", b"http", 2, 0) + b"{}",
        struct.pack("<4sIQ", b"shl1", 1 << 30, 0),
        struct.pack("<4sIQ", b"shl1", 2, 0) + b"[]",
        struct.pack("<4sIQ", b"shl1", 4, 0) + b"\xff\xfe{}",
        *(
            struct.pack("<4sIQ", b"shl1", len(text), 8) + text
            for text in (
                b'{"tensors": [["float32", [3]]]}',  # another size than it says
                b'{"tensors": [["float32", [-2]]]}',
                b'{"tensors": [["load", [2]]]}',
                b'{"tensors": [["float32", [true, 2]]]}',
                b'{"tensors": 3}',
            )
        ),
    ],
)
def test_what_is_no_message(wires: tuple[Channel, Channel], raw: bytes) -> None:
    wires[0]._socket.sendall(raw)
    with pytest.raises(ClosedError):
        wires[1].receive()


def _admit(listener: socket.socket, key: bytes, found: list[Channel | ClosedError]) -> None:
    connected, _ = listener.accept()
    try:
        found.append(admit(connected, key))
    except ClosedError as error:
        found.append(error)


@pytest.mark.parametrize("key", [KEY, OTHER], ids=["the same", "another"])
def test_only_who_knows_the_key_is_let_in(key: bytes) -> None:
    found: list[Channel | ClosedError] = []
    with listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        thread = threading.Thread(target=_admit, args=(listener, KEY, found))
        thread.start()
        if key == KEY:
            wire = connect("127.0.0.1", listener.getsockname()[1], key)
            thread.join()
            assert isinstance(found[0], Channel)
            found[0].send({"kind": "welcome"})
            assert wire.receive()[0] == {"kind": "welcome"}
            found[0].close()
            wire.close()
        else:
            with pytest.raises(ClosedError, match=r"key|gone"):
                connect("127.0.0.1", listener.getsockname()[1], key)
            thread.join()
            assert isinstance(found[0], ClosedError)


def test_who_sends_his_own_proof_back_is_not_let_in() -> None:
    """A stranger who repeats the nonce and the proof that he was sent has shown nothing."""
    found: list[Channel | ClosedError] = []
    with listen() as listener:
        thread = threading.Thread(target=_admit, args=(listener, KEY, found))
        thread.start()
        with socket.create_connection(listener.getsockname()) as raw:
            raw.sendall(raw.recv(32, socket.MSG_WAITALL))
            raw.sendall(raw.recv(32, socket.MSG_WAITALL))
            thread.join()
    assert isinstance(found[0], ClosedError)
