"""A cache of blocks: it returns exactly the blocks that it reported as stored, and its directory does not grow."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from children import in_child

import remanent
from remanent.kv import BlockCache

LENGTH = 64 << 10
IDENTITY = {"model": "a model", "hash": "sha256"}
WORK = 60


def block_of(number: int, length: int = LENGTH) -> bytes:
    return number.to_bytes(8, "big") * (length // 8)


def key_of(number: int) -> bytes:
    return b"key\xff" + number.to_bytes(8, "big")


def open_cache(directory: str, blocks: int = 8, **options: Any) -> BlockCache:
    return BlockCache(directory, identity=IDENTITY, capacity=blocks * LENGTH, **options)


def store(cache: BlockCache, *numbers: int) -> int:
    return cache.store(map(key_of, numbers), map(block_of, numbers)).result(WORK)


def load(cache: BlockCache, *numbers: int) -> list[bool]:
    """Returns which of the blocks exist, and checks their bytes."""
    outs = [bytearray(LENGTH) for _ in numbers]
    found = cache.load(map(key_of, numbers), outs).result(WORK)
    for number, out, is_found in zip(numbers, outs, found, strict=True):
        assert not is_found or out == block_of(number), number
    return found


def numbers(cache: BlockCache) -> list[int]:
    """Returns the existing blocks, in the order of eviction."""
    return [int.from_bytes(key[4:], "big") for key in cache]


@pytest.fixture
def cache(directory: str) -> Iterator[BlockCache]:
    with open_cache(directory) as cache:
        yield cache


def test_only_stored_blocks_are_found(cache: BlockCache) -> None:
    assert store(cache, 1, 2) == 2 * LENGTH
    assert store(cache, 2, 3) == LENGTH, "only what is new is written"
    assert load(cache, 1, 2, 3, 4) == [True, True, True, False]
    assert key_of(1) in cache and key_of(4) not in cache
    assert (len(cache), cache.nbytes, cache.length(key_of(1))) == (3, 3 * LENGTH, LENGTH)


def test_eviction_order_survives_restart(directory: str) -> None:
    with open_cache(directory) as cache:
        store(cache, 1, 2, 3, 4)
        # More requests share the beginning of a request than its end, so the first blocks are evicted last.
        assert numbers(cache) == [4, 3, 2, 1]
        cache.touch([key_of(3), key_of(4)])
        assert load(cache, 2) == [True]
        order = numbers(cache)
        assert order == [1, 4, 3, 2]
    with open_cache(directory, blocks=5) as cache:
        assert numbers(cache) == order
        store(cache, 5, 6)
        assert numbers(cache) == [4, 3, 2, 6, 5]
        assert load(cache, 1) == [False]


def test_smaller_capacity_evicts_oldest_blocks(directory: str) -> None:
    with open_cache(directory) as cache:
        store(cache, *range(8))
    with open_cache(directory, blocks=3) as cache:
        cache.drain()
        assert numbers(cache) == [2, 1, 0]
    with open_cache(directory) as cache:
        assert numbers(cache) == [2, 1, 0]


def test_locked_blocks_stay_and_oversized_blocks_fail(cache: BlockCache) -> None:
    store(cache, *range(8))
    assert cache.lock([key_of(each) for each in (7, 6, 5, 4, 3, 99)]) == [True] * 5 + [False]
    with pytest.raises(remanent.OverBudgetError, match="1 of 4 blocks do not fit"):
        store(cache, 10, 11, 12, 13)
    assert sorted(numbers(cache)) == [3, 4, 5, 6, 7, 10, 11, 12]
    assert cache.delete([key_of(3), key_of(10), key_of(98)]).result(WORK) == 1, "a locked block is not deleted"
    cache.unlock([key_of(each) for each in (7, 6, 5, 4, 3, 99)])
    assert store(cache, 13, 14) == 2 * LENGTH
    # The locks of finished jobs are released, so all blocks can be evicted.
    assert store(cache, *range(20, 28)) == 8 * LENGTH
    assert sorted(numbers(cache)) == list(range(20, 28))


def test_blocks_of_one_job_do_not_evict_each_other(cache: BlockCache) -> None:
    store(cache, *range(8))
    with pytest.raises(remanent.OverBudgetError):
        store(cache, 0, 1, *range(30, 38))
    assert sorted(numbers(cache)) == [0, 1, *range(30, 36)]


def test_block_of_other_kind_or_length_is_replaced(directory: str) -> None:
    key, out = key_of(1), bytearray(LENGTH)
    with open_cache(directory) as cache:
        cache.store([key], [block_of(1)], ["float16[8]"]).result(WORK)
    with open_cache(directory) as cache:
        assert cache.load([key], [out], ["bfloat16[8]"]).result(WORK) == [False]
        assert cache.load([key], [out]).result(WORK) == [False]
        assert cache.load([key], [bytearray(8)], ["float16[8]"]).result(WORK) == [False]
        assert cache.load([key], [out], ["float16[8]"]).result(WORK) == [True]
        assert cache.store([key], [block_of(2)], ["float16[8]"]).result(WORK) == 0
        assert cache.store([key], [block_of(2)], ["bfloat16[8]"]).result(WORK) == LENGTH
        assert cache.load([key], [out], ["bfloat16[8]"]).result(WORK) == [True] and out == block_of(2)
        assert cache.nbytes == LENGTH


def test_keys_of_any_length_survive_restart(directory: str) -> None:
    keys = [b"k" * length for length in (1, 63, 64, 65, 4096)] + ["kö".encode(), b"text"]
    blocks = [block_of(number) for number in range(len(keys))]
    with open_cache(directory) as cache:
        cache.store(keys, blocks).result(WORK)
        cache.touch(keys)
        order = list(cache)
    with open_cache(directory) as cache:
        assert list(cache) == order == keys[::-1]
        outs = [bytearray(LENGTH) for _ in keys]
        assert all(cache.load(keys, outs).result(WORK)) and outs == blocks
        assert cache.delete(keys).result(WORK) == len(keys)
        assert cache._store.page_count == 0


def test_other_identity_error_states_differences(directory: str) -> None:
    open_cache(directory).close()
    with pytest.raises(remanent.MismatchError, match='hash is "sha256" in the cache and "blake3" here, ranks is nothing'):
        BlockCache(directory, identity={**IDENTITY, "hash": "blake3", "ranks": 2}, capacity=1)
    with pytest.raises(remanent.InvalidError, match="identity: the values cannot be converted to JSON"):
        BlockCache(directory, identity={"model": object()}, capacity=1)


def flip(directory: str, old: bytes) -> None:
    """Flips a bit in the image of a block."""
    for file in (Path(directory) / "pages").iterdir():
        data = file.read_bytes()
        if (at := data.find(old)) >= 0:
            with open(file, "r+b") as opened:
                opened.seek(at + len(old) // 2)
                opened.write(bytes([data[at + len(old) // 2] ^ 4]))
            return
    raise AssertionError("the block has no image")


def test_damaged_block_is_deleted_and_can_be_stored_again(directory: str) -> None:
    told: list[bytes] = []
    with open_cache(directory) as cache:
        store(cache, 1, 2, 3)
        cache._store.snapshot()
    flip(directory, block_of(2))
    with open_cache(directory, on_deleted=lambda keys, _: told.extend(keys)) as cache:
        assert load(cache, 1, 2, 3) == [True, False, True]
        assert key_of(2) not in cache and told == [key_of(2)]
        assert store(cache, 2) == LENGTH
        assert load(cache, 1, 2, 3) == [True, True, True]
    with open_cache(directory) as cache:
        assert load(cache, 1, 2, 3) == [True, True, True]
        cache._store.snapshot()
    flip(directory, block_of(3))
    with open_cache(directory) as cache:
        assert load(cache, 3) == [False]
        cache.drain()
    with open_cache(directory) as cache:
        assert sorted(numbers(cache)) == [1, 2]


def test_callbacks_report_stored_and_deleted_blocks(directory: str) -> None:
    there: dict[bytes, int] = {}

    def gone(keys: list[bytes], lengths: list[int]) -> None:
        assert [there.pop(key) for key in keys] == lengths

    with open_cache(directory, on_stored=lambda *pair: there.update(zip(*pair, strict=True)), on_deleted=gone) as cache:
        for number in range(20):
            store(cache, number, number + 1)
            assert there == {key: LENGTH for key in cache}
        cache.delete(list(cache)[:2]).result(WORK)
        assert there == {key: LENGTH for key in cache} and len(there) == 6


class Refusing:
    """A store that refuses commits on request."""

    def __init__(self, store: remanent.Store) -> None:
        self.store, self.error = store, remanent.DiskFullError("no space")
        self.refuses = False

    def commit(self, *arguments: Any, **options: Any) -> Any:
        if self.refuses:
            raise self.error
        return self.store.commit(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def __contains__(self, key: bytes) -> bool:
        return key in self.store


def test_failed_job_changes_nothing(cache: BlockCache) -> None:
    store(cache, *range(8))
    cache.touch([key_of(5)])
    order = numbers(cache)
    refusing = Refusing(cache._store)
    cache._store = refusing  # type: ignore[assignment]
    refusing.refuses = True
    with pytest.raises(remanent.DiskFullError):
        store(cache, 10, 11)
    with pytest.raises(remanent.DiskFullError):
        cache.delete([key_of(1)]).result(WORK)
    refusing.refuses = False
    assert sorted(numbers(cache)) == sorted(order) and cache.nbytes == 8 * LENGTH
    assert not cache.is_arriving(key_of(10))
    assert load(cache, *range(8)) == [True] * 8
    assert store(cache, 10, 11) == 2 * LENGTH and len(cache) == 8


def test_is_arriving_reports_unfinished_stores(directory: str) -> None:
    may_go_on = threading.Event()
    with open_cache(directory, on_stored=lambda *_: may_go_on.wait(WORK) and None) as cache:
        first = cache.store([key_of(1)], [block_of(1)])
        second = cache.store([key_of(2)], [block_of(2)])
        assert cache.is_arriving(key_of(2)) and key_of(2) not in cache
        may_go_on.set()
        assert (first.result(WORK), second.result(WORK)) == (LENGTH, LENGTH)
        assert not cache.is_arriving(key_of(2)) and key_of(2) in cache


def test_directory_size_is_bounded(directory: str) -> None:
    def size() -> int:
        return sum(file.stat().st_blocks * 512 for file in Path(directory).rglob("*") if file.is_file())

    blocks, most = 4096, 0
    with open_cache(directory, blocks) as cache:
        for begin in range(0, 4 * blocks, 512):
            store(cache, *range(begin, begin + 512))
            cache.touch([key_of(number) for number in numbers(cache)[:: 7]])
            most = max(most, size())
    assert most < 2 * blocks * LENGTH + (128 << 20), most / (blocks * LENGTH)


def test_threads_store_load_touch_and_delete_concurrently(directory: str) -> None:
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for round_ in range(30):
                some = [(first + round_ * 3 + each) % 24 for each in range(4)]
                store(cache, *some)
                load(cache, *some)
                cache.touch(map(key_of, some))
                if cache.lock([key_of(some[0])])[0]:
                    assert load(cache, some[0]) == [True]
                    cache.unlock([key_of(some[0])])
                cache.delete([key_of(some[1])]).result(WORK)
        except BaseException as error:
            errors.append(error)

    with open_cache(directory, blocks=20) as cache:
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 5, 11)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert cache._index.locked == 0 and cache.nbytes == len(cache) * LENGTH <= cache.capacity
        left = numbers(cache)
    with open_cache(directory, blocks=20) as cache:
        assert numbers(cache) == left and load(cache, *left) == [True] * len(left)


def test_closed_cache_and_forked_child_raise(directory: str) -> None:
    cache = open_cache(directory)
    store(cache, 1)
    assert in_child(lambda: cache._store.read_into(key_of(1), bytearray(LENGTH)) and None) == "ForkedError"
    cache.close()
    cache.close()
    for use in (lambda: cache.store([key_of(2)], [block_of(2)]), lambda: cache.delete([key_of(1)]),
                lambda: cache.load([key_of(1)], [bytearray(LENGTH)])):
        with pytest.raises(remanent.ClosedError, match="the cache is closed"):
            use()
    cache.touch([key_of(1)])
    assert not cache.is_arriving(key_of(2))
    with pytest.raises(remanent.InvalidError):
        BlockCache(directory, identity=IDENTITY, capacity=0)


def test_threads_use_cache_until_closed(directory: str) -> None:
    cache = open_cache(directory, blocks=16)
    failed: list[BaseException] = []
    loaded: list[int] = []
    enough = threading.Event()

    def use(first: int) -> None:
        try:
            for step in range(100_000):
                number = (first + step) % 24
                cache.store([key_of(number)], [block_of(number)]).result()
                out = bytearray(LENGTH)
                if cache.load([key_of(number)], [out]).result() == [True]:
                    assert out == block_of(number)
                    loaded.append(number)
                    if len(loaded) >= 200:
                        enough.set()
                assert len(list(cache)) <= 16 and cache.nbytes <= cache.capacity
                if step % 7 == 0:
                    cache.delete([key_of(number)]).result()
        except remanent.ClosedError:
            pass
        except BaseException as error:
            failed.append(error)

    def close() -> None:
        assert enough.wait(60)
        cache.close()

    threads = [threading.Thread(target=use, args=(first,)) for first in range(0, 20, 5)]
    threads += [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    with open_cache(directory, blocks=16) as again:
        assert all(load(again, int.from_bytes(key[-8:], "big")) for key in list(again))


CHILD = """
    import sys
    from test_kv import *

    cache = open_cache(sys.argv[1], 64)
    for number in range(0, 1 << 30, 4):
        store(cache, *range(number, number + 4))
        cache.touch([key_of(number)])
        print(number + 3, flush=True)
