"""A checkpoint is believed only if every byte is the one that was written; else the one before it is taken."""

import contextlib
import dataclasses
import errno
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.checkpoint.store
from shoal.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, ManifestError, seal
from shoal.checkpoint.store import SavedCheckpoint, Snapshot, Store, directory_name, make_room, open_folder
from shoal.errors import IntegrityError

NUM_FLIPS = 200


def snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    model: dict[str, Tensor] = {
        "layer.weight": torch.randn(7, 5, generator=generator),
        "layer.bias": torch.randn(7, generator=generator).bfloat16(),
        "seen": torch.tensor(step),
        "empty": torch.empty(0),
    }
    optimizer = {"layer.weight/exp_avg": torch.randn(7, 5, generator=generator)}
    document = {"run": {"step": step, "loss": 0.1 * step, "text": "ä"}, "streams": [{}, {}]}
    return Snapshot(step, {"model": model, "optimizer": optimizer}, document)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "checkpoints")
    for step in (10, 20):
        found.write(snapshot(step))
    return found


def files(store: Store, step: int) -> list[Path]:
    return sorted((store.folder / directory_name(step)).iterdir())


def same(one: SavedCheckpoint, two: Snapshot) -> bool:
    read = {group: one.read(group) for group in one.names}
    tensors = read.keys() == two.tensors.keys() and all(
        read[group].keys() == wanted.keys() and all(torch.equal(read[group][name], wanted[name]) for name in wanted)
        for group, wanted in two.tensors.items()
    )
    return tensors and one.step == two.step and one.document == two.document


# ---------------------------------------------------------------------------------------------------- good checkpoints


def test_what_is_written_is_read_back(store: Store) -> None:
    assert store.steps() == [10, 20]
    assert same(store.read(10), snapshot(10))
    good, complaints = store.newest_good()
    assert good is not None
    assert same(good, snapshot(20))
    assert complaints == []
    assert {p.name for p in files(store, 10)} == {
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o755), (0o027, 0o750), (0o077, 0o700)])
def test_the_umask_says_who_can_read_it_and_nobody_else_can_write(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        store = Store(tmp_path / "checkpoints")
        store.write(snapshot(10))
    finally:
        os.umask(before)
    assert (store.folder / directory_name(10)).stat().st_mode & 0o777 == mode
    assert {path.stat().st_mode & 0o777 for path in files(store, 10)} == {mode & 0o666}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (5, 9, 10, 100):
        store.write(snapshot(step))
    assert store.steps() == [10, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


@pytest.mark.parametrize(("keep", "left"), [(1, [100]), (None, [5, 9, 10, 100])])
def test_one_is_kept_or_all(keep: int | None, left: list[int], tmp_path: Path) -> None:
    store = Store(tmp_path, keep=keep)
    for step in (5, 9, 10, 100):
        store.write(snapshot(step))
    assert store.steps() == left


def test_the_same_step_again_takes_the_place_of_the_older(store: Store) -> None:
    fresh = snapshot(20)
    fresh.document["run"]["loss"] = 7.0
    store.write(fresh)
    assert same(store.read(20), fresh)
    assert sorted(p.name for p in store.folder.iterdir()) == [directory_name(10), directory_name(20)]


def test_no_directory_is_no_checkpoint(tmp_path: Path) -> None:
    for store in (Store(tmp_path), Store(tmp_path / "nowhere")):
        assert store.steps() == store.damaged() == []
        assert store.newest_good() == (None, [])
        store.clean()


# --------------------------------------------------------------------------------------------------------------- damage


def test_every_flipped_byte_is_found(store: Store) -> None:
    """In every file, so that each is hit by at least NUM_FLIPS // 5 of them."""
    chance = random.Random(12)
    for number in range(NUM_FLIPS):
        path = files(store, 20)[number % 4]
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content))
        before = content[place]
        content[place] ^= chance.randrange(1, 256)
        path.write_bytes(content)
        with pytest.raises(ManifestError):
            store.read(20)
        content[place] = before
        path.write_bytes(content)
    assert same(store.read(20), snapshot(20))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"])
def test_every_cut_and_addition_is_found(store: Store, name: str) -> None:
    path = store.folder / directory_name(20) / name
    whole = path.read_bytes()
    for content in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole + b"\0", whole + whole, whole[1:]):
        path.write_bytes(content)
        with pytest.raises(ManifestError):
            store.read(20)
    path.unlink()
    with pytest.raises(ManifestError, match=f"{name} cannot be read: No such file"):
        store.read(20)
    path.write_bytes(whole)
    assert same(store.read(20), snapshot(20))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"])
