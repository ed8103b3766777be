"""A pytest plugin that replaces a host's own storage by ours and records the outcome of each test.

`REMANENT_HOST` names the host whose storage is replaced; without it none is. `REMANENT_RESULTS` names the JSON file for the
results: for each test its outcome and the first line of its error.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import pytest

_results: dict[str, tuple[str, str]] = {}


def pytest_configure(config: Any) -> None:
    replace = {"torch_checkpointing": _replace_file_system, "lmcache": _replace_mock_adapter,
               "safetensors": _replace_files, "vllm": _replace_file_system_tier}.get(os.environ.get("REMANENT_HOST", ""))
    if replace is not None:
        replace()


def _replace_file_system() -> None:
    """All files of torch_checkpointing's tests are below /tmp, some of them regardless of TMPDIR.

    The configuration is pickled for processes that a test spawns, so ours is pickled too.
    """
    from torch_checkpointing.storage import filesystem

    from remanent.integrations.torch_checkpointing import RemanentStorage, RemanentStorageConfig

    def create_storage(self: Any) -> RemanentStorage:
        return RemanentStorageConfig("/tmp").create_storage()

    def pickled(self: Any) -> tuple[Any, ...]:
        return RemanentStorageConfig, ("/tmp",)

    host = filesystem.LocalFileSystemStorageConfig
    host.create_storage, host.__reduce__ = create_storage, pickled


def _replace_mock_adapter() -> None:
    """LMCache's tests create their L2 adapters from its mock adapter, which is replaced."""
    from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

    from remanent.integrations.lmcache import RemanentL2Adapter

    class Adapter(RemanentL2Adapter):
        def __init__(self, config: Any) -> None:
            super().__init__({"path": tempfile.mkdtemp(prefix="l2-"), "capacity": int(config.max_size_gb * (1 << 30)),
                              "revision": "1", "chunk_size": 256})

    mock_l2_adapter.MockL2Adapter = Adapter


def _replace_files() -> None:
    """safetensors' functions take a file where ours take a directory, which has a name of its own here.

    A file that other functions wrote is passed to ours as it is.
    """
    import safetensors
    import safetensors.torch as host

    import remanent.torch as ours

    def directory(path: Any) -> str:
        return os.fspath(path) + ".remanent"

    def found(path: Any) -> str:
        return directory(path) if os.path.isdir(directory(path)) else os.fspath(path)

    sound = {"save": host.save, "load": host.load}
    sound_open = safetensors.safe_open

    def by_host(call: Any) -> Any:
        """Ours, which calls the host's function of the same name."""
        def called(*given: Any, **named: Any) -> Any:
            vars(host).update(sound)
            try:
                return call(*given, **named)
            finally:
                vars(host).update(replaced)

        return called

    replaced = {"save": by_host(ours.save), "load": by_host(ours.load)}

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch"):
            return sound_open(filename, framework, device, **options)
        return ours.safe_open(found(filename), "pt", device, **options)

    host.save_file = lambda tensors, filename, metadata=None: ours.save_file(tensors, directory(filename), metadata)
    host.load_file = lambda filename, device="cpu", **options: ours.load_file(found(filename), device, **options)
    # Tensors of any strides are saved as they are.
    host.save_model = lambda model, filename, metadata=None, force_contiguous=True: ours.save_model(
        model, directory(filename), metadata)
    host.load_model = lambda model, filename, strict=True, device="cpu", **options: ours.load_model(
        model, found(filename), strict, device, **options)
    vars(host).update(replaced)
    safetensors.safe_open = safe_open


def _replace_file_system_tier() -> None:
    """vLLM's tests look at fields of its file tier: the end of a lookup, and the file of a block, for which a mark stands
    here.
    """
    from types import SimpleNamespace

    from vllm.v1.kv_offload.tiering.fs import manager

    from remanent.integrations.vllm import RemanentTier

    class Tier(RemanentTier):
        def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, root_dir: str, *given: Any,
                     n_read_threads: int = 4, n_write_threads: int = 4, **options: Any) -> None:
            super().__init__(offloading_spec, primary_kv_view, tier_type, path=os.path.join(root_dir, "remanent"),
                             capacity=1 << 30, revision="1", readers=n_read_threads, **options)
            self._lookup_manager = SimpleNamespace(_pending_results=SimpleNamespace(empty=lambda: False))
            self._use_o_direct, self._store_job_keys, self.events = False, {}, self._events

            def get_file_name(key: bytes) -> str:
                mark = os.path.join(root_dir, key.hex())
                if key in self.cache:
                    with open(mark, "w", encoding="utf-8"):
                        pass
                return mark

            self.file_mapper = SimpleNamespace(base_path=root_dir, get_file_name=get_file_name)

    manager.FileSystemTierManager = Tier


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Marks all tests: otherwise LMCache's tests share 5 GB of memory, which takes minutes to fill on few cores."""
    for item in items:
        item.add_marker("no_shared_allocator")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        _results[report.nodeid] = report.outcome, message.partition("\n")[0][:200]


def pytest_collectreport(report: Any) -> None:
    if report.outcome == "failed":
        _results[report.nodeid] = "failed", str(report.longrepr).strip().rpartition("\n")[2][:200]


def pytest_sessionfinish(session: Any) -> None:
    with open(os.environ["REMANENT_RESULTS"], "w", encoding="utf-8") as file:
        json.dump(_results, file, indent=1)
