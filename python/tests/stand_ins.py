"""Stand-ins for the hosts of adapters that are not installed, with only the names that the adapters use.

The tests of an adapter use its host if it can be imported, and print which one they use.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import enum
import hashlib
import importlib
import os
import shutil
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar


def _module(name: str, **names: Any) -> None:
    """Creates a module, and the packages that contain it."""
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
    """Returns vLLM 0.33, or a stand-in for it."""
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
    """Returns the part of vLLM 0.33 that receives weights, or a stand-in for it."""
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
    """Returns LMCache 0.5.7, or a stand-in for it."""
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

    class MemorySegment(enum.Enum):
        STORAGE = "storage"

    class MemoryResidency(enum.Enum):
        LOCAL = "local"

    @dataclasses.dataclass(frozen=True)
    class MemoryTags:
        segment: MemorySegment
        residency: MemoryResidency

    class L2AdapterInterface(abc.ABC):
        @abc.abstractmethod
        def get_memory_tags(self) -> MemoryTags: ...

        @abc.abstractmethod
        def close(self) -> None: ...

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
    _module("lmcache.v1.distributed.api", KeyEntry=KeyEntry, KeyListPage=KeyListPage, ObjectKey=ObjectKey,
            MemoryResidency=MemoryResidency, MemorySegment=MemorySegment, MemoryTags=MemoryTags)
    _module("lmcache.v1.distributed.internal_api", L2StoreResult=L2StoreResult, L2AdapterListener=object)
    _module("lmcache.v1.distributed.l2_adapters.base", L2AdapterInterface=L2AdapterInterface)
    return "a stand-in"


def torchtitan() -> str:
    """Returns torchtitan 0.3, or a stand-in whose checkpoint manager has the same configuration and methods."""
    if _is_installed("torchtitan.components.checkpointer.dcp"):
        return "torchtitan"

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    class AsyncMode(str, enum.Enum):
        DISABLED = "disabled"
        ASYNC = "async"
        ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"

    class GarbageCollection:
        @staticmethod
        def collect(reason: str) -> None:
            pass

    class Wrapper:
        def __init__(self, parts: list[Any]) -> None:
            self.parts = parts

        def state_dict(self) -> dict[str, Any]:
            return {name: tensor for part in self.parts for name, tensor in part.state_dict().items()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            for part in self.parts:
                part.load_state_dict(state, strict=False)

    class CheckpointManager:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            _owner: ClassVar[Any] = None
            enable: bool = False
            folder: str = "checkpoint"
            interval: int = 500
            keep_latest_k: int = 10
            last_save_model_only: bool = True
            async_mode: str = "disabled"

            def build(self, **given: Any) -> Any:
                return self._owner(config=dataclasses.replace(self), **given)

        def __init_subclass__(cls) -> None:
            cls.Config._owner = cls

        def __init__(self, config: Any, *, dataloader: Any, model_parts: list[Any], optimizers: Any, lr_schedulers: Any,
                     states: dict[str, Any], sd_adapter: Any, base_folder: str = "") -> None:
            self.enable, self.config = config.enable, config
            if not self.enable:
                return
            self.folder = os.path.join(base_folder, config.folder)
            own = {"model": Wrapper(model_parts), "optimizer": optimizers, "dataloader": dataloader}
            states.update(own, lr_scheduler=lr_schedulers)
            self.states = states
            self.async_mode = AsyncMode(config.async_mode)
            self.pg = None if self.async_mode is AsyncMode.DISABLED else dist.new_group(backend="gloo")
            self.stager: Any = None
            self.staging_future: Any = None
            self.save_future: Any = None

        def _flat(self) -> dict[str, Any]:
            others = {name: each for name, each in self.states.items() if name != "model"}
            return others | self.states["model"].state_dict()

        def save(self, curr_step: int, last_step: bool = False) -> bool:
            if not self.enable or not (last_step or curr_step % self.config.interval == 0):
                return False
            self.maybe_wait_for_saving()
            path = os.path.join(self.folder, f"step-{curr_step}")
            if last_step:
                self.dcp_save(self._flat(), path, AsyncMode.DISABLED, enable_garbage_collection=True)
                return True
            done: Any = self.dcp_save(self._flat(), checkpoint_id=path, async_mode=self.async_mode)
            if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
                assert isinstance(done, dcp.state_dict_saver.AsyncSaveResponse)
                self.staging_future, self.save_future = done.staging_completion, done.upload_completion
            elif self.async_mode is AsyncMode.ASYNC:
                assert isinstance(done, concurrent.futures.Future)
                self.save_future = done
            if dist.get_rank() == 0 and os.path.isdir(self.folder):
                steps = sorted(int(name[5:]) for name in os.listdir(self.folder) if name.startswith("step-"))
                for step in steps[: -self.config.keep_latest_k]:
                    shutil.rmtree(os.path.join(self.folder, f"step-{step}"), ignore_errors=True)
            return True

        def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode,
                     enable_garbage_collection: bool = False, to_hf: bool = False) -> Any:
            dcp.save(state_dict, checkpoint_id=checkpoint_id)

        def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
            dcp.load(state_dict, checkpoint_id=checkpoint_id)
            self.states["model"].load_state_dict(state_dict)

        def load(self, step: int = -1) -> bool:
            if not self.enable or not os.path.isdir(self.folder):
                return False
            steps = [int(name[5:]) for name in os.listdir(self.folder)
                     if os.path.isfile(os.path.join(self.folder, name, ".metadata"))]
            if step == -1 and not steps:
                return False
            path = os.path.join(self.folder, f"step-{max(steps) if step == -1 else step}")
            self.dcp_load(self._flat(), checkpoint_id=path, from_hf=False, from_quantized=False)
            return True

        def maybe_wait_for_staging(self) -> None:
            if self.staging_future is not None:
                self.staging_future.result()
                self.staging_future = None

        def maybe_wait_for_saving(self) -> None:
            if self.save_future is not None:
                self.save_future.result()
                self.save_future = None

        def close(self) -> None:
            if self.enable and self.stager is not None:
                self.stager.close()

    CheckpointManager.Config._owner = CheckpointManager
    _module("torchtitan.components.checkpointer.base", MODEL="model")
    _module("torchtitan.components.checkpointer.dcp", CheckpointManager=CheckpointManager, AsyncMode=AsyncMode)
    _module("torchtitan.tools.utils", GarbageCollection=GarbageCollection)
    return "a stand-in"
