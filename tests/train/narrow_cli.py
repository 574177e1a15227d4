"""`cli.py` for a process of its own, in which "resnet18" is narrow."""

from peclr_dali.__main__ import run
from tests.train.narrow import narrow_resnet18

if __name__ == "__main__":
    with narrow_resnet18():
        run()
