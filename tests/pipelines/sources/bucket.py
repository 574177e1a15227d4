"""A server of S3 on this machine, and a proxy before it that fails on purpose."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

Fault = Literal["500", "InvalidToken", "cut", "slow", "half", "changed"]
"""What goes wrong with a request.

An error of the server; its refusal of a token; half an answer; no answer until the end of the test; half an answer, and
no more until then; an answer with a wrong byte.
"""

NAME = "images"
ADDRESS = f"s3://{NAME}/packed"


class Bucket:
    """Serves a folder as `ADDRESS`.

    Attributes:
        environment: for the processes that read.
        fault: chooses what goes wrong with a request, given the file's name and the number of the request.
        requests: of each file.
        whole: requests of a file's whole bytes.
        sent: bytes of all files.
        restarts: of the server.
    """

    def __init__(self, folder: Path) -> None:
        from moto.server import ThreadedMotoServer  # takes long, and every process collects all tests

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        self._upstream = self._moto.get_host_and_port()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.reset()
        self._send("POST", "/moto-api/reset")  # all servers of this process share their files
        self._send("PUT", f"/{NAME}")
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                sent = self._send("PUT", f"/{NAME}/packed/{file.relative_to(folder)}", file.read_bytes())
                assert sent[0] == 200
        bucket = self

        class Handler(_Handler):
            owner = bucket

        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, args=(0.05,), daemon=True).start()
        self.environment = {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_port}",
        }

    def reset(self) -> None:
        """Serve without faults; count from 0."""
        self.over.set()
        with self.lock:
            self.over = threading.Event()
            self.fault: Callable[[str, int], Fault | None] = lambda name, number: None
            self.requests: Counter[str] = Counter()
            self.whole: Counter[str] = Counter()
            self.faults: Counter[str] = Counter()
            self.sent = 0
            self.restarts = 0

    def _send(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        connection = HTTPConnection(*self._upstream, timeout=30)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        headers_found = {key.title(): value for key, value in response.getheaders()}
        found = response.status, headers_found, response.read()
        connection.close()
        return found

    def close(self) -> None:
        self.over.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()


class _Handler(BaseHTTPRequestHandler):
    """Hands a request on, or does what `Bucket.fault` says."""

    owner: Bucket
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        bucket, name = self.owner, self.path.partition("?")[0].rpartition("/")[2]
        with bucket.lock:
            bucket.requests[name] += 1
            fault = bucket.fault(name, bucket.requests[name])
            bucket.faults[str(fault)] += 1
        if fault == "500":
            self.send_error(500)
            return
        if fault == "InvalidToken":
            told = b"<Error><Code>InvalidToken</Code><Message>The provided token is malformed.</Message></Error>"
            self.send_response(400)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told if self.command == "GET" else b"")
            return
        if fault == "slow":
            bucket.over.wait(3600)
        try:
            status, headers, body = bucket._send(self.command, self.path, headers=dict(self.headers))
        except OSError:  # the server is down
            self.close_connection = True
            return
        self.send_response(status)
        for key in ("Content-Type", "Content-Range", "Last-Modified", "Etag", "Content-Length"):
            if key in headers:
                self.send_header(key, headers[key])
        self.end_headers()
        if fault == "changed" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "half":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            bucket.over.wait(3600)
            self.close_connection = True
            return
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)
        with bucket.lock:
            bucket.sent += len(body)
            bucket.whole[name] += headers.get("Content-Range", "").endswith(f"/{len(body)}")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""
