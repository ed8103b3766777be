"""File operations whose result survives a power cut once the call has returned."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from remanent._store.errors import NoStoreError


class HeldDirectory:
    """A directory that is kept open, so that its current path is known even if the directory is moved or the process
    changes its working directory."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._handle: int | None = None

    def make(self) -> None:
        """Creates the directory if it does not exist, and opens it."""
        make_folder(self._path)
        self._handle = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)

    @property
    def path(self) -> Path:
        """The current path of the directory.

        :raises NoStoreError: the directory was removed.
        """
        if self._handle is not None:
            if os.fstat(self._handle).st_nlink == 0:
                raise NoStoreError(f"{self._path} was removed", path=str(self._path), remedy="restore it from a backup")
            # Without /proc, the last known path is used.
            with contextlib.suppress(OSError):
                self._path = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
        return self._path

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents. Their names are durable when the call returns."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:
            if not folder.is_dir():
                raise
            continue
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes all created, renamed and removed names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(path: Path, content: bytes) -> None:
    """Replaces a file atomically. The new contents are durable when the call returns."""
    temporary = path.with_name(path.name + ".tmp")
    _write(temporary, content)
    os.replace(temporary, path)
    sync_folder(path.parent)


def create(path: Path, content: bytes) -> None:
    """Creates a file atomically. The file is durable when the call returns.

    :raises FileExistsError: the file already exists with other contents.
    """
    temporary = path.with_name(path.name + ".tmp")
    _write(temporary, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        if path.read_bytes() != content:
            raise
    finally:
        temporary.unlink()
    sync_folder(path.parent)


def remove(paths: Iterable[Path]) -> None:
    """Removes files if they exist. The removal is durable when the call returns."""
    folders = set()
    for path in paths:
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in folders:
        sync_folder(folder)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
