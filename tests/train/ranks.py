"""Ranks as processes of this machine, as torchrun would start them, but without importing everything each time."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.train.narrow import narrow_resnet18

_ROOT = Path(__file__).parents[2]
_WAIT_S = 0.2

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch reads it when the server of forks imports it

_PRELOAD = ["pytest", "tests.train.preloaded"]


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(world_size: int, target: Callable[..., None], *arguments: Any, log: Path) -> list[BaseProcess]:
    """Call `target(*arguments)` in `world_size` processes, with torchrun's environment; `log` gets what they print."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    port = free_port()
    processes: list[BaseProcess] = [
        context.Process(target=_one_rank, args=(rank, world_size, port, str(log), target, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def wait_for_steps(process: BaseProcess, out: Path, steps: int) -> None:
    """Until rank 0 has written down the samples of so many steps, or the process has ended."""
    log = out / "samples-rank0.jsonl"
    while process.is_alive() and not (log.exists() and len(log.read_text().splitlines()) >= steps):
        time.sleep(0.005)


def kill(processes: Sequence[BaseProcess]) -> None:
    """SIGKILL, and wait until they are gone."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def finish(processes: Sequence[BaseProcess], log: Path, *, timeout_s: float = 300, code: int = 0) -> str:
    """Wait until all have left, with this exit code: what they printed."""
    try:
        for process in processes:
            process.join(timeout_s)
        printed = log.read_text() if log.exists() else ""
        assert [process.exitcode for process in processes] == [code] * len(processes), printed
        return printed
    finally:
        kill(processes)


def run_ranks(world_size: int, target: Callable[..., None], *arguments: Any, log: Path, code: int = 0) -> str:
    """`start_ranks` and `finish`: what the ranks printed."""
    return finish(start_ranks(world_size, target, *arguments, log=log), log, code=code)


def _one_rank(
    rank: int, world_size: int, port: int, log: str, target: Callable[..., None], arguments: Sequence[Any]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    target(*arguments)
    sys.stdout.flush()


@contextmanager
def _slow_steps() -> Iterator[None]:
    from peclr_dali.train.steps.train_state import TrainState

    update = TrainState.update

    def slowly(self: TrainState) -> None:
        time.sleep(_WAIT_S)
        update(self)

    with patch.object(TrainState, "update", slowly):
        yield


@narrow_resnet18()
def pretrain(settings: Sequence[str]) -> None:
    """`cli.py pretrain --resume auto` of a narrow network, with the exit code of the command line."""
    _run("pretrain", settings)


@_slow_steps()
@narrow_resnet18()
def pretrain_slowly(settings: Sequence[str]) -> None:
    """Likewise, and each step waits a little, so that there is time to be killed."""
    _run("pretrain", settings)


def pretrain_in_full(settings: Sequence[str]) -> None:
    """Likewise, of torchvision's own network, whose checkpoints take a while to be written."""
    _run("pretrain", settings)


@_slow_steps()
@narrow_resnet18()
def finetune_slowly(settings: Sequence[str]) -> None:
    """`cli.py finetune --resume auto` likewise."""
    _run("finetune", settings)


@narrow_resnet18()
def command(arguments: Sequence[str]) -> None:
    """`cli.py ...`, where "resnet18" is narrow."""
    from peclr_dali.cli import main

    main.main(list(arguments))


def torchrun(arguments: Sequence[str]) -> None:
    """`torchrun ...`, whose ranks are processes of their own, as ever."""
    from torch.distributed.run import main

    os.chdir(_ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    main(list(arguments))


def _run(name: str, settings: Sequence[str]) -> None:
    from peclr_dali.cli import main
    from tests.command_line import as_options

    main.main([name, "--resume", "auto", *as_options(settings)])
