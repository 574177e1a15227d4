"""Command line of the checkout: `python cli.py COMMAND`, or under `torchrun` for several processes."""

from peclr_dali.__main__ import run

if __name__ == "__main__":
    run()
