"""Which rank is named when one does not come, or does not answer later."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch.distributed import Store, TCPStore

from peclr_dali.errors import RanksLost, ReportedByAnotherRank, UserError
from peclr_dali.errors.refused import is_transient
from peclr_dali.train.distributed.rendezvous import Peers, connect, meet, name_interface
from peclr_dali.train.distributed.world import World, described_world, joined
from peclr_dali.train.runs.meter import RankTime, Straggler, slowest_rank
from peclr_dali.train.steps.micro_batches import begun_sums
from tests.train import ranks, tiny_run


def on_threads(count: int, action: Callable[[int], Any]) -> list[Any]:
    """What `action(rank)` returns or raises, each on a thread of its own."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = action(rank)
        except UserError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return results


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)


def client(store: Store) -> Store:
    copy: Store = store.clone()  # type: ignore[attr-defined]
    return copy


def test_ranks_meet_and_know_what_each_says(store: Store) -> None:
    assert on_threads(3, lambda rank: meet(client(store), rank, 3, f"of {rank}", 200)) == [["of 0", "of 1", "of 2"]] * 3


@pytest.mark.parametrize("of_torchrun", [True, False])
def test_attempts_share_no_keys_in_the_store_of_torchrun(of_torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of rank 0 belongs to one attempt, whose number may differ between hosts."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    monkeypatch.setattr(os, "environ", os.environ | given | {"TORCHELASTIC_USE_AGENT_STORE": str(of_torchrun)})
    stores = []
    for attempt in ("0", "1"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        stores.append(connect(1, 2, 200))
    stores[0].set("rank 1", "here")
    assert stores[0].check(["rank 1"])
    assert stores[1].check(["rank 1"]) == (not of_torchrun)


def test_ranks_that_do_not_come_are_named(store: Store) -> None:
    found = on_threads(3, lambda rank: meet(client(store), rank if rank < 2 else 4, 5, "", 15.0))
    assert str(found[0]).startswith("rank 2, 3 of 5 did not come within 15 s (run.rank_timeout_s)")
    assert "rank 0 did not begin within 15 s" in str(found[1])


def test_gloo_takes_the_interface_towards_the_first_host_that_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    here = ["127.0.0.1", "nobody.invalid"]
    name_interface(here)
    assert os.environ == {}
    for name, addresses in psutil.net_if_addrs().items():
        for known in addresses:
            if known.family == socket.AF_INET and not known.address.startswith("127."):
                os.environ.clear()
                name_interface([*here, known.address])
                assert os.environ == {"GLOO_SOCKET_IFNAME": name}


FAILED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9\nand a stack")


def peers(store: Store, rank: int, world_size: int = 4, limit_s: float = 10.0) -> Peers:
    return Peers(client(store), rank, [f"host-{rank}" for rank in range(world_size)], limit_s)


def test_missing_ranks_are_named_by_the_lowest_that_answers(store: Store) -> None:
    found = on_threads(4, lambda rank: peers(store, rank).explain(FAILED) if rank in (1, 3) else None)
    assert (type(found[1]), type(found[3])) == (RanksLost, ReportedByAnotherRank)
    assert str(found[1]) == str(found[3])
    assert str(found[1]).startswith("no answer from rank 0 on host-0, rank 2 on host-2: killed, stopped, cut off from")
    assert "too late for run.rank_timeout_s = 10 ([gloo/transport/tcp/pair.cc:547] Connection closed by" in str(
        found[1]
    )
    assert "stack" not in str(found[1])
    assert is_transient(found[3])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_rank_that_reports_its_own_error_is_not_named_by_the_others(number: int, store: Store) -> None:
    error = OSError(number, os.strerror(number), "/data/samples.jsonl")

    def act(rank: int) -> UserError | None:
        mine = peers(store, rank, 3, 1000.0)
        if rank == 1:
            mine.announce(error)
            return None
        return mine.explain(FAILED)

    found = on_threads(3, act)
    assert [type(one) for one in found] == [ReportedByAnotherRank, type(None), ReportedByAnotherRank]
    assert [is_transient(found[rank]) for rank in (0, 2)] == [number == errno.ENOSPC] * 2


def test_if_all_ranks_answer_it_is_the_network(store: Store) -> None:
    found = on_threads(3, lambda rank: peers(store, rank, 3, 1000.0).explain(FAILED))
    assert [type(error) for error in found] == [RanksLost, ReportedByAnotherRank, ReportedByAnotherRank]
    assert str(found[0]).startswith("no answer from the network between the ranks: ")


def test_the_store_outlasts_the_slowest_rank(store: Store) -> None:
    """Rank 0, whose process may hold the store, ends after a rank that is slow to read from it."""
    events = []

    def explain(rank: int) -> None:
        mine = peers(store, rank, 2, 1000.0)
        if rank == 1:
            mine.store.set("answer 1", "")
            assert mine.store.get("done 0") is not None
            time.sleep(1)
            events.append("rank 1 has left")
            mine.store.set("done 1", "")
        else:
            mine.explain(FAILED)
            events.append("rank 0 has left")

    assert on_threads(2, explain) == [None, None]
    assert events == ["rank 1 has left", "rank 0 has left"]


@pytest.mark.parametrize("silent", [False, True], ids=["gone", "silent"])
def test_a_store_that_is_lost_is_one_line(silent: bool) -> None:
    """Its host is down, or its process is stopped."""
    never = threading.Event()

    def wait(*arguments: object) -> None:
        if silent:
            never.wait()
        raise torch.distributed.DistNetworkError("failed to recv")

    error = Peers(Mock(wait=wait), 1, ["host-0", "host-1"], 1.0).explain(FAILED)
    assert type(error) is RanksLost
    assert str(error).startswith("no answer from rank 0 on host-0: killed, stopped, cut off from the network")
    never.set()


def timing(seconds: float, host: str = "a", images: int = 8) -> RankTime:
    return RankTime(host, images, seconds / 4, 3 * seconds / 4)


def test_the_slowest_rank_is_that_of_the_longest_time_per_image() -> None:
    for times, expected in (([0.2, 0.2, 0.8], 2), ([0.8, 0.2], 0)):
        rank, ratio = slowest_rank([timing(seconds) for seconds in times])
        assert rank == expected
        assert ratio == pytest.approx(4.0)
    assert slowest_rank([timing(0.2), timing(0.2)]) == (0, 1.0)
    rank, ratio = slowest_rank([timing(0.4, images=16), timing(0.3)])  # twice the images in less than twice the time
    assert rank == 1
    assert ratio == pytest.approx(1.5)


def told(*intervals: Sequence[float]) -> list[int]:
    """In which log intervals of steps of one second something is said."""
    straggler = Straggler()
    said = [straggler.seen([timing(seconds) for seconds in times], 1.0) for times in intervals]
    return [number for number, line in enumerate(said) if line is not None]


def test_a_straggler_is_reported_once_when_it_was_slow_three_times_in_a_row() -> None:
    even, slow, other = (0.5, 0.45), (0.5, 0.3), (0.3, 0.5)
    assert told(even, even, even, even) == []  # 0.05 s of a second: nobody stands out
    assert told(slow, slow, even, slow, slow) == []
    assert told(slow, slow, other, other, slow, slow) == []
    assert told(slow, slow, slow, slow, slow, even, slow, slow, slow) == [2, 8]


def test_a_straggler_is_named_with_its_host_and_its_times() -> None:
    straggler = Straggler()
    lines = [straggler.seen([timing(0.2), timing(0.2), timing(0.8, "c")], 1.0) for _ in range(3)]
    assert lines[2] == (
        "rank 2 on c slows the others down: 4.0 x the median time per image; per step 0.200 s of computing and "
        "0.600 s of waiting for data"
    )


LIMIT_S = 15.0
"""Of the collectives. The ranks have more time to meet, since they share their cores with other tests."""


def _steps(what: str) -> None:
    """A loop of exchanges in which rank 1 gets into trouble."""

    def patient(store: Store, rank: int, world_size: int, mine: str, timeout_s: float) -> list[str]:
        return meet(store, rank, world_size, mine, 300.0)

    world, layer = described_world("cpu"), torch.nn.Linear(1, 1)
    try:
        with patch("peclr_dali.train.distributed.world.meet", patient), joined(world, LIMIT_S):
            for step in range(10**6):
                if world.rank == 1 and step == 3:
                    if what == "hangs":
                        time.sleep(1000)
                    os.kill(os.getpid(), {"stops": signal.SIGSTOP, "dies": signal.SIGKILL}[what])
                with begun_sums(world, [*layer.parameters()]) as ends:
                    layer(torch.ones(1)).backward()
                for end in ends:
                    end()
    except ReportedByAnotherRank:
        sys.exit(2)
    except UserError as error:
        sys.stderr.write(f"rank {world.rank}: error: {error}\n")
        sys.exit(2)


@pytest.mark.parametrize("what", ["hangs", pytest.param("stops", marks=pytest.mark.slow), "dies"])
def test_a_rank_in_trouble_ends_the_others_in_one_line(what: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = ranks.start_ranks(3, _steps, what, log=log)
    try:
        for rank in (0, 2):
            processes[rank].join(300)
            assert processes[rank].exitcode == 2
    finally:
        ranks.kill(processes)
    (line,) = (line for line in log.read_text().splitlines() if "rror" in line)
    assert line.startswith(f"rank 0: error: no answer from rank 1 on {os.uname().nodename}: killed, stopped, cut off")
    assert ("Timed out waiting 10000ms" in line) == (what != "dies")


def _pretrain_where_nccl_hangs(what: str, settings: list[str]) -> None:
    """Ranks that believe that they have GPUs. NCCL connects in a thread, whose first call ends or never does."""

    def connect_forever(device: torch.device) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        if (what, device.index) == ("dies", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if (what, device.index) == ("fails", 1):
            raise torch.distributed.DistBackendError("NCCL error in: x.cpp\nncclSystemError: a socket")
        threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()  # Python's end would wait for it
        time.sleep(1000)

    def gloo_only(backend: str, **settings: Any) -> None:
        init("gloo", **settings)

    def patient(store: Store, rank: int, world_size: int, mine: str, timeout_s: float) -> list[str]:
        return meet(store, rank, world_size, mine, 300.0)

    rank, init = int(os.environ["RANK"]), torch.distributed.init_process_group
    world = World(rank, 2, rank, torch.device("cuda", rank), 2)
    with (
        patch("torch.cuda.set_device", connect_forever),
        patch("torch.distributed.init_process_group", gloo_only),
        patch("peclr_dali.train.trainer.described_world", return_value=world),
        patch("peclr_dali.train.distributed.world.meet", patient),
    ):
        ranks.pretrain(settings)


@pytest.mark.parametrize(
    ("what", "limit_s", "line"),
    [
        ("dies", 600, "error: no answer from rank 1 on {host}: killed, stopped, cut off from the network, or"),
        ("fails", 600, "rank 1 on {host}: error: the ranks have met, but cannot connect to each other (NCCL error in:"),
        ("hangs", 15, "error: the ranks have met, but cannot connect to each other (NCCL is still connecting after 10"),
    ],
)
def test_ranks_whose_gpus_do_not_connect_end_in_one_line(what: str, limit_s: int, line: str, tmp_path: Path) -> None:
    """NCCL itself has no limit of time for this, and its threads would keep the process alive."""
    tiny_run.write_images(tmp_path / "images")
    settings = tiny_run.settings(tmp_path / "images", tmp_path / "run", f"run.rank_timeout_s={limit_s}")
    log = tmp_path / "log"
    processes = ranks.start_ranks(2, _pretrain_where_nccl_hangs, what, settings, log=log)
    try:
        for process in processes[: 1 if what == "dies" else 2]:
            process.join(300)
            assert process.exitcode == 2
    finally:
        ranks.kill(processes)
    (said,) = (one for one in log.read_text().splitlines() if "rror" in one)
    assert said.startswith(line.format(host=os.uname().nodename))
