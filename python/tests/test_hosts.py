"""The host releases that adapters support: stated in one place, and checked when an adapter is imported."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from remanent.integrations import _hosts

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
HOST = _hosts.Host("A host", "a-host", "1.2.0", "1.10.3rc1")


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(name: str) -> str:
        assert name == HOST.package
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)


@pytest.mark.parametrize("version", ["0.9", "1", "1.1.9", "1.2rc1.dev3", "1.2.0rc1", "1.2.0", "1.2", "1.9.0", "1.11+cu1", "2"])
def test_release_before_oldest_is_rejected(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    is_old = version in ("0.9", "1", "1.1.9")
    if is_old:
        with pytest.raises(ImportError, match=re.escape(f"A host {version} is installed, but the adapter needs 1.2.0")):
            with _hosts.importing(HOST):
                pytest.fail("the host is imported")
    else:
        with _hosts.importing(HOST):
            import json  # noqa: F401


@pytest.mark.parametrize(("version", "found"), [(None, "A host is not installed"), ("3.0", "A host 3.0 is installed")])
def test_missing_name_error_states_releases(monkeypatch: pytest.MonkeyPatch, version: str | None, found: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(ImportError) as raised:
        with _hosts.importing(HOST):
            from json import nothing_of_this_name  # type: ignore[attr-defined]  # noqa: F401
    text = str(raised.value)
    assert "supports releases 1.2.0 to 1.10.3rc1" in text and found in text and "nothing_of_this_name" in text
    assert isinstance(raised.value.__cause__, ImportError)


@pytest.mark.skipif(not PAGE.exists(), reason="the page is in the repository only")
def test_page_states_releases_of_each_host() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()
            if line.startswith("|") and line.count("|") == 6]
    stated = {row[0]: row[1] for row in rows}
    assert {host.name: stated.get(host.name) for host in _hosts.HOSTS} == {
        host.name: host.supported for host in _hosts.HOSTS}


@pytest.mark.parametrize("module", ["lmcache", "vllm", "vllm_weights", "torchtitan", "torch_checkpointing", "orbax"])
def test_release_is_checked_before_host_is_imported(module: str) -> None:
    text = (Path(_hosts.__file__).parent / f"{module}.py").read_text()
    package = {"vllm_weights": "vllm"}.get(module, module)
    checked = text.index("with _hosts.importing(_hosts.")
    first = re.search(rf"^ *(from|import) {package}[. ]", text[text.index('"""', 3):], re.MULTILINE)
    assert first is not None and text.index('"""', 3) + first.start() > checked
