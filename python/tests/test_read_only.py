"""Properties that return copies: an attempt to change one raises an error instead of being lost."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remanent

CHANGES: list[Callable[[Any], Any]] = [
    lambda each: each.__setitem__("x" if isinstance(each, dict) else 0, 1),
    lambda each: each.__delitem__("x" if isinstance(each, dict) else 0),
    lambda each: each.clear(),
    lambda each: each.pop(*(["x"] if isinstance(each, dict) else [])),
    lambda each: each.update({}) if isinstance(each, dict) else each.append(1),
    lambda each: each.setdefault("x", 1) if isinstance(each, dict) else each.extend([1]),
    lambda each: each.popitem() if isinstance(each, dict) else each.insert(0, 1),
    lambda each: each.__ior__({}) if isinstance(each, dict) else each.__iadd__([1]),
    lambda each: each.__ior__({}) if isinstance(each, dict) else each.sort(),
    lambda each: each.__ior__({}) if isinstance(each, dict) else each.reverse(),
    lambda each: each.__ior__({}) if isinstance(each, dict) else each.remove(1),
]


def objects(path: Path) -> dict[str, Any]:
    """Returns an object of each class of the package that has properties."""
    store = remanent.Store(path, device="host", retention={"log_kept": 1 << 20})
    changes = store.changes()
    with store.batch() as batch:
        batch.create(b"ab", key="k", metadata={"list": [1, {"deep": 2}]})
        batch.set_root("config", {"lr": [0.1]})
    receipt = store.commit(store.batch())
    ticket = store.submit(store.batch())
    ticket.wait()
    store.snapshot("first")
    store.snapshot("second")
    pruned = store.prune(give_up=["first"], names_only=True)
    follower = remanent.Follower(path)
    followed = [follower.next(60) for _ in range(3)]
    applied = changes.next(60)
    assert isinstance(applied, remanent.AppliedBatch)
    store.restore("lsn:2")
    restored = follower.next(60)
    found = [store, store.view(), remanent.View(path), store.info("k"), batch, receipt, ticket, pruned, *followed, applied,
             applied.pages[0], restored, store.blame("k", 0)[0], remanent.Replica(path), *store.snapshots()]
    return {type(each).__name__ + f" {number}": each for number, each in enumerate(found)}


def test_copied_properties_are_read_only(tmp_path: Path) -> None:
    seen = set()
    for name, each in objects(tmp_path / "s").items():
        for attribute in dir(type(each)):
            if attribute.startswith("_") or callable(getattr(type(each), attribute)):
                continue
            value = getattr(each, attribute)
            if not isinstance(value, (dict, list)):
                continue
            seen.add(f"{name.split()[0]}.{attribute}")
            before = repr(value)
            for change in CHANGES:
                with pytest.raises(remanent.InvalidTypeError, match="read-only copy") as caught:
                    change(value)
                assert isinstance(caught.value, TypeError)
            assert repr(value) == before
    assert seen == {"AppliedBatch.pages", "AppliedPage.ranges", "Batch.pages", "FollowedBatch.operations",
                    "FollowedBatch.restored_pages", "LiveView.root", "PageInfo.metadata", "Pruned.files", "Pruned.held",
                    "Pruned.snapshots", "Receipt.pages", "Replica.root", "SnapshotInfo.root", "Store.recovered",
                    "Store.root", "Ticket.pages", "ValueChange.root", "View.root"}


def test_nested_values_are_read_only(store: remanent.Store) -> None:
    with store.batch() as batch:
        batch.create(1, key="k", metadata={"list": [1, {"deep": 2}]})
        batch.set_root("config", {"lr": [0.1]})
    with pytest.raises(remanent.InvalidTypeError, match="batch.set_root"):
        store.root["config"]["lr"] = 0.2
    with pytest.raises(remanent.InvalidTypeError, match="batch.set_root"):
        store.root["config"]["lr"].append(0.2)
    with pytest.raises(remanent.InvalidTypeError, match="batch.set_metadata"):
        store.info("k").metadata["list"][1]["deep"] = 3
    assert store.root == {"config": {"lr": [0.1]}} and store.info("k").metadata["list"] == [1, {"deep": 2}]


def test_copies_of_read_only_values_can_be_changed(store: remanent.Store) -> None:
    with store.batch() as batch:
        batch.set_root("config", {"lr": [0.1]})
    root = store.root
    for each in (copy.deepcopy(root), pickle.loads(pickle.dumps(root)), json.loads(json.dumps(root))):
        each["config"]["lr"].append(0.2)
        assert type(each) is dict and each == {"config": {"lr": [0.1, 0.2]}}
    with store.batch() as batch:
        batch.set_root("again", root)
    assert store.root["again"] == root
