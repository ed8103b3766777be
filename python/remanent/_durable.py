"""Folders and files whose names are durable: as they are after a power cut once the call has returned."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def make_folder(path: Path) -> None:
    """Makes a folder with those above it; their names are durable when this returns."""
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
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(path: Path, content: bytes) -> None:
    """Puts a file in the place of another one, whole or not at all; durable when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    _write(temporary, content)
    os.replace(temporary, path)
    sync_folder(path.parent)


def create(path: Path, content: bytes) -> None:
    """Makes a file that is not there yet, whole or not at all; durable when this returns.

    :raises FileExistsError: if there is one with other bytes.
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
    """Removes files; they are gone for good when this returns."""
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