"""


@pytest.mark.parametrize("last", [3, 47, 203])
def test_reported_blocks_survive_kill(last: int, directory: str) -> None:
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), directory], stdout=subprocess.PIPE,
                             text=True, env=environment)
    assert child.stdout is not None
    reported = -1
    for line in child.stdout:
        reported = int(line)
        if reported == last:
            child.send_signal(signal.SIGKILL)
    child.wait()
    assert reported >= last
    with open_cache(directory, 64) as cache:
        # The job after the last reported one may have been logged, and may have evicted four blocks.
        expected = range(max(0, reported - 59), reported + 1)
        assert load(cache, *expected) == [True] * len(expected)
        assert load(cache, *numbers(cache)) == [True] * len(cache)
        assert len(cache) <= 64 and store(cache, 1 << 40) == LENGTH


def test_jobs_are_futures(cache: BlockCache) -> None:
    done: list[Future[int]] = []
    future = cache.store([key_of(1)], [block_of(1)])
    future.add_done_callback(done.append)
    assert future.result(WORK) == LENGTH
    cache.drain()
    with pytest.raises(ValueError):
        cache.store([key_of(1), key_of(2)], [block_of(1)])


def damaged_cache(directory: str) -> None:
    """Creates a cache with the blocks 1, 2 and 3, of which block 2 is damaged on disk."""
    with open_cache(directory) as cache:
        store(cache, 1, 2, 3)
        cache._store.snapshot()
    flip(directory, block_of(2))


def test_unreadable_block_is_missing_temporarily(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    with open_cache(directory) as cache:
        for number in range(8):
            store(cache, number)
            cache._store.snapshot()
    with open_cache(directory) as cache:
        assert load(cache, 0) == [True]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        outs = [bytearray(LENGTH) for _ in range(8)]
        try:
            # The limit prevents opening any file, even after a thread has closed one.
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            found = cache.load(map(key_of, range(8)), outs).result(WORK)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not all(found)
        for number, is_found in enumerate(found):
            assert (key_of(number) in cache) == is_found
        assert len(cache) == 8
        monkeypatch.setattr("remanent.kv.time.monotonic", lambda: 1e12)
        assert all(key_of(number) in cache for number in range(8))
        assert load(cache, *range(8)) == [True] * 8
    with open_cache(directory) as cache:
        assert len(cache) == 8


def test_damaged_block_does_not_affect_rest_of_job(directory: str) -> None:
    damaged_cache(directory)
    with open_cache(directory) as cache:
        keys = [key_of(2)] * 50 + [key_of(1), key_of(2), key_of(3)]
        jobs = [cache.load(keys, [bytearray(LENGTH) for _ in keys]) for _ in range(8)]
        for job in jobs:
            assert job.result(WORK) == [False] * 50 + [True, False, True]
        assert cache._index.locked == 0


def test_failed_load_releases_its_locks(cache: BlockCache) -> None:
    store(cache, 1, 2, 3)
    job = cache.load(map(key_of, (1, 2, 3)), [bytes(LENGTH), bytearray(LENGTH), bytearray(LENGTH)])
    assert isinstance(job.exception(WORK), (BufferError, TypeError, ValueError))
    assert cache._index.locked == 0
    assert cache.delete(map(key_of, (1, 2, 3))).result(WORK) == 3


def test_failed_batch_keeps_no_use_of_deleted_block(directory: str) -> None:
    damaged_cache(directory)
    with open_cache(directory) as cache:
        refusing = Refusing(cache._store)
        cache._store = refusing  # type: ignore[assignment]
        cache.touch([key_of(2), key_of(1)])

        class GivenUp(remanent.DiskFullError):
            pass

        def fail(*_: Any, **__: Any) -> None:
            load(cache, 2)
            raise GivenUp("no space")

        refusing.commit = fail  # type: ignore[method-assign]
        with pytest.raises(GivenUp):
            store(cache, 9)
        del refusing.commit
        cache.drain()
        assert store(cache, 20) == LENGTH
        assert sorted(numbers(cache)) == [1, 3, 20]


def test_waiting_calls_share_batch_and_fail_separately(directory: str) -> None:
    with open_cache(directory, blocks=4) as cache:
        may_go_on = threading.Event()
        cache._writer.submit(may_go_on.wait, WORK)
        released = memoryview(bytearray(block_of(9)))
        jobs = [cache.store([key_of(number)], [block_of(number)]) for number in (1, 2, 2)]
        jobs.append(cache.store([key_of(9)], [released]))
        before = cache._store.lsn
        may_go_on.set()
        assert [job.result(WORK) for job in jobs] == [LENGTH, LENGTH, 0, LENGTH]
        assert cache._store.lsn == before + 1
        assert numbers(cache) == [1, 2, 9], "the last call's blocks are the last to go"

        may_go_on.clear()
        cache._writer.submit(may_go_on.wait, WORK)
        jobs = [cache.store([key_of(10)], [block_of(10)]), cache.store([key_of(11 + at) for at in range(5)],
                                                                       [block_of(11 + at) for at in range(5)])]
        may_go_on.set()
        assert jobs[0].result(WORK) == LENGTH
        assert isinstance(jobs[1].exception(WORK), remanent.OverBudgetError)
        refusing = Refusing(cache._store)
        cache._store = refusing  # type: ignore[assignment]
        made = []

        def commit(batch: Any, **options: Any) -> Any:
            made.append(batch)
            if len(made) in (1, 2, 3, 4):
                raise remanent.PoisonedError("of this call")
            return refusing.store.commit(batch, **options)

        refusing.commit = commit  # type: ignore[method-assign]
        may_go_on.clear()
        cache._writer.submit(may_go_on.wait, WORK)
        jobs = [cache.store([key_of(number)], [block_of(number)]) for number in (20, 21, 22)]
        may_go_on.set()
        # First in one batch, then each call separately.
        assert [type(job.exception(WORK)) for job in jobs] == [remanent.PoisonedError] * 3
        assert store(cache, 23) == LENGTH and key_of(20) not in cache
    with open_cache(directory, blocks=4) as cache:
        assert numbers(cache)[-1] == 23


def test_canceled_job_is_not_arriving(cache: BlockCache) -> None:
    may_go_on = threading.Event()
    cache._writer.submit(may_go_on.wait, WORK)
    jobs = [cache.store([key_of(number)], [block_of(number)]) for number in range(2)]
    assert jobs[1].cancel()
    drained = threading.Thread(target=cache.drain)
    drained.start()
    may_go_on.set()
    drained.join(WORK)
    assert not drained.is_alive() and jobs[0].result(WORK) == LENGTH
    assert not cache.is_arriving(key_of(0)) and not cache.is_arriving(key_of(1))
    assert key_of(0) in cache and key_of(1) not in cache


def test_lock_outlives_deleted_block(directory: str) -> None:
    damaged_cache(directory)
    with open_cache(directory, blocks=4) as cache:
        assert cache.lock([key_of(2)]) == [True]
        assert load(cache, 2) == [False]
        cache.drain()
        store(cache, 2)
        assert cache.lock([key_of(2)]) == [True]
        cache.unlock([key_of(2)])
        assert cache.delete([key_of(2)]).result(WORK) == 0, "another caller holds it"
        cache.unlock([key_of(2), key_of(2)])
        assert cache._index.locked == 0 and cache.delete([key_of(2)]).result(WORK) == 1


def test_failing_callbacks_change_nothing(directory: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a callback's own mistake")

    with open_cache(directory, blocks=4, on_stored=fail, on_deleted=fail) as cache:
        for number in range(0, 12, 2):
            assert store(cache, number, number + 1) == 2 * LENGTH
        assert len(cache) == 4 == cache._store.page_count


def test_uses_are_logged_by_few_jobs(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remanent.kv._USES_WAITING_MAX", 3)
    with open_cache(directory) as cache:
        store(cache, *range(6))
        may_go_on = threading.Event()
        cache._writer.submit(may_go_on.wait, WORK)
        for _ in range(100):
            cache.touch(map(key_of, range(4)))
        # The job that is blocked here, and one that logs uses.
        assert cache._writer._work_queue.qsize() <= 2
        may_go_on.set()
        cache.drain()
        load(cache, 5, 4, 3)
        cache.drain()
        assert cache._index.uses_waiting == 0


@pytest.mark.parametrize("identity", [{"a": 1.0}, {"a": True}, {"a": 1 << 70}, {"a": "\ud800"}, {"a": None}])
def test_similar_identities_differ(identity: Any, directory: str) -> None:
    BlockCache(directory, identity={"a": 1}, capacity=LENGTH).close()
    with pytest.raises(remanent.MismatchError, match="a is 1 in the cache and [^ ]+ here"):
        BlockCache(directory, identity=identity, capacity=LENGTH)
    BlockCache(directory + "-other", identity=identity, capacity=LENGTH).close()


def test_invalid_arguments_create_no_files(directory: str, cache: BlockCache) -> None:
    wrong: list[dict[str, Any]] = [{"capacity": 1.5}, {"capacity": "10"}, {"readers": 0}, {"ack": "applied"},
                                   {"identity": {"a": {1}}}]
    for options in wrong:
        with pytest.raises(remanent.InvalidError):
            BlockCache(directory + "-new", **{"identity": IDENTITY, "capacity": LENGTH, **options})
    assert not os.path.exists(directory + "-new")
    for keys in ([b""], ["text"], [bytearray(b"x")], [key_of(1), b""]):
        with pytest.raises(remanent.InvalidError, match="a block's key"):
            cache.store(keys, [block_of(1)] * len(keys))  # type: ignore[arg-type]
    assert not cache.is_arriving(key_of(1))

    def broken() -> Iterator[bytes]:
        yield key_of(1)
        raise KeyError

    store(cache, 1)
    for call in (cache.lock, cache.touch, cache.unlock, cache.delete):
        with pytest.raises(KeyError):
            call(broken())
    assert cache._index.locked == 0


def test_equal_keys_of_different_lengths_fail_job(cache: BlockCache) -> None:
    with pytest.raises(remanent.OverBudgetError):
        cache.store([key_of(1), key_of(1)], [block_of(1), block_of(1, 8)]).result(WORK)
    assert cache.length(key_of(1)) == LENGTH
    assert cache.store([key_of(2), key_of(2)], [block_of(2), block_of(2)]).result(WORK) == LENGTH


def test_short_blocks_are_stored_in_many_batches(directory: str) -> None:
    with BlockCache(directory, identity=IDENTITY, capacity=64 << 20) as cache:
        keys = [number.to_bytes(4, "big") for number in range(20_000)]
        with pytest.raises(remanent.OverBudgetError):
            cache.store(keys, [key[3:] for key in keys]).result(WORK)
        assert cache.nbytes == len(cache) == 16_384, "each counts 4 KiB"
        outs = [bytearray(1) for _ in keys]
        found = cache.load(keys, outs).result(WORK)
        assert sum(found) == 16_384
        assert all(out == key[3:] for key, out, is_found in zip(keys, outs, found, strict=True) if is_found)


def test_first_blocks_of_long_call_are_evicted_last(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remanent.kv._BATCH_BLOCKS", 3)
    with open_cache(directory) as cache:
        store(cache, *range(8))
        assert numbers(cache) == list(range(7, -1, -1))
    with open_cache(directory) as cache:
        assert numbers(cache) == list(range(7, -1, -1))


def test_forked_child_is_rejected_by_cache_threads(cache: BlockCache) -> None:
    store(cache, 1)
    assert in_child(lambda: load(cache, 1) and None) == "ForkedError"
    assert in_child(lambda: store(cache, 2) and None) == "ForkedError"


def test_random_histories_match_model(tmp_path: Path) -> None:
    """Stores, uses, locks, deletes and restarts: the blocks and their order of eviction match the model."""
    for seed in range(12):
        dice = random.Random(seed)
        directory = str(tmp_path / str(seed))
        cache = open_cache(directory, blocks=6)
        model: list[int] = []
        locked: Counter[int] = Counter()
        for _ in range(60):
            some = dice.sample(range(12), dice.randint(1, 4))
            act = dice.choice(["store", "store", "touch", "load", "lock", "unlock", "delete", "reopen"])
            if act == "store":
                here = [each for each in some if each in model]
                for each in reversed(here):
                    model.remove(each)
                    model.append(each)
                room = 6 - len({each for each in model if locked[each]} | set(here))
                new = [each for each in some if each not in here][: max(room, 0)]
                goes = [each for each in model if not locked[each] and each not in here]
                for each in goes[: max(0, len(model) + len(new) - 6)]:
                    model.remove(each)
                model += reversed(new)
                if len(here) + len(new) == len(some):
                    assert store(cache, *some) == len(new) * LENGTH
                else:
                    with pytest.raises(remanent.OverBudgetError):
                        store(cache, *some)
            elif act in ("touch", "load"):
                if act == "touch":
                    cache.touch(map(key_of, some))
                else:
                    assert load(cache, *some) == [each in model for each in some]
                for each in [each for each in reversed(some) if each in model]:
                    model.remove(each)
                    model.append(each)
            elif act == "lock":
                assert cache.lock(map(key_of, some)) == [each in model for each in some]
                locked.update(each for each in some if each in model)
            elif act == "unlock":
                cache.unlock(map(key_of, some))
                locked.subtract(each for each in some if locked[each])
            elif act == "delete":
                gone = [each for each in some if each in model and not locked[each]]
                assert cache.delete(map(key_of, some)).result(WORK) == len(gone)
                model = [each for each in model if each not in gone]
            else:
                cache.close()
                cache, locked = open_cache(directory, blocks=6), Counter()
            assert numbers(cache) == model, (seed, act)
            assert cache.nbytes == len(model) * LENGTH
            assert cache._index.locked == LENGTH * sum(locked[each] > 0 for each in model)
        assert load(cache, *model) == [True] * len(model)
        assert cache._store.page_count == len(model)
        cache.close()
