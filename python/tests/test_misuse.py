"""Arguments of wrong types and values: each is refused with a `remanent.Error` that has a remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remanent
from remanent._store import errors


class Strange:
    """An object that no call accepts."""


# Valid arguments by name, for all parameters without a default.
GOOD: dict[str, Any] = {
    "page": "k", "source": "k", "target": "k", "left": "k", "right": "k", "key": "new", "offset": 0, "start": 0, "length": 1,
    "data": b"x", "content": b"x", "place": "host", "pages": ["k"], "steps": [["k"]], "at": 1, "good": 1, "name": "n",
    "value": 1, "text": "t", "width": 1, "pattern": b"x", "indices": [0], "values": b"x", "mask": b"\1", "before": b"1",
    "after": b"2", "epoch": 1, "outs": [bytearray(4)], "is_good": lambda view: True, "memory": bytearray(4), "stream": 0,
    "index": 0, "out": bytearray(4), "default": None,
}
BAD: list[Any] = [Strange(), -1, 1 << 70, "nonsense", "lsn:x", "", b"", b"\xff" * 70, 1.5, math.nan, [Strange()], {1: Strange()},
                  {"host": -1}, (1, 2, 3, 4), np.zeros(2, "datetime64[s]"), np.arange(8)[::2], None]
# Unusual values of `timeout`. A valid one would wait forever.
TIMES: list[Any] = [Strange(), "nonsense", math.nan, b"", [1]]
# Methods that close the object, block, or are not calls with checked arguments.
LEFT_OUT = {"close", "end", "closed"}


def objects(path: Path) -> dict[str, Any]:
    store = remanent.Store(path / "s", device="host")
    store["k"] = b"1234"
    batch = store.batch()
    batch.create(b"in", key="in")
    follower, changes = remanent.Follower(path / "s"), store.changes()
    ticket = store.submit(store.batch())
    ticket.wait()
    store["gone"] = b"gone"
    GOOD.update(batch=store.batch(), copy=store.working_copy("k", bytearray(4)), path=path / "new", directory=path / "new")
    return {
        "Store": store, "LiveView": store.view(), "View": remanent.View(path / "s"), "Replica": remanent.Replica(path / "s"),
        "Batch": batch, "Ticket": ticket, "Follower": follower, "ChangeStream": changes, "Lease": store.lease("k"),
        "PageMemory": store.release("gone"), "ReadMany": store.read_many(["k"]), "Prefetch": store.prefetch(["k"], "host"),
        "ManyBytes": store.read_many(["k"]).result(), "FollowedBatch": follower.next(60), "Array": store.array("k"),
    }


def calls(name: str, method: Any) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Returns calls with one unusual argument, with valid values for the others."""
    parameters = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
    for odd in parameters:
        if odd.kind in (odd.VAR_POSITIONAL, odd.VAR_KEYWORD):
            continue
        for value in TIMES if odd.name == "timeout" else BAD:
            positional, named = [], {}
            for each in parameters:
                if each is odd:
                    given = value
                elif each.default is not each.empty or each.name not in GOOD:
                    continue
                else:
                    given = GOOD[each.name]
                if each.kind is each.KEYWORD_ONLY:
                    named[each.name] = given
                else:
                    positional.append(given)
            yield f"{name}({odd.name}={value!r})", positional, named


def refusals(name: str, method: Any) -> Iterator[str]:
    """Makes the call with each unusual argument. Returns those for which it raises an error of another package."""
    for shown, positional, named in calls(name, method):
        try:
            made = method(*positional, **named)
            if isinstance(made, (remanent.Store, remanent.Lease, remanent.Pin, remanent.LiveView, remanent.ReadAhead)):
                (made.end if hasattr(made, "end") else made.close)()
        except remanent.Error as error:
            if not error.remedy or "change the call" in error.remedy:
                yield f"{shown}: {error!r} has no remedy"
        except BaseException as error:
            yield f"{shown}: {error!r}"


def test_methods_raise_only_package_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some of the unusual paths are valid, so they must be in the test's directory.
    monkeypatch.chdir(tmp_path)
    others = []
    for kind, each in objects(tmp_path).items():
        for name in dir(type(each)):
            if name.startswith("_") or name in LEFT_OUT or not callable(getattr(type(each), name)):
                continue
            others += list(refusals(f"{kind}.{name}", getattr(each, name)))
        for name in ("__getitem__", "__contains__", "__delitem__"):
            if hasattr(type(each), name) and not isinstance(each, remanent.ManyBytes):
                for value in BAD:
                    try:
                        getattr(each, name)(value)
                    except remanent.Error:
                        continue
                    except BaseException as error:
                        others.append(f"{kind}.{name}({value!r}): {error!r}")
    assert not others, "\n".join(others)


