from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, final

import numpy as np
from typing_extensions import disjoint_base

from remanent._store.options import (
    ArchiveOptions,
    ImageOptions,
    LogOptions,
    MemoryOptions,
    RetentionOptions,
    ScrubSchedule,
    SnapshotSchedule,
    TierOptions,
)

__all__ = [
    "AppliedBatch",
    "AppliedPage",
    "Array",
    "ArrayLayout",
    "Batch",
    "EventFd",
    "Bisect",
    "Block",
    "ChangeStream",
    "Extent",
    "FollowedBatch",
    "Follower",
    "KeptStates",
    "Lagged",
    "Lease",
    "LiveView",
    "ManyBytes",
    "NewPage",
    "PageClient",
    "PageInfo",
    "PageMemory",
    "PageServer",
    "Pin",
    "Prefetch",
    "Pruned",
    "ReadAhead",
    "ReadMany",
    "Reader",
    "Receipt",
    "Replica",
    "SnapshotInfo",
    "Store",
    "Ticket",
    "ValueChange",
    "View",
    "Waiting",
    "WorkingCopy",
    "__version__",
    "_log_end",
    "_log_level",
    "_log_mark",
    "_log_take",
    "close_all",
    "command",
    "dtype",
    "extents",
    "extents_by_page",
    "extents_within",
    "flatten",
    "gpu_checksums",
    "nearest",
    "state_point",
    "segment",
    "versions",
]

__version__: str

_Path = str | PathLike[str]
_Ack = Literal["applied", "logged", "durable", "archived"]
_Key = str | bytes
_Page = int | str | bytes | PageInfo
_BatchPage = _Page | NewPage
_Range = _Page | tuple[_Page, int] | tuple[_Page, int, int | None]
_At = int | str | SnapshotInfo
# None, bool, 64-bit int, float, str, bytes, and lists and dicts of these.
_Value = Any
# Any object with the buffer protocol, `__dlpack__` or `__cuda_array_interface__`.
_Bytes = Any

class _Operation(TypedDict, total=False):
    kind: str
    page: int
    offset: int
    length: int
    width: int
    base: int
    bytes: bytes
    mask: bytes
    indices: Array
    values: bytes
    pattern: bytes
    place: str
    key: str | bytes | None
    metadata: dict[str, Any]
    name: str
    value: Any
    text: str
    lsn: int

