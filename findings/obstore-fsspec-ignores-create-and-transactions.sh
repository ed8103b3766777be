#!/usr/bin/env bash
# obstore 0.12.1 with fsspec 2026.9.0: obstore's file system for fsspec replaces a file that may only be created, and keeps the
# writes of a transaction that was rolled back. Neither raises an exception.
#
# Seen with FsspecStore("file") and FsspecStore("memory"):
# - `pipe_file(path, new, mode="create")` and `put_file(..., mode="create")` replace an existing file; `pipe_file` returns the
#   new ETag. fsspec's own memory file system raises FileExistsError for both calls, and `obstore.put(mode="create")` raises
#   AlreadyExistsError.
# - An exception within `with fs.transaction:` keeps the new bytes. fsspec's memory file system keeps the old ones.
# - An exception within `with fs.open(path, "wb"):` replaces the old object with the part written so far. The same package's
#   `obstore.open_writer` keeps the old object.
#
# What follows for a user: `obstore.fsspec.register("s3")` replaces s3fs for every caller in the process, and with it the
# create-if-absent of s3fs 2026.9.0, which sends If-None-Match for `mode="create"`. Write locks and commit markers with
# `obstore.put(mode="create")`. `open(path, "xb")` is no substitute, but at least it raises ValueError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet obstore==0.12.1 fsspec==2026.9.0 2>"$folder/log" || { cat "$folder/log"; exit 1; }
mkdir "$folder/data"
"$folder/venv/bin/python" - "$folder/data" <<'PYTHON'
import sys

import fsspec
import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.fsspec import FsspecStore
from obstore.store import LocalStore

folder = sys.argv[1]


class Stop(Exception):
    pass


def create(call):
    try:
        call()
    except (FileExistsError, AlreadyExistsError):
        return "exists"
    return "replaced"


def interrupt(context, write):
    try:
        with context as entered:
            write(entered)
            raise Stop
    except Stop:
        pass


def outcomes(fs, path):
    with open(f"{folder}/source", "wb") as source:
        source.write(b"new")

    def write_new(_):
        with fs.open(path, "wb") as file:
            file.write(b"new")

    fs.pipe_file(path, b"old")
    piped = create(lambda: fs.pipe_file(path, b"new", mode="create")), fs.cat_file(path)
    fs.pipe_file(path, b"old")
    put = create(lambda: fs.put_file(f"{folder}/source", path, mode="create")), fs.cat_file(path)
    fs.pipe_file(path, b"old")
    interrupt(fs.transaction, write_new)
    return piped, put, fs.cat_file(path)


def part(open_writer, read):
    interrupt(open_writer(), lambda writer: writer.write(b"a part of it"))
    return bytes(read())


own = outcomes(fsspec.filesystem("memory"), "/memory")
assert own == (("exists", b"old"), ("exists", b"old"), b"old"), own
for fs, path in ((FsspecStore("file"), f"{folder}/file"), (FsspecStore("memory"), "memory")):
    seen = outcomes(fs, path)
    assert seen == (("replaced", b"new"), ("replaced", b"new"), b"new"), seen
    fs.pipe_file(path, b"old")
    seen = part(lambda: fs.open(path, "wb"), lambda: fs.cat_file(path))
    assert seen == b"a part of it", seen
    try:
        fs.open(path, "xb")
    except ValueError:
        pass
    else:
        raise AssertionError("xb is accepted")

store = LocalStore(folder)
obstore.put(store, "plain", b"old")
assert create(lambda: obstore.put(store, "plain", b"new", mode="create")) == "exists"
seen = part(lambda: obstore.open_writer(store, "plain"), lambda: obstore.get(store, "plain").bytes())
assert seen == b"old", seen
print("as stated: `mode=\"create\"` replaces, a transaction rolled back keeps its write, an interrupted file is stored")
PYTHON
