"""The data of the examples: Fashion-MNIST, scikit-learn's digits, and the text of Python's own help topics."""

from __future__ import annotations

import hashlib
import http.client
import io
import math
import os
import shutil
import subprocess
import tempfile
import urllib.request
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from shoal.errors import DataError, DatasetNotFoundError, SettingWarning

GITHUB = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("usr/share/datasets/fashion-mnist")
HTTPS_TIMEOUT_SECONDS = 5.0
APT_TIMEOUT_SECONDS = 120.0
GZIP_WBITS = 16 + zlib.MAX_WBITS  # zlib's code for "expect a gzip header"
MAX_DOWNLOAD_BYTES = 64 * 2**20
PIECE_BYTES = 2**17

MEAN, STD = 0.2860, 0.3530  # of the training pixels, scaled to [0, 1]
IGNORED = -100  # the target that shoal.cross_entropy leaves out

Item = TypeVar("Item", np.float32, np.int64)


@dataclass(frozen=True, slots=True)
class IdxFile:
    """One idx file of unsigned bytes: the stem of its name, its dims, and the SHA-256 of its decompressed content."""

    stem: str
    dims: tuple[int, ...]
    sha256: str

    @property
    def name(self) -> str:
        """The name under which every source has it, but for a `.gz`."""
        return f"{self.stem}-idx{len(self.dims)}-ubyte"

    @property
    def header(self) -> bytes:
        """The big-endian uint32 words that open it: 0x800 (unsigned bytes) plus the number of dims, then the dims."""
        return b"".join(word.to_bytes(4, "big") for word in (0x800 + len(self.dims), *self.dims))

    @property
    def num_items(self) -> int:
        """Bytes after the header."""
        return math.prod(self.dims)


