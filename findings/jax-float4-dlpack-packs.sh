#!/usr/bin/env bash
# JAX 0.10.2, arrays of float4_e2m1fn on the CPU: the same array has four bytes for NumPy and two for DLPack.
#
# Seen: `nbytes` and `numpy.asarray` give one byte an element. `__dlpack__` gives a copy that is packed, two elements a
# byte, the first in the low half, as type code 17 with 4 bits and 1 lane. Asked for version 1.0 (`max_version=(1, 0)`), it
# still gives a capsule without a version, so it cannot say that the memory is a copy.
#
# What follows for a consumer: it must not compute the length of a DLPack tensor from the array's `nbytes`, nor compare the
# bytes of the two ways. The PyTorch of November 2026 (2.15.0) has its type of the same elements with 2 lanes, and refuses this
# one; JAX refuses lanes other than 1 in turn. So such weights cross between the two only as uint8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import ctypes
import struct

import jax.numpy as jnp
import numpy as np

array = jnp.asarray([0.5, 1, 2, 3]).astype("float4_e2m1fn")
assert array.nbytes == 4 and np.asarray(array).tobytes() == bytes([1, 2, 4, 5]), "one byte an element"

api = ctypes.pythonapi
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
capsule = array.__dlpack__(max_version=(1, 0))
name = api.PyCapsule_GetName(capsule)
assert name == b"dltensor", name
# DLTensor: data, device (kind, number), ndim, type (code, bits, lanes).
tensor = ctypes.string_at(api.PyCapsule_GetPointer(capsule, name), 24)
data, kind, number, ndim, code, bits, lanes = struct.unpack("<QiiiBBH", tensor)
assert (kind, ndim, code, bits, lanes) == (1, 1, 17, 4, 1), (kind, ndim, code, bits, lanes)
packed = ctypes.string_at(data, 2)
assert packed == bytes([0x21, 0x54]), packed.hex()
print("as stated: 4 bytes by NumPy, 2 by DLPack (0x21 0x54), a capsule without a version")
PYTHON
