"""The `check-data` command: decodes every image once and lists those that cannot be used.

The structure of every file is checked before, but a bug in the decoder may still end its process. So it runs in a
process of its own; when that ends, halves of its images go to new processes, until one image is left.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.render.chunk import chunk_of
from peclr_dali.pipelines.render.runner import FileDecoder
from peclr_dali.pipelines.render.settings import Settings, choose_settings
from peclr_dali.pipelines.samples.bad_list import write_bad_list
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.writing import refuse_existing

DOES_NOT_DECODE: Final = "its compressed data does not decode"
ENDS_THE_DECODER: Final = "ends the decoder's process, or keeps it busy for minutes"

LIMIT_S: Final = 60
"""Seconds for a chunk, plus one for each image; a process that takes longer is ended."""

Decoder = Callable[[Sequence[ImageFile]], Sequence[bool]]
"""N files -> N times whether it decodes."""

_decoder: Decoder
"""The decoder of this process."""


@dataclass(frozen=True)
class Checked:
    """Result of the check of one source.

    Attributes:
        key: the source's table in the configuration, "data" or "data.0".
        reasons: path -> reason why the file cannot be used.
        bad: number of samples of these files; an image with several hands is several samples.
    """

    key: str
    index: Index
    reasons: dict[str, str]
    bad: int
    list_file: Path


def check_data(
    sources: Sequence[DataConfig],
    pipelines: PipelinesConfig,
    out: Path,
    *,
    device: torch.device,
    progress: Callable[[int, int], None],
    make_decoder: Callable[[Settings], Decoder] | None = None,
    limit_s: int = LIMIT_S,
) -> list[Checked]:
    """Decode every image of a configuration's sources, whole, with the decoder that a run uses.

    The decoder's process is forked from a fork server, so a script needs `if __name__ == "__main__"`.

    Args:
        sources: several get a list each: `out` with a number before its ending.
        progress: called with (images done, images in all).
        make_decoder: makes the decoder, in its process; it has to be importable. None: `DaliDecoder`.
        limit_s: seconds for a chunk, plus one for each image.

    Raises:
        UserError: a list exists already, the data cannot be read at all, or the decoder does not start.
    """
    lists = {"data": out}  # key: table of the configuration
    if len(sources) > 1:
        lists = {f"data.{number}": out.with_suffix(f".{number}{out.suffix}") for number in range(len(sources))}
    refuse_existing(lists.values())  # before the work, which may take hours
    # All files: without an earlier list of bad files, and with all labels.
    indices = [load_index(replace(one, bad_list=None, label_fraction=1.0)) for one in sources]
    done, checked = 0, []
    for (key, file), index in zip(lists.items(), indices, strict=True):
        settings = choose_settings(index, pipelines, device, rows=len(index))
        process = DecoderProcess(make_decoder or DaliDecoder, settings, limit_s)
        bad: dict[int, str] = {}
        with ThreadPoolExecutor(settings.threads) as pool:
            for first in range(0, len(index), settings.chunk_size):
                rows = range(first, min(first + settings.chunk_size, len(index)))
                read = dict(zip(rows, pool.map(partial(_read, index), rows), strict=True))
                bad |= {row: reason for row, reason in read.items() if isinstance(reason, str)}
                files = {row: file for row, file in read.items() if isinstance(file, ImageFile)}
                bad |= process.faults(files)
                done += len(rows)
                progress(done, sum(map(len, indices)))
        process.close()
        reasons = {index.paths[row]: reason for row, reason in sorted(bad.items())}
        write_bad_list(file, reasons, checked=len(index))
        checked.append(Checked(key, index, reasons, len(bad), file))
    return checked


def _read(index: Index, row: int) -> ImageFile | str:
    """A sample's file, or why it must not reach the decoder."""
    try:
        return check_image(index.read(row))
    except OSError as error:
        return error.strerror or str(error)
    except BadImage as error:
        return str(error)


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
    """A process that decodes, replaced by a new one when it ends."""

    def __init__(self, make_decoder: Callable[[Settings], Decoder], settings: Settings, limit_s: int) -> None:
        self._start, self._limit_s = (make_decoder, settings), limit_s
        self._pool: ProcessPoolExecutor | None = None

    def faults(self, files: dict[int, ImageFile]) -> dict[int, str]:
        """Decode files by number. Returns number -> reason for those that cannot be used.

        Raises:
            UserError: a process does not start.
        """
        if not files:
            return {}
        pool, numbers = self._running(), list(files)
        try:
            good = pool.submit(_decode, list(files.values()), self._limit_s).result()
        except BrokenProcessPool:
            self.close()
        else:
            return {number: DOES_NOT_DECODE for number, decodes in zip(numbers, good, strict=True) if not decodes}
        if len(files) == 1:
            return {numbers[0]: ENDS_THE_DECODER}
        halves = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        first, second = (self.faults({number: files[number] for number in half}) for half in halves)
        return first | second

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None

    def _running(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["__main__", __name__])
            try:
                self._pool = ProcessPoolExecutor(1, context, _start, self._start)
                self._pool.submit(os.getpid).result()
            except (BrokenProcessPool, EOFError, OSError) as error:
                raise UserError(f"The decoder's process does not start ({error}). Is memory short?") from error
        return self._pool


def _start(make_decoder: Callable[[Settings], Decoder], settings: Settings) -> None:
    """Prepare the decoder's process."""
    global _decoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _decoder = make_decoder(settings)
    # Messages that the decoders' libraries print about odd files are dropped: the list has the bad files.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _decode(files: Sequence[ImageFile], limit_s: int) -> Sequence[bool]:
    signal.alarm(limit_s + len(files))  # ends the process, whatever holds it
    good = _decoder(files)
    signal.alarm(0)
    return good
