"""Starts the command line, as `python -m peclr_dali`, as `peclr-dali`, and as `python cli.py` in the checkout."""

from __future__ import annotations

import os
import signal


def run() -> None:
    """Run the command that the process's arguments name.

    CUDA gets as many hardware queues as it can have, unless the environment says how many.

    Ctrl-C during the imports ends the process without a traceback. Where it is ignored, as for background jobs, it
    stays ignored.
    """
    # CUDA reads it when it starts. With its default of 8, DALI's many streams on the GPU wait for the step's kernels
    # (docs/performance.md).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; a notebook's backend may not be there
    heeded = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from peclr_dali.cli import main
    from peclr_dali.processes import exit_on_sigterm

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "RANK" not in os.environ:  # a rank may wait in C++ for others, where no Python runs
        exit_on_sigterm()
    main()


if __name__ == "__main__":
    run()
