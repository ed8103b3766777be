"""The archives of a root of checkpoints: one for each rank's store.

The archive of a store contains the store's named snapshots, but not the files that list the items of checkpoints. The
store of rank 0 therefore contains a copy of each such file, a *listing*. A listing is archived before the file is
published and after the archives of all ranks contain the snapshots that it names. At any time, every checkpoint that is
visible in the root is thus in the archives, and a listing without its snapshots belongs to no checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from remanent._store import _native
from remanent._store.errors import (
    ArchiveError,
    DamagedError,
    Error,
    InvalidError,
    InvalidTypeError,
    NoStateError,
    NoStoreError,
    RefusedError,
)
from remanent._store.options import ArchiveOptions, StoreOptions
from remanent._util import checksummed_json, durable_files
from remanent._versions import rank_archives

_Path = str | os.PathLike[str]

# The folder of a root that contains the stores, the file that lists the items of a checkpoint, and the file's kind.
STORES = ".remanent"
METADATA = ".metadata"
KIND = "checkpoint"

# The file in the folder of stores that shows that the root's checkpoints are archived, and its kind.
_ARCHIVED = "archived"
# The file that is locked during a restore. Once the store of rank 0 is in place, it contains the URL.
_RESTORING = "restoring"
# The entry of the first store's root with the largest number of ranks that saved together.
_RANKS = "ranks"
# Entries in the metadata of a listing's page: the name of the checkpoint, the first line of its file, the number of the
# listing, the token of the save that created it, and the time of its creation in milliseconds since 1970.
_NAME, _SUM, _NUMBER, _TOKEN, _CREATED = "checkpoint", "sum", "number", "save", "created"
# The seconds between two checks of the state of an archive.
_POLL_INTERVAL = 0.5
# The number of archives that are opened at once.
_OPENED_AT_ONCE = 8
# The prefixes of the environment variables that contain the settings of a bucket, by the scheme of its URL.
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def store_of(rank: int) -> str:
    """Returns the name of a rank's store."""
    return f"rank-{rank}"


def _number_of(store: str) -> int:
    return int(store.removeprefix("rank-"))


def _open_view(archive: ArchiveOptions, at: str | None) -> _native.View:
    return _native.View.open_archive(archive, at)


class Listed(NamedTuple):
    """A checkpoint that is visible in a root: its name, and the first line of its metadata file."""

    name: str
    sum: str


def sum_of(content: bytes) -> str:
    """Returns the first line of a metadata file, which contains a checksum of all other lines."""
    return content.partition(b"\n")[0].decode("ascii")


