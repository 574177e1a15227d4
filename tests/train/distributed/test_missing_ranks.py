"""Ranks that do not come, hang or die end the others within the time limit."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from peclr_dali.train.distributed.world import World, _choose_interface, described_world, joined
from peclr_dali.train.steps.micro_batches import GradientSums
from tests.train import ranks, tiny_run

LIMIT_S, LATER_S = 15.0, 30.0
"""Time limit of the ranks, and how much later they end at most."""


def finish_without(missing: int, world_size: int, target: Callable[..., None], *arguments: Any, log: Path) -> str:
    """What all ranks but one print, which end with an error."""
    processes = ranks.start_ranks(world_size, target, *arguments, log=log)
    try:
        others = [process for rank, process in enumerate(processes) if rank != missing]
        for process in others:
            process.join(300)
        assert all(process.exitcode not in (None, 0) for process in others), log.read_text()
    finally:
        ranks.kill(processes)
    return log.read_text()


def _exchange(what: str, began: str) -> None:
    """A loop of exchanges in which rank 1 gets into trouble."""
    world, layer = described_world("cpu"), torch.nn.Linear(1, 1)
    with joined(world, LIMIT_S):
        for step in range(10**6):
            if world.rank == 1 and step == 3:
                Path(began).write_text(str(time.time()))
                if what == "hangs":
                    time.sleep(1000)
                os.kill(os.getpid(), {"stops": signal.SIGSTOP, "dies": signal.SIGKILL}[what])
            sums = GradientSums(world, [*layer.parameters()])
            sums.backward(layer(torch.ones(1)))
            sums.end()


@pytest.mark.parametrize("what", ["hangs", "stops", "dies"])
def test_a_rank_in_trouble_ends_the_others_in_time(what: str, tmp_path: Path) -> None:
    printed = finish_without(1, 3, _exchange, what, str(tmp_path / "began"), log=tmp_path / "log")
    took_s = time.time() - float((tmp_path / "began").read_text())
    assert took_s < LIMIT_S + LATER_S
    assert printed.count("A collective fails when another rank has ended, hangs, or is late") == 2, printed
    assert ("Timed out waiting" in printed) == (what != "dies")


def _pretrain_without_rank_2(settings: list[str]) -> None:
    if os.environ["RANK"] != "2":
        ranks.pretrain(settings)


def test_a_rank_that_does_not_come_ends_the_others(images: Path, tmp_path: Path) -> None:
    settings = tiny_run.settings(images, tmp_path / "run", f"run.rank_timeout_s={LIMIT_S}")
    started = time.monotonic()
    printed = finish_without(2, 3, _pretrain_without_rank_2, settings, log=tmp_path / "log")
    assert time.monotonic() - started < LIMIT_S + LATER_S + 60  # of imports
    assert "The 3 ranks did not all come within 15 s (run.rank_timeout_s)" in printed
    assert not (tmp_path / "run").exists()


def _join_at(port: int, began: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    Path(began).write_text(str(time.time()))
    with joined(World(1, 2), 2.0):
        pass


def test_another_program_where_the_ranks_meet_ends_them(tmp_path: Path) -> None:
    """It accepts connections and says nothing: torch itself would wait forever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        finish_without(-1, 1, _join_at, server.getsockname()[1], str(tmp_path / "began"), log=tmp_path / "log")
    assert time.time() - float((tmp_path / "began").read_text()) < 2 + LATER_S


def test_gloo_takes_the_interface_towards_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    for unknown in ("127.0.0.1", "nobody.invalid"):
        _choose_interface(unknown)
    assert os.environ == {}
    for name, addresses in psutil.net_if_addrs().items():
        for known in addresses:
            if known.family == socket.AF_INET and not known.address.startswith("127."):
                os.environ.clear()
                _choose_interface(known.address)
                assert os.environ == {"GLOO_SOCKET_IFNAME": name}
