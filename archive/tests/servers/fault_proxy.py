"""An HTTP proxy that injects faults between the clients of an object store and the store."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable

# The timeout of a request in the clients, in seconds.
REQUEST_SECONDS = 2.0
FAULTS = (
    "delayed, at times beyond the timeout", "answer throttled", "cut before the request", "cut within the request",
    "carried out, cut before the answer", "cut within the head of the answer", "cut within the body of the answer",
    "never answered", "carried out, never answered", "503, not carried out", "429, not carried out",
    "carried out, then 503", "carried out, then 429", "503, carried out later",
)


class Proxy:
    """Forwards requests to a server. Injects a fault into a share of the requests: `rate`, or three times `rate` for PUT
    requests. The seed and the number of a request determine the fault."""

    def __init__(self, port: int, seed: int) -> None:
        self._server, self._seed = ("127.0.0.1", port), seed
        self.rate, self.requests, self.in_flight = 0.0, 0, 0
        self.injected: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # Connections break, because clients are killed and close connections after a timeout.
        with contextlib.suppress(OSError), client:
            head, _, body = read(client, lambda got: b"\r\n\r\n" in got).partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            length = sum(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:"))
            body += read(client, lambda got: len(body) + len(got) >= length)
            if not head or len(body) < length:
                return
            # Each connection carries one request, so that the end of the connection marks the end of the answer.
            lines = [line for line in lines if not line.lower().startswith(b"connection:")]
            request = b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body
            with self._lock:
                self.requests += 1
                self.in_flight += 1
                chance = random.Random(f"{self._seed} {self.requests}")
                method = head.split(b" ")[0].decode()
                rate = 3 * self.rate if method == "PUT" else self.rate
                fault = chance.choice(FAULTS) if chance.random() < rate else "none"
                self.injected[fault, method] += 1
            try:
                self._handle(fault, client, request, chance.uniform(0.05, 2 * REQUEST_SECONDS))
            finally:
                with self._lock:
                    self.in_flight -= 1

    def _handle(self, fault: str, client: socket.socket, request: bytes, delay: float) -> None:
        if fault[:3] in ("503", "429"):
            refuse(client, fault[:3])
        if fault in ("delayed, at times beyond the timeout", "503, carried out later"):
            time.sleep(delay)
        if fault == "never answered":
            time.sleep(1.5 * REQUEST_SECONDS)
        if fault in ("cut before the request", "never answered", "503, not carried out", "429, not carried out"):
            return
        with socket.create_connection(self._server, timeout=60) as server:
            if fault == "cut within the request":
                return server.sendall(request[:len(request) // 2])
            server.sendall(request)
            answer = read(server, lambda got: False)
        head = answer.index(b"\r\n\r\n") + 4
        if fault == "carried out, never answered":
            time.sleep(1.5 * REQUEST_SECONDS)
        elif fault.startswith("carried out, then"):
            refuse(client, fault[-3:])
        elif fault == "cut within the head of the answer":
            client.sendall(answer[:head // 2])
        elif fault == "cut within the body of the answer":
            client.sendall(answer[:(head + len(answer)) // 2])
        elif fault == "answer throttled":
            for start in range(0, len(answer), len(answer) // 10 + 1):
                client.sendall(answer[start:start + len(answer) // 10 + 1])
                time.sleep(0.04)
        elif fault == "none" or fault.startswith("delayed"):
            client.sendall(answer)


def read(source: socket.socket, is_complete: Callable[[bytearray], bool]) -> bytes:
    got = bytearray()
    while not is_complete(got) and (piece := source.recv(1 << 16)):
        got += piece
    return bytes(got)


def refuse(client: socket.socket, status: str) -> None:
    reason = {"503": "Service Unavailable", "429": "Too Many Requests"}[status]
    client.sendall(f"HTTP/1.1 {status} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
