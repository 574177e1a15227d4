"""Ends a run that hangs, and names the rank that the others wait for."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch.distributed import Store

EXIT_CODE = 75
"""Exit code of a rank that was left waiting. A restart may help (sysexits' EX_TEMPFAIL)."""


class Activity:
    """Progress of this rank: its present task, and how many collectives it has begun.

    All ranks begin the same collectives in the same order. So the others wait for the rank that has begun the fewest.

    Attributes:
        messages: number of collectives begun.
        exchanging: whether this rank is still in the last one.
        moves: counts every piece of work, so that long work between two collectives does not look like hanging.
        doing: the present task in words.
        patience_s: seconds to wait for the watchdog's message when a collective fails, since it names the rank.
        verdict: set when the watchdog has decided to end the process.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.exchanging = False
        self.moves = 0
        self.doing = "starts"
        self.patience_s = 0.0
        self.verdict = threading.Event()

    def moved(self, doing: str | None = None) -> None:
        """Record progress. `doing` is the task that begins now; None: the task continues."""
        self.moves += 1
        self.doing = doing or self.doing

    @contextmanager
    def message(self) -> Iterator[None]:
        """Record the beginning and the end of a collective."""
        self.messages += 1
        self.moves += 1
        self.exchanging = True
        yield
        self.exchanging = False
        self.moves += 1


activity = Activity()
"""The activity of this process."""


@dataclass(frozen=True)
class Sighting:
    """The last report of a rank. The other attributes as in `Activity`.

    Attributes:
        beat: grows while the process lives, also without progress.
        silent_s: seconds since the beat last grew.
        still_s: seconds since `moves` last grew.
    """

    host: str = "an unknown host"
    messages: int = 0
    exchanging: bool = False
    moves: int = 0
    doing: str = "has not begun"
    beat: int = 0
    silent_s: float = 0.0
    still_s: float = 0.0


def diagnose(ranks: Mapping[int, Sighting], limit_s: float) -> str | None:
    """Find the rank that the others wait for: one line with its name, or None while any rank makes progress.

    Silent ranks come first: they were killed, stopped or cut off. Next are ranks that have not begun the collective in
    which the others are, then ranks that are in none. If all are in the same collective, the cause is the network or a
    GPU.
    """
    if any(seen.still_s < limit_s for seen in ranks.values()):
        return None
    silent = [_name(rank, seen) for rank, seen in ranks.items() if seen.silent_s >= limit_s]
    if silent:
        return f"nothing heard for {limit_s:g} s from {', '.join(silent)}: killed, stopped, or cut off from the network"
    stands = f"no progress for {limit_s:g} s (run.rank_timeout_s)"
    newest = max(seen.messages for seen in ranks.values())
    behind = {rank: seen for rank, seen in ranks.items() if seen.messages < newest}
    behind = behind or {rank: seen for rank, seen in ranks.items() if not seen.exchanging}
    if behind:
        named = "; ".join(f"{_name(rank, seen)}, which {seen.doing}" for rank, seen in behind.items())
        return f"{stands}: the run waits for {named}"
    return f"{stands}: all {len(ranks)} ranks wait in the same exchange; look at the network"


def _name(rank: int, seen: Sighting) -> str:
    return f"rank {rank} on {seen.host}"


class Watchdog:
    """Ends this process if the ranks make no progress, since a rank in a collective cannot be stopped otherwise.

    Time is counted in checks, one every `every_s` seconds, so that no rank is blamed after the process or the machine
    was suspended.

    A thread writes this rank's progress into the room and reads rank 0's verdict. On rank 0 it reads the progress of
    all ranks and writes the verdict. A second thread watches the first one, in case the room cannot be reached.

    Args:
        room: shared by the ranks of this attempt, see `rendezvous.meet`.
        activity: progress of this rank, recorded by the loop and the collectives.
        limit_s: seconds without progress after which the run ends.
    """

    def __init__(self, room: Store, rank: int, world_size: int, activity: Activity, limit_s: float) -> None:
        self._room: Store = room.clone()  # type: ignore[attr-defined]  # the stubs lack it
        self._rank, self._world_size = rank, world_size
        self._activity, self._limit_s = activity, limit_s
        self._every_s = min(limit_s / 5, 2.0)
        activity.patience_s = 2 * self._every_s
        self._seen: dict[int, Sighting] = {}
        self._left = threading.Event()
        self._beat = 0
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._exchange, self._keep_contact)
        ]

    def __enter__(self) -> Watchdog:
        self._show(beat=0)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join(timeout=1.0)  # a daemon thread that waits for a lost host is left behind

    def _exchange(self) -> None:
        beat = 0
        try:
            while not self._left.wait(self._every_s):
                beat += 1
                self._show(beat)
                if self._room.check(["verdict"]):
                    self._leave(None)  # rank 0 has given the reason
                verdict = self._judge()
                if verdict is not None:
                    self._activity.verdict.set()
                    self._room.set("verdict", verdict)
                    self._leave(verdict)
                self._beat = beat
        except RuntimeError:  # the room's host is lost: `_keep_contact` reports it, unless this rank ends anyway
            return

    def _show(self, beat: int) -> None:
        mine = {
            "host": platform.node(),
            "messages": self._activity.messages,
            "exchanging": self._activity.exchanging,
            "moves": self._activity.moves,
            "doing": self._activity.doing,
            "beat": beat,
        }
        self._room.set(f"progress/{self._rank}", json.dumps(mine))

    def _judge(self) -> str | None:
        """Rank 0 checks all ranks. The others check rank 0, which cannot report itself when it is stopped."""
        for rank in range(self._world_size) if self._rank == 0 else (0,):
            key = f"progress/{rank}"
            said = Sighting(**json.loads(self._room.get(key))) if self._room.check([key]) else Sighting()
            before = self._seen.get(rank)
            self._seen[rank] = replace(
                said,
                silent_s=before.silent_s + self._every_s if before is not None and said.beat == before.beat else 0.0,
                still_s=before.still_s + self._every_s if before is not None and said.moves == before.moves else 0.0,
            )
        if self._rank == 0:
            return diagnose(self._seen, self._limit_s)
        limit_s = self._limit_s + 2 * self._every_s  # later than rank 0 would report
        return diagnose(self._seen, limit_s) if self._seen[0].silent_s >= limit_s else None

    def _keep_contact(self) -> None:
        beat, silent_s = 0, 0.0
        while not self._left.wait(self._every_s):
            seen = self._beat
            silent_s = silent_s + self._every_s if seen == beat else 0.0
            beat = seen
            if silent_s > self._limit_s + 2 * self._every_s:
                place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                self._leave(
                    f"no contact for {self._limit_s:g} s with the host where the ranks meet, {place}: it is down, or "
                    f"{platform.node()} is cut off from it"
                )

    def _leave(self, message: str | None) -> None:
        """Print the message, if there is one, and end the process."""
        if self._left.is_set():
            return
        self._activity.verdict.set()
        if message is not None:
            prefix = "error" if self._rank == 0 else f"rank {self._rank} on {platform.node()}: error"
            sys.stderr.write(f"{prefix}: {message}. Checkpoints are whole: go on with --resume auto\n")
            sys.stderr.flush()
            time.sleep(2 * self._every_s)  # gives the others time to read the verdict
        os._exit(EXIT_CODE)
