"""Where ranks meet there may be nobody, or somebody else."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peclr_dali.errors import UserError
from peclr_dali.train.distributed.rendezvous import connect
from tests.train import ranks


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
    rank: int, port: int, log: Path, *, address: str = "127.0.0.1", agent: bool = False, limit_s: float = 2.0
) -> str:
    """What a rank prints that cannot meet the others."""
    environment = {
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent),
    }  # fmt: skip
    log.unlink(missing_ok=True)
    printed = ranks.finish(ranks.start_ranks(1, _connect, environment, limit_s, log=log), log, code=2)
    assert len(printed.splitlines()) == 1, printed
    return printed


def _connect(environment: dict[str, str], limit_s: float) -> None:
    os.environ |= environment
    try:
        connect(int(environment["RANK"]), 2, limit_s)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


@pytest.mark.parametrize(
    ("answer", "agent"),
    [(b"", False), (b"", True), (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False)],
    ids=["silent", "silent, by torchrun", "HTTP"],
)
def test_another_program_where_the_ranks_meet_ends_in_one_line(answer: bytes, agent: bool, tmp_path: Path) -> None:
    with listener(answer) as port:
        line = try_to_connect(1, port, tmp_path / "log", agent=agent)
    assert line.startswith(f"error: no contact with the host where the ranks meet, 127.0.0.1:{port}, within 2 s (run.")
    assert "something listens there, but does not answer as the ranks' store" in line


def test_a_port_of_another_program_ends_in_one_line(tmp_path: Path) -> None:
    with listener(b"") as port:
        assert f"error: MASTER_PORT = {port} on " in try_to_connect(0, port, tmp_path / "log", limit_s=300.0)


def test_no_store_where_the_ranks_meet_ends_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        line = try_to_connect(1, bound.getsockname()[1], tmp_path / "log")
    assert "Connection refused. Is rank 0 running, and are MASTER_ADDR and MASTER_PORT the same on all ranks?" in line
    line = try_to_connect(1, 29500, tmp_path / "log", address="nobody.invalid")
    assert "nobody.invalid:29500" in line
    assert "Name or service not known. Is rank 0 running" in line
