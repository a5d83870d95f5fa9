"""Checkpoint manifest: name, size and SHA-256 of each file of a checkpoint directory. Pure: no file access."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20


class ManifestError(ValueError):
    """A manifest is not the one that was written, or the files are not the ones that it names."""


@dataclass(frozen=True)
class FileEntry:
    """A file's size in bytes and the SHA-256 of its content, hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint by name, and the step that it was taken after."""

    step: int
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """The manifest as canonical JSON that carries its own SHA-256."""
        body = {"format": FORMAT, "step": self.step, "files": {k: asdict(v) for k, v in sorted(self.files.items())}}
        return _seal(body)

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """The manifest in a file's content.

        Raises: ManifestError unless the content is, to the byte, what `to_bytes` writes: canonical form is demanded so
        that not even a changed blank goes unnoticed.
        """
        if len(content) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"the manifest has {len(content)} bytes, the limit is {MAX_MANIFEST_BYTES}")
        try:
            document = json.loads(content)
            body = document["body"]
            if content != _seal(body):
                raise ManifestError("the manifest's own checksum does not match")
            if body["format"] != FORMAT:
                raise ManifestError(f"checkpoint format {body['format']}; this version reads {FORMAT}")
            files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
            manifest = cls(body["step"], files)
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ManifestError(f"the manifest cannot be read: {error}") from None
        for name in manifest.files:
            check_name(name)
        return manifest


def check_name(name: str) -> None:
    """Raises: ManifestError for a name that could lead out of the checkpoint's directory."""
    if "/" in name or name in ("", ".", "..", MANIFEST_NAME) or "\\" in name or "\0" in name:
        raise ManifestError(f"the manifest names {name!r}, which is no plain file name")


def directory_name(step: int) -> str:
    """The name of the directory of a checkpoint taken after `step` steps."""
    return f"step-{step:08d}"


def _seal(body: object) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"body":{text},"sha256":"{digest}"}}\n'.encode()
