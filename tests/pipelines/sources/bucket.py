"""A server of S3 on this machine, and a proxy before it that fails on purpose."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

Fault = Literal["500", "cut"]
"""What goes wrong with a request: an error of the server, or half an answer."""

ADDRESS = "s3://images/packed"


class Bucket:
    """Serves a folder as `ADDRESS`.

    Attributes:
        environment: for the processes that read.
        fault: chooses what goes wrong with a request, given the file's name and the number of the request.
        requests: of each file.
        faults: that were made, of each kind.
    """

    def __init__(self, folder: Path) -> None:
        from moto.server import ThreadedMotoServer  # takes long, and every process collects all tests

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        self.lock = threading.Lock()
        self.fault: Callable[[str, int], Fault | None] = lambda name, number: None
        self.requests, self.faults = Counter[str](), Counter[str]()
        self.send("POST", "/moto-api/reset")  # all servers of this process share their files
        self.send("PUT", "/images")
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                assert self.send("PUT", f"/images/packed/{file.relative_to(folder)}", file.read_bytes())[0] == 200

        class Handler(_Handler):
            owner = self

        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, args=(0.05,), daemon=True).start()
        self.environment = {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",  # of botocore, which waits longer before each
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_port}",
        }

    def send(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        """Status, headers and body of the server's answer."""
        connection = HTTPConnection(*self._moto.get_host_and_port(), timeout=30)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        found = response.status, {key.title(): value for key, value in response.getheaders()}, response.read()
        connection.close()
        return found

    def close(self) -> None:
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
        status, headers, body = bucket.send(self.command, self.path, headers=dict(self.headers))
        self.send_response(status)
        for key in ("Content-Type", "Content-Range", "Last-Modified", "Etag", "Content-Length"):
            if key in headers:
                self.send_header(key, headers[key])
        self.end_headers()
        self.close_connection = fault == "cut"
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""