@disjoint_base
class Reader:
    """Read access to pages and the root. The base class of `Store`, `LiveView`, `View` and `Replica`.

    A page is named by its id (int), its key (str or bytes) or its `PageInfo`. A reader is a mapping from keys
    to bytes. Iteration yields the keys, as str if they are UTF-8. `pages` also returns pages without a key.

    >>> def total(pages: remanent.Reader) -> int:
    ...     return sum(info.length for info in pages.pages())
    >>> with remanent.Store(directory) as store:
    ...     store["a"] = b"four"
    ...     total(store), total(remanent.View(directory))
    (4, 4)
    """

    def _repr_html_(self) -> str: ...
    def _ipython_key_completions_(self) -> list[str | bytes]: ...
    @property
    def lsn(self) -> int:
        """The Lsn of the newest batch that is visible in this reader."""

    @property
    def root(self) -> Mapping[str, Any]:
        """The root, which is the store's own metadata, as a read-only copy. To change entries, use
        `Batch.set_root`.

        >>> with remanent.Store(directory) as store:
        ...     with store.batch() as batch:
        ...         batch.set_root("step", 7)
        ...     try:
        ...         store.root["step"] = 8
        ...     except TypeError as error:
        ...         print(error)
        ...     store.root
        the root is a read-only copy; use batch.set_root(name, value) or batch.remove_root(name)
        {'step': 7}
        """

    @property
    def page_count(self) -> int:
        """The number of pages, including those without a key."""

    def info(self, page: _Page) -> PageInfo:
        """Returns the length, epoch, place, key and metadata of a page.

        :raises UnknownPageError: no page has this id.
        :raises UnknownKeyError: no page has this key.
        """

    def pages(self, prefix: _Key | None = None) -> list[PageInfo]:
        """Returns the `PageInfo` of all pages, or of those whose keys begin with `prefix` (str or bytes),
        ordered by id.

        >>> with remanent.Store(directory) as store:
        ...     for key in ("layer.0/w", "layer.1/w", "head"):
        ...         store[key] = b"w"
        ...     len(store.pages("layer.")), len(store.pages())
        (2, 3)
        """

    def keys(self) -> list[str | bytes]:
        """Returns all keys, ordered by the ids of their pages."""

    def get(self, page: _Page, default: Any = None) -> Any:
        """Returns the bytes of a whole page, or `default` if the page does not exist."""

    def read(self, page: _Page, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes of a page from `offset` on. None reads to the end of the page.

        :raises UnknownPageError: no page has this id.
        :raises UnknownKeyError: no page has this key.
        :raises OutOfBoundsError: the range is not within the page.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        :raises OvertakenError: this is a view, and its bytes are no longer kept.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"remanent"
        ...     store.read("k", 2, 3), store.read("k", 6)
        (b'man', b'nt')
        """

    def read_into(self, page: _Page, out: _Bytes, offset: int = 0) -> int:
        """Fills `out` with the bytes of a page from `offset` on, and returns their number, which is the length
        of `out`.

        :param out: contiguous, writable host memory: a bytearray, a NumPy array, or a tensor with
            `__dlpack__`. An open store whose pages are on a GPU also accepts a tensor on that GPU. Such a
            tensor is filled after the work that is queued on its current stream, from the GPU's memory or
            from pages on disk.
        :raises BufferError: `out` is not writable or is on another device. Other errors are those of `read`;
            after one of them, part of `out` may have changed.

        >>> out = bytearray(4)
        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"remanent"
        ...     store.read_into("k", out, 4), out
        (4, bytearray(b'nent'))
        """

    def array(self, page: _Page, dtype: str | None = None, shape: Sequence[int] | None = None) -> Array:
        """Returns a copy of a whole page as an array that torch, JAX and NumPy can use without another copy.

        :param dtype: the element type, such as "float32" or "F32". None uses the dtype in the page's
            metadata, or "uint8".
        :param shape: the length of each dimension in elements. None uses the shape in the page's metadata, or
            one dimension.
        :raises ValueError: the page's length does not match `dtype` and `shape`. Other errors are those of
            `read`.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = bytes(8)
        ...     store.array("k", "float32")
        Array(dtype="float32", shape=[2])
        """

    def numpy(
        self, page: _Page, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray[Any, Any]:
        r"""Returns a copy of a whole page as a NumPy array. `dtype` and `shape` are those of `array`, and errors
        are those of `array` and of `Array.numpy`.

        >>> with remanent.Store(directory) as store:
        ...     with store.batch() as batch:
        ...         page = batch.create(b"\1\2\3\4", metadata={"dtype": "U8", "shape": [2, 2]})
        ...     store.numpy(batch.pages[0]).tolist()
        [[1, 2], [3, 4]]
        """

    def __getitem__(self, page: _Page, /) -> bytes: ...
    def __contains__(self, page: _Page, /) -> bool: ...
    def __iter__(self) -> Iterator[str | bytes]: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...

@final
class Store(Reader):
    """A store directory, open for reading and writing: pages, root, log and snapshots.

    A store has one writer at a time; threads can share the object. Used as a context manager, it is closed at
    the end of the block. Lengths are in bytes, times in seconds.

    :param path: the directory.
    :param create: whether to create the store, with its parent directories, if the directory is missing or
        empty.
    :param ack: what commits wait for by default: "applied", "logged" (survives the death of the process), "durable"
        (survives a power cut) or "archived" (survives the loss of the machine; needs `archive`).
    :param device: the device that holds the pages: "auto", "host" or "cuda:N".
    :param slots: a list of devices to which the places "device:0", "device:1", … refer. None binds all of
        them to `device`.
    :param identity: bytes that identify the application. If a later open passes other bytes, it raises `MismatchError`.
    :param layout_fingerprint: 32 bytes that identify the layout of the data within pages, such as a hash of the model's
        configuration. If a later open passes other bytes, it raises `MismatchError`.
    :param memory: how much memory pages may use, and how an open loads them; see `MemoryOptions`.
    :param tiers: the order of places through which unused pages are demoted; see `TierOptions`. None demotes
        nothing.
    :param log: how the log is written; see `LogOptions`.
    :param images: how images of pages are written; see `ImageOptions`.
    :param snapshots: when snapshots are taken in the background; see `SnapshotSchedule`.
    :param retention: which snapshots and how much log are kept; see `RetentionOptions`.
    :param scrubs: when the data on disk is scrubbed in the background; see `ScrubSchedule`.
    :param archive: where the store is archived while it is open; see `ArchiveOptions`. None archives nothing.
    :raises LockedError: another process has the store open.
    :raises NoStoreError, ForeignDirectoryError, MismatchError, InvalidError, DeviceError, OverBudgetError:
        the store cannot be opened with these arguments.
    :raises ArchiveError: the archive cannot be reached, or does not end in the history of this directory.
    :raises DamagedError: durable bytes on disk differ from the bytes that were written.

    >>> store = remanent.Store(directory, device="host", ack="durable")
    >>> store["config"] = b"a = 1"
    >>> store["config"], list(store), "config" in store
    (b'a = 1', ['config'], True)
    >>> store.close()
    """

    def __new__(
        cls,
        path: _Path,
        *,
        create: bool = True,
        ack: _Ack = "logged",
        device: str = "auto",
        slots: Sequence[str] | None = None,
        identity: bytes | None = None,
        layout_fingerprint: bytes | None = None,
        memory: MemoryOptions = {"budget": None, "load": "eager", "page_memory": None},
        tiers: TierOptions | None = None,
        log: LogOptions = {"io": None, "segment_len": 16777216, "reserve_bytes": None, "spare_bytes": None},
        images: ImageOptions = {"io": "auto", "compression": True},
        snapshots: SnapshotSchedule = {"log_bytes": 268435456, "interval": 60.0, "bytes_per_second": None},
        retention: RetentionOptions = {"snapshots_kept": 2, "snapshots_kept_for": 0.0, "log_kept": 0},
        scrubs: ScrubSchedule = {"interval": 86400.0, "bytes_per_second": 67108864},
        archive: ArchiveOptions | None = None,
    ) -> Self: ...
    @property
    def path(self) -> str:
        """The path of the store's directory, as passed to the constructor."""

    @property
    def directory(self) -> str:
        """The current absolute path of the store's directory, even after the directory was moved.

        :raises NoStoreError: the directory was removed.
        """

    @property
    def id(self) -> str:
        """The identity of the store as hexadecimal text, chosen at random when the store is created."""

    @property
    def closed(self) -> bool:
        """Whether the store is closed."""

    @property
    def recovered(self) -> Mapping[str, Any]:
        """A report of what the open found and did, as a read-only dict.

        >>> with remanent.Store(directory, device="host") as store:
        ...     store.recovered["created"], store.recovered["lsn"], store.recovered["device"]
        (True, 0, 'host')
        """

    def stats(self) -> dict[str, Any]:
        """Returns counts and sizes since the store was opened, in bytes unless stated otherwise.

        "on_disk" counts the pages in the place "disk" and their bytes. "pending_bytes" is the host memory for changes
        to these pages since their newest images. "places" is page memory by place. "tiers" counts the pages that
        `ensure` requested and the pages that were evicted to free memory. "moves" counts pages that the store moved.
        "transfers" and "lanes" count the bytes that the device's command lists moved, and the time that calls waited
        for them. A lane is a queue of command lists for one purpose. "archive" counts what was archived, or is None.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"abc"
        ...     stats = store.stats()
        >>> stats["places"]["host"]["used"], stats["places"]["host"]["allocations"], stats["moves"]
        (3, 1, [])
        """

    def put(self, key: _Key, data: _Bytes, *, place: str = "host") -> int:
        """Sets the contents of the page with key `key` in one batch, creating the page if it does not exist.
        Returns the page's id.

        For an array, the metadata entries `dtype` and `shape` are set. `numpy` and `array` then return an
        array of the same type and shape. Bytes remove these entries. `store[key] = data` does the same.

        :param data: contiguous host memory: bytes, a NumPy array or a tensor.
        :param place: the place of a new page: "host", "pinned", "device:N" or "disk".
        :raises InvalidTypeError: metadata has no name for the element type, such as NumPy's dates and
            structures. Nothing changed.
        :raises OverBudgetError: the page does not fit in the budget of its place. Nothing changed.
        :raises DiskFullError: the disk has no space for the batch. Nothing changed.
        :raises InvalidError: the key is not 1 to 64 bytes long.

        >>> import numpy
        >>> with remanent.Store(directory) as store:
        ...     page = store.put("k", b"one")
        ...     page == store.put("k", memoryview(b"longer")), store[page]
        ...     store["a"] = numpy.ones((2, 3), "float32")
        ...     store.numpy("a").shape, store.info("a").metadata
        (True, b'longer')
        ((2, 3), {'dtype': 'F32', 'shape': [2, 3]})
        """

    def batch(self, *, ack: _Ack | None = None, note: str | None = None) -> Batch:
        r"""Returns a new `Batch`. As a context manager, the batch is committed at the end of the block and
        discarded if the block raises an exception.

        :param ack: the acknowledgement that the commit waits for: "applied", "logged", "durable" or "archived". None uses
            the store's `ack`.
        :param note: a remark of up to 64 KiB that is stored in the log.

        >>> with remanent.Store(directory) as store:
        ...     with store.batch(note="first") as batch:
        ...         page = batch.create(4, key="p")
        ...         batch.write(page, 1, b"ab")
        ...     store["p"], batch.lsn
        (b'\x00ab\x00', 1)
        """

    def submit(self, batch: Batch) -> Ticket:
        """Logs `batch` and returns a `Ticket` without waiting for durability.

        :raises Error: the batch is rejected, for example with `ConflictError`, `UnknownPageError`,
            `OutOfBoundsError`, `TakenError`, `OverBudgetError` or `DiskFullError`. Nothing changed.
        :raises PoisonedError: an earlier failure stopped the store.

        >>> with remanent.Store(directory) as store:
        ...     ticket = store.submit(store.batch(note="empty"))
        ...     ticket.wait(60.0, "durable")
        True
        """

    def commit(self, batch: Batch, ack: _Ack | None = None) -> Receipt:
        """Submits `batch` and waits for its acknowledgement, which is `ack`, or else that of the batch, or else
        that of the store. Returns a `Receipt`. Errors are those of `submit`.
        """

    def wait_durable(self, lsn: int | None = None) -> None:
        """Waits until batch `lsn` and all earlier batches survive a power cut. None waits for the newest batch."""

    def ensure(self, pages: Iterable[_Page], place: str) -> int | None:
        """Moves `pages` to `place`. Pages already at `place` are unchanged.

        The pages move in one batch, or in several batches of 4,096 pages and 256 MiB each. With tiers, other
        pages are evicted if the place is full. Returns the Lsn of the last batch, or None if all pages were
        already at `place`.

        :param pages: an iterable of pages.
        :param place: "host", "pinned", "device:N" or "disk".
        :raises UnknownPageError: no page has one of the ids. Nothing moved.
        :raises UnknownKeyError: no page has one of the keys. Nothing moved.
        :raises OverBudgetError: the pages do not fit in the budget of `place`. Earlier batches stay moved.
        :raises LeasedError: a page is leased or pinned. Earlier batches stay moved.

        >>> with remanent.Store(directory, device="host") as store:
        ...     store["a"], store["b"] = b"one", b"two"
        ...     store.ensure(["a", "b"], "disk"), store.ensure(["a"], "disk")
        ...     store.info("a").place, store["a"]
        (3, None)
        ('disk', b'one')
        """

    def prefetch(self, pages: Iterable[_Page], place: str) -> Prefetch:
        """Starts moving `pages` to `place` in the background and returns a `Prefetch` immediately.

        The pages move a few at a time, in order, after the pages of earlier calls.

        :raises UnknownPageError: no page has one of the ids. Nothing moves.
        :raises UnknownKeyError: no page has one of the keys. Nothing moves. All other errors are raised by
            `Prefetch.wait`.
        """

    def read_ahead(self, steps: Iterable[Iterable[_Page]], place: str) -> ReadAhead:
        """Returns a `ReadAhead`, which iterates over `steps` and moves the pages of each step to `place` before
        their use.

        Exhaust the iterator, or close it as a context manager, before the store is closed.

        :param steps: an iterable of iterables of pages.
        :raises Error: a step's pages cannot be moved, for example with `UnknownKeyError`, `OverBudgetError`
            or `LeasedError`. Raised by the iterator at that step.
        """

    def promote(self, pages: Iterable[_Page]) -> int | None:
        """Moves pages to the first of the store's tiers, in the same way as `ensure`.

        :raises InvalidError: the store was opened without tiers. Other errors are those of `ensure`.
        """

    def demote(self, pages: Iterable[_Page]) -> None:
        """Moves each page from its tier to the next lower tier. Use this for pages that are not needed soon.

        :raises InvalidError: the store was opened without tiers. Other errors are those of `ensure`.

        >>> options = {"device": "host", "tiers": {"places": ["host", "disk"]}, "memory": {"budget": {"host": 4096}}}
        >>> with remanent.Store(directory, **options) as store:
        ...     for number in range(4):
        ...         store[f"{number}"] = bytes(2048)
        ...     store.demote(["3"])
        ...     store.info("3").place, len(store)
        ('disk', 4)
        """

    def wait_loaded(self, timeout: float | None = None, *, progress: bool | None = None) -> bool:
        """Waits until all pages are loaded. Returns False if this takes more than `timeout` seconds.

        :param progress: False disables the progress bar. None shows it for long waits if standard error is a
            terminal and tqdm is installed.
        """

    def view(self) -> LiveView:
        """Returns a `LiveView` of the pages and the root at the newest batch. Later commits do not change the
        view. Close the view before the store.

        >>> store = remanent.Store(directory)
        >>> with store.view() as view:
        ...     store["k"] = b"new"
        ...     list(view), list(store)
        ([], ['k'])
        >>> store.close()
        """

    def lease(self, page: _Page, dtype: str | None = None, shape: Sequence[int] | None = None) -> Lease:
        """Returns a `Lease`, with which a page's current bytes can be read in place. Batches that change the
        page do not change these bytes. End the lease before closing the store.

        :param dtype: the element type, such as "float32" or "F32". None uses the dtype in the page's
            metadata, or "uint8".
        :param shape: the length of each dimension in elements. None uses the shape in the page's metadata, or
            one dimension.
        :raises UnknownPageError: no page has this id.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        :raises ValueError: the page's length does not match `dtype` and `shape`.

        >>> with remanent.Store(directory, device="host") as store:
        ...     store["k"] = b"then"
        ...     with store.lease("k") as lease:
        ...         store["k"] = b"now!"
        ...         bytes(lease), memoryview(lease).readonly
        (b'then', True)
        """

    def pin(self, page: _Page) -> Pin:
        """Returns a `Pin`, which keeps the address of a page constant. Batches change the page in place. End the
        pin before closing the store.

        :raises UnknownPageError: no page has this id.
        :raises UnknownKeyError: no page has this key.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        :raises LeasedError: the page is leased, or work on a stream of a lease may still read it.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"v"
        ...     with store.pin("k"), store.batch() as batch:
        ...         batch.write("k", 0, b"w")
        ...     store["k"]
        b'w'
        """

    def working_copy(
        self, page: _Page, memory: _Bytes, *, width: int = 1, shadow: str = "page", load: bool = False
    ) -> WorkingCopy:
        """Returns a `WorkingCopy`, through which `Batch.capture` commits changes of `memory` to a page.

        :param memory: a writable, contiguous array or tensor with the length of the page. The memory must be on the
            device of the store's pages, or in host memory if pages are on the host. The working copy keeps the memory
            alive. The memory must not be freed by other means, such as `resize_` of a torch storage.
        :param width: the bytes per element: 1, 2, 4, 8 or 16. Changes are detected and logged by element.
        :param shadow: the reference with which the memory is compared. "page" uses the page itself, which
            must be in memory. A place, such as "host", uses a copy of the page in that place. "digests" uses
            16 bytes of host memory per 64 KiB; chunks that changed are then logged completely.
        :param load: whether to copy the page's bytes to `memory` now. If False, `memory` keeps its contents,
            and the next capture commits them to the page.
        :raises UnknownPageError: no page has this id.
        :raises UnknownKeyError: no page has this key.
        :raises InvalidError: the dtype of the array differs from that of the page.
        :raises MemoryRefusedError: the memory has another length, is not a whole number of elements, or is on
            another device.
        :raises DeviceError: `shadow` is "page" and the page is on disk.
        """

    def release(self, page: _Page) -> PageMemory:
        """Removes a page from the store and returns its memory as a `PageMemory`, for example for recovered
        weights that a model continues to use. After the call, no later open finds the page.

        If the page is in caller-owned memory (`Batch.create_in`), the memory stays with the caller.

        :raises UnknownPageError: no page has this id.
        :raises UnknownKeyError: no page has this key.
        :raises DamagedError: bytes on disk differ from the bytes that were written. Nothing changed.
        :raises LeasedError: the page is leased or pinned. Nothing changed.
        :raises DeviceError: the page is on disk and has no memory. Nothing changed.

        >>> with remanent.Store(directory, device="host") as store:
        ...     store["w"] = b"weights"
        ...     store.release("w").read(), len(store)
        (b'weights', 0)
        """

    def read_many(self, pages: Iterable[_Range]) -> ReadMany:
        """Starts to read ranges of many pages and returns a `ReadMany`, on which to wait. All ranges are as of
        one batch, which is the newest one submitted so far or a later one.

        :param pages: an iterable of pages, (page, offset) pairs and (page, offset, length) triples. Offsets
            and lengths are in bytes.
        :raises UnknownPageError: no page has one of the ids.
        :raises UnknownKeyError: no page has one of the keys.
        :raises OutOfBoundsError: a range is not within its page.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        :raises OutOfMemoryError: the bytes of all reads in use would exceed 256 MiB together.

        >>> with remanent.Store(directory) as store:
        ...     store["a"], store["b"] = b"remanent", b"pages"
        ...     store.read_many(["b", ("a", 2, 3)]).result().tolist()
        [b'pages', b'man']
        """

    def read_many_into(self, pages: Iterable[_Range], outs: Iterable[_Bytes]) -> int:
        """Reads ranges of many pages, as of one batch, into caller-owned buffers. Returns the Lsn of the batch.

        :param pages: as for `read_many`.
        :param outs: an iterable of contiguous, writable buffers in host memory, one per range and of the same
            length. If pages are on a GPU, tensors on that GPU are also accepted, which must not overlap.
        :raises BufferError: a buffer is not writable or contiguous. Nothing was read.
        :raises ValueError: the number or lengths of the buffers do not match the ranges. Nothing was read.
            Other errors are those of `read_many`. After an error, host buffers are unchanged, but GPU buffers
            may have been filled.

        >>> a, b = bytearray(8), bytearray(2)
        >>> with remanent.Store(directory) as store:
        ...     store["a"], store["b"] = b"remanent", b"pages"
        ...     store.read_many_into(["a", ("b", 0, 2)], [a, b]), a, b
        (2, bytearray(b'remanent'), bytearray(b'pa'))
        """

    def changes(self) -> ChangeStream:
        """Returns a `ChangeStream` of the changes of each batch from now on. A batch is reported once it is
        applied. The stream is an iterator and an asynchronous iterator.

        >>> with remanent.Store(directory) as store:
        ...     with store.changes() as changes:
        ...         store["k"] = b"v"
        ...         changes.next(timeout=60), changes.next(timeout=0)
        (AppliedBatch(lsn=1, pages=1), None)
        """

    def blame(self, page: _Page, offset: int, length: int | None = None) -> list[ValueChange]:
        """Returns the changes of a page's bytes up to the newest state, oldest first; see `View.blame`.

        >>> with remanent.Store(directory) as store:
        ...     for value in (b"good", b"bad!"):
        ...         store["k"] = value
        ...     [(change.lsn, change.after) for change in store.blame("k", 0, 4)]
        [(1, b'good'), (2, b'bad!')]
        """

    def bisect(self, is_good: Callable[[View], bool | None], *, good: _At, bad: _At | None = None) -> int:
        """Returns the Lsn of the first bad state of this store; see `remanent.bisect`. If `bad` is None, the
        search ends at the newest state.

        >>> with remanent.Store(directory, retention={"log_kept": 1 << 30}) as store:
        ...     for step in range(20):
        ...         store["loss"] = b"nan" if step >= 13 else b"0.5"
        ...     store.bisect(lambda view: view["loss"] != b"nan", good=1)
        14
        """

    def snapshot(self, name: str | None = None, *, exact: bool = False, verify: bool = True) -> SnapshotInfo:
        """Takes a snapshot while commits continue, and removes snapshots and files that are no longer kept.
        Ctrl-C takes effect after the call.

        :param name: a name of 1 to 64 bytes, which keeps the snapshot until the name is passed to `prune` as `give_up`.
            A named snapshot is always exact.
        :param exact: whether the snapshot contains the state of a single batch, so that the state can be
            restored without the log.
        :param verify: whether to wait until the snapshot was read back and verified.
        :raises TakenError: another snapshot has this name. Nothing changed.
        :raises DiskFullError: the disk has no space for the snapshot. Nothing changed.
        :raises OutOfMemoryError: there is not enough memory for the snapshot. Nothing changed.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"v"
        ...     store.snapshot("before tuning").name, [info.end for info in store.snapshots()]
        ('before tuning', [1])
        """

    def verify_pending_images(self) -> int:
        """Reads back and verifies the images that batches have written since the last snapshot. Returns the total length
        of the verified pages in bytes. Ctrl-C takes effect after the call.

        Long batches write such images for new pages, and for pages on disk that they write completely. The
        next snapshot verifies them before it names them. A caller that commits many batches before that
        snapshot can do a part of this work earlier.

        >>> with remanent.Store(directory) as store:
        ...     with store.batch() as batch:
        ...         _ = batch.create(bytes(20 << 20), place="disk")
        ...     store.verify_pending_images()
        20971520
        """

    def snapshots(self) -> list[SnapshotInfo]:
        """Returns the kept snapshots, oldest first."""

    def wait_archived(self, snapshot: int | SnapshotInfo, timeout: float | None = None) -> bool:
        """Waits until the archive keeps a named snapshot. Returns False if this takes more than `timeout` seconds.
        From then on, a store that is restored from the archive contains the snapshot, until its name is given up.

        :param snapshot: the number of the snapshot, or its `SnapshotInfo`.
        :raises NoStateError: the snapshot is not kept, or was removed before it was archived.
        :raises ArchiveError: the store has no archive, the archive has ended, or the snapshot has no name or
            cannot be archived.

        >>> import pathlib
        >>> folder = pathlib.Path(directory + "-archive")
        >>> folder.mkdir()
        >>> with remanent.Store(directory, archive={"url": folder.as_uri()}) as store:
        ...     store["k"] = b"v"
        ...     store.wait_archived(store.snapshot("before tuning"))
        True
        """

    def restore(self, at: _At) -> int:
        """Restores all pages and the root to an earlier state. The restore is one more batch, whose Lsn is
        returned.

        :param at: the state: an Lsn, "lsn:N", "snapshot:N", the name of a snapshot or a `SnapshotInfo`. Write
            a name that has one of the other forms as "name:S".
        :raises NoStateError: the state is not retained. Nothing changed.
        :raises LeasedError: a page is leased or pinned. Nothing changed.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"good"
        ...     store["k"] = b"bad!"
        ...     store.restore("lsn:1"), store["k"]
        (3, b'good')
        """

    def restore_from_snapshot(self, snapshot: int | SnapshotInfo) -> int:
        """Restores all pages and the root to the state at the end of a kept snapshot. Does the same as `restore`
        with the snapshot, and returns the Lsn of the restoring batch.

        :param snapshot: the number of the snapshot, or its `SnapshotInfo`.
        :raises NoStateError: the snapshot is not kept. Nothing changed.
        :raises LeasedError: a page is leased or pinned. Nothing changed.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"good"
        ...     snapshot = store.snapshot()
        ...     store["k"] = b"bad!"
        ...     store.restore_from_snapshot(snapshot.id), store["k"]
        (3, b'good')
        """

    def fork(self, path: _Path, at: _At) -> str:
        """Creates a store at `path` whose history begins at a state of this store, and returns the new store's
        id. Images are shared, not copied.

        :param at: the state, as for `restore`.
        :raises NoStateError: the state is not retained. No store was created.
        :raises ForeignDirectoryError: `path` is not empty. No store was created.
        :raises DiskFullError: the disk has no space for the new store. No store was created.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = b"v"
        ...     identity = store.fork(directory + "-fork", store.lsn)
        >>> remanent.View(directory + "-fork")["k"]
        b'v'
        """

    def prune(
        self,
        *,
        snapshots_kept: int | None = None,
        snapshots_kept_for: float | None = None,
        log_kept: int | None = None,
        give_up: Sequence[str] = (),
        names_only: bool = False,
        dry_run: bool = False,
    ) -> Pruned:
        """Removes the snapshots and files that no rule keeps, and returns a `Pruned`. For a rule that is None,
        the store's own rule is used.

        :param give_up: names to remove, which then no longer keep their snapshots.
        :param names_only: whether to remove only the snapshots named in `give_up`. The newest snapshot is
            always kept.
        :param dry_run: whether to return what would be removed, without removing it.

        >>> with remanent.Store(directory) as store:
        ...     first, second = store.snapshot("first"), store.snapshot("second")
        ...     [info.name for info in store.prune(give_up=["first"], names_only=True).snapshots]
        ['first']
        """

    def compare(self, left: _Page, right: _Page, *, width: int = 1) -> tuple[int, int | None]:
        """Compares two pages of equal length element by element. Returns the number of elements that differ, and
        the index of the first one or None.

        :param width: the bytes per element: 1, 2, 4, 8 or 16.
        :raises InvalidError: the pages have different lengths.

        >>> with remanent.Store(directory) as store:
        ...     store["a"], store["b"] = b"weights, before", b"weights, behind"
        ...     store.compare("a", "b")
        (4, 11)
        """

    def scrub(self) -> list[str]:
        """Reads and verifies all files that the store needs, and repairs damage from memory. Returns a list of
        descriptions of the damage that was found.
        """

    def audit(self) -> list[str | bytes | int]:
        """Checks that page memory matches the committed batches. Returns the pages that do not match, by key or
        id.
        """

    def trim(self) -> int:
        """Releases memory that no page uses any more. Returns the number of bytes that were returned to the
        driver.
        """

    def close(self) -> None:
        """Makes all batches durable, seals the log and releases the directory. Does nothing if the store is
        already closed.

        :raises InUseError: leases, pins or views still use the store. The store stays open.
        """

    def __setitem__(self, key: _Key, data: _Bytes, /) -> None: ...
    def __delitem__(self, page: _Page, /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class LiveView(Reader):
    """The pages and the root of an open store as of one batch. Created by `Store.view`. The store cannot be
    closed before the view.

    The view keeps no contents of pages. Reading a page that has changed since the view was created raises
    `OvertakenError`.

    >>> store = remanent.Store(directory)
    >>> store["k"] = b"old"
    >>> with store.view() as view:
    ...     store["k"] = b"new"
    ...     try:
    ...         view["k"]
    ...     except remanent.OvertakenError:
    ...         "changed", view.info("k").lsn, store.info("k").lsn
    ('changed', 1, 2)
    >>> store.close()
    """

    def close(self) -> None:
        """Closes the view. Its store can then be closed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class View(Reader):
    """A read-only state of a store. The writer's lock is not taken, so a writer in any process can run
    concurrently. As a context manager, the view is closed at the end of the block.

    :param path: the directory of the store.
    :param at: the state: an Lsn, "lsn:N", "snapshot:N", the name of a snapshot or a `SnapshotInfo`; None
        opens the newest state. Write a name that has one of the other forms as "name:S".
    :raises NoStoreError: the directory contains no store.
    :raises NoStateError: the state is not retained.
    :raises DamagedError: bytes on disk differ from the bytes that were written.
    :raises OvertakenError: a writer removes files of the state faster than they can be read.

    >>> with remanent.Store(directory) as store:
    ...     store["k"] = b"then"
    ...     store["k"] = b"now!"
    ...     remanent.View(directory, 1)["k"], remanent.View(directory)["k"]
    (b'then', b'now!')
    """

    def __new__(cls, path: _Path, at: _At | None = None) -> Self: ...
    @staticmethod
    def open_archive(archive: ArchiveOptions, at: _At | None = None) -> View:
        """Opens a state of an archive without restoring it, and returns its `View`. The archive is not changed, and its
        writer continues. The credential needs to read only.

        The call fetches the log of the state into a temporary folder, which is removed with the view. Parts of images,
        up to 8 MiB each, are fetched when a page in them is read. A named snapshot needs no log.

        :param archive: the archive; see `ArchiveOptions`. Only `url`, `settings` and `cache_len_max` are used.
        :param at: the state, as for the constructor; None opens the newest state.
        :raises ArchiveError: the archive cannot be reached or is empty, or an object is damaged or missing. Reads of
            pages also raise this error.
        :raises NoStateError: the archive does not keep the state.
        :raises OvertakenError: a writer removes data of the state faster than it can be read. Reads of pages also raise
            this error, at the earliest after two newer snapshots. A named snapshot is kept.

        >>> import pathlib
        >>> folder = pathlib.Path(directory + "-archive")
        >>> folder.mkdir()
        >>> with remanent.Store(directory, archive={"url": folder.as_uri()}) as store:
        ...     store["k"] = b"best"
        ...     _ = store.wait_archived(store.snapshot("best"))
        ...     store["k"] = b"last"
        >>> with remanent.View.open_archive({"url": folder.as_uri()}, "best") as view:
        ...     view["k"], view.lsn
        (b'best', 1)
        """

    @property
    def id(self) -> str:
        """The identity of the store as hexadecimal text."""

    @property
    def base(self) -> int | None:
        """The number of the snapshot from which the state is computed, or None if it is computed from the
        beginning of the log.
        """

    def blame(self, page: _Page, offset: int, length: int | None = None) -> list[ValueChange]:
        r"""Returns the changes of a page's bytes up to this state, oldest first, as a list of `ValueChange`.

        The result covers the batches in the log. Earlier changes are found by comparing the snapshots that
        are still kept. A batch that writes the same bytes again is not a change.

        :param offset: the offset of the bytes in the page.
        :param length: the number of bytes, up to 65536. None uses the length of an element according to the
            page's metadata, or 1.
        :raises UnknownPageError: no page has this id.
        :raises UnknownKeyError: no page has this key.
        :raises OutOfBoundsError: the range is not within the page.
        :raises InvalidError: `length` is not 1 to 65536.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        :raises OvertakenError: a writer removes files faster than they can be read.

        >>> with remanent.Store(directory) as store:
        ...     store["w"] = bytes([1, 2, 3])
        ...     with store.batch(note="step 2") as batch:
        ...         batch.write("w", 1, b"\x07")
        ...     changes = remanent.View(directory).blame("w", 1)
        >>> [(change.lsn, change.before, change.after) for change in changes]
        [(1, None, b'\x02'), (2, b'\x02', b'\x07')]
        """

    def load(self, pages: dict[Any, Any], device: str = "host") -> None:
        """Reads many whole pages into caller-owned memory, with several threads. Every byte is verified by a
        checksum, on a GPU after the copy to the GPU.

        The first load to a GPU creates a driver context and up to 64 MiB of pinned host memory, which the
        process keeps until it ends.

        :param pages: a dict from pages to contiguous, writable memory of the page's length: bytearrays, NumPy
            arrays or tensors.
        :param device: the device of all of the memory: "host", or a GPU such as "cuda:0".
        :raises BufferError: the memory for a page is on another device or is not writable.
        :raises OutOfBoundsError: the memory for a page does not have the page's length.
        :raises MemoryRefusedError: the memory for two pages overlaps. Other errors are those of `read`; after
            one of them, any of the memory may have changed.

        >>> with remanent.Store(directory) as store:
        ...     store["k"], store["v"] = b"keys", b"values"
        >>> keys, values = bytearray(4), bytearray(6)
        >>> remanent.View(directory).load({"k": keys, "v": values})
        >>> keys, values
        (bytearray(b'keys'), bytearray(b'values'))
        """

    def prove(self, pages: Iterable[_Page]) -> None:
        """Verifies that whole pages can be read, with several threads. All bytes from which the pages are
        computed are read and compared with their checksums. Use this method before overwriting data that
        would otherwise be lost.

        :param pages: an iterable of pages.
        :raises DamagedError: bytes on disk differ from the bytes that were written. Other errors are those of
            `read`.

        >>> with remanent.Store(directory) as store:
        ...     store["k"], store["v"] = b"keys", b"values"
        >>> remanent.View(directory).prove(["k", "v"])
        """

    def _image_checksums(self, pages: Iterable[_Page]) -> list[int | None]: ...
    def fork(self, path: _Path) -> str:
        """Creates a store at `path` whose history begins at this state, and returns the new store's id. Images
        are shared, not copied.
        """

    def close(self) -> None:
        """Closes the view. Files that only this state needs may then be removed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class KeptStates:
    """The files of a store, read once to open many of its earlier states.

    :param path: the directory of the store.
    :raises NoStoreError: the directory contains no store.
    :raises DamagedError: bytes on disk differ from the bytes that were written.
    """

    def __new__(cls, path: _Path) -> Self: ...
    def view(self, lsn: int) -> View:
        """Opens the state after batch `lsn` and returns its `View`."""

@final
class Replica(Reader):
    """A copy of a store's pages in host memory. Applying a follower's batches keeps the copy up to date.

    :param path: the directory of a store whose newest snapshot is the initial state. None creates an empty
        replica, for the state before the first batch.

    >>> with remanent.Store(directory) as store:
    ...     store["k"] = b"v"
    >>> replica, follower = remanent.Replica(), remanent.Follower(directory)
    >>> replica.apply(follower.next(10))
    >>> replica["k"], replica.position == follower.position
    (b'v', True)
    """

    def __new__(cls, path: _Path | None = None) -> Self: ...
    @property
    def position(self) -> str:
        """The position after the last applied batch, as text. Pass it to a `Follower` for this replica."""

    def apply(self, batch: FollowedBatch) -> None:
        """Applies a batch, which must be the next one.

        :raises DivergedError: the batch is not the next one after `position`.
        """

@final
class PageInfo:
    """The result of looking up a page: its id, key, length in bytes, epoch, place and metadata.

    >>> with remanent.Store(directory) as store:
    ...     store["k"] = b"v"
    ...     store.info("k")
    PageInfo(page=1, key=k, length=1, epoch=1, lsn=1, place=host)
    """

    @property
    def page(self) -> int:
        """The id of the page."""

    @property
    def key(self) -> str | bytes | None:
        """The key of the page as a str, or as bytes if the key is not UTF-8. None if the page has no key."""

    @property
    def length(self) -> int:
        """The length of the page in bytes."""

    @property
    def epoch(self) -> int:
        """The page's version number. Each batch that changes contents, length or metadata increments it."""

    @property
    def lsn(self) -> int:
        """The Lsn of the batch that last changed or moved the page."""

    @property
    def place(self) -> str:
        """The place of the page: "host", "pinned", "device:N" or "disk"."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the page, as a read-only copy. To change metadata, use `Batch.set_metadata`."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PageMemory:
    """Memory that belonged to a page and now belongs to the caller. Returned by `Store.release`.

    `torch.as_tensor`, CuPy and Numba use GPU memory without a copy and keep it alive. If pages are in host
    memory, `read` and `write` access the memory. If the page was in caller-owned memory, this object refers
    to that memory.

    The memory counts toward the budget of its place until this object is deleted.

    >>> with remanent.Store(directory, device="host") as store:
    ...     store["k"] = b"remanent"
    ...     memory = store.release("k")
    ...     memory.write(0, b"R")
    ...     memory.read(), memory.read(2, 3), memory.place, "k" in store
    (b'Remanent', b'man', 'host', False)
    """

    @property
    def nbytes(self) -> int:
        """The length of the memory in bytes."""

    @property
    def place(self) -> str:
        """The place of the memory, such as "device:0"."""

    @property
    def address(self) -> int | None:
        """The address at which kernels access the first byte, or None if they cannot access the memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes from `offset` on. None reads to the end of the memory.

        :raises OutOfBoundsError: the range is not within the memory.
        """

    def write(self, offset: int, data: _Bytes) -> None:
        """Replaces the bytes from `offset` on with `data`.

        :param data: contiguous bytes in host memory.
        :raises OutOfBoundsError: the range is not within the memory.
        :raises BufferError: `data` does not provide contiguous bytes.
        """

@final
class NewPage:
    """A page that a batch creates. Later calls of the same batch accept this handle as a page."""

    @property
    def index(self) -> int:
        """The index of the page's id in `Batch.pages` after the commit."""

@final
class Batch:
    """Operations that become visible and durable together or not at all, in the order of the calls. Created by
    `Store.batch`.

    Bytes in host memory are copied by the call that receives them, and bytes in GPU memory are read by the
    commit. Offsets and lengths are in bytes, and widths in bytes per element. A call looks up a key among the
    batch's own new pages first and then in the store. A commit fails and changes nothing if a page is
    missing, a range is outside its page, or a key already exists.

    >>> store = remanent.Store(directory)
    >>> with store.batch() as batch:
    ...     page = batch.create(b"0123456789", key="p")
    ...     batch.scatter(page, [1, 8], b"!?")
    ...     batch.fill(page, 3, 4, b"ab")
    ...     batch.set_metadata(page, "kind", "text")
    ...     batch.set_root("step", 7)
    >>> store["p"], store.info("p").metadata, store.root
    (b'0!2abab7?9', {'kind': 'text'}, {'step': 7})
    >>> store.close()
    """

    @property
    def pages(self) -> Sequence[int]:
        """The ids of the pages that the batch created. Available after the commit.

        :raises ClosedError: the batch is not committed.
        """

    @property
    def lsn(self) -> int:
        """The Lsn of the batch. Available after the commit.

        :raises ClosedError: the batch is not committed.
        """

    def create(
        self,
        content: int | _Bytes,
        *,
        key: _Key | None = None,
        place: str = "host",
        metadata: dict[str, Any] | None = None,
        at_commit: bool = False,
    ) -> NewPage:
        """Creates a page with the bytes of `content`, or filled with zeros. Returns a `NewPage`.

        For an array, the metadata entries `dtype` and `shape` are set unless `metadata` contains one of them.
        `Reader.numpy` and `Reader.array` then return an array of the same type and shape.

        :param content: bytes, a NumPy array, a tensor, or the length in bytes (int) of a page of zeros.
        :param key: a key of 1 to 64 bytes.
        :param place: "host", "pinned", "device:N" or "disk".
        :param metadata: plain values by name.
        :param at_commit: whether the commit reads the bytes instead of this call. The bytes must not change
            until then. If True, a store whose pages are on the host also accepts a tensor on a GPU, by
            DLPack.
        :raises TypeError: `content` does not provide bytes.
        :raises BufferError: the bytes are not contiguous.
        :raises MemoryRefusedError: the bytes are on a GPU, but the store's pages are not.

        >>> with remanent.Store(directory) as store, store.batch() as batch:
        ...     batch.create(16), batch.create(b"bytes", key="k")
        (NewPage(index=0), NewPage(index=1))
        """

    def create_in(
        self, memory: Any, *, key: _Key | None = None, metadata: dict[str, Any] | None = None, zeros: bool = False
    ) -> NewPage:
        """Creates a page in caller-owned memory, such as a model's tensor. The page has the length and place of
        the memory. Returns a `NewPage`. The page's initial contents are those of the memory at the commit,
        after the work that is queued on the memory's current stream during this call.

        After the commit, only the store writes to the memory, after it has logged the change. Kernels of the
        caller read the page under `Store.pin` or `Store.lease`. The page keeps the memory alive. The memory
        must not be freed by other means, such as `resize_` of a torch storage. The page leaves the memory
        when it is deleted, released, resized, moved, or changed during a lease. The next commit or
        `Store.trim` then drops the reference. After the next open, the page is in the store's own memory,
        unless the `page_memory` argument of `Store` provides this memory again. The memory does not count
        toward any budget.

        :param memory: contiguous, writable memory on the store's device: a NumPy array or a tensor.
        :param key: a key of 1 to 64 bytes.
        :param metadata: plain values by name.
        :param zeros: whether to fill the memory with zeros instead of using its contents.
        :raises TypeError: `memory` does not provide memory.
        :raises BufferError: the memory is not contiguous or not writable.
        :raises MemoryRefusedError: the memory is on another device. Raised by the commit if the memory
            overlaps that of another page.

        >>> weights = bytearray(b"weights")
        >>> with remanent.Store(directory, device="host") as store:
        ...     with store.batch() as batch:
        ...         page = batch.create_in(weights, key="w")
        ...     with store.batch(ack="applied") as batch:
        ...         batch.write("w", 0, b"W")
        ...     bytes(weights), store["w"]
        (b'Weights', b'Weights')
        """

    def write(self, page: _BatchPage, offset: int, data: _Bytes) -> None:
        """Replaces the bytes of a page from `offset` on with `data`. The page's metadata does not change.

        :raises InvalidError: `data` is an array whose dtype differs from the page's.
        """

    def write_changes(self, page: _BatchPage, before: _Bytes, after: _Bytes, *, width: int = 1) -> int:
        """Changes a page from `before` to `after` by logging the elements that differ, and returns their number.
        The page must contain `before`, and both must have the length of the page.

        :raises InvalidError: `before` and `after` have different lengths.

        >>> with remanent.Store(directory) as store:
        ...     store["k"] = bytes(4000)
        ...     with store.batch() as batch:
        ...         batch.write_changes("k", bytes(4000), bytes(2000) + b"!" + bytes(1999))
        1
        """

    def update(
        self, page: _BatchPage, data: _Bytes, *, width: int = 1, logged_max: int | None = None
    ) -> int | None:
        """Changes the contents of a page to `data`, after comparing `data` with the page's current contents.

        `data` can be in host memory or, by DLPack, on a GPU. GPU memory is read after the work that is queued
        on the current stream. No other operation of the batch may change the page's bytes.

        Elements that differ are logged. Instead, the whole page is written once, outside the log, in three
        cases: the differences need more than a quarter of the page, all updates of the batch together need
        more than `logged_max` bytes, or the length changes. In these cases the commit reads `data`, which
        must not change before. For a page of 256 KiB or more, the beginning and the middle are compared
        first.

        For an array, the metadata entries `dtype` and `shape` are set as by `create`. For bytes, the metadata
        changes only if the length does, as by `resize`.

        Logged changes to a page on disk stay in memory until the next snapshot. `logged_max` counts that
        memory, which is about 600 bytes for a single element.

        :returns: the number of elements that differ, or None if the whole page is written.
        :raises ConflictError: raised by the commit if another batch changed the page after this call.

        >>> store = remanent.Store(directory)
        >>> store["k"] = bytes(100_000)
        >>> with store.batch() as batch:
        ...     batch.update("k", bytes(50_000) + b"!" + bytes(49_999))
        1
        >>> with store.batch() as batch:
        ...     print(batch.update("k", b"!" * 100_000))
        None
        >>> store.close()
        """

    def _update_many(
        self, updates: Sequence[tuple[_BatchPage, _Bytes, int]], *, logged_max: int | None = None
    ) -> list[int | None]: ...
    def capture(self, copy: WorkingCopy, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Captures a working copy into its page. Logs the elements that changed or, for a copy with digests, the
        chunks of 64 KiB that changed.

        The memory is read when the batch is committed or submitted, after the work that is then queued on the
        device's default stream. The memory may change once that call returns. No other operation of the batch
        may change the page's bytes. If the page is on disk and more than a quarter of it changed, or its
        changes do not fit in memory, all of its bytes are written to a separate file that the log names. If
        the page is in memory, its changes count toward the limit of a batch, 1 GiB.

        :param ranges: (offset, end) pairs in bytes to which the comparison is limited. With digests, the
            ranges are extended to whole chunks. Changes outside the ranges are found by a later capture that
            covers them.
        """

    def write_masked(self, page: _BatchPage, offset: int, mask: _Bytes, data: _Bytes, *, width: int = 1) -> None:
        """Replaces elements of a page from byte `offset` on. An element is replaced if its bit in `mask` is 1.
        Bits are counted from the lowest bit of each byte.
        """

    def scatter(
        self, page: _BatchPage, indices: Sequence[int] | _Bytes, values: _Bytes, *, width: int = 1
    ) -> None:
        """Replaces single elements. Each index in `indices`, which must be distinct, receives the value at the
        same position in `values`.
        """

    def fill(self, page: _BatchPage, offset: int, length: int, pattern: bytes) -> None:
        """Repeats `pattern`, which has 1, 2, 4, 8 or 16 bytes, over `length` bytes of a page from `offset` on."""

    def resize(self, page: _BatchPage, length: int) -> None:
        """Shortens a page, or extends it with zeros, to `length` bytes. Removes `shape` from the page's
        metadata, and `dtype` if the new length does not fit it, unless the batch has set these entries.
        """

    def delete(self, page: _BatchPage) -> None:
        """Deletes a page. The page's key can then be used again."""

    def move_to(self, page: _BatchPage, place: str) -> None:
        """Moves a page to `place`: "host", "pinned", "device:N" or "disk"."""

    def clone_page(self, source: _BatchPage) -> NewPage:
        """Creates a page with the bytes and metadata of another page. Returns a `NewPage`."""

    def copy(self, source: _BatchPage, start: int, length: int, target: _BatchPage, offset: int) -> None:
        """Copies `length` bytes of page `source`, from `start` on, to page `target`, from `offset` on."""

    def set_metadata(self, page: _BatchPage, name: str, value: _Value) -> None:
        """Sets an entry of a page's metadata to a plain value."""

    def remove_metadata(self, page: _BatchPage, name: str) -> None:
        """Removes an entry of a page's metadata, if the entry exists."""

    def set_root(self, name: str, value: _Value) -> None:
        """Sets an entry of the store's root to a plain value."""

    def remove_root(self, name: str) -> None:
        """Removes an entry of the store's root, if the entry exists."""

    def note(self, text: str) -> None:
        """Sets the note of the batch, a remark of up to 64 KiB that is stored in the log."""

    def expect_epoch(self, page: int, epoch: int) -> None:
        """Makes the commit raise `ConflictError` unless the page's epoch is `epoch`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Receipt:
    """The position of a committed batch in the log, and the ids of the pages that the batch created. Returned by
    `Store.commit`.
    """

    @property
    def lsn(self) -> int:
        """The Lsn of the batch."""

    @property
    def position(self) -> str:
        """The Lsn of the batch and the incarnation of the store that acknowledged it, as text."""

    @property
    def pages(self) -> Sequence[int]:
        """The ids of the pages that the batch created, in the order of its creates and clones."""

@final
class Ticket:
    """A handle to a submitted batch, on which to wait for an acknowledgement. `await ticket` waits until the
    batch is durable. Created by `Store.submit`.

    >>> import asyncio
    >>> store = remanent.Store(directory)
    >>> async def put(key, value):
    ...     batch = store.batch()
    ...     batch.create(value, key=key)
    ...     ticket = store.submit(batch)
    ...     await ticket
    ...     return ticket.lsn, ticket.is_acknowledged("durable")
    >>> asyncio.run(put("k", b"v"))
    (1, True)
    >>> store.close()
    """

    @property
    def lsn(self) -> int:
        """The Lsn of the batch."""

    @property
    def position(self) -> str:
        """The Lsn of the batch and the incarnation of the store that acknowledged it, as text."""

    @property
    def pages(self) -> Sequence[int]:
        """The ids of the pages that the batch created, in the order of its creates and clones."""

    def is_acknowledged(self, ack: _Ack = "durable") -> bool:
        """Returns whether the batch has the acknowledgement `ack`, without waiting."""

    def wait(self, timeout: float | None = None, ack: _Ack = "durable") -> bool:
        """Waits until the batch has the acknowledgement `ack`. Returns False if this takes more than `timeout`
        seconds. Ctrl-C ends the wait, and the batch stays submitted.

        :raises PoisonedError: an earlier failure stopped the store, so that the batch will never be
            acknowledged.

        >>> with remanent.Store(directory) as store:
        ...     store.submit(store.batch(note="n")).wait(timeout=60, ack="applied")
        True
        """

    def acknowledged(self, ack: _Ack = "durable") -> Awaitable[None]:
        """Waits asynchronously until the batch has the acknowledgement `ack`."""

    def __await__(self) -> Generator[Any, None, None]: ...
    def _poll(self, event_fd: EventFd, id: int, ack: str) -> Waiting | None: ...

@final
class Lease:
    """Read access to a page in place. The bytes stay as they were when the lease began. Created by
    `Store.lease`.

    A memoryview or NumPy array accesses the store's own memory, read-only, and must be deleted before the
    lease can end. DLPack returns a copy, because consumers such as torch ignore the read-only flag. With
    `copy=False`, DLPack returns the memory itself to a consumer that respects the flag.

    >>> import numpy
    >>> with remanent.Store(directory, device="host") as store:
    ...     store["k"] = bytes(range(6))
    ...     with store.lease("k", "uint8", [2, 3]) as lease:
    ...         int(numpy.asarray(lease)[1].sum())
    12
    """

    @property
    def info(self) -> PageInfo:
        """The page as it was when the lease began."""

    @property
    def epoch(self) -> int:
        """The epoch of the leased version of the page."""

    @property
    def lsn(self) -> int:
        """The Lsn of the newest batch whose changes are included in the bytes."""

    @property
    def nbytes(self) -> int:
        """The length of the page in bytes."""

    @property
    def dtype(self) -> str:
        """The NumPy name of the element type, such as "float32"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension in elements."""

    @property
    def address(self) -> int | None:
        """The address at which kernels access the bytes, or None if pages are only in host memory. Call `on`
        with a stream first.
        """

    def descriptor(self) -> dict[str, Any]:
        """Returns the location of the page's bytes as a dict, for a transport that registers memory (NIXL, UCX,
        verbs).

        The keys are "address", "len", "kind" ("device", "pinned", "host" or "unified"), "gpu" (the CUDA
        ordinal), "store", "page" and "epoch". The location is valid until the lease ends, so end the
        registration first. Transports may only read.

        :raises DeviceError: pages are only in host memory, or the page is empty.
        """

    def on(self, stream: int) -> None:
        """Allows work that is queued on `stream` from now on to read the page.

        :param stream: a CUDA stream handle as an int.
        """

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the bytes as a read-only NumPy array in the store's memory. The lease cannot end before the
        array is deleted.

        :raises MemoryRefusedError: NumPy and `ml_dtypes` have no such element type.
        """

    def end(self) -> None:
        """Ends the lease. Does nothing if the lease has already ended.

        :raises MemoryRefusedError: views of the lease's memory still exist.
        """

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Prefetch:
    """A move of pages to a place in the background. Deleting this object does not stop the move. Created by
    `Store.prefetch`.

    >>> with remanent.Store(directory, device="host") as store:
    ...     store.put("k", b"far", place="disk")
    ...     coming = store.prefetch(["k"], "host")
    ...     coming.wait(), coming.done(), store.info("k").place
    1
    (True, True, 'host')
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all pages have arrived or the move has stopped. Returns False if this takes more than
        `timeout` seconds.

        Pages that are deleted in the meantime are skipped. If the move failed, the first call raises its
        error.

        :raises Error: the move failed, for example with `OverBudgetError`, `LeasedError` or `DamagedError`.
        """

    def done(self) -> bool:
        """Returns whether all pages have arrived or the move has stopped."""

    def cancel(self) -> None:
        """Cancels the moves of pages that have not started, and waits for those in flight. Pages that have
        arrived stay at their new place.
        """

@final
class ReadAhead:
    """An iterator over steps that use different pages, such as the layers of a model. Yields the ids of each
    step's pages once these pages have arrived. Pages of later steps are moved in the meantime. The number of
    prefetched steps depends on the duration of a move and of a step. Created by `Store.read_ahead`.

    >>> with remanent.Store(directory, device="host") as store:
    ...     layers = [store.put(f"layer {n}", bytes([n]) * 100, place="disk") for n in range(8)]
    ...     with store.read_ahead(([layer] for layer in layers), "host") as steps:
    ...         sum(store[page][0] for pages in steps for page in pages)
    ...     store.info("layer 7").place
    28
    'host'
    """

    def __iter__(self) -> Self: ...
    def __next__(self) -> list[int]: ...
    def close(self) -> None:
        """Ends the iteration, as its last step does. Moves in flight continue, and the store can be closed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Pin:
    """Keeps the address of a page constant, for captured CUDA graphs and other users of pointers. Created by
    `Store.pin`.

    Batches change the page in place. Kernels that read the page at the same time may see part of a change, so
    wait for them before a commit. Kernels must not write to the page, because their writes would not be
    logged. Operations that would change the page's address raise `LeasedError` and change nothing: resizing,
    moving, deleting or leasing the page, and `restore`.

    >>> with remanent.Store(directory) as store:
    ...     store["k"] = b"here"
    ...     with store.pin("k") as pin:
    ...         store["k"] = b"new!"
    ...         try:
    ...             del store["k"]
    ...         except remanent.LeasedError as error:
    ...             error.page == pin.page, store["k"]
    ...     del store["k"]
    (True, b'new!')
    """

    @property
    def page(self) -> int:
        """The id of the pinned page."""

    @property
    def nbytes(self) -> int:
        """The length of the page in bytes, which does not change."""

    @property
    def address(self) -> int | None:
        """The address at which kernels access the bytes, constant while the pin exists. None if pages are only
        in host memory, or if the page is empty.
        """

    def descriptor(self) -> dict[str, Any]:
        """Returns the location of the page's bytes as a dict, for a transport that registers memory (NIXL, UCX,
        verbs).

        The keys are "address", "len", "kind" ("device", "pinned", "host" or "unified"), "gpu" (the CUDA
        ordinal), "store", "page" and "epoch". The location is valid until the pin ends, so end the
        registration first. Transports may only read.

        :raises DeviceError: pages are only in host memory, or the page is empty.
        """

    def on(self, stream: int) -> None:
        """Makes work that is queued on `stream` from now on see all batches submitted so far. The stream waits
        on the device, and the call returns immediately.

        :param stream: a CUDA stream handle as an int.
        :raises DeviceError: a graph is being captured from the stream, the stream belongs to another device,
            or pages are in host memory.
        :raises ClosedError: the pin has ended.
        """

    def end(self) -> None:
        """Ends the pin, after which the page may be moved. Does nothing if the pin has already ended."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class WorkingCopy:
    """Caller-owned memory whose changes `Batch.capture` logs to a page. Created by `Store.working_copy`.

    Writes to the memory do not change the page until a capture is committed. A working copy belongs to one
    version of its page, and each capture advances it to the next version. If another batch changes the page,
    captures raise `ConflictError` until `reload` is called.

    >>> import numpy
    >>> store = remanent.Store(directory, device="host")
    >>> weights = numpy.zeros(1_000_000, "float32")
    >>> store["weights"] = weights
    >>> copy = store.working_copy("weights", weights, width=4)
    >>> weights[::100_000] = 1
    >>> logged = store.stats()["log_bytes"]
    >>> with store.batch() as batch:
    ...     batch.capture(copy)
    >>> store["weights"] == weights.tobytes(), store.stats()["log_bytes"] - logged < 1000
    (True, True)
    >>> store.close()
    """

    @property
    def page(self) -> int:
        """The id of the page."""

    @property
    def nbytes(self) -> int:
        """The length of the memory in bytes."""

    @property
    def epoch(self) -> int:
        """The epoch of the page version to which the memory corresponds, or 0 if there is none."""

    def reload(self) -> None:
        """Copies the page's bytes to the memory, replacing its contents. Use this method after a conflict, or to
        discard changes that were not captured.

        :raises UnknownPageError: the page was deleted.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        :raises MemoryRefusedError: the page's length changed.
        """

@final
class ReadMany:
    """A read of many ranges in flight. Call `wait` or `result`, or `await` the object. Created by
    `Store.read_many`.

    >>> import asyncio
    >>> store = remanent.Store(directory)
    >>> store["a"], store["b"] = b"first", b"second"
    >>> read = store.read_many(["a", ("b", 3)])
    >>> read.wait(timeout=60), read.result().tolist()
    (True, [b'first', b'ond'])
    >>> async def lengths():
    ...     return len(await store.read_many(["a", "b"]))
    >>> asyncio.run(lengths())
    2
    >>> store.close()
    """

    def done(self) -> bool:
        """Returns whether the read has completed or failed. If True, `result` does not wait."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the read is done. Returns False if this takes more than `timeout` seconds. Ctrl-C ends the
        wait.
        """

    def result(self) -> ManyBytes:
        """Waits until the read is done and returns its bytes.

        :raises UnknownPageError: a batch deleted a page before the read.
        :raises OutOfBoundsError: a batch shortened a page before the read.
        :raises ClosedError: the store was closed before the read began.
        :raises PoisonedError: an earlier failure stopped the store.
        """

    def __await__(self) -> Generator[Any, None, ManyBytes]: ...
    def _poll(self, event_fd: EventFd, id: int) -> bool: ...

@final
class ManyBytes:
    r"""The bytes of many ranges of pages, all as of one batch. Returned by `ReadMany.result`.

    The object is a sequence of bytes. `numpy(index)` and memoryview access the store's own buffer, read-only
    and without a copy. The buffer returns to the store once this object and all views of it are deleted. All
    such buffers together use at most 256 MiB.

    >>> with remanent.Store(directory) as store:
    ...     store["a"], store["b"] = bytes(range(4)), b"b"
    ...     many = store.read_many(["a", "b"]).result()
    >>> many[1], many.numpy(0, "uint16").tolist(), many.lsn, bytes(memoryview(many))
    (b'b', [256, 770], 2, b'\x00\x01\x02\x03b')
    """

    @property
    def lsn(self) -> int:
        """The Lsn of the batch whose state the bytes show."""

    @property
    def nbytes(self) -> int:
        """The total length of all ranges in bytes."""

    def tolist(self) -> list[bytes]:
        """Returns the ranges as a list of bytes objects."""

    def numpy(
        self, index: int, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Returns one range as a read-only NumPy array in the store's buffer.

        :param index: the index of the range in the call.
        :param dtype: the element type, such as "float32" or "F32". None uses the dtype in the page's
            metadata, or "uint8".
        :param shape: the length of each dimension in elements. None uses the shape in the page's metadata if
            the range is the whole page, and otherwise one dimension.
        :raises ValueError: the length of the range does not match `dtype` and `shape`.
        :raises MemoryRefusedError: NumPy and `ml_dtypes` have no such element type.
        """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> bytes: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class ChangeStream:
    """A stream of the changes of each batch, reported once the batch is applied. Iterable, also asynchronously.
    Yields `AppliedBatch` and `Lagged`. Created by `Store.changes`.

    Batches never wait for the stream. A consumer that falls behind by about 65,000 changes receives a
    `Lagged` in place of the batches that it missed. A restore, which replaces all pages, is also reported as
    `Lagged`. The iteration ends when the store is closed.

    >>> with remanent.Store(directory) as store:
    ...     changes = store.changes()
    ...     page = store.put("k", b"remanent")
    ...     with store.batch() as batch:
    ...         batch.write("k", 2, b"XYZ")
    ...     created, written = changes.next(timeout=60), changes.next(timeout=60)
    >>> created.pages[0].created, written.lsn, written.pages[0].ranges, written.pages[0].page == page
    (True, 2, [(2, 5)], True)
    """

    @property
    def begin_lsn(self) -> int:
        """The Lsn of the batch after which the stream begins. All later batches are reported."""

    def next(self, timeout: float | None = None) -> AppliedBatch | Lagged | None:
        """Returns the next event, or None if no event arrives within `timeout` seconds. A timeout of 0 checks
        once, and None waits indefinitely.

        :raises ClosedError: the store is closed, and all events have been returned.
        :raises PoisonedError: an earlier failure stopped the store.
        :raises InUseError: another thread is waiting for the stream.
        """

    def close(self) -> None:
        """Closes the stream. Batches no longer spend any work on it."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> AppliedBatch | Lagged: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Awaitable[AppliedBatch | Lagged]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def _fetch(self, timeout: float) -> bool | None: ...
    def _take(self) -> AppliedBatch | Lagged | None: ...

@final
class AppliedBatch:
    """The changes of one batch. Yielded by `ChangeStream`."""

    @property
    def lsn(self) -> int:
        """The Lsn of the batch."""

    @property
    def pages(self) -> Sequence[AppliedPage]:
        """The changed pages, ordered by id."""

    @property
    def root_changed(self) -> bool:
        """Whether the batch changed the root."""

@final
class AppliedPage:
    """The changes that one batch made to one page."""

    @property
    def page(self) -> int:
        """The id of the page."""

    @property
    def epoch(self) -> int:
        """The page's epoch after the batch, or its last epoch if the batch deleted the page."""

    @property
    def created(self) -> bool:
        """Whether the batch created the page. If True, all bytes are new, and `ranges` is empty."""

    @property
    def deleted(self) -> bool:
        """Whether the batch deleted the page."""

    @property
    def length(self) -> int | None:
        """The page's new length in bytes, or None if the batch did not change the length."""

    @property
    def place(self) -> str | None:
        """The place to which the batch moved the page, or None if the page did not move."""

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The ranges of bytes that the batch wrote, as (start, end) pairs in ascending order. Ranges neither
        overlap nor touch. Single elements are reported as the one range that contains them.
        """

    @property
    def metadata_changed(self) -> bool:
        """Whether the batch set or removed entries of the page's metadata."""

@final
class Lagged:
    """A gap in a change stream. The batches from `lsn` up to the next reported one are not reported, so read the
    pages again. A gap occurs if the consumer falls behind, if there is no memory for events, or if a restore
    replaces all pages.
    """

    @property
    def lsn(self) -> int:
        """The Lsn of the first batch that is not reported."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class ValueChange:
    """A change of a page's bytes. Returned by `View.blame` and `Store.blame`."""

    @property
    def lsn(self) -> int:
        """The Lsn of the batch that made the change. If `cause` is "snapshot", this is the last batch before the
        snapshot that changed the page.
        """

    @property
    def cause(self) -> Literal["batch", "restore", "snapshot"]:
        """The cause of the change: "batch", "restore" (of an earlier state) or "snapshot". A change has the
        cause "snapshot" if it was found by comparing two snapshots, because the batches between them are no
        longer kept.
        """

    @property
    def before(self) -> bytes | None:
        """The bytes before the change, or None if the page did not exist or ended before them."""

    @property
    def after(self) -> bytes | None:
        """The bytes after the change, or None if the page does not exist or ends before them."""

    @property
    def note(self) -> str | None:
        """The note of the batch, or None."""

    @property
    def root(self) -> Mapping[str, Any] | None:
        """The root after the batch, or None if it is unknown."""

@final
class Bisect:
    """The binary search of `remanent.bisect`. Chooses the version to test next."""

    def __new__(cls, good: int, bad: int) -> Self: ...
    def next(self) -> int | None:
        """Returns the number of the version to test next, or None if the search has ended."""

    def tell(self, lsn: int, is_good: bool | None) -> None:
        """Records the result for a version: True for good, False for bad, and None if it could not be
        determined.
        """

    def bounds(self) -> tuple[int, int]:
        """Returns the newest version known to be good and the oldest version known to be bad."""

@final
class Array:
    """A copy of a page's bytes that the caller owns, with an element type and a shape. Accessible by `numpy()`,
    memoryview and `from_dlpack`.

    The memory is aligned to 64 bytes, so that JAX uses it without another copy. Created by `Reader.array`.

    >>> with remanent.Store(directory) as store:
    ...     store["k"] = bytes(range(8))
    ...     array = store.array("k", "int16", [2, 2])
    >>> array.shape, array.nbytes, array.numpy().tolist()
    ((2, 2), 8, [[256, 770], [1284, 1798]])
    """

    @property
    def dtype(self) -> str:
        """The NumPy name of the element type, such as "int16"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension in elements."""

    @property
    def nbytes(self) -> int:
        """The length in bytes."""

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns a NumPy array that uses the same memory. If NumPy lacks the element type, such as bfloat16,
        the array has the corresponding dtype of `ml_dtypes`.

        :raises MemoryRefusedError: `ml_dtypes` cannot be imported, or also lacks the element type.
        """

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class SnapshotInfo:
    """A snapshot of a store. Returned by `Store.snapshot` and `Store.snapshots`."""

    def _repr_html_(self) -> str: ...
    @property
    def id(self) -> int:
        """The number of the snapshot."""

    @property
    def name(self) -> str | None:
        """The name, or None. A name keeps the snapshot until the name is passed to `prune` as `give_up`."""

    @property
    def created_unix_ms(self) -> int:
        """The time when the snapshot was written, in milliseconds since 1970."""

    @property
    def redo(self) -> int:
        """The Lsn after which an open replays the log."""

    @property
    def end(self) -> int:
        """The Lsn of the batch whose state the snapshot contains."""

    @property
    def pages(self) -> int:
        """The number of pages in the snapshot."""

    @property
    def bytes(self) -> int:
        """The total bytes of all images that the snapshot names."""

    @property
    def bytes_written(self) -> int:
        """The bytes of the images that this snapshot wrote. All other images are shared with older snapshots."""

    @property
    def verified(self) -> bool:
        """Whether the snapshot was read back from the disk and verified."""

    @property
    def root(self) -> Mapping[str, Any]:
        """A read-only copy of the root as of batch `end`."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Pruned:
    """The snapshots and files that a prune removed or, with `dry_run`, would remove. Returned by `Store.prune`."""

    @property
    def snapshots(self) -> Sequence[SnapshotInfo]:
        """The removed snapshots."""

    @property
    def held(self) -> Sequence[int]:
        """The numbers of snapshots that no rule keeps but that are in use by a reader."""

    @property
    def files(self) -> Sequence[tuple[str, int]]:
        """The removed files as (path, length in bytes) pairs."""

    @property
    def bytes(self) -> int:
        """The total length of the removed files in bytes."""

@final
class Follower:
    """Reads the batches of a store in order, each once, while another process may be writing. An endless
    iterator and asynchronous iterator. Takes no locks and writes nothing.

    :param start: "beginning", "snapshot" (after the newest snapshot), or the `position` of a batch or another
        follower.
    :raises NoStoreError: the directory contains no store.
    :raises OvertakenError: log segments were recycled before their batches were read.
    :raises DivergedError: a crash removed the batch at the position.
    :raises DamagedError: bytes on disk differ from the bytes that were written.

    >>> store = remanent.Store(directory)
    >>> store["k"] = b"v"
    >>> follower = remanent.Follower(directory)
    >>> batch = follower.next(timeout=10)
    >>> batch.lsn, [operation["kind"] for operation in batch.operations]
    (1, ['create', 'write'])
    >>> later = remanent.Follower(directory, follower.position)
    >>> later.next(0) is None
    True
    >>> store.close()
    """

    def __new__(cls, path: _Path, start: str = "beginning") -> Self: ...
    @property
    def position(self) -> str:
        """The position after the newest batch that was returned, as text. Pass it to another `Follower` to
        continue from there.
        """

    def next(self, timeout: float | None = None) -> FollowedBatch | None:
        """Returns the next batch, or None if no batch arrives within `timeout` seconds. A timeout of 0 checks
        once, and None waits indefinitely.
        """

    def close(self) -> None:
        """Closes the follower. Later calls raise `ClosedError`."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> FollowedBatch: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Awaitable[FollowedBatch]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def _fetch(self, timeout: float) -> bool: ...
    def _take(self) -> FollowedBatch | None: ...

@final
class FollowedBatch:
    """A batch as it was committed. Every byte is verified. Returned by `Follower.next`."""

    @property
    def lsn(self) -> int:
        """The Lsn of the batch."""

    @property
    def position(self) -> str:
        """The position after this batch, as text. A `Follower` can start from there."""

    @property
    def durable(self) -> int:
        """The Lsn of the newest batch that was durable when this batch was logged."""

    @property
    def note(self) -> str | None:
        """The note of the batch, or None."""

    @property
    def restored(self) -> int | None:
        """The Lsn of the batch whose state this batch restored, or None if it is not a restore."""

    @property
    def restored_pages(self) -> Sequence[PageInfo]:
        """The pages of the restored state if this batch is a restore, or else an empty list."""

    @property
    def operations(self) -> Sequence[_Operation]:
        """The operations in order. Each is a dict with "kind" and the entries of that kind.

        The kinds are "create", "write", "masked", "scatter", "fill", "resize", "delete", "set_metadata",
        "remove_metadata", "set_root", "remove_root", "note", "image", "restore" and "other". A "scatter"
        changes elements of `width` bytes; `indices`, an Array of uint32, counts elements from byte `base` on.
        The contents of a page after an "image" are in a file, which `image(page)` reads.
        """

    def _layout(self) -> list[dict[str, Any]]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def image(self, page: int) -> bytes:
        """Returns the contents that an "image" operation gives a page, read from a file and verified."""

@final
class PageServer:
    """Sends the pages of a store to other processes and hosts, on a thread of its own. Must be closed before
    the store.
    """

    def __new__(cls, store: Store, name: str, timeout: float) -> Self: ...
    @property
    def metadata(self) -> bytes:
        """The bytes with which a client connects to this server."""

    def close(self) -> None:
        """Stops the server after the pages that it is sending."""

@final
class PageClient:
    """Fetches pages from a `PageServer`."""

    def __new__(cls, metadata: bytes, name: str, length_max: int, timeout: float) -> Self: ...
    def fetch(self, key: bytes) -> tuple[bytes, dict[str, Any]] | None:
        """Fetches the newest version of the page with this key. Returns its bytes, which were verified by their
        checksum, and its metadata. Returns None if the page does not exist, is too long, or cannot be sent.
        """

    def close(self) -> None:
        """Disconnects from the server."""

@final
class EventFd:
    """An eventfd that wakes an event loop, and the numbers of the tasks to poll again."""

    def __new__(cls) -> Self: ...
    def fileno(self) -> int:
        """Returns the file descriptor of the eventfd, which is readable while tasks must be polled."""

    def take(self) -> list[int]:
        """Returns the numbers of the tasks to poll, and clears them."""

@final
class Waiting:
    """A task that waits for an acknowledgement. Dropping the object ends the wait."""

def command(program: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs the `remanent` command and returns its exit code. `program` is the command line that starts the
    command again, for subcommands that kill their own process.
    """

def close_all() -> None:
    """Closes all open stores. The package registers this function with `atexit`."""

def gpu_checksums(memory: Iterable[Any], device: str) -> list[int]:
    """Returns the CRC-32 of each tensor, all of which are on one GPU such as "cuda:0"."""

def _log_level(level: int | None) -> bool: ...
def _log_take(
    timeout: float, mark: int
) -> tuple[list[tuple[int, str, str, int, tuple[str, int], float, str, dict[str, str]]], int, int] | None: ...
def _log_mark() -> int: ...
def _log_end() -> None: ...
def versions(
    path: str,
) -> list[tuple[int, int | None, str | None, str | None, float | None, int | None, list[int]]]:
    """Returns the versions in the directory of a store, or of a run with several ranks, oldest first."""

def dtype(name: str) -> tuple[str, str, int]:
    """Returns the NumPy name of an element type, its name in metadata, and its bytes per element. `name` can
    be either name.
    """

def nearest(wanted: str, names: list[str]) -> str | None:
    """Returns the name in `names` that is most similar to `wanted`, or None if none is similar."""

def state_point(text: str) -> tuple[str, int | str]:
    """Parses the text of a state. Returns its kind ("lsn", "snapshot" or "name") and the number or name."""

@final
class ArrayLayout:
    """The name, element type, shape, offset and strides of an array within a page."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int

    def __new__(cls, name: str, dtype: str, shape: Sequence[int], stride: Sequence[int] | None = None,
                offset: int = 0) -> ArrayLayout: ...
    def listed(self) -> list[Any]:
        """Returns the values that represent the layout in JSON."""

    def __eq__(self, value: object, /) -> bool: ...

@final
class Block:
    """The new contents of a page: its arrays, and a contiguous uint8 buffer with their bytes."""

    arrays: tuple[ArrayLayout, ...]
    # A uint8 buffer or a torch tensor.
    data: Any
    nbytes: int
    captured: bool

    def __new__(cls, arrays: tuple[ArrayLayout, ...], data: object, nbytes: int, *, start: int | None = None,
                captured: bool = False) -> Block: ...
    def moved(self, data: object, *, start: int | None = None) -> Block:
        """Returns a block with the same layouts whose bytes are in another buffer.

        `start` is the offset of the bytes if the buffer also contains bytes of other blocks.
        """

@final
class Extent:
    """A plain tensor and the bytes of storage that the tensor uses."""

    # A torch tensor and its torch device.
    tensor: Any
    device: Any
    name: str
    nbytes: int
    is_there: bool
    storage: tuple[Any, int]
    start: int
    end: int

def extents(tensors: dict[str, Any], kinds: object) -> list[Extent]:
    """Returns the extents of tensors. Calls `kinds.plain` for each tensor that is not plain.

    :raises RefusedError: tensors share memory through two storages, so they would be restored separately.
    """

def extents_by_page(extents: list[Extent]) -> list[tuple[Extent, ...]]:
    """Groups extents by page. Extents that overlap in memory share a page and are ordered by address. Each empty
    extent has a page of its own, before all others.
    """

def extents_within(extents: list[Extent], tensors: list[Any]) -> tuple[list[Extent], list[Extent]]:
    """Divides extents into those within the memory of `tensors`, on any device, and all others. Extents that
    share a storage with other bytes are among the others.
    """

def segment(name: str) -> str:
    """Escapes a name for use as a segment of a path in `flatten`."""

def flatten(
    path: str, value: object, adapt: Callable[[str, object], object | None], leaves: object | None = None
) -> str:
    """Returns a value as JSON text. `adapt` converts objects of other libraries. Objects that `leaves` accepts
    are collected there, and the text contains their names.
    """