def url_of_root(root: Path) -> str | None:
    """Returns the URL of the archives of a root, or None if its checkpoints are not archived."""
    path = root / STORES / _ARCHIVED
    try:
        [record] = checksummed_json.parts_of(_ARCHIVED, path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    url: str = json.loads(record)["url"]
    return url


class RootArchive:
    """The archives to which a `StorageWriter` saves.

    :param timeout: the seconds for which requests may fail before a save fails.
    :raises InvalidTypeError, InvalidError: an argument cannot be used.
    """

    def __init__(self, options: StoreOptions, timeout: float) -> None:
        self._options, self._timeout = options, timeout
        url = rank_archives.url_of(options)
        if url is None:
            raise InvalidTypeError("archive: must be a dict with the entry \"url\", a str",
                                   remedy="pass {\"url\": \"s3://bucket/run-7\"}")
        if not timeout >= 0:
            raise InvalidError(f"archive_timeout: {timeout} is not a number of seconds from 0 on")
        self.url = url
        self._archive = cast(ArchiveOptions, options["archive"])

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the bucket as environment variables."""
        prefix = _VARIABLES.get(urlsplit(self.url).scheme, "")
        given = self._archive.get("settings") or {}
        return {prefix + key.upper().removeprefix(prefix): value for key, value in given.items()}

    def view(self, store: str, at: str | None = None) -> _native.View:
        """Opens a state of a rank's store in its archive."""
        return _open_view({**self._archive, "url": rank_archives.url_of_rank(self.url, _number_of(store))}, at)

    def metadata_of(self, checkpoint: Path) -> bytes:
        """Returns the contents of the metadata file of a checkpoint, of which only the name is used.

        :raises NoStateError: the archives do not contain the checkpoint.
        """
        with self.view(store_of(0)) as view:
            pages = _pages(view)
            for page in reversed(pages):
                if page.name == checkpoint.name:
                    content = view.read(page.id)
                    if self._contain(_stores_in(content, checkpoint / METADATA)):
                        return content
        names = sorted({page.name for page in pages})
        raise NoStateError(f"the archive {self.url} contains no checkpoint {checkpoint.name!r}",
                           remedy=f"use one of {names}" if names else "pass the URL to which checkpoints were saved")

    def _contain(self, named: dict[str, tuple[str, str]]) -> bool:
        """Returns whether the archives contain all snapshots that a metadata file names."""
        def has(store: str, store_id: str, snapshot: str) -> bool:
            try:
                with self.view(store, f"name:{snapshot}") as view:
                    return view.id == store_id
            except NoStateError:
                return False

        with concurrent.futures.ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
            return all(pool.map(lambda item: has(item[0], *item[1]), named.items()))

    def options_of(self, store: str) -> StoreOptions:
        """Returns the options for a rank's store, whose archive has its own URL."""
        return rank_archives.of_rank(self._options, _number_of(store), self.url)

    def check(self, checkpoint: Path) -> None:
        """Raises an error if a checkpoint cannot be archived, before anything is written."""
        _check_name(checkpoint.name)
        stores = checkpoint.parent / STORES
        if (stores / _ARCHIVED).exists() or not (stores / store_of(0)).is_dir():
            return
        try:
            with _native.View(stores / store_of(0)) as view:
                is_restored = bool(_pages(view))
        except NoStoreError:
            # Opening the store checks the URL.
            return
        if is_restored:
            raise RefusedError(f"{stores} was restored from an archive without the checkpoints that it contains",
                               remedy=f"first call restore_from_archive({os.fspath(checkpoint.parent)!r}, …)")

    def wait_kept(self, store: _native.Store, snapshot: _native.SnapshotInfo) -> None:
        """Waits until the archive keeps a snapshot of a rank's store.

        :raises ArchiveError: the archive has ended, or its requests failed for longer than the time limit.
        """
        check = _Failing(store, self.url, self._timeout)
        while not store.wait_archived(snapshot, _POLL_INTERVAL):
            check()

    def add(self, store: _native.Store, checkpoint: Path, content: bytes, token: str, ranks: int, *,
            visible: list[Listed] | None, saving: frozenset[str], visible_after: float) -> None:
        """Adds the listing of a checkpoint to the store of rank 0, and waits until it is archived. Also updates the
        listings of other checkpoints, which may have been renamed, copied or removed.

        :param content: the contents of the metadata file, which is not yet published.
        :param visible: the checkpoints in the root; None if they cannot be read.
        :param saving: the tokens of saves in progress, determined before `visible`.
        :param visible_after: the seconds until a file that another machine created is visible.
        """
        _mark(checkpoint.parent / STORES, self.url)
        pages = _pages(store)
        now, number = int(time.time() * 1000), max((page.number for page in pages), default=0)
        batch = store.batch()

        def create(name: str, contents: bytes, token: str) -> None:
            nonlocal number
            number += 1
            batch.create(contents, place="disk", at_commit=True, metadata={
                _NAME: name, _SUM: sum_of(contents), _NUMBER: number, _TOKEN: token, _CREATED: now})

        if visible is not None:
            known = {page.sum: page for page in pages}
            there = {Listed(page.name, page.sum) for page in pages}
            for each in visible:
                if each.sum in known and each not in there:
                    create(each.name, store.read(known[each.sum].id), known[each.sum].token)
            for page in pages:
                is_visible = Listed(page.name, page.sum) in visible
                if not is_visible and page.token not in saving and page.created <= now - visible_after * 1000:
                    batch.delete(page.id)
        # If a name has several listings, the newest one is used.
        create(checkpoint.name, content, token)
        batch.set_root(_RANKS, max(ranks, store.root.get(_RANKS, 0)))
        ticket = store.submit(batch)
        check = _Failing(store, self.url, self._timeout)
        while not ticket.wait(_POLL_INTERVAL, "archived"):
            check()


class _Failing:
    """Raises an error once the requests of an archive have failed repeatedly for longer than a time limit. A single
    failure does not count, because a long upload may follow it."""

    def __init__(self, store: _native.Store, url: str, timeout: float) -> None:
        self._store, self._url, self._timeout = store, url, timeout
        # The time of the first failure since the last success, and the number of failures by then.
        self._since: tuple[float, int] | None = None

    def __call__(self) -> None:
        archive = self._store.stats()["archive"]
        failure, count = archive["last_failure"], archive["failures"]
        if failure is None:
            self._since = None
            return
        now = time.monotonic()
        self._since = (now, count) if self._since is None else self._since
        if now - self._since[0] >= self._timeout and count > self._since[1]:
            raise ArchiveError(f"the checkpoint was not archived: {failure}", kind="bucket", url=self._url,
                               remedy="correct the cause and save again; the earlier checkpoints are unchanged")


class _Page(NamedTuple):
    """A listing in the store of rank 0."""

    id: int
    name: str
    sum: str
    number: int
    token: str
    created: int


def _pages(reader: _native.Reader) -> list[_Page]:
    """Returns the listings in a store, oldest first."""
    found = [_Page(info.page, *(info.metadata[entry] for entry in (_NAME, _SUM, _NUMBER, _TOKEN, _CREATED)))
             for info in reader.pages() if _NUMBER in info.metadata]
    return sorted(found, key=lambda page: page.number)


def _mark(stores: Path, url: str) -> None:
    """Records that the checkpoints of a root are archived."""
    if url_of_root(stores.parent) != url:
        durable_files.publish(stores / _ARCHIVED, checksummed_json.seal(_ARCHIVED, [{"url": url}]))


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"{name!r}: an archive cannot contain a name that is not UTF-8",
                           remedy="use another name for the checkpoint") from error


