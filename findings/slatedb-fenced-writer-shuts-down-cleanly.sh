#!/usr/bin/env bash
# slatedb 0.17.0 (Python) on a local folder: a writer that was fenced by a newer one loses an accepted `put`, and its
# `shutdown` reports success.
#
# Seen: `put` returns a handle, and the newer writer never sees the value. Once the old writer has noticed the newer one in the
# background, `shutdown`, which is documented to flush outstanding work, returns without an error; `status()` and the handle's
# `await_durable` state FENCED. If `shutdown` is the first call that meets the newer writer, it raises Error.Closed with the
# reason FENCED, but then `status()` and `await_durable` state CLEAN. Awaiting the handle is the only call that fails both times.
#
# What follows for a user: await the handle of the last write before `shutdown`, and treat each Error.Closed from it as a lost
# write, whatever its reason. A `shutdown` without an error does not mean that the writes are stored.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet slatedb==0.17.0 2>"$folder/log" || { cat "$folder/log"; exit 1; }
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import sys

from slatedb.uniffi import CloseReason, DbBuilder, Error, ObjectStore, Settings

files = ObjectStore.resolve("file:///")


async def reason(awaitable):
    try:
        await awaitable
    except Error.Closed as error:
        return error.reason
    return None


async def lose_a_write(path, has_noticed):
    settings = Settings.default()
    settings.set("manifest_poll_interval", '"60s"')
    settings.set("flush_interval", '"100ms"' if has_noticed else '"60s"')
    builder = DbBuilder(path, files)
    builder.with_settings(settings)
    old = await builder.build()
    await old.put(b"key", b"first")
    await old.flush()
    new = await DbBuilder(path, files).build()
    write = await old.put(b"key", b"lost")
    for _ in range(200 if has_noticed else 0):
        if old.status().close_reason is not None:
            break
        await asyncio.sleep(0.05)
    shutdown = await reason(old.shutdown())
    seen = shutdown, old.status().close_reason, await reason(write.await_durable())
    await new.shutdown()
    reopened = await DbBuilder(path, files).build()
    assert await reopened.get(b"key") == b"first", "the write is stored"
    await reopened.shutdown()
    return seen


async def main():
    folder = sys.argv[1].lstrip("/")
    noticed = await lose_a_write(f"{folder}/one", True)
    assert noticed == (None, CloseReason.FENCED, CloseReason.FENCED), noticed
    first = await lose_a_write(f"{folder}/two", False)
    assert first == (CloseReason.FENCED, CloseReason.CLEAN, CloseReason.CLEAN), first


asyncio.run(main())
print("as stated: two lost writes; `shutdown` returned for one, and the reason was CLEAN for the other")
PYTHON
