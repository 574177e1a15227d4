"""Starts the command line, as `python -m peclr_dali`, as `peclr-dali`, and as `python cli.py` in the checkout."""

import concurrent.futures.process
import io
import multiprocessing.process
import os
import signal
import sys
import threading
from types import FrameType

# Functions, by file, in whose midst no exception may come: it would leave a lock taken for ever, or free it twice; a
# process that is half started prints a traceback.
_UNDIVIDED = {
    threading.__file__: {"__enter__", "__exit__", "_acquire_restore", "_release_save"},
    multiprocessing.process.__file__: {"start"},
    concurrent.futures.process.__file__: {"submit"},
}
_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def run() -> None:
    """Prepare the process, and run the command that its arguments name."""
    # CUDA reads it when it starts: with its default of 8 hardware queues, DALI's many streams on the GPU wait for the
    # step's kernels (docs/performance.md).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; a notebook's backend may not be there
    # Torch's C++ code writes a page of stack frames as a warning for each attempt to connect to the other ranks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")

    # Ctrl-C during the imports ends the process without a traceback. Where it is ignored, as in background jobs, it
    # stays ignored.
    heeded = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from peclr_dali.cli import main
    from peclr_dali.machine import keep_freed_memory
    from peclr_dali.train.distributed.interrupt import stop_with_torchrun

    if heeded:
        signal.signal(signal.SIGINT, _end)
    if "RANK" not in os.environ:  # a rank may wait in C++ for others, where no Python runs
        for number in _HEEDED[1:]:
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, _end)
    stop_with_torchrun()
    keep_freed_memory()
    try:
        main()
    finally:
        for number in _HEEDED:  # Python's own end is not interrupted with a traceback either
            if signal.getsignal(number) == _end:
                signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    """Raise on a signal, so that files, locks and processes are cleaned up; within `_UNDIVIDED` a moment later."""
    while frame is not None and frame.f_code.co_name not in _UNDIVIDED.get(frame.f_code.co_filename, ()):
        frame = frame.f_back
    if frame is not None:
        signal.signal(signal.SIGALRM, lambda _, later: _end(number, later))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        return
    signal.signal(number, signal.SIG_DFL)  # another one ends the process at once
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    for child in multiprocessing.active_children():  # a pool would wait for their work
        child.terminate()
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run()
