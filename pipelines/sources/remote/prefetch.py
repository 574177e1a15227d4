"""Fetches shards in the background, in the order in which the coming steps read them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from pipelines.arrays import IntArray
from pipelines.samples.store import Follower
from pipelines.sources.remote.cache import Descriptor, NoRoom

log = logging.getLogger(__name__)

DOWNLOADS: Final = 4
"""Shards that a process downloads at once."""

STEPS_UNDER_WAY: Final = 8
"""Steps that a loader may read ahead of the last one that is done."""

_AGAIN_S: Final = 0.1
"""Seconds between two checks for a shard that another process downloads."""

_ROOM_S: Final = 1.0
"""Seconds between two checks for free room."""

_SMALL_SHARE: Final = 1 / 16
"""Share of the rows below which single images are read in place of whole shards."""

_LOG_EVERY_S: Final = 10.0
"""Seconds between two lines in the log about a reader that waits for a shard."""

Fetch = Callable[[int, dict[int, int], threading.Event], Descriptor | None]
"""Gets a shard from the cache or downloads it; None while another process downloads it. Raises `NoRoom`.

The second argument has the steps until each shard's next use; the third one stops a download.
"""


class ShardUses:
    """The coming uses of each shard.

    It looks ahead until it knows the next use of every shard, or over two epochs.

    Args:
        steps: the shards (N,) of the rows of each step.
        shards: number of shards.
        rows: number of rows of an epoch.
        window: shards that are read at a time.
    """

    def __init__(self, steps: Iterator[IntArray], *, shards: int, rows: int, window: int) -> None:
        self._steps, self._shards, self._rows, self._window = steps, shards, rows, window
        self._uses: dict[int, deque[int]] = {}  # shard -> step * shards + place within the step, ascending
        self._ahead: deque[int] = deque()  # rows of each step from the next one to the last one that was looked at
        self._rows_ahead = self._rows_seen = self._done = 0
        self._ended = False
        self._look_ahead()

    def _look_ahead(self) -> None:
        while not self._ended and (
            self._reads_a_small_share() or (len(self._uses) < self._shards and self._rows_ahead < 2 * self._rows)
        ):
            shards = next(self._steps, None)
            if shards is None:
                self._ended = True
                return
            step = self._done + len(self._ahead)
            found, first = np.unique(shards, return_index=True)
            for place, shard in enumerate(found[np.argsort(first)].tolist()):
                self._uses.setdefault(shard, deque()).append(step * self._shards + place)
            self._ahead.append(len(shards))
            self._rows_ahead += len(shards)
            self._rows_seen += len(shards)

    def _reads_a_small_share(self) -> bool:
        return self._rows_seen < _SMALL_SHARE * self._rows

    def done(self) -> None:
        """Go to the next step."""
        self._done += 1
        if self._ahead:
            self._rows_ahead -= self._ahead.popleft()
        for shard, uses in [*self._uses.items()]:
            while uses and uses[0] < self._done * self._shards:
                uses.popleft()
            if not uses:
                del self._uses[shard]
        self._look_ahead()

    def next_uses(self) -> dict[int, int]:
        """Shard -> steps until its next use, as far as known, in the order of use."""
        first = {shard: uses[0] for shard, uses in self._uses.items()}
        return {shard: first[shard] // self._shards - self._done for shard in sorted(first, key=first.__getitem__)}

    def near(self) -> list[int]:
        """The shards to have in the cache now, in the order of use: two windows, and those of the steps under way.

        Empty if all steps together read a small share of the rows: then single images are read.
        """
        if self._ended and self._reads_a_small_share():
            return []
        uses = enumerate(self.next_uses().items())
        return [shard for place, (shard, steps) in uses if place < 2 * self._window or steps < STEPS_UNDER_WAY]


class Prefetcher(Follower):
    """Fetches shards in threads before they are read, and holds each while `ShardUses.near` lists it.

    Args:
        make_uses: makes the `ShardUses`; called in one of the threads.
        fetch: see `Fetch`; called in several threads.
        name: the name of a shard, for the log.
    """

    def __init__(self, make_uses: Callable[[], ShardUses], fetch: Fetch, name: Callable[[int], str]) -> None:
        self._make_uses, self._fetch, self._name = make_uses, fetch, name
        self._changed = threading.Condition()
        self._uses: ShardUses | None = None
        self._steps_done = 0  # since `_uses` was last brought up to date
        self._near: list[int] = []
        self._held: dict[int, Descriptor] = {}
        self._under_way: set[int] = set()
        self._refused: dict[int, float] = {}  # shard without room -> when to try again
        self._elsewhere: dict[int, float] = {}  # shard that another process downloads -> when to look again
        self._why = ""  # of the last shard without room
        self._warned = False
        self._error: Exception | None = None
        self.closed = threading.Event()
        for number in range(DOWNLOADS):
            threading.Thread(target=self._work, name=f"fetch-{number}", daemon=True).start()

    def get(self, shard: int) -> tuple[Descriptor | None, bool]:
        """A shard, and whether it was there at once. Waits while it is on its way.

        None if it is not near, or if there is no room for it.

        Raises:
            UserError: it cannot be downloaded.
            RuntimeError: closed.
        """
        began = said = time.monotonic()
        waited = False
        with self._changed:
            while True:
                if self.closed.is_set():
                    raise RuntimeError("the loader is closed")
                if self._error is not None:
                    raise self._error
                if shard in self._held:
                    return self._held[shard], not waited
                if self._uses is not None and shard not in self._near:
                    return None, False
                if shard in self._refused:
                    self._warn_once(shard)
                    return None, False
                self._changed.wait(1.0)
                waited, now = True, time.monotonic()
                if now - said > _LOG_EVERY_S:
                    said = now
                    log.warning("waiting for %s for %.0f s", self._name(shard), now - began)

    def _warn_once(self, shard: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: %s; images are read one by one until there is room", self._name(shard), self._why)

    def done(self) -> None:
        """See `Follower`."""
        with self._changed:
            self._steps_done += 1
            self._changed.notify_all()

    def close(self) -> None:
        """See `Follower`. A download ends after the request that is under way."""
        with self._changed:
            self.closed.set()
            self._held.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (shard := self._next()) is not None:
                self._get(shard)
        except Exception as error:  # raised again in the readers
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Wait for the next shard to fetch. None if the prefetching has ended."""
        with self._changed:
            while not self.closed.is_set() and self._error is None:
                self._catch_up()
                shard, wait_s = self._choose(time.monotonic())
                if shard is not None:
                    self._under_way.add(shard)
                    return shard
                self._changed.wait(wait_s)
        return None

    def _catch_up(self) -> None:
        """Bring `_uses` up to the steps that are done, and drop the shards that are not near any more."""
        if self._uses is None:
            self._uses = self._make_uses()
        elif not self._steps_done:
            return
        for _ in range(self._steps_done):
            self._uses.done()
        self._steps_done = 0
        self._near = self._uses.near()
        for shard in self._held.keys() - {*self._near}:
            del self._held[shard]
        self._changed.notify_all()

    def _choose(self, now: float) -> tuple[int | None, float | None]:
        """The next shard to fetch; or None, and when to choose again."""
        wait_s = None
        for shard in self._near:
            if shard in self._held or shard in self._under_way:
                continue
            if self._refused.get(shard, 0) > now:
                return None, wait_s or _ROOM_S
            if self._elsewhere.get(shard, 0) > now:
                wait_s = _AGAIN_S
                continue
            return shard, None
        return None, wait_s

    def _get(self, shard: int) -> None:
        with self._changed:
            assert self._uses is not None
            next_uses = self._uses.next_uses()
        try:
            found = self._fetch(shard, next_uses, self.closed)
        except NoRoom as reason:
            self._refuse(shard, next_uses, reason)
            return
        with self._changed:
            self._under_way.discard(shard)
            self._elsewhere[shard] = time.monotonic() + _AGAIN_S
            if found is not None:
                self._refused.clear()
                if shard in self._near and not self.closed.is_set():
                    self._held[shard] = found
                self._changed.notify_all()

    def _refuse(self, shard: int, uses: dict[int, int], reason: NoRoom) -> None:
        """Handle a shard without room: drop a shard that is needed later, or have this one's images read directly."""
        with self._changed:
            self._under_way.discard(shard)
            later = [one for one in self._held if uses.get(one, math.inf) > uses.get(shard, math.inf)]
            if later:
                del self._held[max(later, key=lambda one: uses.get(one, math.inf))]
                return
            # Those that are needed later must not take the room that it waits for.
            behind = self._near[self._near.index(shard) :] if shard in self._near else []
            again = time.monotonic() + _ROOM_S
            self._why = str(reason)
            self._refused |= {one: again for one in behind if one not in self._held and one not in self._under_way}
            self._changed.notify_all()
