"""Unusual arguments, which are accepted or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import remanent


def stored(store: remanent.Store, content: Any) -> bytes:
    with store.batch() as batch:
        batch.create(content)
    return store[batch.pages[0]]


@pytest.mark.parametrize("array", [np.array(5, "int32"), np.float32(1.5), np.array(2.5), np.zeros(0), np.zeros((0, 3)),
                                   np.array(["2020-01-02"], "datetime64[D]"), np.arange(4, dtype=">i4"),
                                   np.zeros(2, [("O", "i4"), ("b", "f8")])], ids=repr)
def test_arrays_of_any_shape_and_type_are_stored(store: remanent.Store, array: Any) -> None:
    # For element types without a name in metadata, writes to parts of a page and reads into arrays are also supported.
    store["k"] = bytes(array.nbytes)
    with store.batch() as batch:
        batch.write("k", 0, array)
    assert store["k"] == array.tobytes()
    out = np.ones_like(array)
    if out.ndim or out.flags.writeable:
        assert store.read_into("k", out) == array.nbytes and out.tobytes() == array.tobytes()


def test_scalar_array_is_stored_in_page(store: remanent.Store) -> None:
    step = np.array(7, "int64")
    with store.batch() as batch:
        batch.create_in(step, key="step")
    with store.batch(ack="applied") as batch:
        batch.write("step", 0, np.array(8, "int64"))
    assert step == 8
    with store.lease("step", "int64", []) as lease:
        assert lease.numpy().shape == () and lease.numpy() == 8


@pytest.mark.parametrize("array", [np.array([1, "a"], dtype=object), np.array(None),
                                   np.zeros(2, [("a", "i4"), ("b", "O")])], ids=repr)
def test_object_arrays_are_rejected(store: remanent.Store, array: Any) -> None:
    with pytest.raises(TypeError, match="of Python objects"):
        stored(store, array)
    with pytest.raises(TypeError, match="of Python objects"):
        store["k"] = array
    assert len(store) == 0


@pytest.mark.parametrize("array", [np.arange(10)[::-1], np.arange(10)[::2], np.arange(6).reshape(2, 3).T], ids=repr)
def test_noncontiguous_arrays_are_rejected(store: remanent.Store, array: Any) -> None:
    with pytest.raises(BufferError, match="contiguous"):
        stored(store, array)


def test_indices_in_other_byte_order_are_rejected(store: remanent.Store) -> None:
    store["k"] = bytes(1 << 25)
    with store.batch() as batch:
        batch.scatter("k", np.array([1], "uint32"), b"!")
        with pytest.raises(TypeError, match="byte order"):
            batch.scatter("k", np.array([1], "uint32").astype(">u4"), b"!")
    assert store["k"].count(b"!") == 1 and store["k"][1] == ord("!")


def test_negative_view_is_rejected_until_resolved(store: remanent.Store) -> None:
    torch = pytest.importorskip("torch")
    # A view with the negative bit set, which torch creates for imaginary parts of conjugates.
    imag = torch.tensor([1 + 2j, 0j]).conj().imag[:1]
    assert imag.item() == -2 and imag.is_neg()
    with pytest.raises(BufferError, match="negative bit"):
        store["k"] = imag
    store["k"] = imag.resolve_neg()
    assert store.numpy("k", "float32") == -2


def test_single_page_is_not_accepted_as_list(store: remanent.Store) -> None:
    store["a"] = store["ab"] = b"x"
    for one in ("ab", "a", b"\1"):
        for use in (store.prefetch, store.ensure):
            with pytest.raises(TypeError, match="iterable"):
                use(one, "disk")
        with pytest.raises(TypeError, match="iterable"):
            store.read_many(one)
    assert store.info("a").place == "host"


def test_out_of_range_ids_and_lsns_are_rejected(store: remanent.Store, directory: str) -> None:
    for number in (-1, 1 << 64):
        with pytest.raises(ValueError, match="2\\^64"):
            store[number]
        with pytest.raises(ValueError, match="2\\^64"):
            store.restore(number)
    with pytest.raises(TypeError, match="float"):
        store[1.0]  # type: ignore[index]
    with pytest.raises(TypeError, match="callable"):
        remanent.Store(directory + "2", memory={"page_memory": 5})  # type: ignore[arg-type]
