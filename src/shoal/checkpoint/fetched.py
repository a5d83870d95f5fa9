"""Copy of a run at an address with one of its checkpoints, for commands that read files."""

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
    """A run directory: `run` itself; of one at an address a copy that has the checkpoint of a step, for a context.

    Nothing is written back. Raises: CommandError, RunDirectoryError of the address, or where it has no such checkpoint.
    """
    if not is_address(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as folder:
        fetch_with_checkpoint(run, Path(folder), step)
        yield Path(folder)


def fetch_with_checkpoint(run: str, folder: Path, step: Step) -> None:
    """Copies the own files of the run at an address and the checkpoint of a step here. Raises: as `with_checkpoint`."""
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
