"""Fetches blocks of other caches over NIXL, and sends blocks to other caches."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from typing import Any

from remanent._kv.block_store import difference
from remanent._store._native import PageClient, PageServer, Store
from remanent._store.errors import ClosedError, Error, InvalidError, MismatchError

__all__ = ["Peers"]

_logger = logging.getLogger("remanent.kv")

# The time in seconds after which a server disconnects a client that does not respond.
_SERVER_TIMEOUT = 30.0
# The time in seconds after a failure during which no request is sent to a peer.
_AWAY_FOR = 60.0


class _Peer:
    """Another cache, from which blocks are fetched."""

    def __init__(self, metadata: bytes, length_max: int, timeout: float) -> None:
        self._metadata, self._length_max, self._timeout = metadata, length_max, timeout
        # Protects the following fields. Held while a block is fetched, because a client has one request at a time.
        self._lock = threading.Lock()
        self._client: PageClient | None = None
        self._retry_after = 0.0
        self._is_warned = self._is_closed = False

    def fetch(self, key: bytes, path: str) -> tuple[bytes, dict[str, Any]] | None:
        """Returns a page and its metadata, or None if the peer does not have the page or cannot be reached."""
        with self._lock:
            if self._is_closed or time.monotonic() < self._retry_after:
                return None
            try:
                if self._client is None:
                    self._client = PageClient(self._metadata, "remanent-kv", self._length_max, self._timeout)
                found = self._client.fetch(key)
            except Error as error:
                client, self._client = self._client, None
                if client is not None:
                    client.close()
                self._retry_after = time.monotonic() + _AWAY_FOR
                # A peer that stays unreachable is reported only once.
                _logger.log(logging.DEBUG if self._is_warned else logging.WARNING,
                            "%s: blocks cannot be requested from a peer: %s", path, error)
                self._is_warned = True
                return None
            self._is_warned = False
            return found

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()


class Peers:
    """The peers from which a cache fetches blocks, and the server that sends the cache's own blocks."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store, self._identity = store, identity
        self._lock = threading.Lock()
        self._peers: tuple[_Peer, ...] = ()
        self._server: PageServer | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._peers)

    def serve(self) -> bytes:
        """Starts the server unless it is running, and returns its address."""
        with self._lock:
            self._refuse_closed()
            if self._server is None:
                self._server = PageServer(self._store, "remanent-kv", _SERVER_TIMEOUT)
            metadata = base64.b64encode(self._server.metadata).decode()
        return json.dumps({"remanent.kv": 1, "identity": self._identity, "metadata": metadata}).encode()

    def add(self, address: bytes, length_max: int, timeout: float) -> None:
        """Adds a peer. Raises `InvalidError` if `address` is not an address, and `MismatchError` with the values that
        differ if the peer's blocks have another identity."""
        try:
            parts = json.loads(address)
            version, identity = parts["remanent.kv"], parts["identity"]
            metadata = base64.b64decode(parts["metadata"], validate=True)
            there = json.loads(identity)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidError(f"address is not the result of BlockCache.serve: {error!r}",
                               "pass the bytes that BlockCache.serve returned on the peer") from None
        if not isinstance(there, dict):
            raise InvalidError("address does not contain the identity of a cache",
                               "pass the bytes that BlockCache.serve returned on the peer")
        if version != 1:
            raise InvalidError(f"address has version {version!r}, expected 1",
                               "use the same release of Remanent for both caches")
        if identity != self._identity:
            raise MismatchError(
                f"the peer contains blocks of another identity: {difference(identity, self._identity, 'in the peer')}",
                remedy="add only peers with the same identity", path=self._store.path)
        with self._lock:
            self._refuse_closed()
            self._peers = (*self._peers, _Peer(metadata, length_max, timeout))

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ClosedError("the cache is closed", remedy="open the cache again", path=self._store.path)

    def fetch(self, key: bytes) -> tuple[bytes, dict[str, Any]] | None:
        """Returns the page with this key, and its metadata, from the first peer that has the page."""
        for peer in self._peers:
            found = peer.fetch(key, self._store.path)
            if found is not None:
                return found
        return None

    def close(self) -> None:
        """Ends the server and the clients. All calls that wait for a block must have ended or be about to end."""
        with self._lock:
            self._is_closed = True
            peers, self._peers = self._peers, ()
            server, self._server = self._server, None
        for peer in peers:
            peer.close()
        if server is not None:
            server.close()
