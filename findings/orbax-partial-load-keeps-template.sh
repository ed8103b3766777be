#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 with JAX 0.10.2 on the CPU, `orbax.checkpoint.v1`: three loads and saves that report success and
# return another value than the one that was saved.
#
# Seen, first: with `partial_load=True`, a leaf that only the template has is returned as if it was loaded. A checkpoint of
# {"s"} loaded with a template {"s", "t"} gives the template's own array for "t" (the same object); a template {"t"}, of which
# nothing is in the checkpoint, gives {"t"}. Neither raises an exception. Without the option, the load raises ValueError.
#
# Second: a template's None gives None for a leaf that was saved, with and without `partial_load`, for an array and for an int.
#
# Third: a `dtype` in the context's storage options, meant for arrays, also changes a Python int: 7 saved with float32 is
# loaded as the float 7.0. With a template of an int it is loaded as 7.
#
# What follows for a consumer: compare the template's paths with the checkpoint's metadata before a partial load, give types
# rather than None, and set the storage dtype for each array (`scoped_storage_options_creator`), not for the whole tree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import sys

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

folder = sys.argv[1]
ocp.save(f"{folder}/one", {"s": jnp.asarray([1.0, 2.0])})
template = {"s": jnp.zeros(2), "t": jnp.asarray([9.0])}
try:
    ocp.load(f"{folder}/one", template)
except ValueError as error:
    assert "do not match" in str(error), error
else:
    raise AssertionError("without partial_load, the load must fail")
partial = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
with ocp.Context(pytree_options=partial):
    loaded = ocp.load(f"{folder}/one", template)
    nothing = ocp.load(f"{folder}/one", {"t": template["t"]})
assert loaded["s"].tolist() == [1.0, 2.0] and loaded["t"] is template["t"], loaded
assert nothing["t"] is template["t"], nothing

ocp.save(f"{folder}/two", {"array": jnp.asarray([1.0, 2.0]), "number": 3})
for options in (ocp.options.PyTreeOptions(), partial):
    with ocp.Context(pytree_options=options):
        loaded = ocp.load(f"{folder}/two", {"array": None, "number": None})
    assert loaded == {"array": None, "number": None}, loaded

saving = ocp.options.ArrayOptions.Saving
storage = ocp.options.ArrayOptions(saving=saving(storage_options=saving.StorageOptions(dtype=np.float32)))
with ocp.Context(array_options=storage):
    ocp.save(f"{folder}/three", {"number": 7})
number = ocp.load(f"{folder}/three")["number"]
assert type(number) is float and number == 7.0, repr(number)
assert type(ocp.load(f"{folder}/three", {"number": 0})["number"]) is int
print("as stated: the template's own leaf, None for two saved leaves, and 7.0 for 7")
PYTHON