def restore_from_archive(root: _Path, archive: ArchiveOptions) -> list[Path]:
    """Restores a folder of checkpoints from its archives, on a machine that lost it or a part of it.

    Restores the stores that `root` lacks, with all checkpoints that the archives keep. `dcp.load` can then load the
    checkpoints, with any number of ranks, and the next save with the same `archive` continues the archives. Once the
    first store is restored, the lost machine can no longer save to the archives. Existing stores and checkpoints are
    unchanged. If the restore was interrupted, call it again. One process calls it for all ranks; other calls wait.

    A checkpoint is restored if its save returned, or if the save was interrupted after the whole checkpoint was
    archived. Checkpoints that were renamed or removed after the last save are restored as they were during that save.

    :param root: the folder that contains the checkpoints, which need not exist.
    :param archive: the argument `archive` of the `StorageWriter` that saved them.
    :returns: the paths of the archived checkpoints, oldest first.
    :raises ArchiveError: an archive is empty, or cannot be reached or restored. Restored stores are kept.
    :raises RefusedError: `root` contains checkpoints or stores that these archives do not contain. Nothing changed.

    >>> import pathlib, shutil, torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import StorageReader, StorageWriter, restore_from_archive
    >>> bucket = pathlib.Path(directory + "-bucket")
    >>> bucket.mkdir()
    >>> archive = {"url": bucket.as_uri()}
    >>> writer = StorageWriter(directory + "/step-1", archive=archive)
    >>> _ = dcp.save({"w": torch.ones(2, 3)}, storage_writer=writer, no_dist=True)
    >>> shutil.rmtree(directory)
    >>> [path.name for path in restore_from_archive(directory, archive)]
    ['step-1']
    >>> state = {"w": torch.zeros(2, 3)}
    >>> dcp.load(state, storage_reader=StorageReader(directory + "/step-1"), no_dist=True)
    >>> state["w"].sum().item()
    6.0
    """
    where = RootArchive({"archive": archive}, 0.0)
    folder = Path(os.path.abspath(root))
    stores = folder / STORES
    is_new = not folder.exists()
    durable_files.make_folder(stores)
    with _locked(stores / _RESTORING) as claim:
        try:
            return _restored(folder, where, claim)
        except BaseException:
            if not (stores / store_of(0)).exists():
                # The next restore can use another URL.
                claim.release()
                for empty in [stores, *([folder] if is_new else [])]:
                    with contextlib.suppress(OSError):
                        empty.rmdir()
            raise


