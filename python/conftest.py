"""Examples in docstrings and pages run as tests; each finds an empty place by the name `directory`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remanent


@pytest.fixture(autouse=True)
def example_names(doctest_namespace: dict[str, Any], tmp_path: Path) -> None:
    doctest_namespace["remanent"] = remanent
    doctest_namespace["directory"] = str(tmp_path / "example")
