"""A disk without room, as far as a test can make one."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from unittest.mock import patch


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write more than `size` bytes into a file.

    Python must not write bytecode meanwhile: it does not notice that the file ends early, and no later process could
    import the module.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with patch.object(sys, "dont_write_bytecode", True), patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
