"""Sums time spans as measured on the device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums time spans on a device without waiting for it.

    On a CPU it uses the host's clock. On a GPU, whose work is queued ahead by the host, it uses events in the current
    stream. For a span that queues work, this is the time of the work. For a span in which the host waits, this is the
    time in which the GPU is idle because of it.

    Attributes:
        is_off: spans do not count, and nothing is put into the stream.
    """

    def __init__(self) -> None:
        self.is_off = False
        self._seconds = 0.0
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """A span of time. It does not count if it ends in an exception."""
        if self.is_off:
            yield
        elif device.type == "cuda":
            begin = _mark(device)
            yield
            self._spans.append((begin, _mark(device)))
            self._read_finished()  # also if nobody takes the seconds, no more events are kept than the GPU is behind
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take_s(self) -> float:
        """Seconds of the spans since the last call. On a GPU this waits for the last span, so call it at a
        synchronisation."""
        for _, end in self._spans:
            end.synchronize()
        self._read_finished()
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _read_finished(self) -> None:
        """Add the spans that the GPU has finished, the oldest first, and forget their events."""
        while self._spans and self._spans[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._spans.popleft()
            self._seconds += begin.elapsed_time(end) * 1e-3  # type: ignore[no-untyped-call]


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return event
