"""Who hangs: every rank shows how far it is, and rank 0 names the one that the others wait for."""

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
"""Of a rank that was left waiting: temporary, so worth a restart (sysexits' EX_TEMPFAIL)."""


class Activity:
    """How far this rank is: what it does, and how many messages to the others it has begun.

    Ranks exchange the same messages in the same order, so the one with the fewest is the one that is waited for.

    Attributes:
        messages: collectives begun.
        exchanging: whether this rank is in the last of them.
        moves: counts anything done, so that long work between two messages is no hanging.
        doing: in words, for people.
        patience_s: how long to let the watchdog speak when an exchange fails: it knows names.
        verdict: set when the watchdog speaks, which ends the process.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.exchanging = False
        self.moves = 0
        self.doing = "starts"
        self.patience_s = 0.0
        self.verdict = threading.Event()

    def moved(self, doing: str | None = None) -> None:
        """Note that this rank gets on, and what it begins now; None for more of the same."""
        self.moves += 1
        self.doing = doing or self.doing

    @contextmanager
    def message(self) -> Iterator[None]:
        """A collective."""
        self.messages += 1
        self.moves += 1
        self.exchanging = True
        yield
        self.exchanging = False
        self.moves += 1


activity = Activity()
"""Of this process, which is one rank."""


@dataclass(frozen=True)
class Sighting:
    """What a rank last said of itself, and when it was last seen to do anything; the others as in `Activity`.

    Attributes:
        beat: grows while the process lives, whether or not it gets on.
        heard_s: since the beat last grew.
        still_s: since `moves` last grew.
    """

    host: str = "an unknown host"
    messages: int = 0
    exchanging: bool = False
    moves: int = 0
    doing: str = "has not begun"
    beat: int = 0
    heard_s: float = 0.0
    still_s: float = 0.0


def diagnose(ranks: Mapping[int, Sighting], limit_s: float) -> str | None:
    """One line that names who is waited for; None while anybody gets on.

    A rank that is silent is named first: it was killed, stopped or cut off. Then those that have not come to the
    exchange in which the others are. If all are in the same one, it is the network between them, or a GPU.
    """
    if any(seen.still_s < limit_s for seen in ranks.values()):
        return None
    silent = [_name(rank, seen) for rank, seen in ranks.items() if seen.heard_s >= limit_s]
    if silent:
        return f"nothing heard for {limit_s:g} s from {', '.join(silent)}: killed, stopped, or cut off from the network"
    newest = max(seen.messages for seen in ranks.values())
    behind = [
        f"{_name(rank, seen)}, which {seen.doing}"
        for rank, seen in ranks.items()
        if seen.messages < newest or not seen.exchanging
    ]
    if behind:
        return f"no progress for {limit_s:g} s: the run waits for {'; '.join(behind)}"
    return f"no progress for {limit_s:g} s: all {len(ranks)} ranks wait in the same exchange; look at the network"


def _name(rank: int, seen: Sighting) -> str:
    return f"rank {rank} on {seen.host}"


class Watchdog:
    """Ends this process if the ranks stop getting on, since a rank in a collective cannot be woken otherwise.

    Time is counted in looks, each `every_s` after the one before, so that a process or a machine that slept as a whole
    blames nobody when it wakes.

    A thread writes this rank's progress into the room and reads rank 0's verdict there; on rank 0 it reads everybody's
    progress and passes the verdict. Another thread watches the first, for the case that the room itself is out of
    reach.

    Args:
        room: of this attempt's ranks.
        activity: of this rank; the loop and the collectives move it.
        limit_s: after which a rank that does not get on is named.
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
            thread.join(timeout=1.0)  # a thread that waits for a lost host is left behind: it is a daemon

    def _exchange(self) -> None:
        beat = 0
        try:
            while not self._left.wait(self._every_s):
                beat += 1
                self._show(beat)
                if self._room.check(["verdict"]):
                    self._leave(None)  # rank 0 has said why
                verdict = self._judge()
                if verdict is not None:
                    self._activity.verdict.set()
                    self._room.set("verdict", verdict)
                    self._leave(verdict)
                self._beat = beat
        except RuntimeError:  # the room's host is gone: `_keep_contact` says so, unless this rank leaves anyway
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
        """Rank 0 looks at all ranks, every other one at rank 0, which cannot tell of itself when it is stopped."""
        for rank in range(self._world_size) if self._rank == 0 else (0,):
            key = f"progress/{rank}"
            said = Sighting(**json.loads(self._room.get(key))) if self._room.check([key]) else Sighting()
            before = self._seen.get(rank)
            self._seen[rank] = replace(
                said,
                heard_s=before.heard_s + self._every_s if before is not None and said.beat == before.beat else 0.0,
                still_s=before.still_s + self._every_s if before is not None and said.moves == before.moves else 0.0,
            )
        if self._rank == 0:
            return diagnose(self._seen, self._limit_s)
        silent_s = self._limit_s + 2 * self._every_s  # later than rank 0 would be
        return diagnose(self._seen, silent_s) if self._seen[0].heard_s >= silent_s else None

    def _keep_contact(self) -> None:
        beat, silent_s = 0, 0.0
        while not self._left.wait(self._every_s):
            beat, silent_s = (beat, silent_s + self._every_s) if beat == self._beat else (self._beat, 0.0)
            if silent_s > self._limit_s + 2 * self._every_s:
                place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                self._leave(
                    f"no contact for {self._limit_s:g} s with the host where the ranks meet, {place}: it is down, or "
                    f"{platform.node()} is cut off from it"
                )

    def _leave(self, message: str | None) -> None:
        """End the process; after its last words, if it has any."""
        if self._left.is_set():
            return
        self._activity.verdict.set()
        if message is not None:
            prefix = "error" if self._rank == 0 else f"rank {self._rank} on {platform.node()}: error"
            sys.stderr.write(f"{prefix}: {message}. Checkpoints are whole: go on with --resume auto\n")
            sys.stderr.flush()
            time.sleep(2 * self._every_s)  # so that the others, too, leave because of the verdict
        os._exit(EXIT_CODE)
