"""A look at data before training: `check-data` decodes every image and lists the bad ones, `views` draws views.

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
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.render.chunk import chunk_of
from peclr_dali.pipelines.render.runner import FileDecoder
from peclr_dali.pipelines.render.settings import Settings, choose_settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.subsets import write_bad_list
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.pictures import save_views
from peclr_dali.writing import refuse_existing, refuse_inputs

DOES_NOT_DECODE: Final = "its compressed data does not decode"
ENDS_THE_DECODER: Final = "ends the decoder's process, or keeps it busy for minutes"

LIMIT_S: Final = 60
"""Seconds for a chunk, plus one for each image; a process that takes longer is ended."""

Decode = Callable[[Settings, Sequence[ImageFile]], Sequence[bool]]
"""Settings of the decoder and N files -> N times whether it decodes."""


@cache
def _decoders(settings: Settings) -> tuple[FileDecoder, FileDecoder]:
    whole = replace(settings, regions=False)
    return FileDecoder(whole), FileDecoder(replace(whole, chunk_size=1))


def decode(settings: Settings, files: Sequence[ImageFile]) -> list[bool]:
    """For each of at most `settings.chunk_size` files, whether it decodes, whole, as in the data path.

    Raises:
        UserError: one does not, and the machine is at fault, as without memory.
    """
    many, one = _decoders(settings)
    if not files or many.error(chunk_of(files)) is None:
        return [True] * len(files)
    return [one.decodes(chunk_of([file])) for file in files]


def check_data(
    index: Index,
    pipelines: PipelinesConfig,
    out: Path,
    *,
    device: torch.device,
    progress: Callable[[int, int], None],
    decode: Decode = decode,
    limit_s: int = LIMIT_S,
) -> dict[str, str]:
    """Decode every image of an index, whole, with the decoder that a run uses. Write the list of the bad ones.

    The decoder's process is forked from a fork server, so a script needs `if __name__ == "__main__"`.

    Args:
        progress: called with (images done, images in all).
        decode: runs in a process of its own, so it has to be importable.
        limit_s: see `LIMIT_S`.

    Returns:
        path -> reason why the file cannot be used.

    Raises:
        UserError: the list exists already, or the decoder does not start.
    """
    refuse_existing([out])  # before the work, which may take hours
    settings = choose_settings(index, pipelines, device, rows=len(index))
    row_of = {path: row for row, path in enumerate(index.paths)}  # an image with several hands has several rows
    paths, size, done = list(row_of), settings.chunk_size, 0
    reasons: dict[str, str] = {}

    def read(path: str) -> ImageFile | str:
        try:
            return check_image(index.read(row_of[path]))
        except OSError as error:
            return error.strerror or str(error)
        except BadImage as error:
            return str(error)

    work = partial(_in_time, decode, settings, limit_s)
    with ThreadPoolExecutor(settings.threads) as pool, DecoderProcess(work) as process:
        for chunk in (paths[first : first + size] for first in range(0, len(paths), size)):
            files = dict(zip(chunk, pool.map(read, chunk), strict=True))
            bad = process.faults({path: file for path, file in files.items() if isinstance(file, ImageFile)})
            bad |= {path: reason for path, reason in files.items() if isinstance(reason, str)}
            reasons |= {path: bad[path] for path in chunk if path in bad}
            done += len(chunk)
            progress(done, len(paths))
    write_bad_list(out, reasons)
    return reasons


class DecoderProcess(AbstractContextManager["DecoderProcess"]):
    """A process that decodes, replaced by a new one when it ends.

    Raises:
        UserError: it does not start.
    """

    def __init__(self, work: Callable[[Sequence[ImageFile]], Sequence[bool]]) -> None:
        self._work, self._pool = work, _started(work)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def faults(self, files: dict[str, ImageFile]) -> dict[str, str]:
        """Decode files by path. Returns path -> reason for those that cannot be used."""
        if not files:
            return {}
        paths = list(files)
        try:
            good = self._pool.submit(self._work, list(files.values())).result()
            return {path: DOES_NOT_DECODE for path, decodes in zip(paths, good, strict=True) if not decodes}
        except BrokenProcessPool:
            self._pool = _started(self._work)
        if len(files) == 1:
            return {paths[0]: ENDS_THE_DECODER}
        halves = paths[: len(paths) // 2], paths[len(paths) // 2 :]
        first, second = (self.faults({path: files[path] for path in half}) for half in halves)
        return first | second


def _started(work: Callable[[Sequence[ImageFile]], Sequence[bool]]) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    try:
        pool = ProcessPoolExecutor(1, context, _start)
        pool.submit(work, []).result()
    except (BrokenProcessPool, EOFError, OSError) as error:
        raise UserError(f"The decoder's process does not start ({error}). Is memory short?") from error
    return pool


def _start() -> None:
    """Prepare the decoder's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Messages that the decoders' libraries print about odd files are dropped: the list has the bad files.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _in_time(decode: Decode, settings: Settings, limit_s: int, files: Sequence[ImageFile]) -> Sequence[bool]:
    signal.alarm(limit_s + len(files) if files else 0)  # ends the process, whatever holds it
    good = decode(settings, files)
    signal.alarm(0)
    return good


def preview(config: Config, out: Path, *, samples: int) -> None:
    """Draw the views of the first samples of a run, on the CPU."""
    if out.suffix.lower() not in (".png", ".jpg"):
        raise UserError(f"{out}: expected a name that ends in .png or .jpg")
    index = load_index(config.data)
    if index.store is None:
        refuse_inputs(out, map(index.path, range(len(index))))
    count = min(samples, len(index))
    batch = max(count, min(config.train.batch, len(index)))  # the run's, where the data fills it
    order = build_order(index, batch=batch, seed=config.run.seed)
    cpu = torch.device("cpu")
    schedule = Schedule(order, RankSlice(batch, 0, count), last_step=1)
    with Loader(index, schedule, config.pipelines, config.augmentation, device=cpu) as loader:
        save_views(out, next(iter(loader)), index, samples=count)
