"""Stand-ins for the hosts of adapters, where these are not installed: the names that the adapters use, and no more.

The tests of an adapter run against its host if it can be imported, and say which it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import importlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar


def _module(name: str, **names: Any) -> None:
    """Makes a module, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            sys.modules[path] = types.ModuleType(path)
            sys.modules[path].__path__ = []
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
    vars(sys.modules[name]).update(names)


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def vllm() -> str:
    """vLLM 0.33, or what stands in for it."""
    if _is_installed("vllm.v1.kv_offload.tiering.base"):
        return "vLLM"

    class Medium(enum.Enum):
        CPU = "CPU"
        STORAGE = "STORAGE"

    class Locality(enum.Enum):
        LOCAL = "LOCAL"
        REMOTE = "REMOTE"

    class LookupResult(enum.Enum):
        MISS, HIT, HIT_PENDING, RETRY = range(4)

    @dataclasses.dataclass
    class OffloadingEvent:
        keys: list[bytes]
        medium: Medium
        removed: bool
        locality: Locality | None = None

    @dataclasses.dataclass
    class ReqContext:
        req_id: str

    class RequestOffloadingContext:
        pass

    @dataclasses.dataclass
    class TransferJob:
        job_id: int
        keys: list[bytes]
        chunk_ids: Any
        is_promotion: bool
        req_context: ReqContext

    @dataclasses.dataclass
    class JobResult:
        job_id: int
        success: bool
        successful_keys: Any = None
        transfer_time: float | None = None
        transfer_bytes: int | None = None

    class SecondaryTierManager:
        medium: ClassVar[Any] = None

        def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                     backpressure_detector: Any = None) -> None:
            assert primary_kv_view.strides is not None
            self.block_size_bytes = primary_kv_view.strides[0]
            self.tier_type = tier_type

    def hash_of(name: str) -> Any:
        if name not in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
            raise ValueError(name)
        return lambda value: hashlib.sha256((name + repr(value)).encode()).digest()

    base = "vllm.v1.kv_offload"
    _module(f"{base}.base", Medium=Medium, Locality=Locality, LookupResult=LookupResult, OffloadKey=bytes,
            OffloadingEvent=OffloadingEvent, ReqContext=ReqContext, RequestOffloadingContext=RequestOffloadingContext)
    _module(f"{base}.tiering.base", JobResult=JobResult, SecondaryTierManager=SecondaryTierManager,
            TransferJob=TransferJob)
    _module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping",
            canonical_format_id=lambda layout: f"v1-{layout}")
    _module("vllm.utils.hashing", get_hash_fn_by_name=hash_of)
    _module("vllm.v1.core.kv_cache_utils", DEFAULT_NONE_HASH_SEED="vllm-none-hash",
            get_none_hash_seed=lambda: "vllm-none-hash")
    return "a stand-in"


