"""A storage for torch_checkpointing that writes files durably and verifies them when they are read.

    from torch_checkpointing import CheckpointManager
    from remanent.integrations.torch_checkpointing import RemanentStorageConfig

    manager = CheckpointManager.Config(storage_config=RemanentStorageConfig("/checkpoints")).build()
    manager.save("/checkpoints/step-100", {"model": model.state_dict()})

All checkpoints are below one root folder. The directory tree is the one that torch_checkpointing creates, but each file
in it is a *mark*: a few bytes that name pages of a store in `root/.remanent/`. A file exists completely or not at all,
because it gets its name once its bytes are durable. The rename with which torch_checkpointing commits a checkpoint
therefore exposes only bytes that survive a power cut. Every byte that is read is verified by its checksum.

To delete a checkpoint, remove its folder. A folder may also be renamed within the root. The next write of a process
frees the disk space of removed files. Copies of single files are not checkpoints. To move or back up checkpoints, copy
the whole root.

Checkpoints below the root that torch_checkpointing's own storage or Hugging Face wrote can also be loaded and
consolidated. Their files are read without verification.

>>> from remanent.integrations.torch_checkpointing import RemanentStorageConfig
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

import contextlib
import errno
import io
import json
import os
import re
import shutil
import threading
import time
import uuid
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remanent._store._native import Store, View
from remanent._store.errors import DamagedError, DiskFullError, Error, InvalidError, LockedError
from remanent._store.options import StoreOptions
from remanent._util import durable_files
from remanent.integrations import _hosts

with _hosts.importing(_hosts.TORCH_CHECKPOINTING):
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

__all__ = ["RemanentStorage", "RemanentStorageConfig"]

_STORES = ".remanent"
# The first bytes of a file, and the number of bytes that are read of one.
_MAGIC = b'{"remanent file": 1, '
_MARK_BYTES_MAX = 4096
# The end of a file, with its checksum.
_MARK_END = re.compile(rb"}\n[0-9a-f]{8}\n\Z")
# The bytes of a page. A file consists of as many pages as it needs.
_PAGE_BYTES = 32 << 20
_OPTIONS: StoreOptions = {"device": "host", "images": {"compression": False}, "retention": {"snapshots_kept": 1},
                          "log": {"spare_bytes": 0}}
# Seconds of writing for each second spent on finding removed files.
_WRITING_PER_LOOK = 20.0
# The number of attempts to read a file that others replace.
_READ_TRIES = 10
# The entry of a store's root with the folder of its marks, as device and inode numbers.
_MARKS = "marks"


def __dir__() -> list[str]:
    return __all__


@dataclass
class RemanentStorageConfig(StorageConfig):
    """The configuration of a `RemanentStorage`. `root` is the folder that contains all checkpoints, at any depth."""

    root: str

    def create_storage(self) -> RemanentStorage:
        return RemanentStorage(self)


class RemanentStorage(Storage):
    """Stores files below one root as pages of stores. Created by `RemanentStorageConfig.create_storage`.

    Each process that writes has a store of its own until it ends. Reads take no lock and can run concurrently with
    writes.
    """

    def __init__(self, config: RemanentStorageConfig) -> None:
        self._root = Path(os.path.realpath(config.root))
        self._views = _Views(self._root / _STORES)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Opens a file's current contents for random access. If this storage wrote the file, bytes are verified when
        they are read.

        Other files, such as those of torch_checkpointing's own storage or of Hugging Face, are read without
        verification.
        """
        path = self._within(path)
        return open(path, "rb", buffering=0) if _is_foreign(path) else _ReadStream(path, self._views)

    def stream_write(self, path: Path) -> io.IOBase:
        """Opens a new file for writing. The file gets its name when the stream is closed. If the `with` block raises an
        exception, the file is discarded."""
        path = self._within(path)
        if not path.parent.is_dir():
            raise RuntimeError(f"{path.parent} is not a folder; create it first")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "the path is a folder", str(path))
        return _WriteStream(path, _written(self._root))

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)

    def delete(self, path: Path) -> None:
        path = self._within(path)
        os.remove(path)
        durable_files.sync_folder(path.parent)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        path = self._within(path)
        if recursive:
            durable_files.make_folder(path)
        else:
            path.mkdir()
            durable_files.sync_folder(path.parent)

    def rmdir(self, path: Path) -> None:
        path = self._within(path)
        shutil.rmtree(path)
        durable_files.sync_folder(path.parent)

    def rename(self, src_path: Path, dst_path: Path, is_directory: bool = False,
               background_cleanup: bool = False) -> None:
        """Renames a file or folder atomically and durably. An existing target must be a file, and the source must be a
        file too."""
        source, target = self._within(src_path), self._within(dst_path)
        try:
            os.replace(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise _occupied(error.errno, source, target) from error
            raise
        for folder in {source.parent, target.parent}:
            durable_files.sync_folder(folder)

    def ls(self, path: Path) -> list[str]:
        return [name for name in os.listdir(self._at(path)) if name != _STORES]

    def exists(self, path: Path) -> bool:
        return self._at(path).exists()

    def getsize(self, path: Path) -> int:
        path = self._within(path)
        return path.stat().st_size if _is_foreign(path) else _Mark.read(path).length

    def isdir(self, path: Path) -> bool:
        return self._at(path).is_dir()

    def remap_path(self, path: Path) -> str:
        return str(path)

    def _at(self, path: Path) -> Path:
        """Returns the resolved path of a file or folder in the root, or the root itself.

        :raises InvalidError: the path is not below the root, or belongs to the stores.
        """
        folder, name = os.path.split(os.path.abspath(path))
        # The folder is resolved like the root; links at the last component are not followed.
        full = Path(os.path.realpath(folder), name) if name else Path(folder)
        if Path(os.path.realpath(full)) == self._root:
            full = self._root
        if full != self._root and self._root not in full.parents:
            raise InvalidError(f"{path} is not below {self._root}", remedy="use a root that contains all paths",
                               path=str(self._root))
        if self._root / _STORES in (full, *full.parents):
            raise InvalidError(f"{path} is reserved for the storage itself", remedy="use another path",
                               path=str(self._root))
        return full

    def _within(self, path: Path) -> Path:
        """Returns the resolved path of a file or folder below the root.

        :raises InvalidError: the path is the root, is not below the root, or belongs to the stores.
        """
        full = self._at(path)
        if full == self._root:
            raise InvalidError(f"{path} is the storage's root", remedy="use a path below the root", path=str(self._root))
        return full


def _occupied(number: int, source: Path, target: Path) -> FileExistsError:
    return FileExistsError(number, f"the path already exists and cannot be replaced by {source}; remove it first",
                           str(target))


def _is_foreign(path: Path) -> bool:
    """Returns whether a file was not written by this storage.

    :raises DamagedError: the file is a damaged mark, whose bytes must not be read as contents.
    """
    with open(path, "rb") as file:
        content = file.read(_MARK_BYTES_MAX + 1)
        # A mark has a second name, in a folder of its store.
        has_names = os.fstat(file.fileno()).st_nlink > 1
    if content.startswith(_MAGIC):
        return False
    is_short = len(content) <= _MARK_BYTES_MAX
    if is_short and (_MARK_END.search(content) or has_names and _MAGIC[2:10] in content):
        raise DamagedError(f"{path} is damaged", remedy="copy the checkpoint again from a backup of the whole root",
                           path=str(path), file=str(path), offset=0)
    return True


@dataclass(frozen=True)
class _Mark:
    """The contents of a mark: the store and the pages with the file's bytes."""

    path: Path
    store: str
    key: str
    length: int
    page_bytes: int

    def encode(self) -> bytes:
        fields = {"store": self.store, "key": self.key, "length": self.length, "page": self.page_bytes}
        body = _MAGIC + json.dumps(fields)[1:].encode() + b"\n"
        return body + f"{zlib.crc32(body):08x}\n".encode()

    @classmethod
    def read(cls, path: Path) -> _Mark:
        with open(path, "rb") as file:
            content = file.read(_MARK_BYTES_MAX)
        body, end, total = content.partition(b"\n")
        if not body.startswith(_MAGIC):
            raise InvalidError(f"{path} was not written by RemanentStorage, so its bytes cannot be verified",
                               remedy="write the file with RemanentStorage", path=str(path))
        if total != f"{zlib.crc32(body + end):08x}\n".encode():
            raise DamagedError(f"{path} is damaged", path=str(path), file=str(path), offset=0)
        try:
            fields = json.loads(body)
            return cls(path, fields["store"], fields["key"], fields["length"], fields["page"])
        except (ValueError, KeyError) as error:
            raise DamagedError(f"{path} has an unknown format", path=str(path), file=str(path),
                               offset=0) from error


class _Views:
    """The views of stores from which open streams read. A view shows the state at the time when its first stream was
    opened.

    A view keeps the images of its state on disk, so it is closed with its last stream.
    """

    def __init__(self, stores: Path) -> None:
        self._stores = stores
        # The views, with the number of streams that read from each. Those of another process cannot be used.
        self._views: dict[tuple[int, str], list[tuple[View, list[int]]]] = {}
        self._lock = threading.Lock()
        # The streams that were closed but not processed yet. The garbage collector may close a stream while this thread
        # holds the lock, so closing only appends to this queue.
        self._closed: deque[tuple[_Mark, View]] = deque()
        _all_views.add(self)

    def forget(self) -> None:
        """Discards the parent's views in a forked child."""
        self._lock = threading.Lock()
        self._views = {}

    def open(self, path: Path) -> tuple[_Mark, View]:
        """Returns the mark of a file and a view that contains the file's pages. Pass both to `close` after use."""
        try:
            return self._open(path)
        finally:
            self._give_back()

    def _open(self, path: Path) -> tuple[_Mark, View]:
        for _ in range(_READ_TRIES):
            mark = _Mark.read(path)
            first = _page_key(mark.key, 0)
            with self._lock:
                shared = self._views.setdefault((os.getpid(), mark.store), [])
                for view, count in shared:
                    if mark.length == 0 or first in view:
                        count[0] += 1
                        return mark, view
                view = View(self._stores / mark.store)
                if mark.length == 0 or first in view:
                    shared.append((view, [1]))
                    return mark, view
            view.close()
            # The file was replaced in the meantime, and its pages are gone.
        raise DamagedError(f"the store does not contain the bytes of {path}", path=str(path), file=str(path), offset=0)

    def close(self, mark: _Mark, view: View) -> None:
        self._closed.append((mark, view))
        self._give_back()

    def _give_back(self) -> None:
        # If another thread holds the lock, that thread processes the queue.
        while self._closed and self._lock.acquire(blocking=False):
            try:
                mark, view = self._closed.popleft()
                shared = self._views.get((os.getpid(), mark.store), [])
                for at, (each, count) in enumerate(shared):
                    if each is view:
                        count[0] -= 1
                        if count[0] == 0:
                            del shared[at]
                            view.close()
                        break
            except IndexError:
                pass  # another thread has done it
            finally:
                self._lock.release()


_all_views: weakref.WeakSet[_Views] = weakref.WeakSet()


def _page_key(key: str, number: int) -> str:
    return f"{key}/{number}"


class _ReadStream(io.RawIOBase):
    """A stream that reads a file's bytes from pages of a store."""

    _view: View | None = None

    def __init__(self, path: Path, views: _Views) -> None:
        super().__init__()
        self._views = views
        self._mark, self._view = views.open(path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._mark.length}
        if whence not in begins or begins[whence] + offset < 0:
            raise ValueError(f"offset {offset} with whence {whence} is not a valid position")
        self._position = begins[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads the next bytes of the file into `buffer`, up to the end of the file. Returns their number."""
        if self._view is None:
            raise ValueError("the file is closed")
        out = memoryview(buffer)
        if out.nbytes == 0:
            return 0
        out = out.cast("B")
        end = min(self._position + out.nbytes, self._mark.length)
        done = 0
        while self._position < end:
            number, offset = divmod(self._position, self._mark.page_bytes)
            length = min(end - self._position, self._mark.page_bytes - offset)
            self._view.read_into(_page_key(self._mark.key, number), out[done : done + length], offset)
            self._position += length
            done += length
        return done

    def close(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            self._views.close(self._mark, view)
        super().close()


class _WriteStream(io.RawIOBase):
    """A stream that writes a new file page by page. The file gets its name when the stream is closed."""

    # True until `__init__` has begun the file, so that `abort` has no effect before.
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
        """Appends the bytes of `data`, any contiguous object with the buffer protocol. Returns their number."""
        if self._is_ended:
            raise ValueError("the file is closed")
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        try:
            self._take(view)
        except BaseException:
            # Part of `data` may be stored. If writing continued, the file would contain these bytes twice.
            self.abort()
            raise
        self._length += view.nbytes
        return view.nbytes

    def _take(self, view: memoryview) -> None:
        begin = 0
        while begin < view.nbytes:
            # Whole pages are read in place; only parts of pages are copied.
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

    def _put(self, page: memoryview) -> None:
        self._files.put(_page_key(self._key, self._pages), page)
        self._pages += 1

    def close(self) -> None:
        """Makes the file durable and moves it to its path."""
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
        """Discards the file and closes the stream."""
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
        # A stream that is dropped without being closed may be incomplete.
        self.abort()


class _Files:
    """The store to which this process writes, and the marks of its files.

    Each mark has a second name in a folder of the store. If the second name is the only one left, a program has removed
    the file from the tree, and the file's pages are deleted. Since the check counts names instead of searching the
    tree, a concurrent rename of a folder loses nothing.
    """

    def __init__(self, stores: Path, name: str) -> None:
        self._stores, self._name = stores, name
        self._store = Store(stores / name, **_OPTIONS)
        self._marks = stores / f"{name}.marks"
        durable_files.make_folder(self._marks)
        # Second names before they are moved into the tree. Existing ones were left by a killed process.
        self._names = stores / f"{name}.names"
        durable_files.make_folder(self._names)
        for left in self._names.iterdir():
            left.unlink()
        self._lock = threading.Lock()
        # The keys of files that are being written, and of those that have ended: the garbage collector may end a stream
        # while this thread holds the lock.
        self._begun: set[str] = set()
        self._ended: deque[str] = deque()
        # Whether a snapshot will free space: an earlier process may have left deleted pages.
        self._owes_space = True
        # The time of the next check for removed files.
        self._look_at = 0.0
        self._adopt()

    @classmethod
    def open(cls, root: Path) -> _Files:
        """Opens the first store that no other process has open. All other stores that no process has open are cleaned
        up."""
        stores = root / _STORES
        durable_files.make_folder(stores)
        own: _Files | None = None
        number = 0
        while own is None or (stores / f"files-{number}").exists():
            with contextlib.suppress(LockedError):
                found = cls(stores, f"files-{number}")
                if own is None:
                    own = found
                else:
                    found.close()
            number += 1
        return own

    def close(self) -> None:
        self._give_up()
        self._store.close()

    def _adopt(self) -> None:
        """Creates the second names of all marks again if the root was copied, because a copy may turn the two names of
        a file into two files."""
        held = self._marks.stat()
        # The device number may change after a restart. The search below then changes nothing.
        here, known = f"{held.st_dev}:{held.st_ino}", self._store.root.get(_MARKS)
        if known == here:
            return
        # A new store has no files yet.
        for folder, folders, names in os.walk(self._stores.parent) if known is not None else ():
            if _STORES in folders:
                folders.remove(_STORES)
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(Error, OSError):
                    mark = _Mark.read(path)
                    if mark.store == self._name and not os.path.samefile(path, self._marks / mark.key):
                        os.link(path, self._names / mark.key)
                        os.replace(self._names / mark.key, self._marks / mark.key)
        durable_files.sync_folder(self._marks)
        with self._store.batch(ack="durable") as batch:
            batch.set_root(_MARKS, here)

    def begin(self) -> str:
        self._give_up()
        key = uuid.uuid4().hex
        with self._lock:
            self._begun.add(key)
        return key

    def end(self, key: str) -> None:
        self._ended.append(key)

    def put(self, key: str, page: memoryview) -> None:
        def store() -> None:
            with self._store.batch(ack="logged") as batch:
                batch.create(page, key=key, place="disk", at_commit=True)

        try:
            store()
        except DiskFullError:
            self._look_at, self._owes_space = 0.0, True
            self._give_up()
            store()

    def publish(self, path: Path, key: str, length: int) -> None:
        """Moves a file to its path, after its pages have become durable."""
        self._store.wait_durable()
        mark, name = self._marks / key, self._names / key
        durable_files.publish(mark, _Mark(path, self._name, key, length, _PAGE_BYTES).encode())
        # A second name of the same file, moved into the tree.
        os.link(mark, name)
        try:
            if mark.stat().st_nlink != 2:
                raise InvalidError("the file system does not count hard links", path=str(self._stores),
                                   remedy="use a root on a file system with hard links")
            os.replace(name, path)
        except Exception:
            name.unlink(missing_ok=True)
            raise
        durable_files.sync_folder(path.parent)

    def _give_up(self) -> None:
        """Deletes the pages of files that have lost their name, and of files that never got one."""
        with self._lock:
            began = time.monotonic()
            if began < self._look_at:
                return
            while self._ended:
                self._begun.discard(self._ended.popleft())
            gone, there = [], set(self._begun)
            for entry in os.scandir(self._marks):
                with contextlib.suppress(FileNotFoundError):
                    names = entry.stat().st_nlink
                    if entry.name.removesuffix(".tmp") in self._begun:
                        continue
                    if names == 1:
                        gone.append(entry.name)
                    else:
                        there.add(entry.name)
            pages = [info.page for info in self._store.pages() if str(info.key).partition("/")[0] not in there]
            if pages:
                self._owes_space = True
                with self._store.batch(ack="durable") as batch:
                    for page in pages:
                        batch.delete(page)
            if self._owes_space:
                self._store.snapshot(verify=False)
                self._owes_space = False
            for name in gone:
                os.unlink(self._marks / name)
            ended = time.monotonic()
            self._look_at = ended + _WRITING_PER_LOOK * (ended - began)


_open_files: dict[Path, _Files] = {}
_open_lock = threading.Lock()


def _written(root: Path) -> _Files:
    """Returns the store to which this process writes files below `root`, opening it at the first write."""
    with _open_lock:
        if root not in _open_files:
            _open_files[root] = _Files.open(root)
        return _open_files[root]


def _forget() -> None:
    """Discards the parent's stores and locks in a forked child."""
    global _open_files, _open_lock
    _open_files, _open_lock = {}, threading.Lock()
    for views in list(_all_views):
        views.forget()


os.register_at_fork(after_in_child=_forget)
