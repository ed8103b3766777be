"""An on-disk tier for vLLM's KV cache whose blocks survive restarts.

vLLM offloads blocks of its cache from the GPU to host memory, and from there to further tiers. This tier is based on
`remanent.kv.BlockCache`. A block that was reported as stored can be loaded after the process was killed. Each block is
verified by its checksum before vLLM reads it, and blocks of different models are never confused. Lookups never wait.
vLLM 0.33.0 or later is required, and loads the tier if its configuration names it:

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000,
            "secondary_tiers": [{
                "type": "RemanentTier", "module_path": "remanent.integrations.vllm",
                "path": "/mnt/nvme/kv", "capacity": 1000000000000, "revision": "main of 2026-11-26"}]}}'

Blocks are named by hashes that vLLM computes from the tokens. With `--prefix-caching-hash-algo xxhash` or
`xxhash_cbor`, vLLM chooses a random seed in each process unless PYTHONHASHSEED is set. A later process could then find
no block, so this configuration is rejected. Set `"hash_algorithm"` to the algorithm if it is not vLLM's default.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from remanent._store.errors import InvalidError
from remanent.integrations import _hosts
from remanent.kv import BlockCache

with _hosts.importing(_hosts.VLLM):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["RemanentTier"]

_logger = logging.getLogger("remanent.vllm")

# The algorithms whose seed vLLM draws at random in each process.
_SEEDED_BY_CHANCE = ("xxhash", "xxhash_cbor")


def __dir__() -> list[str]:
    return __all__


class RemanentTier(SecondaryTierManager):
    """A secondary tier for vLLM's `TieringOffloadingSpec` that stores blocks in a directory.

    :param path: the directory, one per engine. Data-parallel engines create their own directories in it.
    :param capacity: the bytes of blocks to keep. The directory uses up to twice as much disk space.
    :param revision: identifies the weights to which the blocks belong: the commit of the model, or a name that you
        change with the weights.
    :param hash_algorithm: the value of vLLM's `--prefix-caching-hash-algo`.
    :param durable: whether a store completes only after the blocks survive a power cut and not only the death of the
        process.
    :param readers: the number of threads that read from the disk.
    :param enable_kv_events: whether to report stored and deleted blocks as events, as vLLM's own tiers do.
    :raises MismatchError: the blocks in the directory have another model, revision, type, layout, number of ranks, hash
        algorithm or seed. The message states the differences.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str, *,
                 path: str, capacity: int, revision: str, hash_algorithm: str = "sha256", durable: bool = False,
                 readers: int = 4, enable_kv_events: bool = False, locality: str | None = None,
                 backpressure_detector: BackpressureDetector | None = None) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        if not isinstance(durable, bool):
            raise InvalidError(f"durable must be true or false, not {durable!r}")
        self._seed = _seed(hash_algorithm)
        self._is_seed_proven = False
        self._hash_algorithm = hash_algorithm
        self._memory = primary_kv_view.cast("B")
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        # The number of jobs whose result is not reported yet.
        self._open_jobs = 0
        self._is_told = threading.Condition()
        self._events: queue.SimpleQueue[OffloadingEvent] | None = None
        if enable_kv_events:
            if offloading_spec.kv_events_config.enable_kv_cache_events:
                self._events = queue.SimpleQueue()
            else:
                _logger.warning("tier %s reports no events, because they are disabled in the engine", tier_type)
        parallel = offloading_spec.config.parallel
        if parallel.data_parallel_size > 1:
            path = os.path.join(path, f"engine-{parallel.data_parallel_index}")
            os.makedirs(path, exist_ok=True)
        identity = _identity(offloading_spec, self.block_size_bytes, revision, hash_algorithm, self._seed)
        self._cache = BlockCache(path, identity=identity, capacity=capacity, readers=readers,
                                 ack="durable" if durable else "logged",
                                 on_stored=self._tell_stored, on_deleted=self._tell_deleted)
        _logger.info("tier %s has %d blocks, %d bytes, in %s", tier_type, len(self._cache), self._cache.nbytes, path)

    @property
    def cache(self) -> BlockCache:
        """The `BlockCache` that contains the blocks."""
        return self._cache

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # `is_arriving` is checked first, so that a block that arrives in between is found.
        is_arriving = self._cache.is_arriving(key)
        if key in self._cache:
            return LookupResult.HIT
        return LookupResult.RETRY if is_arriving else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, self._cache.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, self._cache.load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return _taken(self._finished)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return () if self._events is None else _taken(self._events)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._cache.touch(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._prove_seed()
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        with self._is_told:
            self._is_told.wait_for(lambda: self._open_jobs == 0)

    def shutdown(self) -> None:
        """Finishes the jobs in progress and closes the store. vLLM unmaps the memory afterwards."""
        self._cache.close()
        self._memory.release()

    def _begin(self, job: TransferJob, begin: Callable[..., Future[Any]]) -> None:
        """Starts to store or load blocks. `get_finished_jobs` reports the result, even if the job cannot begin."""
        began = time.monotonic()
        keys = list(job.keys)

        def finish(future: Future[Any]) -> None:
            self._finished.put(self._result(job.job_id, keys, future, time.monotonic() - began))
            with self._is_told:
                self._open_jobs -= 1
                self._is_told.notify_all()

        with self._is_told:
            self._open_jobs += 1
        try:
            future = begin(keys, [self._row(int(number)) for number in job.chunk_ids])
        except Exception as error:
            future = Future()
            # The traceback is dropped because its frames hold rows, and vLLM could not unmap its memory.
            future.set_exception(error.with_traceback(None))
        future.add_done_callback(finish)

    def _row(self, number: int) -> memoryview:
        """Returns the memory of block `number` in the previous tier."""
        length = self.block_size_bytes
        row = self._memory[number * length : (number + 1) * length]
        if number < 0 or row.nbytes != length:
            raise InvalidError(f"block {number} of {length} bytes is outside the memory of the previous tier")
        return row

    def _result(self, job_id: int, keys: list[OffloadKey], future: Future[Any], seconds: float) -> JobResult:
        error = future.exception()
        if error is not None:
            _logger.warning("tier %s: job %d failed: %r", self.tier_type, job_id, error)
            return JobResult(job_id=job_id, success=False, transfer_time=seconds)
        result = future.result()
        if isinstance(result, int):
            return JobResult(job_id=job_id, success=True, transfer_time=seconds, transfer_bytes=result)
        loaded = tuple(key for key, is_loaded in zip(keys, result, strict=True) if is_loaded)
        return JobResult(job_id=job_id, success=len(loaded) == len(keys), transfer_time=seconds,
                         successful_keys=None if len(loaded) in (0, len(keys)) else loaded,
                         transfer_bytes=len(loaded) * self.block_size_bytes)

    def _tell_stored(self, keys: list[bytes], _lengths: list[int]) -> None:
        self._tell(keys, removed=False)

    def _tell_deleted(self, keys: list[bytes], _lengths: list[int]) -> None:
        self._tell(keys, removed=True)

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if self._events is not None:
            reported_keys = [OffloadKey(key) for key in keys]
            self._events.put(OffloadingEvent(keys=reported_keys, medium=self.medium, removed=removed, locality=self.locality))

    def _prove_seed(self) -> None:
        """Checks that the engine's first hash has the algorithm and seed of the identity.

        vLLM computes that hash after it creates its tiers, so the check happens at the first request.

        :raises InvalidError: the algorithm or the seed differs.
        """
        if self._is_seed_proven:
            return
        seed = kv_cache_utils.get_none_hash_seed()
        first = getattr(kv_cache_utils, "NONE_HASH", None)
        if first is not None and (seed != self._seed or first != get_hash_fn_by_name(self._hash_algorithm)(seed)):
            raise InvalidError(f"the blocks of this tier are named by {self._hash_algorithm} with the seed {self._seed!r}, "
                               "but vLLM uses another hash", remedy="set `hash_algorithm` to the value of "
                               "--prefix-caching-hash-algo", path=self._cache.path)
        self._is_seed_proven = True


def _taken(things: queue.SimpleQueue[Any]) -> list[Any]:
    taken = []
    while True:
        try:
            taken.append(things.get_nowait())
        except queue.Empty:
            return taken


def _seed(algorithm: str) -> str:
    """Returns the seed that vLLM will use for the hashes in block keys."""
    try:
        get_hash_fn_by_name(algorithm)
    except ValueError as error:
        raise InvalidError(f"hash_algorithm: vLLM has no algorithm {algorithm!r}", remedy="use the value of "
                           "--prefix-caching-hash-algo") from error
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm in _SEEDED_BY_CHANCE:
        raise InvalidError(f"vLLM chooses a random seed of {algorithm} in each process, so later processes would find no "
                           "blocks",
                           remedy="set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256")
    return str(kv_cache_utils.DEFAULT_NONE_HASH_SEED)


def _identity(spec: OffloadingSpec, length: int, revision: str, algorithm: str, seed: str) -> dict[str, Any]:
    """Returns all values on which the bytes of a block with a given key depend."""
    config = spec.config
    parallel = config.parallel
    return {
        "engine": "vllm",
        "model": config.model.name,
        "revision": revision,
        "dtype": str(config.model.dtype),
        "block bytes": length,
        "tokens per hash": config.cache.tokens_per_hash,
        "blocks per chunk": config.cache.blocks_per_chunk,
        "groups": [{"tokens": group.tokens_per_block, "layers": list(group.layer_names)} for group in config.groups],
        "layout": config.kv_cache_layout,
        "canonical": canonical_format_id(str(config.kv_cache_layout)) if config.canonical_layout else None,
        "replicated": config.replicated_layout,
        "ranks": None if parallel.is_parallelism_agnostic or config.replicated_layout else
                 [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "hash": algorithm,
        "seed": seed,
    }
