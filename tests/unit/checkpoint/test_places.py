"""Checkpoints at an address are believed as those on disk are: whole, checked to the byte, of one run at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.manifest import MANIFEST_NAME
from shoal.checkpoint.places import RemotePlace
from shoal.checkpoint.store import (
    BEST_NAME,
    NewestMark,
    SavedCheckpoint,
    Snapshot,
    Store,
    directory_name,
    open_in,
    remove_later,
)
from shoal.errors import FencedError
from shoal.runs.directory import Fence


def opened(tmp_path: Path, keep: int | None = 3) -> Store:
    """A store of a run that has the right to write there, with a working copy of its own."""
    here = tmp_path / "here"
    here.mkdir(exist_ok=True)
    (here / "job.json").write_text("{}")
    found = Store(
        here / "checkpoints", keep, NewestMark(here / "saved.json"), remote=RemotePlace(f"file://{tmp_path}/there/run")
    )
    assert found.remote is not None
    found.remote.take_over(found.folder.parent, found.fence)
    return found


def snapshot(step: int, *, best: bool = False) -> Snapshot:
    tensors = {"model": {"weight": torch.full((3, 2), float(step)), "none": torch.empty(0)}}
    return Snapshot(step, tensors, {"run": {"step": step}}, best)


def there(tmp_path: Path, *parts: str) -> Path:
    return Path(tmp_path, "there", "run", "checkpoints", *parts)


def step_of(found: SavedCheckpoint | None) -> int:
    assert found is not None
    assert torch.equal(found.read("model")["weight"], torch.full((3, 2), float(found.step)))
    return found.step


def test_what_is_written_is_read_back_and_the_newest_are_kept(tmp_path: Path) -> None:
    store = opened(tmp_path, keep=2)
    for step in (5, 9, 10):
        store.write(snapshot(step, best=step == 5))
    assert store.steps() == [9, 10]
    good, complaints = opened(tmp_path).newest_good()
    assert (step_of(good), complaints) == (10, [])
    assert there(tmp_path, BEST_NAME, MANIFEST_NAME).read_bytes() != there(tmp_path, directory_name(10), MANIFEST_NAME)
    assert not (tmp_path / "here" / "checkpoints").exists()
    assert (tmp_path / "there" / "run" / "saved.json").read_text() == '{"step": 10}\n'


def test_the_same_step_again_takes_the_place_of_the_older(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for loss in (1.0, 2.0):
        found = snapshot(7)
        found.document["run"]["loss"] = loss
        store.write(found)
    good, _ = store.newest_good()
    assert good is not None
    assert good.document["run"]["loss"] == 2.0
    assert [name for name in store.place.names() if name.startswith(".")] == []


def test_a_folder_without_its_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    """As a writer leaves one that is killed while a folder gets its name."""
    store = opened(tmp_path)
    for step in (5, 9):
        store.write(snapshot(step))
    there(tmp_path, directory_name(9), MANIFEST_NAME).unlink()
    store = opened(tmp_path)
    good, complaints = store.newest_good()
    assert step_of(good) == 5
    assert complaints == ["the checkpoint of step 9 is not there any more"]
    store.write(snapshot(9))
    assert store.steps() == [5, 9]


def test_a_changed_byte_is_found_and_the_one_before_is_taken(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for step in (5, 9):
        store.write(snapshot(step))
    file = there(tmp_path, directory_name(9), "model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    good, complaints = store.newest_good()
    assert step_of(good) == 5
    assert "SHA-256 differs" in complaints[0]
    assert store.damaged() == ["step-00000009.bad"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(store.begin(3), "model", {"weight": torch.ones(2)})
    store.write(snapshot(5))
    store.place.move(directory_name(5), ".old-step-00000005-abcdef")
    store.clean()
    assert store.place.names() == [directory_name(5)]


def test_a_run_that_another_has_followed_writes_no_more(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    second.write(snapshot(5))
    with pytest.raises(OSError, match=r"another run trains there since .* writes there no more"):
        first.write(snapshot(6))
    assert second.steps() == [5]


def test_a_commit_that_was_begun_before_another_run_took_over_moves_nothing(tmp_path: Path) -> None:
    first = opened(tmp_path)
    aside = first.begin(6)
    files = dict([first.add(aside, "model", {"weight": torch.ones(2)})])
    second = opened(tmp_path)
    second.clean()
    for step in (4, 6, 8):
        second.write(snapshot(step, best=step == 4))
    with pytest.raises(OSError, match="another run trains there since"):
        first.commit(aside, 6, files, {}, best=True)
    acts: list[Callable[[], object]] = [lambda: first.keep_best(6), first.clean, lambda: remove_later(first, 4)]
    for act in acts:
        with pytest.raises(OSError, match="another run trains there since"):
            act()
    assert second.steps() == [4, 6, 8]
    assert [step_of(second.read(step)) for step in second.steps()] == [4, 6, 8]
    assert open_in(second.place, BEST_NAME).step == 4


def test_a_folder_that_lacks_a_file_becomes_no_checkpoint(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(snapshot(6))
    aside = store.begin(6)
    files = dict([store.add(aside, "model", {"weight": torch.ones(2)})])
    there(tmp_path, aside, "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"is not whole any more: model.safetensors is gone"):
        store.commit(aside, 6, files, {})
    assert step_of(store.read(6)) == 6


def test_a_damaged_checkpoint_is_not_moved_after_another_run_took_over(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.write(snapshot(6))
    there(tmp_path, directory_name(6), "model.safetensors").unlink()
    opened(tmp_path)
    with pytest.raises(OSError, match="another run trains there since"):
        first.newest_good()
    assert first.damaged() == []


def test_a_process_whose_followers_go_on_does_not_take_over(tmp_path: Path) -> None:
    opened(tmp_path)
    mark = (tmp_path / "there" / "run" / "owner.json").read_text()
    fence = Fence.next(tmp_path / "here", 1, "first")
    Fence.next(tmp_path / "here", 1, "second")
    remote = RemotePlace(f"file://{tmp_path}/there/run")
    with pytest.raises(FencedError):
        remote.take_over(tmp_path / "here", fence)
    assert (tmp_path / "there" / "run" / "owner.json").read_text() == mark