def test_files_of_another_checkpoint_are_found(store: Store, name: str) -> None:
    one, two = (store.folder / directory_name(step) / name for step in (10, 20))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    for step in (10, 20):
        with pytest.raises(ManifestError):
            store.read(step)


def test_a_renamed_directory_is_found(store: Store) -> None:
    (store.folder / directory_name(20)).rename(store.folder / directory_name(30))
    with pytest.raises(ManifestError, match="it is the checkpoint of step 20"):
        store.read(30)


def test_a_link_a_directory_or_a_pipe_is_no_file(store: Store, tmp_path: Path) -> None:
    path = store.folder / directory_name(20) / "model.safetensors"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)  # with the right content
    with pytest.raises(ManifestError, match="cannot be read"):
        store.read(20)
    path.unlink()
    path.mkdir()
    with pytest.raises((ManifestError, IsADirectoryError)):  # both are caught by `newest_good`
        store.read(20)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ManifestError, match="not a regular file"):
        store.read(20)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "..", "model.safetensors/../x"])
def test_a_manifest_that_names_other_places_is_refused(store: Store, name: str) -> None:
    (store.folder.parent / "secret").write_text("x")
    body = {"format": 1, "step": 20, "files": {name: {"size": 1, "sha256": "00" * 32}}}
    (store.folder / directory_name(20) / MANIFEST_NAME).write_bytes(seal(body))
    with pytest.raises(ManifestError, match="no plain file name"):
        store.read(20)


def sealed(store: Store, **contents: bytes) -> None:
    """Replaces files of step 20 by others, with a manifest that fits them."""
    folder = store.folder / directory_name(20)
    entries: dict[str, FileEntry] = {}
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in contents.items():
        entries[name.replace("__", ".")] = store.place.write(folder.name, name.replace("__", "."), content)
    (folder / MANIFEST_NAME).write_bytes(Manifest(20, entries).to_bytes())


@pytest.mark.parametrize("contents", [{}, {"state__json": b"{"}, {"state__json": b"\xff"}])
def test_good_sums_over_nonsense_are_refused(store: Store, contents: dict[str, bytes]) -> None:
    sealed(store, **contents)
    with pytest.raises(ManifestError, match="do not hold a training state"):
        store.read(20)


def test_good_sums_over_what_is_no_safetensors_are_refused(store: Store) -> None:
    sealed(store, state__json=b"{}", model__safetensors=b"nothing")
    with pytest.raises(ManifestError):
        store.read(20)


