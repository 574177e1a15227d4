"""What this rank does at the moment, for the watchdog and for messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
