"""Decodes images in a separate process, so that an image that kills the decoder can be found.

The structure of every file is checked before, but a bug in the decoder may still end its process. The parent then gives
halves of that process's images to new processes, until one image is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from peclr_dali.errors import UserError
from peclr_dali.pipelines.files.image_file import ImageFile
from peclr_dali.pipelines.render.chunk import chunk_of
from peclr_dali.pipelines.render.runner import FileDecoder
from peclr_dali.pipelines.render.settings import Settings

DOES_NOT_DECODE: Final = "its compressed data does not decode"

LIMIT_S: Final = 60.0
"""Seconds for a request, plus one for each image; a process that takes longer counts as hanging."""

_START_LIMIT_S: Final = 600.0

Decoder = Callable[[Sequence[ImageFile]], Sequence[bool]]
"""N files -> N times whether it decodes."""

log = logging.getLogger(__name__)


class DaliDecoder:
    """Decodes whole images as the data path does."""

    def __init__(self, settings: Settings) -> None:
        whole = replace(settings, regions=False)
        self._many, self._one = FileDecoder(whole), FileDecoder(replace(whole, chunk_size=1))

    def __call__(self, files: Sequence[ImageFile]) -> list[bool]:
        """For each of at most `settings.chunk_size` files, whether it decodes.

        Raises:
            UserError: one does not, and the machine is at fault, as without memory.
        """
        if self._many.error(chunk_of(files)) is None:
            return [True] * len(files)
        return [self._one.decodes(chunk_of([file])) for file in files]


class DecoderProcess:
    """A process that decodes. It is replaced by a new one when it dies or hangs.

    The processes are forked from a fork server, so a script needs `if __name__ == "__main__"`.

    Args:
        make_decoder: called in the process; it has to be importable, and so has the class of its result.
        limit_s: seconds for a request, plus one for each image.
    """

    def __init__(self, make_decoder: Callable[[], Decoder], *, limit_s: float = LIMIT_S) -> None:
        self._make_decoder, self._limit_s = make_decoder, limit_s
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._deaths = 0

    def faults(self, files: Sequence[ImageFile]) -> dict[int, str]:
        """Decode N files. Returns number of a file -> reason why it cannot be used.

        Raises:
            UserError: a process does not start.
        """
        try:
            return {place: DOES_NOT_DECODE for place, good in enumerate(self._decode(files)) if not good}
        except _DiedError as death:
            reason = str(death)
        if len(files) == 1:
            return {0: reason}
        found: dict[int, str] = {}
        deaths, middle = self._deaths, len(files) // 2
        for start, stop in ((0, middle), (middle, len(files))):
            self.close()  # a new process, since an image of the first half may have damaged the old one
            found |= {start + place: reason for place, reason in self.faults(files[start:stop]).items()}
        if self._deaths == deaths:
            log.warning("%d images %s when decoded together, but not when each half is decoded alone; none of them is "
                        "listed", len(files), reason)  # fmt: skip
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _decode(self, files: Sequence[ImageFile]) -> Sequence[bool]:
        connection = self._connection or self._start()
        with suppress(OSError):  # the process is gone, which `_answer` finds too
            connection.send(files)
        answer: Sequence[bool] = self._answer(connection, self._limit_s + len(files))
        return answer

    def _start(self) -> Connection[Any, Any]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        try:
            connection, other_end = context.Pipe()
            process = context.Process(target=_work, args=(other_end, self._make_decoder), daemon=True)
            process.start()
            other_end.close()
            self._process, self._connection = process, connection
            self._answer(connection, _START_LIMIT_S)
        except _DiedError as death:
            raise UserError(f"The decoder's process does not start: it {death}. Is memory short?") from None
        except (EOFError, OSError) as error:  # an end of the fork server is an EOFError without words
            reason = str(error) or "the server that forks it ended"
            raise UserError(
                f"The decoder's process does not start: {reason}. Check memory and the limits of processes and open "
                "files (ulimit -a)"
            ) from error
        return connection

    def _answer(self, connection: Connection[Any, Any], limit_s: float) -> Any:
        """The process's next answer.

        Raises:
            _DiedError: it ended, or did not answer in time.
        """
        process = self._process
        assert process is not None
        reason = f"kept the decoder busy for more than {limit_s:.0f} s"
        if wait([connection], limit_s):
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                process.join()
                reason = _how_it_ended(process.exitcode or 0)
            else:
                if isinstance(answer, Exception):
                    raise answer
                return answer
        self._deaths += 1
        self.close()
        raise _DiedError(reason)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended the decoder's process with exit code {code}"
    memory = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    return f"killed the decoder's process ({signal.Signals(-code).name}{memory})"


class _DiedError(Exception):
    """The decoder's process ended or hung. The message completes "the image ..."."""


def _work(connection: Connection[Any, Any], make_decoder: Callable[[], Decoder]) -> None:
    """Answer requests until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        decoder = make_decoder()
        connection.send(None)
        # Messages that the decoders' libraries print about odd files are dropped: the answer lists the bad files.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while True:
            connection.send(decoder(connection.recv()))
    except (EOFError, OSError):
        return
    except Exception as error:  # a bug of ours
        connection.send(error)
