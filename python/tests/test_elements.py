"""Arrays are returned with the dtype and shape that they were stored with, and metadata never disagree with the bytes.
"""

from __future__ import annotations

import array
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import remanent

NAMED: dict[str, Any] = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "C128": "complex128",
}
SHAPES = [(), (0,), (3,), (2, 3), (0, 3), (2, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("short", NAMED)
def test_arrays_are_restored_unchanged(store: remanent.Store, short: str, shape: tuple[int, ...]) -> None:
    given = np.ones(shape, NAMED[short])
    store["k"] = given
    with store.batch() as batch:
        batch.create(given, key="created")
        batch.create(given, key="later", at_commit=True)
        batch.create_in(given, key="there")
    for key in ("k", "created", "later", "there"):
        found = store.numpy(key)
        assert (found.dtype, found.shape) == (given.dtype, given.shape) and found.tobytes() == given.tobytes()
        assert np.from_dlpack(store.array(key)).shape == shape
        with store.lease(key) as lease:
            assert lease.shape == shape and lease.numpy().dtype == given.dtype


def numpy_arrays(store: remanent.Store, dtype: str | None = None) -> Iterator[Any]:
    """Returns page "k" through each call that returns a NumPy array."""
    yield store.numpy("k", dtype)
    yield store.array("k", dtype).numpy()
    yield store.read_many(["k"]).result().numpy(0, dtype)
    with store.lease("k", dtype) as lease:
        array = lease.numpy()
        with pytest.raises(remanent.MemoryRefusedError, match="1 views"):
            lease.end()
        assert not array.flags.writeable
        yield array.copy()
        del array


def test_types_missing_in_numpy_use_ml_dtypes(store: remanent.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ("bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
             "float8_e8m0fnu", "float4_e2m1fn_x2")
    # ml_dtypes before 0.6 lacks complex32, and no release has elements of two numbers.
    named = [name for name in names if hasattr(ml_dtypes, name)]
    assert "bfloat16" in named and "float4_e2m1fn_x2" not in named
    for name in named:
        dtype = np.dtype(getattr(ml_dtypes, name))
        for shape in ((2, 128), (), (0, 3), (256,)):
            bits = np.random.default_rng(0).bytes(int(np.prod(shape)) * dtype.itemsize)
            store["k"] = given = np.frombuffer(bits, dtype).reshape(shape)
            for found in numpy_arrays(store):
                assert (found.dtype, found.shape, found.tobytes()) == (dtype, shape, given.tobytes())
    store["k"] = bytes(4)
    for name in set(names) - set(named):
        with pytest.raises(remanent.MemoryRefusedError, match=f"neither NumPy nor ml_dtypes has a dtype {name}"):
            store.numpy("k", name)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for name in named:
        with pytest.raises(remanent.MemoryRefusedError, match=f"NumPy has no dtype {name}, and ml_dtypes cannot") as raised:
            store.numpy("k", name)
        assert "install ml_dtypes" in raised.value.remedy and isinstance(raised.value.__cause__, ImportError)


def test_types_without_format_keep_names(store: remanent.Store) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, short in [("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")]:
        store["k"] = np.ones((2, 2), getattr(ml_dtypes, name))
        assert store.info("k").metadata == {"dtype": short, "shape": [2, 2]}
        assert store.array("k").dtype == name and store.array("k").shape == (2, 2)
    with pytest.raises(remanent.InvalidTypeError, match="int4"):
        store["k"] = np.ones(2, ml_dtypes.int4)


def test_tensors_keep_dtype_and_shape(store: remanent.Store) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        given = torch.ones(2, 3).to(dtype)
        store["k"] = given
        found = torch.from_dlpack(store.array("k"))
        assert (found.dtype, found.shape) == (dtype, given.shape)
        assert bool((found.view(torch.uint8) == given.view(torch.uint8)).all())


def test_buffer_format_determines_dtype(store: remanent.Store) -> None:
    for given, metadata in [
        (b"plain", {}), (bytearray(b"plain"), {}), (memoryview(b"plain"), {}), (np.arange(3, dtype="uint8"), {}),
        (memoryview(b"plain").cast("c"), {}), (array.array("d", [1, 2]), {"dtype": "F64", "shape": [2]}),
        ((ctypes.c_float * 3)(), {"dtype": "F32", "shape": [3]}), (np.float32(1), {"dtype": "F32", "shape": []}),
        (np.ones((2, 2), "uint8"), {"dtype": "U8", "shape": [2, 2]}),
    ]:
        store["k"] = given
        assert store.info("k").metadata == metadata, given


@pytest.mark.parametrize("given", [np.array(["2020-01-02"], "datetime64[D]"), np.arange(4, dtype=">i4"),
                                   np.zeros(2, [("a", "i4"), ("b", "f8")]), np.zeros(2, "S3"), np.zeros(2, "U3"),
                                   np.ones(1, "longdouble"), np.zeros(2, "timedelta64[s]")], ids=repr)
def test_types_without_name_are_rejected(store: remanent.Store, given: Any) -> None:
    store["there"] = b"there"
    for call in (lambda: store.put("k", given), lambda: store.batch().create(given, key="k"),
                 lambda: store.batch().update("there", given)):
        with pytest.raises(remanent.InvalidTypeError, match="no name") as caught:
            call()
        assert str(given.dtype) in str(caught.value) and "view" in caught.value.remedy
    assert list(store) == ["there"] and store["there"] == b"there"
    store["k"] = given.view("uint8")
    assert store["k"] == given.tobytes()


F32 = {"dtype": "F32", "shape": [2, 2]}
Change = Callable[[remanent.Batch], Any]
floats = np.zeros(4, "float32")
# The metadata of a page of 2 by 2 float32 after each call that takes bytes or changes the length.
AFTER: list[tuple[str, Change, dict[str, Any] | str]] = [
    ("write bytes", lambda batch: batch.write("k", 0, b"four"), F32),
    ("write uint8", lambda batch: batch.write("k", 0, np.zeros((2, 2), "uint8")), F32),
    ("write float32", lambda batch: batch.write("k", 4, np.float32(1)), F32),
    ("write float64", lambda batch: batch.write("k", 0, np.float64(1)), "dtype F32"),
    ("write dates", lambda batch: batch.write("k", 0, np.zeros(1, "datetime64[D]")), "dtype F32"),
    ("write changes", lambda batch: batch.write_changes("k", floats, floats + 1, width=4), F32),
    ("write changes of int32", lambda batch: batch.write_changes("k", bytes(16), np.zeros(4, "int32")), "dtype F32"),
    ("write masked", lambda batch: batch.write_masked("k", 0, b"\1", b"four", width=4), F32),
    ("write masked int32", lambda batch: batch.write_masked("k", 0, b"\1", np.int32(1), width=4), "dtype F32"),
    ("scatter", lambda batch: batch.scatter("k", [1], np.float32(1), width=4), F32),
    ("scatter int32", lambda batch: batch.scatter("k", [1], np.int32(1), width=4), "dtype F32"),
    ("fill", lambda batch: batch.fill("k", 0, 4, b"\0"), F32),
    ("update with bytes", lambda batch: batch.update("k", b"x" * 16), F32),
    ("update with fewer bytes", lambda batch: batch.update("k", b"x" * 8), {"dtype": "F32"}),
    ("update with odd bytes", lambda batch: batch.update("k", b"x" * 7), {}),
    ("update with float32", lambda batch: batch.update("k", floats), {"dtype": "F32", "shape": [4]}),
    ("update with int16", lambda batch: batch.update("k", np.zeros((2, 4), "int16")), {"dtype": "I16", "shape": [2, 4]}),
    ("update with the same", lambda batch: batch.update("k", floats.reshape(2, 2)), F32),
    ("resize", lambda batch: batch.resize("k", 8), {"dtype": "F32"}),
    ("resize to odd", lambda batch: batch.resize("k", 7), {}),
    ("resize and say so", lambda batch: (batch.set_metadata("k", "shape", [2]), batch.resize("k", 8)),
     {"dtype": "F32", "shape": [2]}),
    ("resize, then say so", lambda batch: (batch.resize("k", 8), batch.set_metadata("k", "shape", [2])),
     {"dtype": "F32", "shape": [2]}),
    ("move", lambda batch: batch.move_to("k", "disk"), F32),
]


@pytest.mark.parametrize(("change", "after"), [row[1:] for row in AFTER], ids=[row[0] for row in AFTER])
def test_metadata_matches_contents_after_writes(store: remanent.Store, change: Change, after: dict[str, Any] | str) -> None:
    store["k"] = np.zeros((2, 2), "float32")
    batch = store.batch()
    if isinstance(after, str):
        with pytest.raises(remanent.InvalidError, match=after):
            change(batch)
        after = F32
    else:
        change(batch)
        store.commit(batch)
    info = store.info("k")
    assert info.metadata == after
    # The page can be read with its metadata in any case.
    assert store.numpy("k").nbytes == info.length


def test_assignment_updates_dtype_and_keeps_other_metadata(store: remanent.Store) -> None:
    with store.batch() as batch:
        batch.create(np.zeros((2, 2), "float32"), key="k")
        batch.set_metadata("k", "layer", 3)
    for given, said in [(np.zeros(3, "int16"), {"dtype": "I16", "shape": [3]}), (b"plain", {}),
                        (np.ones((1, 2)), {"dtype": "F64", "shape": [1, 2]}), (np.zeros(2, "uint8"), {})]:
        store["k"] = given
        assert store.info("k").metadata == {"layer": 3, **said}
        assert store["k"] == bytes(given)
    epoch = store.info("k").epoch
    store["k"] = np.zeros(2, "uint8")
    assert store.info("k").epoch == epoch + 1


def test_batch_keeps_metadata_consistent(store: remanent.Store) -> None:
    with store.batch() as batch:
        page = batch.create(np.zeros(4, "float32"), key="new")
        batch.write(page, 0, np.float32(1))
        with pytest.raises(remanent.InvalidError, match="dtype F32"):
            batch.write(page, 0, np.int64(1))
        copied = batch.clone_page("new")
        batch.resize(page, 8)
        with pytest.raises(remanent.InvalidError, match="dtype F32"):
            batch.write(copied, 0, np.int64(1))
        batch.create(np.zeros(2, "int16"), key="own", metadata={"dtype": "BF16", "shape": [2]})
    assert store.info("new").metadata == {"dtype": "F32"}
    assert store.info(batch.pages[1]).metadata == {"dtype": "F32", "shape": [4]}
    assert store.array("own").dtype == "bfloat16"


def test_working_copy_requires_dtype_of_page(store: remanent.Store) -> None:
    store["k"] = np.zeros(4, "float32")
    with pytest.raises(remanent.InvalidError, match="dtype F32"):
        store.working_copy("k", np.zeros(2, "float64"))
    assert store.working_copy("k", np.zeros(16, "uint8")).nbytes == 16
