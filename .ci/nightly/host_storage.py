"""A pytest plugin that puts our storage in the place of a host's own, and records how each test ends.

`REMANENT_HOST` names the host whose storage is replaced; without it nothing is. `REMANENT_RESULTS` names the file of JSON
that gets the results: for each test its outcome and the first line of its error.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import pytest

_results: dict[str, tuple[str, str]] = {}


def pytest_configure(config: Any) -> None:
    replace = {"torch_checkpointing": _replace_file_system, "lmcache": _replace_mock_adapter}.get(
        os.environ.get("REMANENT_HOST", ""))
    if replace is not None:
        replace()


def _replace_file_system() -> None:
    """All files of torch_checkpointing's tests lie below /tmp, some whatever the folder of temporary files is.

    A process that a test spawns gets the configuration pickled, and so ours too.
    """
    from torch_checkpointing.storage import filesystem

    from remanent.torch_checkpointing import RemanentStorage, RemanentStorageConfig

    def create_storage(self: Any) -> RemanentStorage:
        return RemanentStorageConfig("/tmp").create_storage()

    def pickled(self: Any) -> tuple[Any, ...]:
        return RemanentStorageConfig, ("/tmp",)

    host = filesystem.LocalFileSystemStorageConfig
    host.create_storage, host.__reduce__ = create_storage, pickled


def _replace_mock_adapter() -> None:
    """LMCache's tests make their L2 adapters of its mock adapter, which gets replaced."""
    from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

    from remanent.lmcache import RemanentL2Adapter

    class Adapter(RemanentL2Adapter):
        def __init__(self, config: Any) -> None:
            super().__init__({"path": tempfile.mkdtemp(prefix="l2-"), "capacity": int(config.max_size_gb * (1 << 30)),
                              "revision": "1", "chunk_size": 256})

    mock_l2_adapter.MockL2Adapter = Adapter


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """LMCache's tests share 5 GB of memory, which takes minutes to fill where cores are few, unless they are marked."""
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
