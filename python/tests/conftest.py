"""Fixtures of all tests: a directory for each test, and the names that docstring examples use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import remanent


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(directory: str) -> Iterator[remanent.Store]:
    store = remanent.Store(directory, device="host")
    yield store
    store.close()
