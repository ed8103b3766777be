"""Remanent: pages that live in GPU memory and survive a crash.

A store is a directory and the pages in it. Pages are changed by batches, and each batch reaches a write-ahead log
before it is applied. Opening the directory after a crash restores every page up to the last acknowledged batch, bit for
bit.

>>> import remanent
>>> store = remanent.Store(directory)
>>> with store.batch(ack="durable") as batch:
...     page = batch.create(b"remains", key="layer.0.weight", metadata={"dtype": "U8", "shape": [7]})
...     batch.set_root("step", 1)
>>> store.close()                       # or the process dies

>>> with remanent.Store(directory) as store:
...     store["layer.0.weight"], store.root["step"]
(b'remains', 1)

All lengths and offsets are in bytes, all times in seconds. Calls that wait release the interpreter's lock, and Ctrl-C
interrupts their waits. A store belongs to the process that opened it: in a forked child, its methods raise
`ForkedError`.

All exceptions are subclasses of `Error`, such as `LockedError`. The options of a store are dicts, one for each group,
such as `LogOptions`; see `Store`. `dir(remanent)` lists both.
"""

from __future__ import annotations

# The private folders have no `__init__.py`: `help` lists regular packages, private ones as well.
#
# - `_checkpoint`: saves and restores of training runs, the parts of `remanent.torch.Checkpointer`
# - `_dcp`: parts of `remanent.dcp`: staging, and conversion from and to other formats
# - `_kv`: parts of `remanent.kv`: the index and the store of a block cache
# - `_versions`: versions of a store's state: listing, retention, removal and comparison
# - `_tensors`: tensors and arrays as pages: element types, memory layouts, overlaps, and copies from and to devices
# - `_state`: state as pages and plain values: trees, modules, optimizers, random number generators, user-defined types
# - `_store`: the native module and the exceptions, options, asynchronous waits, logging, search, HTML tables
# - `_util`: durable files, checksummed JSON, progress bars and threads
import atexit as _atexit

from remanent._store import _native
from remanent._store._native import (
    AppliedBatch,
    AppliedPage,
    Array,
    Batch,
    ChangeStream,
    FollowedBatch,
    Follower,
    Lagged,
    Lease,
    LiveView,
    ManyBytes,
    NewPage,
    PageInfo,
    PageMemory,
    Pin,
    Prefetch,
    Pruned,
    ReadAhead,
    Reader,
    ReadMany,
    Receipt,
    Replica,
    SnapshotInfo,
    Store,
    Ticket,
    ValueChange,
    View,
    WorkingCopy,
    __version__,
)
from remanent._store.bisect import bisect
from remanent._store.errors import *  # noqa: F403
from remanent._store.log import flush_logging, update_logging
from remanent._store.options import *  # noqa: F403

# What `help` shows. The exceptions and the groups of options, which repeat the methods of `BaseException` and `dict`, are
# public too.
__all__ = [
    "AppliedBatch",
    "AppliedPage",
    "Array",
    "Batch",
    "ChangeStream",
    "Error",
    "FollowedBatch",
    "Follower",
    "Lagged",
    "Lease",
    "LiveView",
    "ManyBytes",
    "NewPage",
    "PageInfo",
    "PageMemory",
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
    "WorkingCopy",
    "__version__",
    "bisect",
    "flush_logging",
    "update_logging",
]

# Stores that are open at exit are sealed while the interpreter is still intact. A store that is in use at that time is
# left as after a crash, which loses no acknowledged batch. Exit handlers run in reverse order, so the one of
# `remanent._store.log` runs after this one.
_atexit.register(_native.close_all)


def __dir__() -> list[str]:
    # A submodule is listed once it is imported.
    return sorted({*__all__, *(name for name in globals() if not name.startswith("_"))} - {"annotations"})
