"""Adds up spans of time as the device sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up what passes on a device while it runs, without making anything wait for the device.

    On a CPU that is the host's clock. On a GPU, whose work the host queues ahead of time, it is events in the current
    stream: of a span in which work is queued, the time that the work takes; of one in which the host waits for
    something, the time that the GPU has nothing to do because of it, and none while it still works on what is queued.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """A span; one that ends in an exception does not count."""
        if device.type == "cuda":
            begin = _mark(device)
            yield
            self._spans.append((begin, _mark(device)))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take_s(self) -> float:
        """Seconds since the last call; on a GPU, waits for the last span, so ask when the GPU is waited for anyway."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) * 1e-3  # type: ignore[no-untyped-call]
        self._spans.clear()
        taken, self._seconds = self._seconds, 0.0
        return taken


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return event
