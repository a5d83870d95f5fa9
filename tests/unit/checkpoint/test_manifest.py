"""A manifest is believed only in the exact bytes that were written."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.manifest import MAX_MANIFEST_BYTES, FileEntry, Manifest, ManifestError, check_name, seal
from shoal.checkpoint.store import directory_name

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.text("abcdefghijklmnopqrstuvwxyzäß0123456789._- \"'", min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", "manifest.json")
)
MANIFESTS = st.builds(
    Manifest,
    st.integers(0, 2**62),
    st.dictionaries(NAMES, st.builds(FileEntry, st.integers(0, 2**62), HEX), max_size=5),
)
ONE = Manifest(7, {"model.safetensors": FileEntry(12, "ab" * 32), "state.json": FileEntry(3, "cd" * 32)})


@given(MANIFESTS)
def test_what_is_written_is_read_back(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@given(MANIFESTS, st.data())
def test_no_changed_byte_goes_unnoticed(manifest: Manifest, data: st.DataObject) -> None:
    content = bytearray(manifest.to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestError):
        Manifest.from_bytes(bytes(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: b"",
        lambda c: c[:-1],
        lambda c: c[: len(c) // 2],
        lambda c: c + b"\n",
        lambda c: b" " + c,
        lambda c: c.replace(b'"step":7', b'"step": 7'),
        lambda c: c.replace(b'"step":7', b'"step":8'),
        lambda c: json.dumps(json.loads(c), indent=1).encode(),
        lambda c: b"null",
        lambda c: b"[]",
        lambda c: b"{}",
        lambda c: b'{"body":3}',
        lambda c: b"\xff\xfe",
        lambda c: b"[" * 100_000,
        lambda c: b"0" * (MAX_MANIFEST_BYTES + 1),
        lambda c: c * 2,
    ],
)
def test_what_is_not_the_manifest_is_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(change(ONE.to_bytes()))


@pytest.mark.parametrize(
    "body",
    [
        {"format": 2, "step": 1, "files": {}},
        {"format": 1, "files": {}},
        {"format": 1, "step": 1},
        {"format": 1, "step": 1, "files": []},
        {"format": 1, "step": 1, "files": {"a": {"size": 1}}},
        {"format": 1, "step": 1, "files": {"a": {"size": 1, "sha256": "", "mode": 7}}},
        {"format": 1, "step": 1, "files": {"../a": {"size": 1, "sha256": ""}}},
        {"format": 1, "step": 1, "files": {"manifest.json": {"size": 1, "sha256": ""}}},
        [],
        None,
    ],
)
def test_a_sealed_manifest_of_the_wrong_form_is_refused(body: object) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(seal(body))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../a", "a/b", "a/../../b", "manifest.json", "a\\b", "..\\b", "a\0b", "/"]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="no plain file name"):
        check_name(name)


def test_plain_names_pass() -> None:
    for name in ("model.safetensors", "state.json", "...", "a b", "-"):
        check_name(name)


def test_directory_names_sort_as_steps_do() -> None:
    assert directory_name(42) == "step-00000042"
    assert directory_name(123456789) == "step-123456789"
