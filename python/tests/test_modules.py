"""The public names of modules, and the aliases of adapters at their former paths."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import pydoc
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import stand_ins

import remanent
from remanent._store import errors, options

STAND_INS = {"lmcache": stand_ins.lmcache, "torchtitan": stand_ins.torchtitan, "vllm": stand_ins.vllm,
             "vllm_weights": stand_ins.vllm_weights}
ADAPTERS = sorted(path.stem for path in (Path(remanent.__file__).parent / "integrations").glob("[!_]*.py"))


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.jax) if name == "orbax" else name for name in ADAPTERS])
def adapter(request: pytest.FixtureRequest) -> ModuleType:
    try:
        STAND_INS.get(request.param, lambda: "")()
        return importlib.import_module(f"remanent.integrations.{request.param}")
    except ImportError as error:
        pytest.skip(str(error))


def former_path(adapter: ModuleType) -> str:
    return adapter.__name__.replace(".integrations", "")


def test_adapters_are_aliased_at_their_former_paths(adapter: ModuleType) -> None:
    name = former_path(adapter)
    assert importlib.import_module(name) is sys.modules[name] is adapter
    names: dict[str, object] = {}
    exec(f"from {name} import {', '.join(adapter.__all__)}", names)
    assert all(names[each] is getattr(adapter, each) for each in adapter.__all__)


def test_pickles_with_former_paths_load(adapter: ModuleType) -> None:
    for name in adapter.__all__:
        assert pickle.loads(f"c{former_path(adapter)}\n{name}\n.".encode()) is getattr(adapter, name)


def test_each_adapter_has_an_alias() -> None:
    assert len(ADAPTERS) == 6
    assert [name for name in ADAPTERS if importlib.util.find_spec(f"remanent.{name}") is None] == []


PUBLIC = {"remanent.kv": None, "remanent.torch": "torch", "remanent.dcp": "torch", "remanent.weights": "torch"}


@pytest.fixture(params=[*PUBLIC, pytest.param("remanent.jax", marks=pytest.mark.jax)])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if needs := PUBLIC.get(request.param, "jax"):
        pytest.importorskip(needs)
    return importlib.import_module(request.param)


def test_dir_lists_public_names(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


def test_dir_of_an_adapter_lists_public_names(adapter: ModuleType) -> None:
    assert dir(adapter) == sorted(adapter.__all__)


def test_dir_of_the_package_adds_imported_submodules() -> None:
    importlib.import_module("remanent.kv")
    others = set(dir(remanent)).difference(remanent.__all__, errors.__all__, options.__all__)
    assert "kv" in others and {f"remanent.{name}" for name in others} <= sys.modules.keys()
    assert {"_native", "annotations"}.isdisjoint(dir(remanent))


def test_help_shows_what_a_program_uses_first() -> None:
    text = pydoc.plain(pydoc.render_doc(remanent))
    assert "class Store(" in text and "class Error(" in text and "class LockedError(" not in text
    assert {*errors.__all__, *options.__all__} <= set(dir(remanent))


def test_signatures_state_defaults() -> None:
    unknown = []
    for name in dir(remanent):
        owner = getattr(remanent, name)
        for member in [owner, *vars(owner).values()] if inspect.isclass(owner) else [owner]:
            try:
                parameters = inspect.signature(member).parameters
            except (TypeError, ValueError):  # not callable, or without a signature
                continue
            unknown += [(name, member, each) for each in parameters.values() if each.default is ...]
    assert unknown == []
    defaults = inspect.signature(remanent.Store).parameters
    assert defaults["snapshots"].default == {"log_bytes": 256 << 20, "interval": 60, "bytes_per_second": None}
    assert defaults["log"].default["segment_len"] == 16 << 20


def test_groups_of_options_state_the_defaults() -> None:
    parameters = inspect.signature(remanent.Store).parameters
    groups = {"memory": remanent.MemoryOptions, "log": remanent.LogOptions, "images": remanent.ImageOptions,
              "snapshots": remanent.SnapshotSchedule, "retention": remanent.RetentionOptions,
              "scrubs": remanent.ScrubSchedule, "tiers": remanent.TierOptions,
              "archive": remanent.ArchiveOptions}
    assert set(parameters) - {"path"} == set(remanent.StoreOptions.__annotations__)
    for name, kind in groups.items():
        entries = dict(re.findall(r"^ *- `(\w+)`: (.*?)(?=\n *- |\n *\n|\Z)", kind.__doc__ or "", re.M | re.S))
        assert list(entries) == list(kind.__annotations__), name
        default = parameters[name].default
        if default is None:
            continue
        assert list(default) == list(entries), name
        for option, value in default.items():
            stated = f'"{value}"' if isinstance(value, str) else repr(value)
            if value is not None:
                assert f"Default: {stated}" in " ".join(entries[option].split()), (name, option)
