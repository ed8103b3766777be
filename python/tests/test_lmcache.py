"""The L2 adapter for LMCache: blocks are found after a restart, verified, with the type and shape of the buffers."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins
from children import run_script

import remanent

HOST = stand_ins.lmcache()

from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.internal_api import L2AdapterListener  # noqa: E402

from remanent.integrations.lmcache import RemanentL2Adapter  # noqa: E402

LENGTH = 64 << 10
PARAMS = {"capacity": 64 * LENGTH, "revision": "1", "chunk_size": 256}


def setup_module() -> None:
    print(f"the host is {HOST}")


def key(number: int, **others: Any) -> Any:
    return ObjectKey(**{"chunk_hash": number.to_bytes(32, "big"), "model_name": "org/a model", "kv_rank": 0x01000100,
                        "cache_salt": "", **others})


class Memory:
    """Memory of LMCache: bytes with a type and a shape."""

    def __init__(self, number: int, dtype: str = "bfloat16", length: int = LENGTH) -> None:
        self.bytes = bytearray(number.to_bytes(8, "big") * (length // 8))
        self.metadata = SimpleNamespace(dtype=None, shape=None, dtypes=[dtype], shapes=[[length // 2]],
                                        fmt=SimpleNamespace(name="KV_2LTD"))

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.bytes)


class Listener(L2AdapterListener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.there: dict[Any, int] = {}
        self.accessed: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.there |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        for each in keys:
            del self.there[each]


def wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(60_000)
    os.eventfd_read(fd)


def store(adapter: RemanentL2Adapter, keys: list[Any], memories: list[Memory]) -> Any:
    task = adapter.submit_store_task(keys, memories)
    wait(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bitmap.test(index) for index in range(count)]


def lookup(adapter: RemanentL2Adapter, keys: list[Any]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = bits(adapter.query_lookup_and_lock_result(task), len(keys))
    assert adapter.query_lookup_and_lock_result(task) is None
    return found


def load(adapter: RemanentL2Adapter, keys: list[Any], memories: list[Memory]) -> list[bool]:
    task = adapter.submit_load_task(keys, memories)
    wait(adapter.get_load_event_fd())
    loaded = bits(adapter.query_load_result(task), len(keys))
    assert adapter.query_load_result(task) is None
    return loaded


def make(directory: str, **params: Any) -> RemanentL2Adapter:
    return RemanentL2Adapter({"path": directory, **PARAMS, **params})


@pytest.fixture
def adapter(directory: str) -> Iterator[RemanentL2Adapter]:
    adapter = make(directory)
    yield adapter
    adapter.close()


def test_blocks_are_found_after_a_restart_with_their_bytes(directory: str) -> None:
    adapter = make(directory)
    stored = store(adapter, [key(1), key(2), key(1)], [Memory(1), Memory(2), Memory(1)])
    assert stored.is_successful() and stored.bytes_transferred() == 2 * LENGTH
    assert store(adapter, [key(1)], [Memory(1)]).bytes_transferred() == 0
    adapter.close()

    adapter = make(directory)
    assert adapter.get_usage().total_bytes_used == 2 * LENGTH
    others = [key(1, kv_rank=2), key(1, model_name="b"), key(1, object_group_id=1), key(1, cache_salt="of a user")]
    assert lookup(adapter, [key(1), key(2), key(3), *others]) == [True, True, False, False, False, False, False]
    outs = [Memory(0), Memory(0), Memory(0)]
    assert load(adapter, [key(2), key(3), key(1)], outs) == [True, False, True]
    assert outs[0].bytes == Memory(2).bytes and outs[2].bytes == Memory(1).bytes
    adapter.submit_unlock([key(1), key(2)])
    assert adapter.report_status()["is_healthy"]
    adapter.close()
    adapter.close()
    assert not adapter.report_status()["is_healthy"]


def test_blocks_of_other_type_or_length_are_not_returned(adapter: RemanentL2Adapter) -> None:
    store(adapter, [key(1)], [Memory(1)])
    assert load(adapter, [key(1)], [Memory(0, "float16")]) == [False]
    assert load(adapter, [key(1)], [Memory(0, length=8)]) == [False]
    assert store(adapter, [key(1)], [Memory(7, "float16")]).bytes_transferred() == LENGTH
    out = Memory(0, "float16")
    assert load(adapter, [key(1)], [out]) == [True] and out.bytes == Memory(7).bytes


def test_listeners_receive_changes_and_locked_blocks_stay(directory: str) -> None:
    adapter, listener = make(directory, capacity=4 * LENGTH), Listener()
    adapter.register_listener(listener)
    salted = key(0, cache_salt="of a user")
    store(adapter, [salted, *map(key, range(1, 4))], [Memory(each) for each in range(4)])
    assert lookup(adapter, [salted, key(1)]) == [True, True]
    store(adapter, [key(5), key(6)], [Memory(5), Memory(6)])
    assert listener.there == {each: LENGTH for each in (salted, key(1), key(5), key(6))}
    assert not store(adapter, [key(each) for each in (7, 8, 9)], [Memory(each) for each in (7, 8, 9)]).is_successful()
    adapter.delete([salted])
    assert salted in listener.there
    adapter.submit_unlock([salted])
    adapter.delete([salted, key(77)])
    assert salted not in listener.there and adapter.get_usage().total_bytes_used == sum(listener.there.values())
    load(adapter, [key(1), salted], [Memory(0), Memory(0)])
    assert listener.accessed == [key(1)]
    adapter.close()


def test_listeners_receive_blocks_of_earlier_process(directory: str) -> None:
    adapter = make(directory)
    for number in range(3):
        store(adapter, [key(number)], [Memory(number)])
    adapter.close()
    adapter, listener = make(directory), Listener()
    adapter.register_listener(listener)
    # LMCache treats the first key as the most recently used one.
    assert list(listener.there) == [key(2), key(1), key(0)]
    assert adapter.get_usage().total_bytes_used == 3 * LENGTH
    adapter.close()
    for capacity in (2, 1):
        adapter = make(directory, capacity=capacity * LENGTH)
        assert adapter.get_usage().total_bytes_used == adapter.cache.nbytes == capacity * LENGTH
        adapter.close()


def test_failing_listener_delays_no_result(adapter: RemanentL2Adapter) -> None:
    class Failing(Listener):
        def on_l2_keys_accessed(self, keys: list[Any]) -> None:
            raise ValueError("a listener's own mistake")

    adapter.register_listener(Failing())
    store(adapter, [key(1)], [Memory(1)])
    assert load(adapter, [key(1)], [Memory(0)]) == [True]
    adapter.close()
    adapter.delete([key(1)])


def test_keys_are_listed_by_page(adapter: RemanentL2Adapter) -> None:
    for number in range(5):
        store(adapter, [key(number), key(number, model_name="b")], [Memory(number), Memory(number)])
    seen, cursor = [], None
    while True:
        page = adapter.list_l2_keys("org/a model", page_size=2, cursor=cursor)
        seen += page.entries
        cursor = page.next_page_token
        if cursor is None:
            break
    assert [entry.key for entry in seen] == [key(number).to_encoded_object_key() for number in range(5)]
    assert {entry.size_bytes for entry in seen} == {LENGTH}
    assert len(adapter.list_l2_keys().entries) == 10
    for wrong in ({"page_size": 0}, {"cursor": "no key"}):
        with pytest.raises(ValueError):
            adapter.list_l2_keys(**wrong)  # type: ignore[arg-type]


def test_blocks_of_other_identity_are_rejected(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(directory).close()
    with pytest.raises(remanent.MismatchError, match='revision is "1" in the cache and "2" here'):
        make(directory, revision="2")
    with pytest.raises(remanent.MismatchError, match="chunk is 256 in the cache and 512 here"):
        make(directory, chunk_size=512)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(remanent.InvalidError, match="the seed of builtin may differ in each process"):
        make(directory, hash_algorithm="builtin")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(remanent.MismatchError, match='hash is "blake3" in the cache and "builtin" here, seed is ""'):
        make(directory, hash_algorithm="builtin")


@pytest.mark.parametrize(("params", "what"), [
    ({"capcity": 1}, r"missing \['capacity', 'chunk_size', 'path', 'revision'\], unknown \['capcity'\]"),
    ({"path": "x", **PARAMS, "capacity": "1 TB"}, "capacity must be of type int, not '1 TB'"),
    ({"path": "x", **PARAMS, "durable": 1}, "durable must be of type bool, not 1"),
])
def test_invalid_parameters_are_rejected_by_name(params: Any, what: str) -> None:
    with pytest.raises(remanent.InvalidError, match=what):
        RemanentL2Adapter(params)


def test_task_that_cannot_begin_fails_and_signals(adapter: RemanentL2Adapter) -> None:
    broken = SimpleNamespace(byte_array=None, metadata=Memory(1).metadata)
    task = adapter.submit_store_task([key(1)], [broken])  # type: ignore[list-item]
    wait(adapter.get_store_event_fd())
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    assert load(adapter, [key(1)], [broken]) == [False]  # type: ignore[list-item]


def test_documented_configuration_creates_adapter(directory: str) -> None:
    text = importlib.import_module("remanent.integrations.lmcache").__doc__ or ""
    shown = re.search(r"l2-adapter '(.*?)'\n\n", text, re.DOTALL)
    assert shown is not None
    config = json.loads(shown.group(1))
    config["adapter_params"]["path"] = directory
    if HOST == "a stand-in":
        made = getattr(importlib.import_module(config["module_path"]), config["class_name"])(config["adapter_params"])
    else:
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        made = create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict(config), None)
    assert type(made) is RemanentL2Adapter
    made.close()


class Lent(Memory):
    """A memory object of LMCache: `byte_array` is only an address, and the memory is reused after the object is freed.
    """

    def __init__(self, number: int, freed: list[bytes]) -> None:
        super().__init__(number)
        self._freed = freed
        # The list of the test keeps the memory, as an allocator keeps its pool.
        self._pool = (ctypes.c_ubyte * LENGTH).from_buffer(self.bytes)

    @property
    def byte_array(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * LENGTH).from_address(ctypes.addressof(self._pool))).cast("B")

    def __del__(self) -> None:
        self._freed.append(bytes(self.bytes))
        ctypes.memset(self._pool, 0xEE, LENGTH)
        _pools.append(self._pool)


# The memory of freed objects, so that a late access finds other bytes instead of unmapped memory.
_pools: list[Any] = []


def hold(adapter: RemanentL2Adapter) -> threading.Event:
    """Blocks the threads of the cache until the returned event is set."""
    may_go_on = threading.Event()
    cache = adapter.cache
    cache._writer.submit(may_go_on.wait, 60)
    for _ in range(cache._readers._max_workers):
        cache._readers.submit(may_go_on.wait, 60)
    return may_go_on


def test_store_task_keeps_objects_until_it_ends(adapter: RemanentL2Adapter) -> None:
    freed: list[bytes] = []
    may_go_on = hold(adapter)
    objects = [Lent(number, freed) for number in range(3)]
    task = adapter.submit_store_task([key(number) for number in range(3)], objects)  # type: ignore[arg-type]
    objects.clear()
    assert freed == []
    may_go_on.set()
    wait(adapter.get_store_event_fd())
    assert adapter.pop_completed_store_tasks()[task].is_successful()
    assert sorted(freed) == [bytes(Memory(number).bytes) for number in range(3)], "freed once the task ended"
    outs = [Memory(9) for _ in range(3)]
    assert load(adapter, [key(number) for number in range(3)], outs) == [True] * 3
    assert [out.bytes for out in outs] == [Memory(number).bytes for number in range(3)]


def test_load_task_keeps_objects_until_it_ends(adapter: RemanentL2Adapter) -> None:
    store(adapter, [key(1), key(2)], [Memory(1), Memory(2)])
    freed: list[bytes] = []
    may_go_on = hold(adapter)
    task = adapter.submit_load_task([key(1), key(3), key(2)],
                                    [Lent(0, freed) for _ in range(3)])  # type: ignore[list-item]
    assert freed == []
    may_go_on.set()
    wait(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task)
    assert loaded is not None and bits(loaded, 3) == [True, False, True]
    assert sorted(freed) == [bytes(Memory(number).bytes) for number in range(3)]


@pytest.mark.parametrize("end", ["failed", "closed"])
def test_task_frees_objects_however_it_ends(directory: str, end: str) -> None:
    adapter = make(directory)
    store(adapter, [key(0)], [Memory(0)])
    freed: list[bytes] = []
    may_go_on = hold(adapter)
    cache_store = adapter.cache._store
    adapter.submit_store_task([key(1)], [Lent(1, freed)])  # type: ignore[list-item]
    adapter.submit_load_task([key(0)], [Lent(7, freed)])  # type: ignore[list-item]
    if end == "failed":
        adapter.cache._store = None  # type: ignore[assignment]
        may_go_on.set()
        adapter.cache.drain()
        adapter.cache._store = cache_store
    else:
        may_go_on.set()
    adapter.close()
    assert len(freed) == 2


def test_interpreter_exits_with_pending_tasks(directory: str) -> None:
    done = run_script("""
        import sys
        sys.path.insert(0, sys.argv[2])
        import test_lmcache as t
        adapter, freed = t.make(sys.argv[1]), []
        for number in range(20):
            adapter.submit_store_task([t.key(number)], [t.Lent(number, freed)])
    """, directory, os.path.dirname(__file__))
    assert done.returncode == 0, done.stderr
    adapter = make(directory)
    outs = [Memory(99) for _ in range(20)]
    assert load(adapter, [key(number) for number in range(20)], outs) == [True] * 20
    assert [out.bytes for out in outs] == [Memory(number).bytes for number in range(20)]
    adapter.close()


def test_touched_blocks_are_evicted_last(directory: str) -> None:
    adapter, listener = make(directory, capacity=3 * LENGTH), Listener()
    adapter.register_listener(listener)
    for number in range(3):
        store(adapter, [key(number)], [Memory(number)])
    adapter.submit_touch([key(0)])
    assert listener.accessed == [key(0)]
    store(adapter, [key(3)], [Memory(3)])
    assert lookup(adapter, [key(0), key(1)]) == [True, False]
    adapter.close()


def test_memory_tags_are_local_storage(adapter: RemanentL2Adapter) -> None:
    try:
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags
    except ImportError:
        pytest.skip("this release of LMCache has no memory tags")
    assert adapter.get_memory_tags() == MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL)