# ------------------------------------------------------------------------------------------------------------- fallback


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(folder / "model.safetensors", 10),
    "empty manifest": lambda folder: os.truncate(folder / MANIFEST_NAME, 0),
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "garbled": lambda folder: (folder / MANIFEST_NAME).write_bytes(os.urandom(300)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_one_before_is_taken_and_the_bad_one_kept_aside(store: Store, kind: str) -> None:
    DAMAGES[kind](store.folder / directory_name(20))
    good, complaints = store.newest_good()
    assert good is not None
    assert same(good, snapshot(10))
    (complaint,) = complaints
    assert complaint.startswith("checkpoint of step 20 is damaged: ")
    assert complaint.endswith("kept as step-00000020.bad")
    assert store.steps() == [10]
    assert store.damaged() == ["step-00000020.bad"]
    # The step is trained and damaged again: neither of the two is lost.
    store.write(snapshot(20))
    DAMAGES[kind](store.folder / directory_name(20))
    assert store.newest_good()[1][0].endswith("kept as step-00000020.bad-2")
    assert len(store.damaged()) == 2


def test_all_bad_is_an_error_also_when_asked_again(store: Store) -> None:
    for step in (10, 20):
        DAMAGES["cut"](store.folder / directory_name(step))
    with pytest.raises(IntegrityError) as caught:
        store.newest_good()
    assert "step 10 is damaged" in caught.value.conflict
    assert "step 20 is damaged" in caught.value.conflict
    with pytest.raises(IntegrityError):
        store.newest_good()


# -------------------------------------------------------------------------------------------------------- broken writes


def test_what_a_killed_writer_left_is_cleaned(store: Store) -> None:
    (store.folder / ".tmp-step-00000030-abc").mkdir()
    (store.folder / ".tmp-step-00000030-abc" / "model.safetensors").write_bytes(b"x")
    (store.folder / directory_name(20)).rename(store.folder / ".old-step-00000020-abcdef")  # killed between two renames
    shutil.copytree(store.folder / directory_name(10), store.folder / ".old-step-00000010-abcdef")
    assert store.steps() == [10]
    store.clean()
    assert store.steps() == [10, 20]
    assert same(store.read(20), snapshot(20))
    assert len(list(store.folder.iterdir())) == 2


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("number", range(8))
def test_a_full_disk_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk is full at the first, second ... of the calls that write a checkpoint: five syncs, then a rename."""
    calls = 0
    fsync, rename = os.fsync, Path.rename

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object) -> object:
            nonlocal calls
            calls += 1
            return full() if calls == number + 1 else call(*args)

        return wrapped

    before = sorted(p.name for p in store.folder.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", counted(fsync))
        patched.setattr(Path, "rename", counted(rename))
        if number < 6:
            with pytest.raises(OSError, match="No space left"):
                store.write(snapshot(30))
            assert sorted(p.name for p in store.folder.rglob("*")) == before
        elif number == 6:  # the whole checkpoint is there, only its directory entry may not be on the disk yet
            with pytest.raises(OSError, match="No space left"):
                store.write(snapshot(30))
            assert same(store.read(30), snapshot(30))
        else:
            store.write(snapshot(30))
            assert calls == 7, "a call that no case of this test breaks"
    good, complaints = store.newest_good()
    assert good is not None
    assert complaints == []


def test_a_failed_replacement_keeps_the_older(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda a, b: full() if a.name.startswith(".tmp-") else rename(a, b))
        with pytest.raises(OSError, match="No space left"):
            store.write(snapshot(20))
    assert store.steps() == [10, 20]


def test_what_was_just_written_is_kept(store: Store) -> None:
    store.write(snapshot(30))
    store.write(snapshot(5))
    assert 5 in store.steps()


def test_a_checkpoint_that_cannot_be_opened_now_is_not_called_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    store.write(snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    files.enter_context(open(os.devnull, "rb"))
            with pytest.raises(OSError, match="Too many open files"):
                store.newest_good()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.steps() == [1]
    assert not store.damaged()


def test_each_file_is_hashed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = shoal.checkpoint.store.hashlib.sha256

    def counting(content: bytes = b"") -> Any:
        hashed.append(len(content))
        return real(content)

    monkeypatch.setattr(shoal.checkpoint.store.hashlib, "sha256", counting)
    judged = store.read(20)
    assert len(hashed) == 4  # the manifest, the state, two files of tensors
    assert {name for name in judged.names if judged.read(name)} == {"model", "optimizer"}
    assert len(hashed) == 4
    hashed.clear()
    opened = store.open(20)
    assert len(hashed) == 2
    assert opened.read("model").keys() == judged.read("model").keys()
    assert len(hashed) == 3


def test_a_file_that_was_opened_is_checked_when_it_is_read(store: Store) -> None:
    path = store.folder / directory_name(20) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    opened = store.open(20)
    with pytest.raises(ManifestError, match="SHA-256 differs"):
        opened.read("model")


# ------------------------------------------------------------------------------------------------------------- the best


def test_the_best_outlives_newer_ones(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", keep=2)
    for step in (10, 20, 30, 40):
        store.write(dataclasses.replace(snapshot(step), best=step == 20))
    assert store.steps() == [30, 40]
    assert same(open_folder(store.folder / "best"), snapshot(20))
    store.write(dataclasses.replace(snapshot(50), best=True))
    assert same(open_folder(store.folder / "best"), snapshot(50))
    assert store.newest_good()[0] is not None
    assert {path.name for path in store.folder.iterdir()} == {"best", "step-00000040", "step-00000050"}


def test_the_best_is_made_up_for_where_a_kill_came_before(store: Store) -> None:
    """Of a step that has a checkpoint; of one that has none the best stays as it is."""
    store.keep_best(10, if_missing=True)
    assert open_folder(store.folder / "best").step == 10
    store.keep_best(15, if_missing=True)
    assert open_folder(store.folder / "best").step == 10
    (store.folder / "best" / MANIFEST_NAME).unlink()
    store.keep_best(20, if_missing=True)
    assert open_folder(store.folder / "best").step == 20


def test_the_best_is_copied_where_a_file_has_one_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.keep_best(10)
    assert same(open_folder(store.folder / "best"), snapshot(10))


def test_room_is_made_by_the_oldest_but_not_by_the_best_or_the_newest_valid_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", keep=2)
    for step in (4, 8):
        store.write(snapshot(step))
    assert make_room(Store(store.folder, keep=None), 12) is None
    assert make_room(Store(store.folder, keep=3), 12) is None
    assert make_room(Store(store.folder, keep=1), 8) is not None  # that of step 4, since 8 is written again
    store.write(snapshot(4))
    store.keep_best(4)
    assert make_room(store, 12) is None
    shutil.rmtree(store.folder / "best")
    (store.folder / directory_name(8) / "model.safetensors").write_bytes(b"")
    assert make_room(store, 12) is None
    assert store.steps() == [4, 8]
