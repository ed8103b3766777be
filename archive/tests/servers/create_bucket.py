#!/usr/bin/env python3
"""Creates a bucket or container on a server that is starting: create_bucket.py s3|azure ENDPOINT USER KEY NAME.

Retries for two minutes. Uses only the standard library.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

SECONDS = 120


def digest(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def s3(endpoint: str, user: str, key: str, name: str) -> urllib.request.Request:
    """Returns a CreateBucket request signed with Signature Version 4."""
    now = datetime.now(UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    scope = f"{day}/us-east-1/s3/aws4_request"
    empty = hashlib.sha256(b"").hexdigest()
    host = endpoint.removeprefix("http://")
    signed = "host;x-amz-content-sha256;x-amz-date"
    canonical = f"PUT\n/{name}\n\nhost:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{stamp}\n\n{signed}\n{empty}"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    secret = f"AWS4{key}".encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        secret = digest(secret, part)
    signature = digest(secret, text).hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={user}/{scope}, SignedHeaders={signed}, Signature={signature}"
    headers = {"x-amz-date": stamp, "x-amz-content-sha256": empty, "Authorization": authorization}
    return urllib.request.Request(f"{endpoint}/{name}", method="PUT", headers=headers)


def azure(endpoint: str, user: str, key: str, name: str) -> urllib.request.Request:
    """Returns a Create Container request signed with a shared key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2021-12-02"
    resource = f"/{user}/{user}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    signature = base64.b64encode(digest(base64.b64decode(key), text)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {user}:{signature}",
               "Content-Length": "0"}
    return urllib.request.Request(f"{endpoint}/{user}/{name}?restype=container", method="PUT", headers=headers)


def main(service: str, endpoint: str, user: str, key: str, name: str) -> int:
    deadline = time.monotonic() + SECONDS
    while True:
        request = (s3 if service == "s3" else azure)(endpoint, user, key, name)
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return 0
        except urllib.error.HTTPError as error:
            problem = f"{error}: {error.read().decode(errors='replace')}"
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            print(f"{endpoint}/{name} cannot be created: {problem}", file=sys.stderr)
            return 1
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
