"""A proxy in front of an object store, which counts requests and injects faults."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("503", "409", "cut", "lose", "truncate", "delay")
"""503: the store is busy. 409: another request conflicts. cut: the connection ends before the store has the request.
lose: the connection ends after that, so the answer is lost. truncate: the answer ends early. delay: it comes late."""


@dataclass
class Asked:
    """One request. ``path`` includes the query, ``nbytes`` is the size of the body."""

    method: str
    path: str
    nbytes: int

    @property
    def faults(self) -> Sequence[str]:
        """The faults that a store may answer with. Only a write can conflict with another one (409)."""
        return (
            FAULTS
            if self.method == "PUT" and "uploadId" not in self.path
            else [fault for fault in FAULTS if fault != "409"]
        )


@dataclass
class StoreProxy:
    """The proxy. ``spoil`` returns the fault for a request: one of ``FAULTS``, or None."""

    backend: str
    spoil: Callable[[Asked], str | None] = lambda asked: None
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> StoreProxy:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(proxy: StoreProxy) -> type[BaseHTTPRequestHandler]:
    backend = urlsplit(proxy.backend)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = Asked(self.command, self.path, len(body))
            proxy.asked.append(asked)
            fault = proxy.spoil(asked)
            if fault == "cut":
                self._hang_up()
                return
            if fault in ("503", "409", "403"):
                self._send(int(fault), {}, b"<Error><Code>AsTheTestWants</Code></Error>")
                return
            if fault == "delay":
                time.sleep(0.2)
            connection = http.client.HTTPConnection(str(backend.hostname), backend.port, timeout=60)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                data, headers = answer.read(), dict(answer.getheaders())
            finally:
                connection.close()
            if fault == "lose":
                self._hang_up()
            else:
                self._send(answer.status, headers, data, len(data) // 2 if fault == "truncate" and data else None)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def _send(self, status: int, headers: dict[str, str], data: bytes, only: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", headers.get("content-length", "0"))
            self.send_header("Connection", "close")  # leave no idle connection behind
            self.close_connection = True
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:only])
            if only is not None:
                self._hang_up()

        def _hang_up(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
