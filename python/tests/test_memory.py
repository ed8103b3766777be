"""Leases, and the store's memory as other libraries see it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import remanent


def test_lease_is_unchanged_and_read_only(store: remanent.Store) -> None:
    store["a"] = b"then"
    with store.lease("a") as lease:
        view = memoryview(lease)
        assert bytes(view) == b"then" and view.readonly and lease.nbytes == 4
        array = np.asarray(lease)
        with pytest.raises(ValueError):
            array[0] = 1
        with pytest.raises((ValueError, TypeError)):
            array.flags.writeable = True
        store["a"] = b"now!"
        assert bytes(array) == b"then" and lease.epoch < store.info("a").epoch
        with pytest.raises(BufferError):
            lease.end()
        with pytest.raises(remanent.InUseError):
            store.close()
        view.release()
        del array
    with pytest.raises(remanent.ClosedError):
        bytes(lease)
    assert store["a"] == b"now!" and store.audit() == []


def test_lease_has_dtype_and_shape(store: remanent.Store) -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    with store.batch() as batch:
        batch.create(array, key="x", metadata={"dtype": "I64", "shape": [2, 3]})
    with store.lease("x") as lease:
        assert lease.shape == (2, 3) and lease.dtype == "int64"
        leased = lease.numpy()
        assert (leased == array).all() and not leased.flags.owndata
        del leased
    with store.lease("x", "float32", [12]) as lease:
        assert memoryview(lease).format == "f" and memoryview(lease).shape == (12,)
    with pytest.raises(ValueError):
        store.lease("x", "float32", [13])


def test_ended_lease_returns_no_array(store: remanent.Store) -> None:
    store["k"] = bytes(8)
    lease = store.lease("k")
    lease.end()
    # If an object refuses its buffer, NumPy would create an array that contains the object itself.
    with pytest.raises(remanent.ClosedError):
        lease.numpy()


def test_lease_dlpack_copies_by_default(store: remanent.Store) -> None:
    store["a"] = b"then"
    lease = store.lease("a")
    copied = np.from_dlpack(lease)
    copied[0] = 0
    assert bytes(lease) == b"then"
    shared = np.from_dlpack(lease, copy=False)
    assert not shared.flags.writeable and bytes(shared) == b"then"
    with pytest.raises(BufferError):
        lease.end()
    with pytest.raises(BufferError):
        lease.__dlpack__(copy=False)
    del shared, copied
    gc.collect()
    lease.end()
    assert store.audit() == []


def test_unconsumed_capsules_are_freed(store: remanent.Store) -> None:
    store["a"] = b"then"
    lease = store.lease("a")
    for _ in range(3):
        lease.__dlpack__(max_version=(1, 0), copy=False)
        lease.__dlpack__(max_version=(1, 0))
        store.array("a").__dlpack__()
    with pytest.raises(BufferError):
        lease.__dlpack__(stream=7)
    with pytest.raises(BufferError):
        lease.__dlpack__(dl_device=(2, 0))
    lease.end()


def test_arrays_are_aligned_to_64_bytes(store: remanent.Store) -> None:
    for length in (0, 1, 64, 65, 100_000):
        store["a"] = bytes(length)
        array = store.array("a").numpy()
        assert array.nbytes == length and (length == 0 or array.ctypes.data % 64 == 0)


def test_dtypes_without_buffer_format_use_dlpack(store: remanent.Store) -> None:
    store["a"] = bytes(8)
    with pytest.raises(BufferError, match="bfloat16"):
        memoryview(store.array("a", "bfloat16"))
    with store.lease("a", "bfloat16") as lease, pytest.raises(BufferError, match="bfloat16"):
        memoryview(lease)


def test_gpu_array_is_rejected_by_host_store(store: remanent.Store) -> None:
    class Pretender:
        __cuda_array_interface__ = {"data": (4096, False), "shape": (4,), "typestr": "<f4", "version": 3}

    with store.batch() as batch:
        page = batch.create(16)
        with pytest.raises(remanent.MemoryRefusedError):
            batch.write(page, 0, Pretender())
        with pytest.raises(BufferError):
            batch.scatter(page, [0], Pretender(), width=1)
    Pretender.__cuda_array_interface__["strides"] = (8,)
    with store.batch() as batch, pytest.raises(BufferError, match="contiguous"):
        batch.create(Pretender())


def test_descriptor_of_host_page_is_rejected(store: remanent.Store) -> None:
    store["a"] = b"1234"
    with store.lease("a") as lease, pytest.raises(remanent.DeviceError, match="memory of the host alone"):
        lease.descriptor()
    with store.pin("a") as pin, pytest.raises(remanent.DeviceError, match="memory of the host alone"):
        pin.descriptor()
