"""Prepares batches ahead in a thread."""

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

import torch

from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.loader.prepare import CLOSED


class Ahead:
    """Runs an iterator of batches in a thread, a few batches ahead of its consumer.

    Args:
        batches: number of batches that wait for the consumer at most.
        stream: the GPU stream on which the batches are made; None: they are made on a CPU.

    Attributes:
        stopped: set to end the thread.
    """

    def __init__(self, batches: int, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(batches)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self.stopped = threading.Event()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread can run here: a forked process has none of its parent's threads."""
        return os.getpid() == self._process

    def iterate(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, which are made in the thread; errors there are raised here.

        Raises:
            RuntimeError: it is closed, or this process was forked from the one that made it.
        """
        self._require_own_process()
        if self.stopped.is_set():
            raise RuntimeError(CLOSED)
        self._thread = threading.Thread(target=self._work, args=[batches], name="loader", daemon=True)
        self._thread.start()
        while (item := self._next_item()) is not None:
            if isinstance(item, BaseException):
                raise item
            if self._stream is not None:
                for view in item.views:  # tells the allocator that the consumer's stream uses the tensors too
                    view.image.record_stream(torch.cuda.current_stream(self._stream.device))
            yield item

    def _next_item(self) -> Batch | BaseException | None:
        self._require_own_process()
        return self._queue.get()

    def _require_own_process(self) -> None:
        if not self.is_of_this_process:
            raise RuntimeError(
                f"the loader belongs to process {self._process}, and its threads are not in process {os.getpid()}, "
                "which was forked from it: make a loader in each process, after the fork"
            )

    def close(self) -> None:
        """End the thread and wait for it."""
        self.stopped.set()
        if self._thread is not None:
            while self._thread.is_alive():
                with suppress(queue.Empty):
                    self._queue.get(timeout=0.05)
            if self._queue.empty():  # wakes a consumer that waits for a batch
                self._queue.put_nowait(RuntimeError(CLOSED))

    def _work(self, batches: Iterator[Batch]) -> None:
        try:
            if self._stream is not None:  # a thread begins on GPU 0, and goes back there when it leaves the stream
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                for batch in batches:
                    if not self._put(batch):
                        return
            self._put(None)
        except BaseException as error:  # every error is raised again in the consumer
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        """Hand an item to the consumer; False if the thread was stopped before."""
        while not self.stopped.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return True
        return False
