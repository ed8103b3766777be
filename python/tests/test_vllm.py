"""The tier for vLLM: blocks are found after a restart, verified, and refused where their meaning would differ."""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_ins

import remanent

HOST = stand_ins.vllm()

from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

from remanent.integrations.vllm import RemanentTier  # noqa: E402

ROWS, LENGTH = 8, 64 << 10
REQUEST = ReqContext(req_id="a request")


def setup_module() -> None:
    print(f"the host is {HOST}")


def spec(**changes: Any) -> Any:
    parallel = {"tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "data_parallel_index": 0,
                "data_parallel_size": 1, "is_parallelism_agnostic": False}
    config = {"model": SimpleNamespace(name="a model", dtype="bfloat16"), "enable_kv_cache_events": True,
              "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
              "groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layer.0", "layer.1")),),
              "kv_cache_layout": "NHD", "canonical_layout": False, "replicated_layout": False}
    for name, value in changes.items():
        (parallel if name in parallel else config)[name] = value
    return SimpleNamespace(config=SimpleNamespace(**config, parallel=SimpleNamespace(**parallel)),
                           kv_events_config=SimpleNamespace(enable_kv_cache_events=config["enable_kv_cache_events"]))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + (0).to_bytes(4, "big")


class Engine:
    """Host memory with rows of blocks, and a tier that stores them."""

    def __init__(self, directory: str, of: Any = None, **config: Any) -> None:
        self.rows = np.zeros((ROWS, LENGTH // 8), dtype=np.int64)
        self.tier = RemanentTier(of or spec(), memoryview(self.rows), "remanent",
                                 **{"path": directory, "capacity": 64 * LENGTH, "revision": "1", **config})
        self.jobs = 0

    def run(self, begin: Any, keys: list[int], rows: list[int]) -> Any:
        self.jobs += 1
        begin(TransferJob(job_id=self.jobs, keys=[key(each) for each in keys], chunk_ids=np.array(rows, dtype=np.int64),
                          is_promotion=begin == self.tier.submit_load, req_context=REQUEST))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def store(self, *numbers: int) -> Any:
        rows = list(range(len(numbers)))
        for row, number in zip(rows, numbers, strict=True):
            self.rows[row] = number
        return self.run(self.tier.submit_store, list(numbers), rows)

    def load(self, *numbers: int) -> Any:
        self.rows[:] = -1
        return self.run(self.tier.submit_load, list(numbers), [ROWS - 1 - at for at in range(len(numbers))])

    def has(self, *numbers: int) -> list[bool]:
        return [self.tier.lookup(key(each), REQUEST) is LookupResult.HIT for each in numbers]


@pytest.fixture
def engine(directory: str) -> Iterator[Engine]:
    engine = Engine(directory)
    yield engine
    engine.tier.shutdown()


def test_blocks_are_found_after_a_restart_with_their_bytes(directory: str) -> None:
    engine = Engine(directory)
    assert engine.has(1, 2) == [False, False]
    stored = engine.store(1, 2, 3)
    assert stored.success and stored.transfer_bytes == 3 * LENGTH and stored.transfer_time >= 0
    engine.tier.touch([key(1)], REQUEST)
    engine.tier.shutdown()

    engine = Engine(directory)
    engine.tier.on_new_request(REQUEST)
    assert engine.has(1, 2, 3, 4) == [True, True, True, False]
    assert engine.load(3, 1).success
    assert (engine.rows[7] == 3).all() and (engine.rows[6] == 1).all() and (engine.rows[:6] == -1).all()
    assert list(engine.tier.get_finished_jobs()) == []
    engine.tier.shutdown()


def test_partial_load_reports_loaded_blocks(engine: Engine) -> None:
    engine.store(1, 2)
    result = engine.load(1, 99, 2)
    assert not result.success and list(result.successful_keys) == [key(1), key(2)]
    assert (engine.rows[7] == 1).all() and (engine.rows[5] == 2).all()
    result = engine.load(98)
    assert not result.success and result.successful_keys is None


def test_rows_outside_memory_fail_job(engine: Engine) -> None:
    for rows in ([ROWS], [-1]):
        assert not engine.run(engine.tier.submit_store, [5], rows).success
    assert engine.has(5) == [False]
    assert engine.store(5).success


def test_job_that_cannot_begin_holds_no_memory(directory: str) -> None:
    memory = mmap.mmap(-1, ROWS * LENGTH)
    view = memoryview(memory).cast("B", (ROWS, LENGTH))
    tier = RemanentTier(spec(), view, "remanent", path=directory, capacity=64 * LENGTH, revision="1")
    gc.disable()
    try:
        for rows in ([0, ROWS], [0, 1, 2], [0, 1]):
            tier.submit_store(TransferJob(job_id=len(rows), keys=[key(1), key(2)], chunk_ids=np.array(rows),
                                          is_promotion=False, req_context=REQUEST))
            tier.drain_jobs()
        assert [result.success for result in tier.get_finished_jobs()] == [False, False, True]
        tier.shutdown()
        view.release()
        memory.close()  # raises an error if a view of the memory still exists
    finally:
        gc.enable()


def test_lookup_of_arriving_block_returns_retry(engine: Engine) -> None:
    may_go_on = threading.Event()
    held = engine.tier.cache._writer.submit(may_go_on.wait, 60)
    engine.tier.submit_store(TransferJob(job_id=9, keys=[key(7)], chunk_ids=np.array([0]), is_promotion=False,
                                         req_context=REQUEST))
    assert engine.tier.lookup(key(7), REQUEST) is LookupResult.RETRY
    assert list(engine.tier.get_finished_jobs()) == []
    may_go_on.set()
    assert held.result(60)
    engine.tier.drain_jobs()
    assert engine.tier.lookup(key(7), REQUEST) is LookupResult.HIT
    assert [result.job_id for result in engine.tier.get_finished_jobs()] == [9]


def test_events_report_stored_and_deleted_blocks(directory: str) -> None:
    engine = Engine(directory, capacity=4 * LENGTH, enable_kv_events=True, locality="LOCAL")
    for number in range(6):
        engine.store(number)
    events = list(engine.tier.take_events())
    stored = [each for event in events if not event.removed for each in event.keys]
    removed = [each for event in events if event.removed for each in event.keys]
    assert stored == [key(each) for each in range(6)] and removed == [key(0), key(1)]
    assert {event.locality.value for event in events} == {"LOCAL"}
    assert list(engine.tier.take_events()) == []
    engine.tier.shutdown()
    quiet = Engine(directory, spec(enable_kv_cache_events=False), enable_kv_events=True)
    quiet.store(9)
    assert list(quiet.tier.take_events()) == []
    quiet.tier.shutdown()


@pytest.mark.parametrize(("changes", "config", "what"), [
    ({}, {"revision": "2"}, 'revision is "1" in the cache and "2" here'),
    ({"model": SimpleNamespace(name="a model", dtype="float16")}, {}, 'dtype is "bfloat16" in the cache and "float16" here'),
    ({"model": SimpleNamespace(name="another", dtype="bfloat16")}, {}, 'model is "a model" in the cache and "another" here'),
    ({"tp_size": 4}, {}, r"ranks is \[2, 1, 1, 1\] in the cache and \[4, 1, 1, 1\] here"),
    ({"kv_cache_layout": "HND"}, {}, 'layout is "NHD" in the cache and "HND" here'),
    ({"groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",)),)}, {}, "groups is"),
    ({}, {"hash_algorithm": "sha256_cbor"}, 'hash is "sha256" in the cache and "sha256_cbor" here'),
])
def test_blocks_of_other_identity_are_rejected(changes: Any, config: Any, what: str, directory: str) -> None:
    Engine(directory).tier.shutdown()
    with pytest.raises(remanent.MismatchError, match=what):
        Engine(directory, spec(**changes), **config)


