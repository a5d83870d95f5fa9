"""Local copy of a remote run and one of its checkpoints, for commands that read files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST_NAME
from shoal.checkpoint.remote_place import RemotePlace
from shoal.checkpoint.store import Step, Store, name_of
from shoal.errors import RunDirectoryError
from shoal.runs.address import CHECKPOINTS, RunAddress, fetch_to_read, is_address
from shoal.runs.directory import RunDirectory


@contextlib.contextmanager
def with_checkpoint(run: str, step: Step = "last") -> Iterator[Path]:
    """Yield a local run directory that has the checkpoint of `step`.

    A local run is used in place. A run at an address is copied to a temporary folder, and nothing is written back.
    Raises: CommandError or RunDirectoryError if the address is wrong or has no such checkpoint.
    """
    if not is_address(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as folder:
        fetch_with_checkpoint(run, Path(folder), step)
        yield Path(folder)


def fetch_with_checkpoint(run: str, folder: Path, step: Step) -> None:
    """Copy the run's own files and the checkpoint of a step from an address to `folder`.

    Raises: CommandError or RunDirectoryError as `with_checkpoint`.
    """
    fetch_to_read(run, folder)
    address, model = RunAddress(run), RunDirectory(folder).model
    try:
        name = name_of(Store(folder / CHECKPOINTS, remote=RemotePlace(run)), step, run)
        for below in (f"{CHECKPOINTS}/{name}", model.name):
            address.fetch_folder(below, folder / below)
    except OSError as error:
        raise RunDirectoryError(
            given=run,
            conflict=f"its checkpoint cannot be read: {error}",
            remedy="try again, where the run still trains and has a newer one by now; check this host's way to it",
        ) from error
    if not (folder / CHECKPOINTS / name / MANIFEST_NAME).exists():
        raise RunDirectoryError(
            given=f"{run}/{CHECKPOINTS}/{name}",
            conflict="the run has removed it meanwhile, for a newer one",
            remedy="try again",
        )
