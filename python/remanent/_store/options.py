"""The groups of options with which a store is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict, cast

from remanent._store import _native

__all__ = [
    "ArchiveOptions", "ImageOptions", "LogOptions", "MemoryOptions", "RetentionOptions", "ScrubSchedule",
    "SnapshotSchedule", "StoreOptions", "TierOptions",
]


class MemoryOptions(TypedDict, total=False):
    """How much memory pages may use, and how an open loads them: the argument `memory` of `Store`, a dict.

    - `budget`: the limits of places in bytes, such as `{"host": 1 << 30}`. Default: no limits, except 128 MiB of host
      memory for changes of pages on disk (`{"disk": 128 << 20}`). Set it to share a GPU or a host with other programs.
    - `load`: when an open loads pages. "eager" loads all pages before the open returns. "on_demand" loads only pages
      that the log changed before it returns, and the others in the background, requested pages first. Default: "eager".
      Use "on_demand" if a process must serve before all of a large store is loaded.
    - `page_memory`: a callable that provides memory for pages, such as a model's tensors. For each page with bytes, the
      open calls it with the page's PageInfo; it returns writable memory of the page's length in the page's place, or
      None to use the store's own memory. No work may be in flight on this memory. The page then lives there as after
      `Batch.create_in`. The callable runs on other threads; an exception from it ends the open. Default: None. Use it
      to recover weights directly into tensors.

    >>> with remanent.Store(directory, memory={"budget": {"host": 1 << 20}}) as store:
    ...     store["k"] = bytes(1 << 21)
    Traceback (most recent call last):
    remanent.OverBudgetError: ...
    """

    budget: Mapping[str, int] | None
    load: Literal["eager", "on_demand"]
    page_memory: Callable[[_native.PageInfo], Any] | None


class TierOptions(TypedDict, total=False):
    """The order of places through which unused pages are demoted: the argument `tiers` of `Store`, a dict.

    - `places`: the places, fastest first, such as `["device:0", "pinned", "disk"]`. When one is full, unused pages are
      moved to the next one. Every place but the last needs a limit in `memory["budget"]`. Set `places` if the pages need
      more memory than is available.
    - `eviction`: which pages leave a full place first: "s3-fifo" or "lru". Default: "s3-fifo". Use "lru" if pages that
      were used once are likely to be used again soon.
    """

    places: Required[Sequence[str]]
    eviction: Literal["s3-fifo", "lru"]


class LogOptions(TypedDict, total=False):
    """How the log is written, and how much disk space it uses: the argument `log` of `Store`, a dict.

    - `io`: "mapped", "buffered" or "direct". Default: None, which chooses "direct" if commits wait for a sync,
      otherwise "mapped", or "buffered" if the file system supports neither. Change it if `remanent-bench commit` shows
      that another mode is faster.
    - `segment_len`: the largest length of a segment in bytes, a multiple of 4096 from 16 KiB to 4 GiB. Default:
      16777216. Reduce it to bound the disk space of a small store.
    - `reserve_bytes`: the disk space in bytes that is reserved for deletes on a full disk. Default: None, which
      reserves two segments. Increase it if more than about 100 deletes must succeed on a full disk.
    - `spare_bytes`: the obsolete segments in bytes that are kept for reuse. Default: None, which keeps a hundredth of
      the file system, at most 512 MiB. Reduce it if disk space matters more than steady commit times. With 0, no image
      files are kept for reuse either.
    """

    io: Literal["mapped", "buffered", "direct"] | None
    segment_len: int
    reserve_bytes: int | None
    spare_bytes: int | None


class ImageOptions(TypedDict, total=False):
    """How images of pages are written: the argument `images` of `Store`, a dict.

    - `io`: "auto", "mapped", "buffered" or "direct". Default: "auto", which uses direct I/O for image files of at least
      8 MiB on a disk, and the page cache otherwise. Use "buffered" if pages are usually read soon after they were
      written, and "mapped" for a store on tmpfs with pages on a GPU.
    - `compression`: whether images are compressed. Default: True. Use False if CPU time matters more than disk space.
    """

    io: Literal["auto", "mapped", "buffered", "direct"]
    compression: bool


class SnapshotSchedule(TypedDict, total=False):
    """When snapshots are taken in the background: the argument `snapshots` of `Store`, a dict.

    - `log_bytes`: the bytes of log after which a snapshot is taken. None disables this trigger. Default: 268435456.
      Reduce it for a faster recovery, which replays the log; increase it to write less.
    - `interval`: the seconds after which a snapshot is taken, if anything was committed. None disables this trigger.
      Default: 60.0. Increase it to write less.
    - `bytes_per_second`: the rate limit of background snapshots. Default: None, which sets no limit. Set it if
      snapshots slow down other users of the disk.
    """

    log_bytes: int | None
    interval: float | None
    bytes_per_second: int | None


class RetentionOptions(TypedDict, total=False):
    """Which snapshots and how much log are kept: the argument `retention` of `Store`, a dict.

    - `snapshots_kept`: the number of newest snapshots to keep, with the log since the oldest of them. Default: 2.
      Increase it to be able to return to older snapshots.
    - `snapshots_kept_for`: snapshots younger than this many seconds are also kept, with the log since the oldest of
      them. Default: 0.0. Set it to be able to return to any state of the last hours or days.
    - `log_kept`: the smallest number of bytes of log to keep. Default: 0, which keeps only the log that the kept
      snapshots need. Set it if followers read the log, or to be able to return to earlier states.
    """

    snapshots_kept: int
    snapshots_kept_for: float
    log_kept: int


class ScrubSchedule(TypedDict, total=False):
    """When the data on disk is scrubbed in the background: the argument `scrubs` of `Store`, a dict.

    - `interval`: the seconds between scrubs. None disables them. Default: 86400.0. Reduce it to detect damage sooner.
    - `bytes_per_second`: the rate limit of scrubs. None sets no limit. Default: 67108864. Increase it if a scrub takes
      longer than its interval.
    """

    interval: float | None
    bytes_per_second: int | None


class ArchiveOptions(TypedDict, total=False):
    """Where and how a store is archived while it is open: the argument `archive` of `Store`, a dict.

    A batch that was acknowledged as "archived" is in every restore that begins later, on any machine:
    `remanent restore DIRECTORY --from URL`. So is a named snapshot for which `Store.wait_archived` returned True, until
    its name is given up.

    - `url`: the URL of the archive: "s3://…", "gs://…", "az://…", or "file:///…" for an existing folder. Each store has a
      URL of its own. Credentials come from the environment.
    - `settings`: settings of the bucket, such as `{"endpoint": "http://127.0.0.1:9000"}`. Default: None. They replace
      variables of the environment.
    - `interval`: the seconds that a batch waits until it is archived, unless a caller waits for it. Default: 1.0. Each
      interval with batches costs one PUT and one GET.
    - `log_len_max`: the bytes of log that are kept while the bucket is slow or cannot be reached. Default: 8589934592.
      Beyond that, the archive continues with the next snapshot, and states in between cannot be restored from it.
    - `required`: whether an open raises ArchiveError if the bucket cannot be reached. Default: True. With False, the
      archive is checked later.
    - `takeover`: whether the directory may continue an archive to which another directory of the store has written. Set
      it if that other directory is lost. Default: False. The batches of the archive must be in this directory in any
      case.
    - `cache_len_max`: the bytes of image data that a view of the archive keeps in its temporary folder. Default:
      4294967296. Only `View.open_archive` uses it.

    >>> import pathlib
    >>> folder = pathlib.Path(directory, "archive")
    >>> folder.mkdir(parents=True)
    >>> with remanent.Store(directory + "/store", archive={"url": folder.as_uri()}) as store:
    ...     with store.batch(ack="archived") as batch:
    ...         page = batch.create(b"survives the machine", key="k")
    ...     store.stats()["archive"]["archived"] == store.lsn
    True
    """

    url: Required[str]
    settings: Mapping[str, str] | None
    interval: float
    log_len_max: int
    required: bool
    takeover: bool
    cache_len_max: int


class StoreOptions(TypedDict, total=False):
    """All keyword arguments of `Store`, for functions that pass them on. `Store` describes them."""

    create: bool
    ack: Literal["applied", "logged", "durable", "archived"]
    device: str
    slots: Sequence[str] | None
    identity: bytes | None
    layout_fingerprint: bytes | None
    memory: MemoryOptions
    tiers: TierOptions | None
    log: LogOptions
    images: ImageOptions
    snapshots: SnapshotSchedule
    retention: RetentionOptions
    scrubs: ScrubSchedule
    archive: ArchiveOptions | None


def merged(defaults: StoreOptions, given: Mapping[str, object]) -> StoreOptions:
    """Returns the given options, and the defaults of all other options. Applies to options within groups, too."""
    options: dict[str, Any] = {**defaults, **given}
    for name, group in defaults.items():
        if isinstance(group, dict) and isinstance(options[name], dict):
            options[name] = {**group, **options[name]}
    return cast(StoreOptions, options)