def test_rank_count_is_ignored_for_replicated_blocks(directory: str) -> None:
    Engine(directory, spec(is_parallelism_agnostic=True)).tier.shutdown()
    Engine(directory, spec(is_parallelism_agnostic=True, tp_size=4)).tier.shutdown()


def test_data_parallel_engines_have_own_directories(directory: str) -> None:
    engines = [Engine(directory, spec(data_parallel_size=2, data_parallel_index=index)) for index in range(2)]
    engines[0].store(1)
    assert [engine.has(1) for engine in engines] == [[True], [False]]
    for engine in engines:
        engine.tier.shutdown()


def test_random_hash_seed_is_rejected(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(remanent.InvalidError, match="chooses a random seed of xxhash") as refused:
        Engine(directory, hash_algorithm="xxhash")
    assert "PYTHONHASHSEED" in refused.value.remedy and not os.path.exists(directory)
    with pytest.raises(remanent.InvalidError, match="vLLM has no algorithm 'sha-256'"):
        Engine(directory, hash_algorithm="sha-256")
    with pytest.raises(remanent.InvalidError, match="durable must be true or false, not 'no'"):
        Engine(directory, durable="no")
    Engine(directory).tier.shutdown()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with pytest.raises(remanent.MismatchError, match='seed is "vllm-none-hash" in the cache and "7" here'):
        Engine(directory)
    Engine(directory + "-xxhash", hash_algorithm="xxhash").tier.shutdown()


def test_other_hash_is_rejected_at_first_request(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "get_none_hash_seed", lambda: "vllm-none-hash")
    engine = Engine(directory)
    first = get_hash_fn_by_name("sha256_cbor" if HOST == "a stand-in" else "sha256")("another seed")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", first, raising=False)
    with pytest.raises(remanent.InvalidError, match="named by sha256 with the seed 'vllm-none-hash', but vLLM uses another hash"):
        engine.tier.on_new_request(REQUEST)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", get_hash_fn_by_name("sha256")("vllm-none-hash"))
    engine.tier.on_new_request(REQUEST)
    engine.tier.on_new_request(REQUEST)
    engine.tier.shutdown()


def documented() -> dict[str, Any]:
    """Returns the configuration in the module's docstring."""
    text = importlib.import_module("remanent.integrations.vllm").__doc__ or ""
    shown = re.search(r"kv-transfer-config '(.*?)'\n\n", text, re.DOTALL)
    assert shown is not None
    config: dict[str, Any] = json.loads(shown.group(1))["kv_connector_extra_config"]
    return config


def test_documented_configuration_creates_tier(directory: str) -> None:
    config = documented()
    (tier,) = config["secondary_tiers"]
    tier["path"] = directory
    rows = memoryview(np.zeros((ROWS, LENGTH), dtype=np.uint8))
    if HOST == "a stand-in":
        kind = getattr(importlib.import_module(tier.pop("module_path")), tier.pop("type"))
        made = kind(spec(), rows, "remanent", **tier)
    else:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        made = SecondaryTierFactory.create_secondary_tier(tier, rows, spec())
    assert type(made) is RemanentTier and Path(directory, "STORE").exists()
    made.shutdown()


SERVER = """
    import sys
    from test_vllm import *

    manager, memory = serve(sys.argv[1])
    for number in range(0, 1 << 20, 3):
        blocks = range(number, number + 3)
        request = ReqContext(req_id=str(number))
        manager.on_new_request(request)
        output = manager.prepare_store([key(each) for each in blocks], request)
        for row, each in zip(output.store_spec.chunk_ids, blocks, strict=True):
            memory[row] = each % 251
        manager.complete_store([key(each) for each in blocks], request)
        manager.on_request_finished(request)
        while manager.has_pending_work():
            step(manager)
        print(number + 2, flush=True)
"""


def serve(directory: str) -> tuple[Any, Any]:
    """Returns vLLM's own manager of tiers, with host memory for 16 blocks and this tier, and that memory."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    tier = {"type": "RemanentTier", "module_path": "remanent.integrations.vllm", "path": directory,
            "capacity": 64 * LENGTH, "revision": "1"}
    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
        data_parallel_rank_local=None, is_parallelism_agnostic=False)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),), worker_kv_bytes_per_block=LENGTH,
        enable_kv_cache_events=False, engine_id=f"engine-{os.getpid()}",
        extra_config={"cpu_bytes_to_use": 16 * LENGTH, "secondary_tiers": [tier]},
        model=OffloadingModelConfig(name="a model", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1), parallel=parallel)
    manager = TieringOffloadingSpec(config).get_manager()
    return manager, np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)


def step(manager: Any) -> None:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
    time.sleep(0.001)


@pytest.mark.skipif(HOST == "a stand-in", reason="vLLM is not installed")
@pytest.mark.parametrize("last", [50, 200])
def test_blocks_reported_to_vllm_survive_kill(last: int, directory: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER), directory], stdout=subprocess.PIPE,
                              text=True, env=environment)
    assert server.stdout is not None
    reported = -1
    for line in server.stdout:
        if line.strip().isdigit():
            reported = int(line)
            if reported >= last:
                server.send_signal(signal.SIGKILL)
    server.wait()
    assert reported >= last
    manager, memory = serve(directory)
    # Blocks that were being stored at the kill may exist, and may have evicted as many.
    for number in range(max(0, reported - 60), reported + 1):
        request = ReqContext(req_id=f"again {number}")
        manager.on_new_request(request)
        while (found := manager.lookup(key(number), request)) not in (LookupResult.HIT, LookupResult.MISS):
            step(manager)
        assert found is LookupResult.HIT, number
        (row,) = manager.prepare_load([key(number)], request).chunk_ids
        assert (memory[row] == number % 251).all(), number
        manager.complete_load([key(number)], request)
        manager.on_request_finished(request)
    del memory
    manager.shutdown()