def _restored(root: Path, where: RootArchive, claim: _Claim) -> list[Path]:
    stores, first = root / STORES, root / STORES / store_of(0)
    is_archived = (stores / _ARCHIVED).exists()
    if not is_archived:
        if claim.url not in (None, where.url):
            raise RefusedError(f"{root} is being restored from {claim.url}", remedy="pass this URL")
        if claim.url is None:
            _check_free(root, first)
    _restore(where, store_of(0), first)
    if not is_archived:
        claim.write(where.url)
    with _native.View(first) as view:
        pages = _pages(view)
        contents = {page.id: view.read(page.id) for page in pages}
        ranks = view.root.get(_RANKS, 1)
    listings = {page: _stores_in(contents[page.id], root / page.name / METADATA) for page in pages}
    ids = {store: store_id for named in listings.values() for store, (store_id, _) in named.items()}
    for rank in range(1, ranks):
        _restore(where, store_of(rank), stores / store_of(rank), ids.get(store_of(rank)))
    with contextlib.suppress(ArchiveError):
        # An interrupted save added these ranks.
        while not (stores / store_of(ranks)).exists():
            _restore(where, store_of(ranks), stores / store_of(ranks))
            ranks += 1
    found: dict[str, _Page] = {}
    for page, named in reversed(listings.items()):
        if page.name not in found and _is_whole(stores, named):
            found[page.name] = page
    for name in {page.name for page in pages} - found.keys():
        logging.getLogger("remanent").warning("%s is not restored, because the archives do not contain all of its "
                                              "parts: it was removed, or its save was interrupted", root / name)
    if not is_archived:
        for page in found.values():
            path = root / page.name / METADATA
            if not path.exists():
                durable_files.make_folder(path.parent)
                durable_files.publish(path, contents[page.id])
        _mark(stores, where.url)
    claim.release()
    restored = sorted(found.values(), key=lambda page: page.number)
    return [root / page.name for page in restored if (root / page.name / METADATA).exists()]


def _check_free(root: Path, first: Path) -> None:
    """Raises `RefusedError` if a root contains checkpoints or stores that were not restored from archives."""
    for path in root.glob(f"*/*{METADATA}"):
        raise RefusedError(f"{root} already contains the checkpoint {path.parent.name}, which is not archived",
                           remedy="restore into another folder")
    if first.exists():
        try:
            with _native.View(first) as view:
                is_ours = bool(_pages(view))
        except NoStoreError:
            # The restore has not written to this directory yet.
            return
        if not is_ours:
            raise RefusedError(f"{first} contains a store without archived checkpoints",
                               remedy="restore into another folder")


def _restore(where: RootArchive, store: str, directory: Path, store_id: str | None = None) -> None:
    """Restores a rank's store from its archive, unless its directory already contains a store.

    :param store_id: the expected identity of the store, or None if it is unknown.
    """
    if not (directory / "STORE").exists():
        url = rank_archives.url_of_rank(where.url, _number_of(store))
        _run_restore(url, directory, where.settings)
    with _native.View(directory) as view:
        if store_id is not None and view.id != store_id:
            raise RefusedError(f"the checkpoints are in store {store_id}, but {directory} contains store {view.id}",
                               remedy="remove it, and pass the archive with which the checkpoints were saved")


def _run_restore(url: str, directory: Path, settings: dict[str, str]) -> None:
    """Runs the command `remanent restore`, which continues an interrupted restore."""
    package = os.fspath(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "remanent", "restore", "--quiet", "--from", url, os.fspath(directory)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        text = done.stderr.strip().removeprefix("remanent: ") or f"the restore ended with status {done.returncode}"
        raise ArchiveError(text if url in text else f"{url}: {text}", kind="restore", url=url,
                           remedy="correct the cause and restore again; restored stores are kept")


def _stores_in(content: bytes, path: Path) -> dict[str, tuple[str, str]]:
    """Returns the store's identity and the snapshot that a metadata file names, by store."""
    if path.parent.name in ("", ".", "..", STORES) or "/" in path.parent.name:
        raise DamagedError(f"the archive lists a checkpoint with the name {path.parent.name!r}")
    return {store: (store_id, snapshot) for store, (store_id, snapshot)
            in json.loads(checksummed_json.parts_of(KIND, content, path)[0]).items()}


def _is_whole(stores: Path, named: dict[str, tuple[str, str]]) -> bool:
    """Returns whether the stores contain all snapshots that a metadata file names."""
    for store, (store_id, snapshot) in named.items():
        try:
            with _native.View(stores / store, f"name:{snapshot}") as view:
                if view.id != store_id:
                    return False
        except (NoStateError, NoStoreError):
            return False
    return True


class _Claim:
    """The locked file of a restore."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file

    @property
    def url(self) -> str | None:
        """The URL from which the root is being restored, or None if no store was restored yet."""
        return self._path.read_text() or None

    def write(self, url: str) -> None:
        os.pwrite(self._file, url.encode(), 0)
        os.fsync(self._file)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[_Claim]:
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another restore may have ended and removed the file. `NoStoreError` is a `FileNotFoundError`, so errors of
            # the caller must not be suppressed here.
            is_current = False
            with contextlib.suppress(FileNotFoundError):
                is_current = os.path.samestat(os.fstat(file), os.stat(path))
            if is_current:
                yield _Claim(path, file)
                return
        finally:
            os.close(file)
