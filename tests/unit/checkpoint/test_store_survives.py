"""Writers killed before any call to the system, random damages, forged manifests: never a state that is not one."""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.unit.checkpoint.test_store import files, same, snapshot
from tests.usual import parametrize

from shoal.checkpoint.manifest import MANIFEST_NAME, ManifestError, seal
from shoal.checkpoint.places import LocalPlace
from shoal.checkpoint.store import BEST_NAME, Store, directory_name, open_folder

NUM_DAMAGES, NUM_FORGED = 300, 50
# Functions that change what is on a disk; of others a kill before them is one before the next of these.
CHANGES = {"open", "mkdir", "write", "fsync", "rename", "replace", "link", "unlink", "rmdir", "close", "flush"}


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Whether a child that does the work was killed before its call of that number; else it had fewer."""
    child = os.fork()
    if child == 0:
        left = number

        def before(frame: FrameType, event: str, function: Any) -> None:
            nonlocal left
            if event == "c_call" and getattr(function, "__name__", "") in CHANGES:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        try:
            sys.setprofile(before)
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@parametrize("how", ["another step", "the same step again", "the best"], usual=["the same step again"])
def test_a_kill_before_every_call_leaves_a_state_to_go_on_from(how: str, tmp_path: Path) -> None:
    step = 20 if how == "the same step again" else 30
    kept = Store(tmp_path / "kept", keep=2)
    for old in (10, 20):
        kept.write(snapshot(old))
    taken = snapshot(step)
    if how == "the best":
        taken = type(taken)(taken.step, taken.tensors, taken.document, best=True)
    for number in range(1000):
        folder = tmp_path / str(number)
        shutil.copytree(kept.folder, folder)
        died = killed_at(number, lambda folder=folder: Store(folder, keep=2).write(taken))  # type: ignore[misc]
        again = Store(folder, keep=2)
        again.clean()
        found, complaints = again.newest_good()
        assert found is not None
        assert complaints == []
        assert found.step in (20, step)
        assert same(found, snapshot(found.step))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        again.write(snapshot(40))  # and the next one is written
        assert again.steps()[-1] == 40
        shutil.rmtree(folder)
        if not died:
            break
    assert number > 20, "there are some calls to be killed before"
    assert found.step == step


def damage(folder: Path, other: Path, drawn: random.Random) -> str:
    """Damages a checkpoint in some way."""
    kind = drawn.choice(["bits", "zeros", "cut", "longer", "gone", "empty", "swapped", "link", "folder"])
    path = drawn.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    if kind == "bits":
        for _ in range(drawn.randint(1, 3)):
            content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    elif kind == "zeros":
        at = drawn.randrange(len(content))
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "cut":
        del content[drawn.randrange(len(content)) :]
    elif kind == "longer":
        content += drawn.randbytes(drawn.randint(1, 40))
    elif kind == "swapped":
        content = bytearray((other / path.name).read_bytes())
    path.unlink()
    if kind == "link":
        path.symlink_to(other / path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.write_bytes(b"" if kind == "empty" else content)
    return f"{kind} {path.name}"


def test_random_damages_are_all_found(tmp_path: Path) -> None:
    drawn, found = random.Random(21), 0
    kept = Store(tmp_path / "kept")
    for step in (10, 20):
        kept.write(snapshot(step))
    for number in range(NUM_DAMAGES):
        store = Store(tmp_path / str(number))
        shutil.copytree(kept.folder, store.folder)
        before = {path.name: path.read_bytes() for path in files(store, 20)}
        what = damage(store.folder / directory_name(20), store.folder / directory_name(10), drawn)
        after = {path.name: path.read_bytes() for path in files(store, 20) if path.is_file() and not path.is_symlink()}
        if before == after:  # zeros where there were some
            continue
        good, complaints = store.newest_good()
        assert good is not None
        assert good.step == 10, what
        assert len(complaints) == 1
        found += 1
        shutil.rmtree(store.folder)
    assert found > 0.9 * NUM_DAMAGES


def forged(body: dict[str, Any], drawn: random.Random, secret: Path) -> None:
    """Changes a manifest's content in some way."""
    names = list(body["files"])
    name = drawn.choice(names)
    entry = body["files"][name]
    kind = drawn.choice(["path", "size", "sha", "drop", "type", "step", "key"])
    if kind == "path":
        place = drawn.choice([str(secret), f"../../{secret.name}", f"..\\{secret.name}", ".", "a/../b", "x\0y", ""])
        body["files"][place] = body["files"].pop(name)
    elif kind == "size":
        entry["size"] = drawn.choice([-1, 10**18, entry["size"] + 1, 1.5, "7", None, True])
    elif kind == "sha":
        entry["sha256"] = drawn.choice(["00" * 32, "", 5, entry["sha256"].upper() + "x", None])
    elif kind == "drop":
        del body["files"][name]
    elif kind == "type":
        body["files"] = drawn.choice([[], None, 5, "files", {name: None}])
    elif kind == "step":
        body["step"] = drawn.choice([-1, "20", None, 10**9, 20.0])
    else:
        entry["more"] = 1


def test_forged_manifests_are_all_found_and_nothing_outside_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own checksum is right: what they say has to be judged by itself."""
    drawn, secret = random.Random(50), tmp_path / "secret"
    taken = snapshot(20)
    held = {group: {path: {"files": {group: []}} for path in tensors} for group, tensors in taken.tensors.items()}
    taken.document["tensors"] = held
    secret.write_text("x")
    opened: list[Path] = []
    real = os.open

    def noting(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(Path(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", noting)
    for number in range(NUM_FORGED):
        store = Store(tmp_path / str(number))
        store.write(taken)
        manifest = store.folder / directory_name(20) / MANIFEST_NAME
        body = json.loads(manifest.read_bytes())["body"]
        forged(body, drawn, secret)
        manifest.write_bytes(seal(body))
        opened.clear()
        with pytest.raises(ManifestError):
            store.read(20)
        assert all(path.resolve().parent == store.folder / directory_name(20) for path in opened), opened


def test_the_best_is_there_after_a_disk_refused_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, move = Store(tmp_path), LocalPlace.move
    for step in (10, 20):
        store.write(snapshot(step))
    store.keep_best(10)

    def refuse(place: LocalPlace, name: str, new: str) -> None:
        if name.startswith(".tmp-"):
            raise OSError("no space")
        move(place, name, new)

    monkeypatch.setattr(LocalPlace, "move", refuse)
    with pytest.raises(OSError, match="no space"):
        store.keep_best(20)
    assert open_folder(tmp_path / BEST_NAME).step == 10
    assert not [name for name in store.place.names() if name.startswith(".")]


def test_the_best_that_a_killed_writer_moved_aside_is_put_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(snapshot(10))
    store.keep_best(10)
    store.place.move(BEST_NAME, f".old-{BEST_NAME}-abcdef")
    store.clean()
    assert open_folder(tmp_path / BEST_NAME).step == 10
