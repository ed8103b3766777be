#!/usr/bin/env bash
# pyarrow 26.0.1, AzureFileSystem against Azurite 3.37.0: two writers of one blob both succeed, and the blob has blocks of both.
#
# Seen, first: one writer stages a block and pauses. A second writer writes two blocks and closes; the blob is its own. The first
# writer continues with its second block and closes without an error: the blob is now the second writer's first block and the
# first writer's second block. No writer wrote this blob. The ID of a block is its position ("00000-arrow" and so on); a commit
# takes the committed block of that ID if none is staged. obstore 0.12.1 has random IDs: in the same case, its first writer fails
# with InvalidBlockList, and the blob stays the second writer's.
#
# Second: `open_output_stream` replaces an existing blob with an empty one before anything is written. obstore's writer leaves
# the blob until it closes.
#
# What follows for a user: a lock that expires while its holder is paused does not protect such a blob, not even as "the last
# writer wins", and readers meet an empty blob during each rewrite. Give each writer its own blob name, and publish the name with
# a conditional put.
#
# Needs npm; a few minutes.
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1 obstore==0.12.1 azure-storage-blob==12.31.1 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }
npm install --silent --no-fund --no-audit --prefix "$folder" azurite@3.37.0 node@22.23.3 >"$folder/log" 2>&1 ||
    { cat "$folder/log"; exit 1; }
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/node_modules/.bin/node" "$folder/node_modules/azurite/dist/src/blob/main.js" --blobHost 127.0.0.1 --blobPort "$port" \
    --location "$folder/blobs" --silent --skipApiVersionCheck --disableTelemetry >"$folder/log" 2>&1 &
server=$!
"$folder/venv/bin/python" - "$port" <<'PYTHON'
import sys
import time

import obstore
import pyarrow.fs
from azure.core.exceptions import ResourceNotFoundError, ServiceRequestError
from azure.storage.blob import ContainerClient
from obstore.store import AzureStore

ACCOUNT = "devstoreaccount1"
# Azurite's published key.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BLOCK = 11 << 20
host = f"127.0.0.1:{sys.argv[1]}"
endpoint = f"http://{host}/{ACCOUNT}"
container = ContainerClient(endpoint, "container", credential=KEY, retry_total=0)
for attempt in range(300):
    try:
        container.create_container()
        break
    except ServiceRequestError:
        assert attempt < 299, "the server does not answer"
        time.sleep(0.5)
store = AzureStore(
    "container", account_name=ACCOUNT, account_key=KEY, endpoint=endpoint, client_options={"allow_http": True}
)
arrow = pyarrow.fs.AzureFileSystem(
    ACCOUNT, account_key=KEY, blob_storage_authority=host, dfs_storage_authority=host,
    blob_storage_scheme="http", dfs_storage_scheme="http",
)


def with_arrow(name):
    return arrow.open_output_stream(f"container/{name}")


def with_obstore(name):
    return obstore.open_writer(store, name, buffer_size=BLOCK)


def stage(writer, letter, name):
    """Writes a block and waits until the server has staged it."""
    writer.write(letter * BLOCK)
    blob = container.get_blob_client(name)
    for _ in range(300):
        try:
            if blob.get_block_list("uncommitted")[1]:
                return
        except ResourceNotFoundError:
            pass
        time.sleep(0.1)
    raise AssertionError("no block was staged")


def content(name):
    data = container.download_blob(name).readall()
    parts = [data[at:at + BLOCK] for at in range(0, len(data), BLOCK)]
    assert all(part == part[:1] * BLOCK for part in parts)
    return b"".join(part[:1] for part in parts)


def pause_and_resume(open_writer, name):
    first = open_writer(name)
    stage(first, b"A", name)
    second = open_writer(name)
    second.write(b"B" * BLOCK)
    second.write(b"B" * BLOCK)
    second.close()
    assert content(name) == b"BB", content(name)
    first.write(b"A" * BLOCK)
    first.close()
    return content(name)


assert pause_and_resume(with_arrow, "one") == b"BA", content("one")
try:
    pause_and_resume(with_obstore, "two")
except OSError as error:
    assert "InvalidBlockList" in str(error), error
else:
    raise AssertionError("obstore's first writer must fail")
assert content("two") == b"BB", content("two")

old = container.upload_blob("three", b"old", overwrite=True)
with_obstore("three").write(b"new")
assert old.get_blob_properties().size == 3
stream = with_arrow("three")
assert old.get_blob_properties().size == 0, "the blob is not empty"
stream.close()
print("as stated: blocks of two writers in one blob, both without an error; an empty blob after the open")
PYTHON
