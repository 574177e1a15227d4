"""A decoder with a defect, in a module that a process loads fast."""

import os
import signal
import time
from collections.abc import Sequence

from peclr_dali.pipelines.files.image_file import ImageFile
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.train.check_data import decode

KILL, ABORT, EXIT, HANG, COSTLY = (b"kill", b"abort", b"exit", b"hang", b"costly")


def mortal_decode(settings: Settings, files: Sequence[ImageFile]) -> bool:
    """DALI's decoder with a defect that some bytes behind an image's end set off."""
    endings = [bytes(file.encoded[-8:]).lstrip(b"\0") for file in files]
    if KILL in endings:
        os.kill(os.getpid(), signal.SIGSEGV)
    if ABORT in endings:
        os.abort()
    if EXIT in endings:
        os._exit(3)
    if HANG in endings:
        time.sleep(3600)
    if endings.count(COSTLY) > 2:  # than memory has room for at once
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(settings, files)


def never_starts(settings: Settings, files: Sequence[ImageFile]) -> bool:
    """A decoder for which there is no memory."""
    os._exit(1)
