"""Time as the device sees it, on a CPU and, with events that a script of a GPU answers, on a GPU."""

import time
from dataclasses import dataclass

import pytest
import torch

from peclr_dali.train.steps.stopwatch import Stopwatch

GPU = torch.device("cuda", 0)


@dataclass
class Script:
    """The clock of a GPU: an event is reached when the host gets to it and the queue is done.

    Attributes:
        host_ms: the host's clock.
        busy_until_ms: when what is queued is done.
        waits: how often the host waited for an event.
    """

    host_ms: float = 0.0
    busy_until_ms: float = 0.0
    waits: int = 0

    def queue(self, work_ms: float) -> None:
        """Work that begins when what is queued is done."""
        self.busy_until_ms = max(self.busy_until_ms, self.host_ms) + work_ms


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.reached_ms = max(script.host_ms, script.busy_until_ms)

        def synchronize(self) -> None:
            script.waits += 1
            script.host_ms = max(script.host_ms, self.reached_ms)

        def query(self) -> bool:
            return self.reached_ms <= script.host_ms

        def elapsed_time(self, end: "Event") -> float:
            return end.reached_ms - self.reached_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return script


def test_spans_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter([10.0, 10.25, 11.0, 11.5, 20.0, 20.0])  # when each of three spans begins and ends
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock_s))
    watch = Stopwatch()
    for _ in range(2):
        with watch.running(torch.device("cpu")):
            pass
    assert watch.take_s() == 0.75
    with watch.running(torch.device("cpu")):
        pass
    assert watch.take_s() == 0


def test_waiting_counts_from_when_the_gpu_has_nothing_to_do(script: Script) -> None:
    watch = Stopwatch()
    script.queue(work_ms=50)
    with watch.running(GPU):
        script.host_ms += 80
    assert watch.take_s() == pytest.approx(0.030)
    script.host_ms += 500  # of the host's own, such as writing a row: nobody waits for a batch then
    with watch.running(GPU):
        script.host_ms += 7
    assert watch.take_s() == pytest.approx(0.007)


def test_queued_work_counts_as_long_as_it_takes(script: Script) -> None:
    watch = Stopwatch()
    script.queue(work_ms=50)
    with watch.running(GPU):
        script.host_ms += 1
        script.queue(work_ms=20)
    assert script.waits == 0
    assert watch.take_s() == pytest.approx(0.020)
    assert script.waits == 1


def test_events_are_forgotten_although_nobody_takes_the_seconds(script: Script) -> None:
    watch = Stopwatch()
    for _ in range(2000):
        with watch.running(GPU):
            script.queue(work_ms=1)
        script.host_ms += 1
    assert len(watch._spans) <= 2
    assert script.waits == 0
    assert watch.take_s() == pytest.approx(2.0)


@pytest.mark.gpu
def test_a_gpu_that_is_kept_busy_does_not_wait() -> None:
    watch, square = Stopwatch(), torch.randn(4096, 4096, device=GPU)
    for _ in range(3):  # the first call sets the library up
        torch.mm(square, square)
    torch.cuda.synchronize()
    for _ in range(50):
        torch.mm(square, square)
    with watch.running(GPU):
        pass
    assert watch.take_s() < 0.001
    with watch.running(GPU):
        time.sleep(0.05)
    assert 0.045 <= watch.take_s() < 0.2