# The digests are those of Debian's dataset-fashion-mnist 0.0~git20200523.55506a9, decompressed.
FILES = {
    "train": (
        IdxFile("train-images", (60000, 28, 28), "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        IdxFile("train-labels", (60000,), "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    ),
    "test": (
        IdxFile("t10k-images", (10000, 28, 28), "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        IdxFile("t10k-labels", (10000,), "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
}
ALL_FILES = FILES["train"] + FILES["test"]


def fashion_mnist(split: str) -> TensorDataset:
    """Fashion-MNIST: normalised float32 images [N, 1, 28, 28] and int64 labels [N]; N = 60000 train, 10000 test.

    Searched in $SHOAL_DATA, Debian's dataset-fashion-mnist and the user's cache, then fetched into that cache.
    Raises: DatasetNotFoundError if no place has it and no fetch works; DataError if a file that lies there is damaged.
    Source: Xiao, Rasul and Vollgraf, arXiv 1708.07747.
    """
    _check_split(split)
    folder = _find(FILES[split]) or _fetch()
    images, labels = FILES[split]
    pixels = _read(folder, images, np.float32)[:, None]
    pixels *= np.float32(1 / (255 * STD))
    pixels -= np.float32(MEAN / STD)
    return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(_read(folder, labels, np.int64)))


def _find(files: Sequence[IdxFile]) -> Path | None:
    """The first folder that holds all of `files`, packed or not; None where there is none."""
    if given := os.environ.get("SHOAL_DATA"):
        here = Path(given)
        if found := next((folder for folder in (here, here / "fashion-mnist") if _holds(folder, files)), None):
            return found
        warnings.warn(f"SHOAL_DATA={given} holds no Fashion-MNIST; searching elsewhere", SettingWarning, stacklevel=3)
    return next((folder for folder in ("/" / DEBIAN_FOLDER, _cache()) if _holds(folder, files)), None)


def _holds(folder: Path, files: Sequence[IdxFile]) -> bool:
    return all((folder / file.name).is_file() or (folder / f"{file.name}.gz").is_file() for file in files)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "fashion-mnist"


def _read(folder: Path, file: IdxFile, dtype: type[Item]) -> npt.NDArray[Item]:
    """The file's items as an array of its dims. Raises: DataError if it is not that file."""
    path = folder / file.name
    packed = not path.is_file()
    if packed:
        path = folder / f"{file.name}.gz"
    out, end = np.empty(file.num_items, dtype), 0
    try:
        with path.open("rb") as stream:
            # Piece by piece: the whole content in memory, twice while it is joined, cost up to 0.5 s of page faults.
            for piece in _items(stream, file, packed):
                start, end = end, end + len(piece)
                out[start:end] = np.frombuffer(piece, np.uint8)
    except ValueError as error:
        raise DataError(
            given=f"Fashion-MNIST from {path}",
            conflict=str(error),
            remedy=f"remove {path} so that it is searched or fetched anew, or restore it",
        ) from error
    return out.reshape(file.dims)


def _items(stream: BinaryIO, file: IdxFile, packed: bool) -> Iterator[bytes]:
    """The content after the header, in pieces. Raises: ValueError if the stream is not of the file's format and size.

    A piece is bounded, and too much content ends it, so that a hostile download cannot fill the memory.
    """
    unpacker = zlib.decompressobj(GZIP_WBITS) if packed else None
    head, num_items = b"", 0
    while piece := stream.read(PIECE_BYTES):
        try:
            content = unpacker.decompress(piece) if unpacker else piece
        except zlib.error as error:
            raise ValueError(f"its gzip stream is damaged ({error})") from error
        if missing := len(file.header) - len(head):
            head, content = head + content[:missing], content[missing:]
            if not file.header.startswith(head):
                raise ValueError(f"it opens with {head.hex()}, not with {file.header.hex()}")
        num_items += len(content)
        if num_items > file.num_items:
            raise ValueError(f"it holds more than {file.num_items} bytes after its header")
        yield content
    if num_items < file.num_items or (unpacker and not unpacker.eof):
        raise ValueError(f"it is cut short: it ends {num_items} bytes after its header, of {file.num_items}")


def _fetch() -> Path:
    """The cache folder, with all four files fetched and verified. Raises: DatasetNotFoundError."""
    cache, failures = _cache(), []
    for name, source in ((GITHUB, _from_github), (f"apt-get download {DEBIAN_PACKAGE}", _from_debian)):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            for file, packed in source():
                _store(cache, file, packed)
        except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")
        else:
            return cache
    raise DatasetNotFoundError(
        given="fashion_mnist(...), SHOAL_DATA=" + os.environ.get("SHOAL_DATA", "(unset)"),
        conflict=f"neither $SHOAL_DATA nor /{DEBIAN_FOLDER} nor {cache} holds it, and fetching failed:\n"
        + "\n".join(failures),
        remedy=f"either `apt-get install {DEBIAN_PACKAGE}`,\n"
        f"or set SHOAL_DATA to a folder with the four idx files of {GITHUB},\n"
        "or start once with a network",
    )


def _from_github() -> Iterator[tuple[IdxFile, bytes]]:
    for file in ALL_FILES:
        with urllib.request.urlopen(f"{GITHUB}/{file.name}.gz", timeout=HTTPS_TIMEOUT_SECONDS) as reply:
            yield file, reply.read(MAX_DOWNLOAD_BYTES)


def _from_debian() -> Iterator[tuple[IdxFile, bytes]]:
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        raise FileNotFoundError("no apt-get and dpkg-deb on this machine")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        _command(folder, apt, "-q", "download", DEBIAN_PACKAGE)
        _command(folder, dpkg, "-x", *(path.name for path in Path(folder).glob("*.deb")), ".")
        for file in ALL_FILES:
            yield file, (Path(folder) / DEBIAN_FOLDER / f"{file.name}.gz").read_bytes()


def _command(folder: str, *words: str) -> None:
    """Runs a command in `folder`. Raises: OSError with what it said, or TimeoutExpired."""
    nothing, limit = subprocess.DEVNULL, APT_TIMEOUT_SECONDS
    done = subprocess.run(words, cwd=folder, stdin=nothing, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip() or f"{words[0]} exited with {done.returncode}")


def _store(cache: Path, file: IdxFile, packed: bytes) -> None:
    """Verifies a fetched file and moves it into the cache in one step. Raises: ValueError if it is another file."""
    digest = hashlib.sha256(file.header)
    for piece in _items(io.BytesIO(packed), file, packed=True):
        digest.update(piece)
    if digest.hexdigest() != file.sha256:
        raise ValueError(f"{file.name}.gz has SHA-256 {digest.hexdigest()} once decompressed, not {file.sha256}")
    # Ranks may fetch side by side: each writes a file of its own, and whoever moves last replaces equal content.
    descriptor, temporary = tempfile.mkstemp(dir=cache, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(packed)
        Path(temporary).replace(cache / f"{file.name}.gz")
    except BaseException:
        Path(temporary).unlink()
        raise


def digits(split: str) -> TensorDataset:
    """Scikit-learn's handwritten digits: float32 images [N, 1, 8, 8] in [0, 1] and int64 labels [N].

    Every fifth of the 1797 samples, from the first on, is test (360), the others are train (1437).
    """
    _check_split(split)
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    images, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 5 == 0) == (split == "test")
    scaled = (images[chosen] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return TensorDataset(torch.from_numpy(scaled), torch.from_numpy(labels[chosen].astype(np.int64)))


class Windows(Dataset[Tensor]):
    """Documents as windows of bytes: each sample a uint8 tensor [2 .. block + 1], ragged.

    A window opens with the byte that closes the one before it, so that each byte of a document but its first is a
    target exactly once.
    """

    def __init__(self, documents: Sequence[bytes], block: int = 128) -> None:
        self.bytes = torch.from_numpy(np.frombuffer(b"".join(documents), np.uint8).copy())
        self.windows: list[tuple[int, int]] = []
        offset = 0
        for document in documents:
            end = offset + len(document)
            self.windows += [(start, min(start + block + 1, end)) for start in range(offset, end - 1, block)]
            offset = end

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        start, end = self.windows[index]
        return self.bytes[start:end]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return [self.bytes[start:end] for start, end in (self.windows[i] for i in indices)]


def topics(split: str, block: int = 128) -> Windows:
    """The help topics of Python as windows of at most block + 1 bytes.

    Documents come sorted by key; every tenth, from the first on, is test. The text is that of the running Python:
    another version, even another patch version, has other bytes.
    """
    _check_split(split)
    from pydoc_data.topics import topics as texts

    chosen = [key for i, key in enumerate(sorted(texts)) if (i % 10 == 0) == (split == "test")]
    return Windows([texts[key].encode() for key in chosen], block)


def pad(samples: Sequence[Tensor], block: int = 128) -> tuple[Tensor, Tensor]:
    """Ragged samples as (inputs, targets), int64 [B, block]: targets are inputs one byte later, -100 at padding.

    The width is always `block`, never that of the longest sample: one batch shape, whatever grain a sample is in.
    """
    lengths = torch.tensor([len(sample) for sample in samples])
    if int(lengths.max()) > block + 1:
        raise DataError(
            given=f"a sample of {int(lengths.max())} bytes",
            conflict=f"pad(block={block}) takes at most {block + 1}",
            remedy="give the dataset and pad the same block",
        )
    inside = torch.arange(block + 1) < lengths[:, None]
    tokens = torch.full((len(samples), block + 1), IGNORED)
    tokens[inside] = torch.cat(list(samples)).long()
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:].contiguous()


def _check_split(split: str) -> None:
    if split not in FILES:
        raise DataError(given=f"split={split!r}", conflict="the splits are train and test", remedy='write "train"')
