"""The environment of a process in which torch takes tensors of the card through a backward pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peclr_dali.errors import UserError

_DRIVER = Path(__file__).with_name("driver.c")


@contextmanager
def card_environment() -> Iterator[dict[str, str]]:
    """The environment variables for a Python process that uses `card.card`, as long as the `with` block lasts.

    Raises:
        UserError: gcc is missing, or does not compile the library that stands for the driver.
    """
    if shutil.which("gcc") is None:
        raise UserError("the card of make-believe needs a C compiler, and gcc is missing: install gcc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        line = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(_DRIVER)]
        made = subprocess.run(line, capture_output=True, text=True)
        if made.returncode != 0:
            raise UserError(f"gcc does not compile {_DRIVER.name}: {' '.join(made.stderr.split())[:200]}")
        yield {**os.environ, "LD_PRELOAD": str(library)}
