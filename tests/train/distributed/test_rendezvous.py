"""Where ranks meet there may be nobody, or somebody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONNECT = """
from errors import UserError
from train.distributed.rendezvous import connect
try:
    connect({rank}, 2, {limit_s})
except UserError as error:
    sys.stderr.write(f"error: {{error}}\\n")
    sys.exit(2)
"""


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """Another program: it accepts every connection, says its word, and keeps the connection open."""
    connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            connections.append(connection)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def try_to_connect(
    rank: int, port: int, *, address: str = "127.0.0.1", agent: bool = False, limit_s: float = 2.0
) -> str:
    """What a rank prints that cannot meet the others."""
    environment = {
        **os.environ, "MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent),
    }  # fmt: skip
    program = "import sys" + CONNECT.format(rank=rank, limit_s=limit_s)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("answer", "agent"),
    [(b"", False), (b"", True), (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False)],
    ids=["silent", "silent, by torchrun", "HTTP"],
)
def test_another_program_where_the_ranks_meet(answer: bytes, agent: bool) -> None:
    with listener(answer) as port:
        line = try_to_connect(1, port, agent=agent)
    assert line.startswith(f"error: no contact with the host where the ranks meet, 127.0.0.1:{port}, within 2 s (run.")
    assert "something listens there, but does not answer as the ranks' store" in line


def test_a_port_that_another_program_holds() -> None:
    with listener(b"") as port:
        assert f"error: MASTER_PORT = {port} on " in try_to_connect(0, port, limit_s=300.0)


def test_nobody_where_the_ranks_meet() -> None:
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        assert "nothing listens there" in try_to_connect(1, bound.getsockname()[1])
    assert "knows no address of nobody.invalid; look at MASTER_ADDR" in try_to_connect(
        1, 29500, address="nobody.invalid"
    )
