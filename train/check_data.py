"""Decodes every image, judges every label, and lists the bad ones.

The structure of every file is checked before, but a bug in the decoder may still end its process. So it runs in a
process of its own. When images do not decode, or end the process, their halves are tried, until one image is left.
"""

import logging
import multiprocessing
import os
import resource
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import torch

from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.render.runner import FileDecoder
from peclr_dali.pipelines.render.settings import Settings, choose_settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.rules import find_faults
from peclr_dali.pipelines.sources import write_bad_list
from peclr_dali.pipelines.views.plan import Chunk

log = logging.getLogger(__name__)

DOES_NOT_DECODE = "its compressed data does not decode"
ENDS_THE_DECODER = "ends the decoder's process, or keeps it busy for minutes"

LIMIT_S = 60
"""Seconds for a chunk, plus one for each image; a process that takes longer is ended."""

Decode = Callable[[Settings, Sequence[ImageFile]], bool]
"""Settings of the decoder and N files -> whether all of them decode."""

_decoder_of = cache(FileDecoder)  # the decoder of this process


def decode(settings: Settings, files: Sequence[ImageFile]) -> bool:
    """Whether all of at most `settings.chunk_size` files decode, whole, as in the data path.

    Raises:
        UserError: a single one does not, and the machine is at fault, as without memory.
    """
    if not files:
        return True
    decoder, chunk = _decoder_of(replace(settings, regions=False)), Chunk(np.arange(len(files)), files=files)
    return decoder.decodes(chunk) if len(files) == 1 else decoder.error(chunk) is None


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
    """Decode every image of an index, whole, with the decoder that a run uses, and judge its labels by all rules.

    The list of the bad ones is written; what may be right, and is only doubted, is told.

    The decoder's process is forked from a fork server, so a script that calls this needs `if __name__ == "__main__"`.

    Args:
        progress: called with (images done, images in all).
        decode: runs in a process of its own, so it has to be importable.
        limit_s: see `LIMIT_S`.

    Returns:
        path -> reasons why the file cannot be used, or what is wrong with the labels of its rows.

    Raises:
        BrokenProcessPool: the decoder's process does not start, as without memory.
    """
    settings = choose_settings(index, pipelines, device, rows=len(index))
    rows_of = defaultdict[str, list[int]](list)  # an image with several hands has several rows
    for row, path in enumerate(index.paths):
        rows_of[path].append(row)
    paths, size = list(rows_of), settings.chunk_size
    reasons = defaultdict[str, list[str]](list)
    size_px = np.full((len(index), 2), np.nan)
    work = partial(_in_time, decode, settings, limit_s)

    def read(path: str) -> ImageFile | None:
        try:
            file = check_image(index.read(rows_of[path][0]))
        except OSError as error:
            reasons[path].append(error.strerror or str(error))
        except BadImage as error:
            reasons[path].append(str(error))
        else:
            size_px[rows_of[path]] = file.displayed_size_px[::-1]
            return file
        return None

    with ThreadPoolExecutor(settings.threads) as threads, ExitStack() as started:
        process = _start_decoder(started, work)
        for first in range(0, len(paths), size):
            chunk = paths[first : first + size]
            files = {path: file for path, file in zip(chunk, threads.map(read, chunk), strict=True) if file is not None}
            todo = [list(files)]
            while todo:
                some = todo.pop()
                try:
                    damage = None if process.submit(work, [files[path] for path in some]).result() else DOES_NOT_DECODE
                except BrokenProcessPool:
                    damage = ENDS_THE_DECODER
                    process = _start_decoder(started, work)
                if damage and len(some) > 1:
                    todo += [some[: len(some) // 2], some[len(some) // 2 :]]
                elif damage:
                    reasons[some[0]].append(damage)
            progress(first + len(chunk), len(paths))
    for fault in find_faults(index, size_px):
        if fault.rule.most == 1:  # may be right
            log.warning("%s They are not listed", fault)
            continue
        for row in fault.rows.tolist():
            reasons[index.paths[row]].append(f"{fault.numbers(row)}: {fault.found}")
    listed = {path: "; ".join(reasons[path]) for path in paths if path in reasons}
    write_bad_list(out, listed)
    return listed


def _start_decoder(started: ExitStack, work: Callable[[Sequence[ImageFile]], bool]) -> ProcessPoolExecutor:
    """A process that does `work`, until the stack is closed. It has begun: one that cannot is no fault of an image."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = started.enter_context(ProcessPoolExecutor(1, context, _prepare))  # a signal waits until it has begun
    resource_tracker.ensure_running()  # which would free what the next line blocks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # for the fork server: it is the parent's
    begun = pool.submit(work, [])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    begun.result()
    return pool


def _prepare() -> None:
    """Prepare the decoder's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Messages that the decoders' libraries print about odd files are dropped: the list has the bad files.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _in_time(decode: Decode, settings: Settings, limit_s: int, files: Sequence[ImageFile]) -> bool:
    signal.alarm(limit_s + len(files) if files else 0)  # ends the process, whatever holds it
    good = decode(settings, files)
    signal.alarm(0)
    return good
