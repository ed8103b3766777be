#!/usr/bin/env bash
# tensorstore 0.1.86, KvStore with the drivers "memory", "file" and "ocdbt": a conditional write that fails raises no exception,
# and its result, used as the next condition, makes the next write unconditional.
#
# Seen, first: `write(key, value, if_equal=generation)` with an outdated generation stores nothing and returns a result with the
# generation b"". `if_equal=b""` is no condition at all. So a writer that passes the generation of its last result to its next
# write replaces the value of another writer, or deletes it with the value None. A failed delete also returns b""; a successful
# one returns b"\x02", which as a condition means that the key is missing. The documentation of `write` has neither value.
#
# Second: in a transaction, the same failed condition makes `commit_sync` raise ValueError (ABORTED, "Generation mismatch").
# With the driver "memory", no key of the transaction is written. With "file" and "ocdbt", all other keys are written. With
# `Transaction(atomic=True)`, "ocdbt" writes none, and "file" rejects a transaction of several keys.
#
# What follows for a user: treat an empty generation as a failure, and read the key again before the next write. After an error
# of `commit_sync`, assume that some keys were written unless the transaction is atomic. Tests with "memory" do not show it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorstore==0.1.86 numpy==2.4.6 ml_dtypes==0.6.0 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import tensorstore as ts

DRIVERS = {
    "memory": {"driver": "memory"},
    "file": {"driver": "file", "path": f"{sys.argv[1]}/files/"},
    "ocdbt": {"driver": "ocdbt", "base": {"driver": "file", "path": f"{sys.argv[1]}/ocdbt/"}},
}


def write(store, key, value, condition=None):
    return store.write(key, value, if_equal=condition).result().generation


def value(store, key):
    found = store.read(key).result()
    return found.value if found.state == "value" else None


def pass_on(store):
    """Writes on the condition of the last result, after another writer has replaced the value."""
    mine = write(store, "key", b"mine")
    write(store, "key", b"other")
    failed = write(store, "key", b"second", mine)
    after_first = failed, value(store, "key")
    write(store, "key", b"third", failed)
    after_second = value(store, "key")
    deletes = write(store, "key", None, mine), write(store, "key", None, failed)
    return after_first, after_second, deletes, value(store, "key")


def commit(store, name, atomic):
    mine = write(store, f"{name}key", b"mine")
    write(store, f"{name}key", b"other")
    transaction = ts.Transaction(atomic=atomic)
    inside = store.with_transaction(transaction)
    try:
        for key in ("a", "b"):
            inside.write(name + key, b"new").result()
        inside.write(f"{name}key", b"mine", if_equal=mine).result()
        transaction.commit_sync()
    except ValueError as error:
        reason = "mismatch" if "Generation mismatch" in str(error) else "refused"
    else:
        reason = None
    assert value(store, f"{name}key") == b"other"
    return reason, value(store, f"{name}a"), value(store, f"{name}b")


EXPECTED = {
    "memory": (("mismatch", None, None), ("mismatch", None, None)),
    "file": (("mismatch", b"new", b"new"), ("refused", None, None)),
    "ocdbt": (("mismatch", b"new", b"new"), ("mismatch", None, None)),
}
for driver, spec in DRIVERS.items():
    store = ts.KvStore.open(spec).result()
    seen = pass_on(store)
    assert seen == ((b"", b"other"), b"third", (b"", b"\x02"), None), (driver, seen)
    seen = commit(store, "plain/", False), commit(store, "atomic/", True)
    assert seen == EXPECTED[driver], (driver, seen)
print("as stated: b\"\" after a failed condition is no condition; an aborted commit writes the other keys, except in memory")
PYTHON