def test_functions_raise_only_package_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects(tmp_path)
    others = []
    for name in ("Store", "View", "Follower", "Replica", "bisect"):
        others += list(refusals(name, getattr(remanent, name)))
    assert not others, "\n".join(others)


@pytest.mark.parametrize(("call", "kinds", "message", "remedy"), [
    (lambda store: remanent.Store("x", identity="a"), (TypeError,), "identity must be bytes or None, not str", "pass bytes"),
    (lambda store: remanent.Store("x", log_kept=5), (TypeError,),
     "unknown option log_kept; did you mean retention={\"log_kept\": …}?", "pass one of create, ack,"),
    (lambda store: remanent.Store("x", devise="host"), (TypeError,), "unknown option devise; did you mean device?", "pass"),
    (lambda store: remanent.Store("x", snapshot_log_bytes=5), (TypeError,), "did you mean snapshots={\"log_bytes\": …}?", ""),
    (lambda store: remanent.Store("x", log={"segment_length": 5}), (TypeError,),
     "unknown option log.segment_length; did you mean \"segment_len\"?", "pass one of log.io, log.segment_len,"),
    (lambda store: remanent.Store("x", log={"segment_len": "5"}), (TypeError,),
     "log.segment_len must be an int from 0 to 2^64 - 1, not str", "pass an int from 0"),
    (lambda store: remanent.Store("x", snapshots=5), (TypeError,), "snapshots must be a dict, not int", "pass a dict"),
    (lambda store: remanent.Store("x", memory=None), (TypeError,), "memory must be a dict, not NoneType", "pass a dict"),
    (lambda store: remanent.Store("x", tiers={"eviction": "lru"}), (TypeError,), "tiers has no places", "pass tiers.places"),
    (lambda store: remanent.Store("x", images={"io": "by hand"}), (ValueError,), "images.io must be one of", "pass one of"),
    (lambda store: store.restore_from_snapshot("s"), (TypeError,), "snapshot must be the number of a snapshot", "SnapshotInfo"),
    (lambda store: store.read("k", -1), (ValueError,), "offset must be an int from 0 to 2^64 - 1, not -1", "pass an int from 0"),
    (lambda store: store.read("k", "1"), (TypeError,), "offset must be an int from 0 to 2^64 - 1, not str", "pass an int from 0"),
    (lambda store: store.numpy("k", "float31"), (ValueError,), "dtype \"float31\" is not one of", "use one of these"),
    (lambda store: store.numpy("k", shape=[2.5]), (TypeError,), "shape must be a list of lengths", "pass a list"),
    (lambda store: store.put(5, b""), (TypeError,), "a key must be str or bytes, not int", "pass str or bytes"),
    (lambda store: store.put("k", 5), (TypeError,), "int has no bytes", "pass bytes, a NumPy array or a tensor"),
    (lambda store: store.put("k", b"", place="moon"), (ValueError,), "moon", "pass \"host\""),
    (lambda store: store.batch(ack="soon"), (ValueError,), "ack must be one of", "pass one of"),
    (lambda store: store.commit(5), (TypeError,), "batch must be a Batch of this store, not int", "pass a Batch of this store"),
    (lambda store: store.read_into("k", b"1234"), (BufferError,), "the buffer is read-only", "bytearray"),
    (lambda store: store.batch().set_root("big", 1 << 70), (ValueError,), "64 bits", "store it as str or bytes"),
    (lambda store: store.read_many(["k"]).result()[3], (IndexError,), "index 3 is outside the 1 ranges", "pass an index"),
])
def test_errors_state_cause_and_remedy(store: remanent.Store, call: Any, kinds: Any, message: str, remedy: str) -> None:
    store["k"] = b"1234"
    with pytest.raises(remanent.Error) as caught:
        call(store)
    assert isinstance(caught.value, kinds) and message in str(caught.value) and remedy in caught.value.remedy
    assert store["k"] == b"1234"


def test_every_error_class_has_remedy() -> None:
    remedies = []
    for name in errors.__all__:
        error = getattr(errors, name)("text")
        assert error.remedy and "change the call" not in error.remedy and str(error) == "text", name
        remedies.append(error.remedy)
    assert getattr(errors, "LockedError")("x").remedy == "open a View to read it, or close it in the other process"
    assert len(set(remedies)) > 20
