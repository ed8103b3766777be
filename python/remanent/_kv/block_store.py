"""Opens the store of a block cache, and bounds its disk space."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from remanent._store._native import Store, View
from remanent._store.errors import Error, InvalidError, MismatchError

__all__ = ["Space", "difference", "identity_of", "open_store", "snapshot_interval"]

_logger = logging.getLogger("remanent.kv")

# The entry of the store's root with the identity of the blocks, as JSON.
_IDENTITY = "identity"
# The bytes of blocks after which a snapshot frees the space of removed ones: an eighth of the capacity, within these
# limits.
_INTERVAL_MIN, _INTERVAL_MAX = 32 << 20, 4 << 30


def snapshot_interval(capacity: int) -> int:
    """Returns the bytes of blocks after which a cache of `capacity` bytes takes a snapshot."""
    return min(max(capacity // 8, _INTERVAL_MIN), _INTERVAL_MAX)


def open_store(path: str | os.PathLike[str], identity: Mapping[str, Any], interval: int) -> Store:
    """Opens or creates the store of a cache. Raises `MismatchError` with the values that differ if an existing store
    has another identity."""
    try:
        text = json.dumps(dict(identity), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidError(f"identity: the values cannot be converted to JSON: {error}") from error
    try:
        store = Store(path, device="host", identity=text.encode(), images={"compression": False},
                      retention={"snapshots_kept": 1}, snapshots={"log_bytes": interval})
    except MismatchError as error:
        there = None
        with contextlib.suppress(Error), View(path) as view:
            there = view.root.get(_IDENTITY)
        if not isinstance(there, str):
            raise
        raise MismatchError(f"the cache contains blocks of another identity: {difference(there, text, 'in the cache')}",
                            remedy="use another directory for these blocks", path=os.fspath(path)) from error
    if _IDENTITY not in store.root:
        with store.batch() as batch:
            batch.set_root(_IDENTITY, text)
    return store


def identity_of(store: Store) -> str:
    """Returns the identity of the blocks of a cache, as JSON."""
    return str(store.root[_IDENTITY])


def difference(there: str, here: str, where: str) -> str:
    """Returns the values that differ between two identities, as text for an error message."""
    old, new = json.loads(there), json.loads(here)
    # The values are compared as text, since 1 and 1.0 are equal but not the same.
    rows = [(name, *(json.dumps(each[name], sort_keys=True) if name in each else "nothing" for each in (old, new)))
            for name in {**old, **new}]
    return ", ".join(f"{name} is {was} {where} and {now} here" for name, was, now in rows if was != now)


class Space:
    """Bounds the disk space of deleted blocks, even if blocks arrive faster than the disk writes them.

    A snapshot frees the space. The engine takes a snapshot in the background after `interval` bytes. If twice as many
    bytes were stored without a snapshot, the next batch waits for one.
    """

    def __init__(self, store: Store, interval: int) -> None:
        self._store, self._interval = store, interval
        self._snapshots = 0
        # The bytes stored since the last snapshot.
        self._stored = 0

    def claim(self, nbytes: int) -> None:
        """Counts bytes that are about to be stored. Waits for a snapshot if too many bytes were stored since the last
        one."""
        snapshots = self._store.stats()["snapshots_taken"]
        if snapshots != self._snapshots:
            self._snapshots, self._stored = snapshots, 0
        self._stored += nbytes
        if self._stored >= 2 * self._interval:
            self._stored = nbytes
            self.give_back()

    def give_back(self) -> None:
        """Takes a snapshot. A failure is logged, and the space stays in use."""
        try:
            self._store.snapshot()
        except Error as error:
            _logger.warning("%s: snapshot failed; the space of deleted blocks is not freed: %s", self._store.path,
                            error)
