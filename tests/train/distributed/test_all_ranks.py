"""What ranks share, and what fails on one of them: it fails on all, and each says so.

Ranks that do not come, hang or die end the others within the time limit.
"""

import errno
import os
import platform
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peclr_dali.errors import AnotherRankFailed, UserError
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import World, _choose_interface, described_world, joined, on_all_ranks
from peclr_dali.train.runs.run import set_threads
from peclr_dali.train.steps.micro_batches import GradientSums
from tests.train import ranks, tiny_run


def _fail_on_ranks_1_and_2(out: str) -> None:
    world = described_world("cpu")
    with joined(world, 60.0):
        try:
            with on_all_ranks(world), on_all_ranks(world):
                _ = 1 / (0 if world.rank in (1, 2) else 1)
        except (ZeroDivisionError, AnotherRankFailed) as error:
            Path(out, str(world.rank)).write_text(repr(error))


def test_the_lowest_failed_rank_raises_its_error_through_nested_calls(tmp_path: Path) -> None:
    ranks.run_ranks(3, _fail_on_ranks_1_and_2, str(tmp_path), log=tmp_path / "log")
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    elsewhere = "AnotherRankFailed('rank 1 has failed: division by zero')"
    assert found == [elsewhere, "ZeroDivisionError('division by zero')", elsewhere]


def pretrain_where_rank_1_differs(what: str, settings: list[str], *others: str) -> None:
    elsewhere = World(1, 2, 1, torch.device("meta"), 2)
    change: dict[str, AbstractContextManager[Any]] = {
        "device": patch("peclr_dali.train.runs.run.described_world", return_value=elsewhere),
        "precision": patch("peclr_dali.train.runs.run.resolve_precision", return_value="fp64"),
    }
    if os.environ["RANK"] == "0":
        ranks.pretrain(settings)
    with change.get(what, nullcontext()):
        ranks.pretrain([*settings, *others])


@pytest.mark.parametrize(
    ("what", "others", "said"),
    [
        ("device", [], r"different devices \(rank 0: cpu, rank 1: meta\)"),
        ("precision", [], r"different precisions: rank 0 on \S+ has fp32, rank 1 on \S+ has fp64\."),
        (
            "data", ["data.root={here}/few", "pipelines.threads=2"],
            r"different data: rank 0 on \S+ has 50 images \(.*\), rank 1 on \S+ has 49 images \(",
        ),
        ("rate", ["optim.lr=2e-3"], r"different values of optim\.lr: rank 0 on \S+ has 0\.001, rank 1 .* has 0\.002\."),
    ],
    ids=["device", "precision", "data", "rate"],
)  # fmt: skip
def test_ranks_that_differ_do_not_begin(what: str, others: list[str], said: str, images: Path, tmp_path: Path) -> None:
    """Their weights would part without a message, or they would wait for each other in vain."""
    tiny_run.write_images(tmp_path / "few", 49)
    settings = tiny_run.settings(images, tmp_path / "run", "train.precision=fp32")
    differing = [one.format(here=tmp_path) for one in others]
    output = ranks.run_ranks(2, pretrain_where_rank_1_differs, what, settings, *differing, log=tmp_path / "log", code=2)
    assert len(re.findall(rf"^rank [01] on \S+: error: .*the ranks have {said}", output, re.MULTILINE)) == 2
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "config.toml").exists()


def pretrain_where_rank_1_has_no_room(action: str, settings: list[str]) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/labels.json")
    with patch(action, side_effect=full) if os.environ["RANK"] == "1" else nullcontext():
        ranks.pretrain(settings)


