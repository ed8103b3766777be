"""Caches that fetch blocks from each other over NIXL. Skipped unless NIXL is installed; REMANENT_NIXL contains its path."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import in_child

import remanent
from remanent._kv import peers
from remanent.kv import BlockCache

# UCX reads its variables when it is loaded. With its InfiniBand modules, it can crash when the process ends.
for _name, _value in {"UCX_TLS": "shm,tcp,self", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib", "UCX_DEBUG_SIGNO": "0",
                      "UCX_MEM_EVENTS": "n", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}.items():
    os.environ.setdefault(_name, _value)

IDENTITY = {"model": "a model", "hash": "sha256"}
LENGTH = 64 << 10
WORK = 60


def is_installed() -> bool:
    try:
        remanent._store._native.PageClient(b"", "probe", 1, 1.0)
    except remanent.Error as error:
        return "could not load the NIXL library" not in str(error)
    return True


pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")


def open_cache(path: Path, **identity: Any) -> BlockCache:
    return BlockCache(path, identity={**IDENTITY, **identity}, capacity=64 * LENGTH)


def block(number: int) -> bytes:
    return number.to_bytes(8, "big") * (LENGTH // 8)


def key(number: int) -> bytes:
    """Returns a key that is too long to be the key of a page, for odd numbers."""
    return b"key %d" % number * (40 if number % 2 else 1)


def store(cache: BlockCache, *numbers: int) -> None:
    cache.store(map(key, numbers), map(block, numbers), [f"kind {number % 3}" for number in numbers]).result(WORK)


def load(cache: BlockCache, *numbers: int) -> list[bool]:
    outs = [bytearray(LENGTH) for _ in numbers]
    found = cache.load(map(key, numbers), outs, [f"kind {number % 3}" for number in numbers]).result(WORK)
    for number, out, is_found in zip(numbers, outs, found, strict=True):
        assert not is_found or out == block(number), number
    return found


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[BlockCache]:
    with open_cache(tmp_path / "owner") as cache:
        store(cache, *range(6))
        yield cache


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[BlockCache]:
    with open_cache(tmp_path / "reader") as cache:
        yield cache


def test_missing_blocks_are_fetched_and_stored(owner: BlockCache, reader: BlockCache, tmp_path: Path) -> None:
    assert load(reader, 0) == [False]
    reader.add_peer(owner.serve())
    assert load(reader, 0, 1, 9) == [True, True, False]
    assert reader.fetch([key(2), key(3), key(9)]).result(WORK) == [True, True, False]
    reader.drain()
    assert [number for number in range(6) if key(number) in reader] == [0, 1, 2, 3]
    reader.close()
    owner.close()
    with open_cache(tmp_path / "reader") as again:
        assert load(again, 0, 1, 2, 3, 4) == [True, True, True, True, False]


def test_block_of_other_kind_or_length_is_a_miss(owner: BlockCache, reader: BlockCache) -> None:
    reader.add_peer(owner.serve())
    short, exact = bytearray(8), bytearray(LENGTH)
    assert reader.load([key(1)], [short], ["kind 1"]).result(WORK) == [False]
    assert reader.load([key(1)], [exact], ["kind 0"]).result(WORK) == [False]
    assert reader.load([key(1)], [exact]).result(WORK) == [False]
    assert short == bytes(8) and exact == bytes(LENGTH) and key(1) not in reader
    assert load(reader, 1) == [True]


def test_too_long_block_is_a_miss(owner: BlockCache, reader: BlockCache) -> None:
    reader.add_peer(owner.serve(), length_max=LENGTH - 1)
    assert load(reader, 0) == [False]
    owner.store([b"short"], [b"short"]).result(WORK)
    assert reader.fetch([b"short"]).result(WORK) == [True], "the peer is still asked"


def test_peer_with_other_identity_is_refused(tmp_path: Path, reader: BlockCache) -> None:
    with open_cache(tmp_path / "other", model="another") as other:
        address = other.serve()
        assert other.serve() == address
        with pytest.raises(remanent.MismatchError) as caught:
            reader.add_peer(address)
        assert 'model is "another" in the peer and "a model" here' in str(caught.value)
    for wrong in (b"", b"{}", b"[1]", b'{"remanent.kv": 1, "identity": "{}", "metadata": "!"}'):
        with pytest.raises(remanent.InvalidError, match="BlockCache.serve"):
            reader.add_peer(wrong)
    for options in ({"length_max": 0}, {"timeout": 0}, {"timeout": "soon"}):
        with pytest.raises(remanent.InvalidError):
            reader.add_peer(address, **options)


@pytest.mark.parametrize("away_for", [60.0, 0.0])
def test_lost_peer_is_a_miss_with_one_warning(owner: BlockCache, reader: BlockCache, away_for: float,
                                              caplog: pytest.LogCaptureFixture,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_AWAY_FOR", away_for)
    address = owner.serve()
    owner.close()
    reader.add_peer(address, timeout=1.0)
    store(reader, 7)
    with caplog.at_level(logging.DEBUG, "remanent.kv"):
        assert load(reader, 0, 1, 7) == [False, False, True]
        assert reader.fetch([key(0), key(7)]).result(WORK) == [False, True]
    levels = [record.levelno for record in caplog.records if "cannot be requested from a peer" in record.message]
    assert levels == [logging.WARNING] + ([] if away_for else [logging.DEBUG] * 2)


def test_second_peer_is_asked_if_first_lacks_block(owner: BlockCache, reader: BlockCache, tmp_path: Path) -> None:
    with open_cache(tmp_path / "empty") as empty:
        reader.add_peer(empty.serve())
        reader.add_peer(owner.serve())
        assert load(reader, 5, 4) == [True, True]


def test_closing_ends_server_and_client_in_any_order(owner: BlockCache, reader: BlockCache) -> None:
    reader.add_peer(owner.serve())
    owner.add_peer(reader.serve())
    assert load(reader, 1) == [True]
    for cache in (reader, owner):
        cache.close()
        cache.close()
        with pytest.raises(remanent.ClosedError):
            cache.fetch([key(1)])


def test_closed_cache_serves_and_adds_no_peer(owner: BlockCache, reader: BlockCache) -> None:
    address = owner.serve()
    reader.close()
    for call in (reader.serve, lambda: reader.add_peer(address)):
        with pytest.raises(remanent.ClosedError, match="cache is closed"):
            call()


def test_fetched_blocks_wait_in_bounded_memory(owner: BlockCache, reader: BlockCache,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"block %d" % number for number in range(12)]
    owner.store(keys, [bytes([number]) * 65536 for number in range(12)]).result(60)
    reader.add_peer(owner.serve())
    monkeypatch.setattr(remanent.kv, "_FETCHED_BYTES", 100_000)
    store, jobs, unfinished = reader.store, list[Any](), list[int]()

    def counted(*given: Any) -> Any:
        unfinished.append(sum(not job.done() for job in jobs))
        jobs.append(store(*given))
        return jobs[-1]

    monkeypatch.setattr(reader, "store", counted)
    assert reader.fetch(keys).result(60) == [True] * 12
    assert len(jobs) == 12 and max(unfinished) <= 1


def test_forked_child_uses_no_peer(owner: BlockCache, reader: BlockCache) -> None:
    address = owner.serve()
    reader.add_peer(address)
    assert load(reader, 1) == [True]
    for call in (reader.serve, lambda: reader.add_peer(address), lambda: reader.fetch([key(1)])):
        assert in_child(call) == "ForkedError"
    assert load(reader, 2) == [True], "the parent's connection still works"


@pytest.mark.skipif("fake" in os.environ.get("REMANENT_NIXL", ""), reason="the simulated library has one process")
def test_blocks_are_fetched_from_another_process(reader: BlockCache, tmp_path: Path) -> None:
    script = """
        import sys
        from remanent.kv import BlockCache
        cache = BlockCache(sys.argv[1], identity={"model": "a model", "hash": "sha256"}, capacity=1 << 24)
        cache.store([b"key 0"], [bytes(8192) * 8], ["kind 0"]).result(60)
        print(cache.serve().hex(), flush=True)
        sys.stdin.read()
        cache.close()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "child")],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        address = bytes.fromhex(child.stdout.readline())
        reader.add_peer(address)
        started = time.monotonic()
        assert load(reader, 0) == [True]
        print(f"{LENGTH} bytes in {time.monotonic() - started:.3f} s")
        child.stdin.close()
        assert child.wait(WORK) == 0
    finally:
        child.kill()
        child.wait()
