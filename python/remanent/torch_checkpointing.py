"""A storage for torch_checkpointing, whose files are durable and proven on the way back.

    from torch_checkpointing import CheckpointManager
    from remanent.torch_checkpointing import RemanentStorageConfig

    manager = CheckpointManager.Config(storage_config=RemanentStorageConfig("/checkpoints")).build()
    manager.save("/checkpoints/step-100", {"model": model.state_dict()})

All checkpoints lie below one root. The tree of folders is there as torch_checkpointing makes it; a file in it is a few
bytes that name pages of a store, in `root/.remanent/`. A file is there whole or not at all: it gets its name once its
bytes are durable, so that the rename with which torch_checkpointing commits a checkpoint shows nothing that a power cut
could take. Each byte that is read was proven by its checksum.

Remove a checkpoint's folder to give it up, or rename it within the root: the next write of any process gives the space
of what has no name any more back. Copies of the files are not checkpoints.

>>> from remanent.torch_checkpointing import RemanentStorageConfig
>>> from pathlib import Path
>>> storage, root = RemanentStorageConfig(directory).create_storage(), Path(directory)
>>> storage.mkdir(root / "writing-1")
>>> with storage.stream_write(root / "writing-1" / "rank-0") as file:
...     file.write(b"weights")
7
>>> storage.rename(root / "writing-1", root / "step-1", is_directory=True)
>>> storage.ls(root), storage.read(root / "step-1" / "rank-0")
(['step-1'], b'weights')
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from remanent import _durable
from remanent._errors import DamagedError, InvalidError, LockedError
from remanent._native import Store, View

__all__ = ["RemanentStorage", "RemanentStorageConfig"]

_STORES = ".remanent"
# What a file begins with, and how much of one is looked at.
_MAGIC = b'{"remanent file": 1, '
_MARK_BYTES_MAX = 4096
# Bytes of a page. A file is as many as it needs.
_PAGE_BYTES = 32 << 20
_OPTIONS: dict[str, Any] = {"device": "host", "compression": False, "snapshots_kept": 1, "spare_bytes": 0}
# Seconds of writing for each second that it takes to look which files are gone.
_WRITING_PER_LOOK = 20.0
# Stores of one root, each written by one process at a time.
_STORES_MAX = 4096


@dataclass
class RemanentStorageConfig(StorageConfig):
    """Says where a `RemanentStorage` is: `root`, the folder that all checkpoints lie in, at any depth."""

    root: str

    def create_storage(self) -> RemanentStorage:
        return RemanentStorage(self)


class RemanentStorage(Storage):
    """Files below one root, whose bytes are pages of stores. Made by `RemanentStorageConfig.create_storage`.

    Each process that writes has a store of its own, as long as it lives. Reading takes no lock, and goes on beside it.
    """

    def __init__(self, config: RemanentStorageConfig) -> None:
        self._root = Path(os.path.abspath(config.root))
        self._views = _Views(self._root / _STORES)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A file's bytes: proven as they are read, in any order."""
        return _ReadStream(_Mark.read(self._within(path)), self._views)

    def stream_write(self, path: Path) -> io.IOBase:
        """A stream to a new file, which has its name once the stream is closed. After an exception it has none."""
        path = self._within(path)
        if not path.parent.is_dir():
            raise RuntimeError(f"{path.parent} is no folder: make it before files in it")
        return _WriteStream(path, _written(self._root))

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)

    def delete(self, path: Path) -> None:
        path = self._within(path)
        os.remove(path)
        _durable.sync_folder(path.parent)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        path = self._within(path)
        if recursive:
            _durable.make_folder(path)
        else:
            path.mkdir()
            _durable.sync_folder(path.parent)

    def rmdir(self, path: Path) -> None:
        path = self._within(path)
        shutil.rmtree(path)
        _durable.sync_folder(path.parent)

    def rename(self, src_path: Path, dst_path: Path, is_directory: bool = False,
               background_cleanup: bool = False) -> None:
        """Gives a file or folder another name, in one step and durably. Only a file takes the place of a file."""
        source, target = self._within(src_path), self._within(dst_path)
        if source.is_dir() and target.is_file():
            raise _occupied(errno.ENOTDIR, source, target)
        if not source.is_dir() and target.is_dir():
            raise _occupied(errno.EISDIR, source, target)
        try:
            os.replace(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise _occupied(error.errno, source, target) from error
            raise
        for folder in {source.parent, target.parent}:
            _durable.sync_folder(folder)

    def ls(self, path: Path) -> list[str]:
        return [name for name in os.listdir(self._at(path)) if name != _STORES]

    def exists(self, path: Path) -> bool:
        return self._at(path).exists()

    def getsize(self, path: Path) -> int:
        return _Mark.read(self._within(path)).length

    def isdir(self, path: Path) -> bool:
        return self._at(path).is_dir()

    def remap_path(self, path: Path) -> str:
        return str(path)

    def _at(self, path: Path) -> Path:
        """A path in the root, or the root itself."""
        full = Path(os.path.abspath(path))
        if full != self._root and self._root not in full.parents:
            raise InvalidError(f"{path} is not below {self._root}", remedy="let the storage's root be above all paths",
                               path=str(self._root))
        if self._root / _STORES in (full, *full.parents):
            raise InvalidError(f"{path} is the storage's own", path=str(self._root))
        return full

    def _within(self, path: Path) -> Path:
        """A path that can be made, renamed or removed: not the root."""
        full = self._at(path)
        if full == self._root:
            raise InvalidError(f"{path} is the storage's root", path=str(self._root))
        return full


def _occupied(number: int, source: Path, target: Path) -> FileExistsError:
    return FileExistsError(number, f"{source} cannot take the place of what is there: remove it first", str(target))


@dataclass(frozen=True)
class _Mark:
    """What a file says: which pages of which store are its bytes."""

    path: Path
    store: str
    key: str
    length: int
    page_bytes: int

    def encode(self) -> bytes:
        said = {"store": self.store, "key": self.key, "length": self.length, "page": self.page_bytes}
        body = _MAGIC + json.dumps(said)[1:].encode() + b"\n"
        return body + f"{zlib.crc32(body):08x}\n".encode()

    @classmethod
    def read(cls, path: Path) -> _Mark:
        with open(path, "rb") as file:
            content = file.read(_MARK_BYTES_MAX)
        body, end, total = content.partition(b"\n")
        if not body.startswith(_MAGIC):
            raise InvalidError(f"{path} is no file of this storage", path=str(path),
                               remedy="write it with RemanentStorage; the bytes of other files cannot be proven")
        if total != f"{zlib.crc32(body + end):08x}\n".encode():
            raise DamagedError(f"{path} is damaged", path=str(path), file=str(path), offset=0)
        said = json.loads(body)
        return cls(path, said["store"], said["key"], said["length"], said["page"])


class _Views:
    """The newest states of the stores, to read from. A view is replaced once it lacks a page."""

    def __init__(self, stores: Path) -> None:
        self._stores = stores
        self._lock = threading.Lock()
        self._views: dict[str, View] = {}

    def read(self, mark: _Mark, number: int, offset: int, out: memoryview) -> None:
        key = _page_key(mark.key, number)
        self._with(mark.store, key).read_into(key, out, offset)

    def _with(self, store: str, key: str) -> View:
        with self._lock:
            view = self._views.get(store)
            if view is None or key not in view:
                view = self._views[store] = View(self._stores / store)
            return view


def _page_key(key: str, number: int) -> str:
    return f"{key}/{number}"


class _ReadStream(io.RawIOBase):
    """The bytes of a file, from the pages that they lie in."""

    def __init__(self, mark: _Mark, views: _Views) -> None:
        super().__init__()
        self._mark, self._views = mark, views
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._mark.length}[whence]
        if begin + offset < 0:
            raise ValueError(f"there is no offset {begin + offset}")
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills as much of the buffer as the file has bytes."""
        if self.closed:
            raise ValueError("the file is closed")
        out = memoryview(buffer).cast("B")
        end = min(self._position + out.nbytes, self._mark.length)
        done = 0
        while self._position < end:
            number, offset = divmod(self._position, self._mark.page_bytes)
            length = min(end - self._position, self._mark.page_bytes - offset)
            self._views.read(self._mark, number, offset, out[done : done + length])
            self._position += length
            done += length
        return done


class _WriteStream(io.RawIOBase):
    """A file that is being written: page by page, and with its name at the end."""

    # Until it has begun there is nothing to end.
    _is_ended = True

    def __init__(self, path: Path, files: _Files) -> None:
        super().__init__()
        self._path, self._files = path, files
        self._rest = bytearray()
        self._pages = self._length = 0
        self._key = files.begin()
        self._is_ended = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._length

    def write(self, data: Any) -> int:
        """Takes whatever has the buffer protocol and is contiguous."""
        if self._is_ended:
            raise ValueError("the file is closed")
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        begin = 0
        while begin < view.nbytes:
            # What fills a page is read where it lies; only what begins or ends amid one is copied.
            if not self._rest and view.nbytes - begin >= _PAGE_BYTES:
                self._put(view[begin : begin + _PAGE_BYTES])
                begin += _PAGE_BYTES
                continue
            part = view[begin : begin + _PAGE_BYTES - len(self._rest)]
            self._rest += part
            begin += part.nbytes
            if len(self._rest) == _PAGE_BYTES:
                self._put(memoryview(self._rest))
                self._rest = bytearray()
        self._length += view.nbytes
        return view.nbytes

    def _put(self, page: memoryview) -> None:
        self._files.put(_page_key(self._key, self._pages), page)
        self._pages += 1

    def close(self) -> None:
        """Makes the file durable, and gives it its name."""
        if self._is_ended:
            return
        self._is_ended = True
        try:
            if self._rest:
                self._put(memoryview(self._rest))
            self._files.publish(self._path, self._key, self._length)
        finally:
            self._files.end(self._key)
            super().close()

    def abort(self) -> None:
        """Ends the stream; there is no file."""
        if not self._is_ended:
            self._is_ended = True
            self._files.end(self._key)
            super().close()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        # Whoever lets go of a stream without closing it has not said that the file is whole.
        self.abort()


class _Files:
    """The store that this process writes to, and the marks of its files.

    Each mark has a second name, in a folder of the store's: when that is the only one left, the file is gone from the
    tree, whoever removed it, and its pages go. So a rename of a folder meanwhile takes nothing away.
    """

    def __init__(self, root: Path) -> None:
        self._stores = root / _STORES
        _durable.make_folder(self._stores)
        self._store, self._name = self._open()
        self._marks = self._stores / f"{self._name}.marks"
        _durable.make_folder(self._marks)
        # Second names on their way to the tree. What lies there now is a killed process's.
        self._names = self._stores / f"{self._name}.names"
        _durable.make_folder(self._names)
        for left in self._names.iterdir():
            left.unlink()
        self._lock = threading.Lock()
        # Keys of files that are being written.
        self._begun: set[str] = set()
        # When it is looked again what is gone.
        self._look_at = 0.0

    def _open(self) -> tuple[Store, str]:
        """The first store that no other process has."""
        for number in range(_STORES_MAX):
            name = f"files-{number}"
            try:
                return Store(self._stores / name, **_OPTIONS), name
            except LockedError:
                continue
        raise InvalidError(f"{_STORES_MAX} processes write to {self._stores}", path=str(self._stores))

    def begin(self) -> str:
        self._give_up()
        key = uuid.uuid4().hex
        with self._lock:
            self._begun.add(key)
        return key

    def end(self, key: str) -> None:
        with self._lock:
            self._begun.discard(key)

    def put(self, key: str, page: memoryview) -> None:
        with self._store.batch(ack="logged") as batch:
            batch.create(page, key=key, place="disk", at_commit=True)

    def publish(self, path: Path, key: str, length: int) -> None:
        """Gives a file its name, once its pages are durable."""
        self._store.wait_durable()
        mark = self._marks / key
        _durable.publish(mark, _Mark(path, self._name, key, length, _PAGE_BYTES).encode())
        # A second name of the same file, put in the place of what was there.
        name = self._names / key
        os.link(mark, name)
        os.replace(name, path)
        _durable.sync_folder(path.parent)

    def _give_up(self) -> None:
        """Deletes the pages of files that have no name any more, or never got one."""
        with self._lock:
            began = time.monotonic()
            if began < self._look_at:
                return
            begun = set(self._begun)
            marks = {entry.name: entry.stat().st_nlink for entry in os.scandir(self._marks)}
            gone = [name for name, names in marks.items() if names == 1 and name.removesuffix(".tmp") not in begun]
            lost = set(gone) | {key.partition("/")[0] for key in map(str, self._store.keys())} - set(marks) - begun
            pages = [info.page for info in self._store.pages() if str(info.key).partition("/")[0] in lost]
            if pages:
                with self._store.batch(ack="durable") as batch:
                    for page in pages:
                        batch.delete(page)
                # Space comes back with a snapshot.
                self._store.snapshot(verify=False)
            for name in gone:
                os.unlink(self._marks / name)
            ended = time.monotonic()
            self._look_at = ended + _WRITING_PER_LOOK * (ended - began)


_open_files: dict[tuple[int, Path], _Files] = {}
_open_lock = threading.Lock()


def _written(root: Path) -> _Files:
    """What this process writes to, made at its first write."""
    with _open_lock:
        found = _open_files.get((os.getpid(), root))
        if found is None:
            found = _open_files[os.getpid(), root] = _Files(root)
        return found
