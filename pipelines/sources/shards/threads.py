"""Work on many shards at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def in_threads(
    work: Callable[[T], None],
    items: Iterable[T],
    *,
    workers: int,
    stop: threading.Event,
    progress: Callable[[], None],
) -> None:
    """Call `work` for each item in threads, and `progress` in this one, several times a second.

    The first error is raised here, after `stop` was set and the calls that run have ended.
    """
    with ThreadPoolExecutor(workers) as pool:
        try:
            running = {pool.submit(work, item) for item in items}
            while running:
                finished, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
                for one in finished:
                    one.result()
                progress()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
