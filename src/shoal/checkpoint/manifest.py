"""Manifest of a checkpoint: the size and SHA-256 of each file, with a checksum of the manifest itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20


class ManifestError(ValueError):
    """A manifest was altered, or the files do not match the manifest."""


class FormatError(ManifestError):
    """A checkpoint has a format that this version does not read. The checkpoint is not damaged."""


@dataclass(frozen=True)
class FileEntry:
    """A file's size in bytes and the hexadecimal SHA-256 of its content."""

    size: int
    sha256: str

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> FileEntry:
        """Parse an entry of a manifest, which may be forged. Raises: ValueError, KeyError or TypeError."""
        if set(entry) != {"size", "sha256"} or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
            raise ValueError(f"{entry} is no size with a SHA-256")
        return cls(_count(entry["size"]), entry["sha256"])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} counts nothing")
    return value


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by name, and the number of steps before the checkpoint."""

    step: int
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """Return the manifest as canonical JSON with its own SHA-256."""
        body = {"format": FORMAT, "step": self.step, "files": {k: asdict(v) for k, v in sorted(self.files.items())}}
        return seal(body)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse the content of a manifest file.

        Raises: ManifestError unless the content is byte for byte what `to_bytes` writes. The canonical form makes any
        changed byte visible, even a blank.
        """
        if len(content) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"the manifest has {len(content)} bytes, the limit is {MAX_MANIFEST_BYTES}")
        try:
            document = json.loads(content)
            body = document["body"]
            if content != seal(body):
                raise ManifestError("the manifest's own checksum does not match")
            if body["format"] != FORMAT:
                raise FormatError(f"checkpoint format {body['format']}; this version reads {FORMAT}")
            files = {name: FileEntry.of(entry) for name, entry in body["files"].items()}
            manifest = cls(_count(body["step"]), files)
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ManifestError(f"the manifest cannot be read: {error}") from None
        for name in manifest.files:
            check_name(name)
        return manifest


def check_name(name: str) -> None:
    """Check that a file name stays in the checkpoint's directory. Raises: ManifestError."""
    if "/" in name or name in ("", ".", "..", MANIFEST_NAME) or "\\" in name or "\0" in name:
        raise ManifestError(f"the manifest names {name!r}, which is no plain file name")


def seal(body: object) -> bytes:
    """Return a manifest's content: the body as canonical JSON, with the SHA-256 of that text."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"body":{text},"sha256":"{digest}"}}\n'.encode()
