"""Records what this rank does at the moment, for the watchdog and for messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
        """Record progress, and the task that begins now; None if the task continues."""
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