def vllm_weights() -> str:
    """What of vLLM 0.33 takes over weights, or what stands in for it."""
    if _is_installed("vllm.distributed.weight_transfer.base"):
        return "vLLM"

    class Info:
        pass

    class WeightTransferEngine:
        def __class_getitem__(cls, _: Any) -> Any:
            return cls

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            self.model, self.model_config, self.device = model, vllm_config.model_config, device

    class Factory:
        _registry: ClassVar[dict[str, Any]] = {}

        @classmethod
        def register_engine(cls, name: str, module: str, kind: str) -> None:
            cls._registry[name] = lambda: getattr(importlib.import_module(module), kind)

    class Trainers(Factory):
        _registry: ClassVar[dict[str, Any]] = {}

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            return cls._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)

    @dataclasses.dataclass
    class TrainerInitInfo:
        rank: int = dataclasses.field(kw_only=True)

        @property
        def is_sender(self) -> bool:
            return self.rank == 0

    class TrainerWeightTransferEngine:
        def __class_getitem__(cls, _: Any) -> Any:
            return cls

        def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
            self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    class ModuleSource:
        def __init__(self, module: Any) -> None:
            self.module = module
            self.metadata = list(dict(module.named_parameters()))

        def owned_names(self, rank: int) -> list[str]:
            return list(self.metadata)

        def implements_iter_full(self) -> bool:
            return True

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            for name, tensor in self.module.named_parameters():
                yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def groups_of(names: list[str]) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(next((part for part in name.split(".") if part.isdigit()), ""), []).append(name)
        return list(groups.values())

    def nothing(*_: Any) -> None:
        pass

    _module("vllm.distributed.weight_transfer", WeightTransferEngineFactory=Factory, ModuleSource=ModuleSource,
            WeightTransferTrainerFactory=Trainers)
    _module("vllm.distributed.weight_transfer.base", WeightTransferEngine=WeightTransferEngine,
            WeightTransferInitInfo=Info, WeightTransferUpdateInfo=Info, layerwise_groups=groups_of,
            TrainerInitInfo=TrainerInitInfo, TrainerWeightTransferEngine=TrainerWeightTransferEngine,
            VLLMWeightSyncClient=Any, WeightSource=Any)
    _module("vllm.model_executor.model_loader.reload", initialize_layerwise_reload=nothing,
            finalize_layerwise_reload=nothing)
    _module("vllm.model_executor.model_loader.mtp_validation",
            disable_mtp_completeness_check=contextlib.nullcontext)
    return "a stand-in"


def lmcache() -> str:
    """LMCache 0.5, or what stands in for it."""
    if _is_installed("lmcache.v1.distributed.l2_adapters.base"):
        return "LMCache"

    class Bitmap:
        def __init__(self, length: int) -> None:
            self.bits = [False] * length

        def set(self, index: int) -> None:
            self.bits[index] = True

        def test(self, index: int) -> bool:
            return self.bits[index]

    @dataclasses.dataclass(frozen=True)
    class ObjectKey:
        chunk_hash: bytes
        model_name: str
        kv_rank: int
        object_group_id: int = 0
        cache_salt: str = ""

        def to_encoded_object_key(self) -> Any:
            return self

    @dataclasses.dataclass(frozen=True)
    class KeyEntry:
        key: Any
        size_bytes: int

    @dataclasses.dataclass(frozen=True)
    class KeyListPage:
        entries: tuple[KeyEntry, ...]
        next_page_token: str | None

    class L2StoreResult(int):
        def __new__(cls, success: bool, transferred: int) -> Any:
            return super().__new__(cls, transferred if success else -1)

        def is_successful(self) -> bool:
            return self >= 0

        def bytes_transferred(self) -> int:
            return max(self, 0)

    class L2AdapterInterface:
        def __init__(self, max_capacity_bytes: int = 0) -> None:
            self.listeners: list[Any] = []
            self.nbytes = 0

        def register_listener(self, listener: Any) -> None:
            self.listeners.append(listener)

        def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            self.nbytes += sum(sizes)
            for listener in self.listeners:
                listener.on_l2_keys_stored(keys, sizes)

        def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
            for listener in self.listeners:
                listener.on_l2_keys_accessed(keys)

        def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            self.nbytes -= sum(sizes)
            for listener in self.listeners:
                listener.on_l2_keys_deleted(keys)

        def get_usage(self) -> Any:
            return types.SimpleNamespace(total_bytes_used=self.nbytes)

    class Notifier:
        def __init__(self) -> None:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        def fileno(self) -> int:
            return self.fd

        def notify(self) -> None:
            os.eventfd_write(self.fd, 1)

        def close(self) -> None:
            os.close(self.fd)

    _module("lmcache.lmcache_native", Bitmap=Bitmap)
    _module("lmcache.v1.platform", create_event_notifier=Notifier)
    _module("lmcache.v1.distributed.api", KeyEntry=KeyEntry, KeyListPage=KeyListPage, ObjectKey=ObjectKey)
    _module("lmcache.v1.distributed.internal_api", L2StoreResult=L2StoreResult, L2AdapterListener=object)
    _module("lmcache.v1.distributed.l2_adapters.base", L2AdapterInterface=L2AdapterInterface)
    return "a stand-in"
