"""Where ranks meet, and who is named when one does not come or does not get on."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch.distributed import Store, TCPStore

from errors import RanksLost, UserError
from tests.train import ranks
from train.distributed import world as distributed_world
from train.distributed.rendezvous import barrier, interface_to, leave_last, meet
from train.distributed.watchdog import EXIT_CODE, Activity, Sighting, Watchdog, activity, diagnose
from train.distributed.world import described_world, joined
from train.runs.meter import RankTime, Straggler, slowest_rank


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


def test_ranks_meet_in_a_new_room_despite_keys_of_earlier_attempts(store: Store) -> None:
    rooms = []
    for _ in range(3):
        store.set("hello/1", "of a process that was killed")
        found = on_threads(3, lambda rank: meet(client(store), rank, 3, 200))
        found[0].set("word", "ours")
        assert [room.get("word") for room in found] == [b"ours"] * 3
        rooms.append(found[0])
    rooms[0].set("word", "theirs")
    assert rooms[1].get("word") == b"ours"


def test_ranks_that_do_not_come_are_named(store: Store) -> None:
    found = on_threads(3, lambda rank: meet(client(store), rank if rank < 2 else 4, 5, 15.0))
    assert str(found[0]).startswith("rank 2, 3 of 5 did not come within 15 s (run.rank_timeout_s)")
    assert "rank 0 did not begin within 15 s" in str(found[1])


def test_the_interface_is_that_of_the_address_towards_a_host() -> None:
    assert interface_to("127.0.0.1") is None
    assert interface_to("nobody.invalid") is None
    for name, addresses in psutil.net_if_addrs().items():
        for known in addresses:
            if known.family == socket.AF_INET and not known.address.startswith("127."):
                assert interface_to(known.address) == name


def test_barrier_names_who_is_missing(store: Store) -> None:
    assert on_threads(3, lambda rank: barrier(client(store), "one", rank, 3, 200)) == [None] * 3
    for rank, missing in ((1, "0, 2, 3"), (0, "2, 3")):  # one after the other
        with pytest.raises(UserError, match=f"rank {missing} of 4 did not come within 0.3 s"):
            barrier(client(store), "two", rank, 4, 0.3)


STOPPED = "no progress for 10 s (run.rank_timeout_s)"


def test_the_store_outlasts_the_slowest_rank(store: Store) -> None:
    """Rank 0, whose process may hold the store, waits for a rank that is slow to leave the barrier."""
    events = []

    def come(rank: int) -> None:
        room = client(store)
        barrier(room, "end", rank, 2, 200)
        if rank == 1:
            time.sleep(1)
            events.append("rank 1 has left")
        leave_last(room, "end", rank, 2, 200)
        if rank == 0:
            events.append("rank 0 has left")

    assert on_threads(2, come) == [None, None]
    assert events == ["rank 1 has left", "rank 0 has left"]


def test_a_store_that_is_gone_is_one_line() -> None:
    room = Mock(wait=Mock(side_effect=torch.distributed.DistNetworkError("failed to recv")))
    with pytest.raises(RanksLost, match="the process where the ranks meet has ended: see the output of rank 0"):
        barrier(room, "end", 1, 2, 200)


def seen(**changes: Any) -> Sighting:
    return replace(Sighting("a", 7, True, 30, "computes step 5", 9, silent_s=0.5, still_s=20.0), **changes)


def test_no_rank_is_named_while_any_rank_makes_progress() -> None:
    assert diagnose({0: seen(), 1: seen(still_s=1.0), 2: seen(silent_s=50.0)}, 10.0) is None


def test_the_silent_are_named_first() -> None:
    line = diagnose({0: seen(), 1: seen(host="b", silent_s=12.0), 2: seen(messages=6)}, 10.0)
    assert line == "nothing heard for 10 s from rank 1 on b: killed, stopped, or cut off from the network"


def test_the_rank_with_the_fewest_messages_is_named() -> None:
    line = diagnose({0: seen(), 1: seen(), 2: seen(host="c", messages=6, doing="waits for its data of step 5")}, 10.0)
    assert line == f"{STOPPED}: the run waits for rank 2 on c, which waits for its data of step 5"


def test_a_rank_between_two_exchanges_is_named() -> None:
    line = diagnose({0: seen(exchanging=False), 1: seen()}, 10.0)
    assert line == f"{STOPPED}: the run waits for rank 0 on a, which computes step 5"


def test_a_rank_in_no_exchange_is_not_named_beside_one_that_is_late() -> None:
    line = diagnose({0: seen(exchanging=False), 1: seen(host="b", messages=6, exchanging=False)}, 10.0)
    assert line == f"{STOPPED}: the run waits for rank 1 on b, which computes step 5"


def test_if_all_are_in_the_same_exchange_it_is_the_network() -> None:
    assert diagnose({0: seen(), 1: seen()}, 10.0) == (
        f"{STOPPED}: all 2 ranks wait in the same exchange; look at the network"
    )


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
"""Of the watchdog; the ranks of a test that share their cores with others are heard of more often."""


def _steps(what: str) -> None:
    """A loop of exchanges in which rank 1 gets into trouble; the ranks have all the time to meet."""

    def impatient(room: Store, rank: int, world_size: int, progress: Activity, limit_s: float) -> Watchdog:
        return Watchdog(room, rank, world_size, progress, LIMIT_S)

    distributed_world.Watchdog = impatient  # type: ignore[assignment,attr-defined]  # in this rank's process
    world = described_world("cpu")
    with joined(world, 300.0):
        for step in range(10**6):
            activity.moved(f"waits for its data of step {step}")
            if world.rank == 1 and step == 3:
                if what == "hangs":
                    time.sleep(1000)
                os.kill(os.getpid(), {"stops": signal.SIGSTOP, "dies": signal.SIGKILL}[what])
            activity.moved(f"computes step {step}")
            world.sum_(torch.ones(1))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (
            "hangs",
            "error: no progress for 15 s (run.rank_timeout_s): the run waits for rank 1 on {host}, which waits for its "
            "data of step 3",
        ),
        pytest.param("stops", "error: nothing heard for 15 s from rank 1 on {host}", marks=pytest.mark.slow),
        ("dies", "another rank has ended during an exchange with this rank, which computes step 3"),
    ],
)
def test_a_rank_in_trouble_ends_the_others_in_one_line(what: str, named: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = ranks.start_ranks(3, _steps, what, log=log)
    try:
        for rank in (0, 2):
            processes[rank].join(300)
            if what == "dies":
                assert processes[rank].exitcode not in (0, None)
            else:
                assert processes[rank].exitcode == EXIT_CODE
    finally:
        ranks.kill(processes)
    assert named.format(host=os.uname().nodename) in log.read_text()
    if what != "dies":
        assert log.read_text().count("error") == 1