@pytest.mark.parametrize(
    ("action", "code"), [("runs.run.load_index", 2), ("pretrain.Meter", 1)], ids=["agreed", "alone"]
)
def test_ranks_leave_at_once_when_one_has_no_room(action: str, code: int, images: Path, tmp_path: Path) -> None:
    """The others would wait for ten minutes. Outside of `on_all_ranks` they see that the connection is closed."""
    settings = tiny_run.settings(images, tmp_path / "run", "train.micro_batch=4", "run.rank_timeout_s=600")
    log = tmp_path / "log"
    processes = ranks.start_ranks(3, pretrain_where_rank_1_has_no_room, f"peclr_dali.train.{action}", settings, log=log)
    try:
        for process, expected in zip(processes, (code, 2, code), strict=True):
            process.join(200)
            assert process.exitcode == expected
    finally:
        ranks.kill(processes)
    output = log.read_text()
    here = platform.node()
    assert f"rank 1 on {here}: error: /data/labels.json: No space left on device" in output
    assert ("Traceback" in output) == (code == 1)
    if code == 2:
        for rank in (0, 2):
            assert f"rank {rank} on {here}: error: rank 1 has failed: [Errno 28] No space left on device" in output
        assert not (tmp_path / "run").exists()


@given(st.integers(1, 40), st.integers(1, 7), st.data())
def test_shares_are_whole_consecutive_and_even(micro_batches: int, micro_batch: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, micro_batches))
    batch = micro_batches * micro_batch
    shares = [micro_batch_share(batch, micro_batch, rank, world_size) for rank in range(world_size)]
    assert [position for share in shares for position in share] == list(range(batch))
    sizes = [len(share) for share in shares]
    assert all(size % micro_batch == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= micro_batch


@pytest.mark.parametrize(
    ("batch", "micro_batch", "world_size", "message"),
    [
        (10, 4, 1, "batch = 10 is not a multiple of train.micro_batch = 4"),
        (64, 256, 1, "batch = 64 is not a multiple of train.micro_batch = 256"),
        (8, 4, 3, "holds 2 micro-batches of 4 images, fewer than the 3 ranks"),
    ],
)
def test_impossible_shares_say_what_to_change(batch: int, micro_batch: int, world_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        micro_batch_share(batch, micro_batch, 0, world_size)


@pytest.mark.usefixtures("without_torchrun")
def test_without_torchrun_it_is_a_run_of_one() -> None:
    world = described_world("cpu")
    with joined(world, 1.0):
        assert world == World()
        assert world.is_main
        world.barrier()
        rows = torch.arange(6.0).view(3, 2)
        assert torch.equal(world.gather_rows(rows, range(3), 3), rows)
        assert torch.equal(world.sum_(rows.clone()), rows)
        world.sum_in_buckets_([rows])
        assert torch.equal(rows, torch.arange(6.0).view(3, 2))


def test_buckets_respect_shape_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    flats: list[torch.Tensor] = []

    def double(flat: torch.Tensor, **_: object) -> Mock:
        flats.append(flat.mul_(2))
        return Mock()

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    tensors = [
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(5.0),
        torch.ones(3, dtype=torch.float64),
        torch.arange(4.0),
        torch.ones(()),
    ]
    expected = [2 * tensor for tensor in tensors]
    World(world_size=2).sum_in_buckets_(tensors, bucket_bytes=16)
    assert [flat.numel() for flat in flats] == [96, 5, 3, 4, 1]
    flats.clear()
    World(world_size=2).sum_in_buckets_(tensors)
    assert [flat.numel() for flat in flats] == [101, 3, 5]
    assert all(torch.equal(tensor, 2 * value) for tensor, value in zip(tensors, expected, strict=True))
    assert tensors[0].is_contiguous(memory_format=torch.channels_last)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher does not tell how many processes it starts on a machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    with pytest.raises(UserError, match=r"4 processes on this machine see 1 GPUs: .* train.device=cpu"):
        described_world()
    assert described_world("cpu").rank == 3
    with pytest.raises(UserError, match="device = 'cuda:0': expected auto, cpu or cuda"):
        described_world("cuda:0")


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)  # torch's own choice, which knows no quota
    monkeypatch.setattr("peclr_dali.train.runs.run.available_cores", lambda: 9)
    for threads, processes in ((None, 1), (None, 2), (None, 16), (3, 2), (1024, 1)):
        set_threads(threads, World(world_size=processes, local_world_size=processes))
    assert chosen == [9, 4, 1, 3, 9]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    set_threads(None, World())
    assert chosen[-1] == 6


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
    assert time.time() - float((tmp_path / "began").read_text()) < LIMIT_S + LATER_S
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
