#!/usr/bin/env bash
# cloudpathlib 0.26.0 with an S3 server (moto 5.2.5): whether `close` detects that another client has replaced the object
# depends on what Python still buffers.
#
# Seen: a CloudPath is opened with "ab", and five bytes are written. Two seconds later, another client replaces the object. Then
# the first client closes. If it had called `flush` after its write, `close` raises OverwriteNewerCloudError, and the object of
# the other client stays. If not, `close` uploads without an error, and the other client's bytes are lost. A write larger than
# the buffer needs no `flush`, so the same program detects the conflict for a long record and not for a short one.
#
# The cause: the guard compares the modification time of the local copy at `close` with the object's time. Bytes that `close`
# itself writes make the local copy newer than any object.
#
# What follows for a user: OverwriteNewerCloudError does not protect an object with several writers; use a conditional put.
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet cloudpathlib==0.26.0 boto3==1.43.117 \
    'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.2 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/moto_server" -H 127.0.0.1 -p "$port" >"$folder/log" 2>&1 &
server=$!
AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_DEFAULT_REGION=us-east-1 TMPDIR="$folder" \
    "$folder/venv/bin/python" - "http://127.0.0.1:$port" <<'PYTHON'
import sys
import time

import boto3
from botocore.exceptions import EndpointConnectionError
from cloudpathlib import S3Client
from cloudpathlib.exceptions import OverwriteNewerCloudError

# A path whose upload failed repeats it when it is collected, and Python prints that error.
sys.unraisablehook = lambda _: None
other = boto3.client("s3", endpoint_url=sys.argv[1])
for attempt in range(100):
    try:
        other.create_bucket(Bucket="bucket")
        break
    except EndpointConnectionError:
        assert attempt < 99, "the server does not answer"
        time.sleep(0.5)
client = S3Client(endpoint_url=sys.argv[1])


def append(key, record, flush):
    other.put_object(Bucket="bucket", Key=key, Body=b"old,")
    file = client.CloudPath(f"s3://bucket/{key}").open("ab")
    file.write(record)
    if flush:
        file.flush()
    time.sleep(2)
    other.put_object(Bucket="bucket", Key=key, Body=b"other")
    try:
        file.close()
        detected = False
    except OverwriteNewerCloudError:
        detected = True
    return detected, other.get_object(Bucket="bucket", Key=key)["Body"].read()


assert append("flushed", b"mine!", True) == (True, b"other")
assert append("buffered", b"mine!", False) == (False, b"old,mine!")
assert append("long", bytes(1 << 20), False) == (True, b"other")
print("as stated: detected after a flush and for a long record, overwritten for a short one")
PYTHON
