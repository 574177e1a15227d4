"""The terminal: the log, and a progress line."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peclr_dali.errors import printable


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Print no more. By default Rich ends the process, and a run whose reader has ended would be lost."""
        self.quiet = True


console = _Terminal(stderr=True, soft_wrap=True)

_QUIET_S = 60.0  # the most seconds without a line of progress in a file, such as a job's log


class OneLine(logging.Formatter):
    """A log formatter that escapes control characters and newlines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        """The message of a record, escaped."""
        return printable(super().formatMessage(record))


def print_line(text: RenderableType) -> None:
    """Print a line about a run, which goes on if it cannot be printed: a full disk, or no reader, behind stderr."""
    with suppress(OSError):
        console.print(text, highlight=False)


def configure_logging() -> None:
    """Set up logging: on a terminal above the progress line, elsewhere one line per message.

    Ranks other than 0 print errors only, since rank 0 prints the same.
    """
    handler = (
        RichHandler(console=console, show_path=False, show_time=False, markup=False)
        if console.is_terminal
        else logging.StreamHandler()
    )
    handler.setFormatter(OneLine("%(message)s"))
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Places of credentials, notes on each node, and statistics of an import that Ctrl-C ended.
    for library in ("botocore", "aiobotocore", "onnxscript", "onnx_ir", "torch"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a cache of fonts, a home that cannot be written to
    # fp16 may skip the first step because its gradient is not finite; torch then warns about the order of calls.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress line with an ETA, on a terminal; elsewhere one a minute. Yields a function to call with (done, total).

    The line appears with the first call, so that an early error is printed without it.
    """
    progress = Progress(
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console
    )
    task, told_s = progress.add_task(title, total=None), time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal told_s
        progress.start()
        progress.update(task, completed=done, total=total)
        if not console.is_terminal and time.monotonic() > told_s + _QUIET_S:
            told_s = time.monotonic()
            print_line(progress.get_renderable())

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
