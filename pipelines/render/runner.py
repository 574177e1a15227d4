"""The stage that runs DALI on chunks, and finds the files that do not decode."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
from nvidia.dali import Pipeline

from peclr_dali.errors import UserError
from peclr_dali.pipelines.render.dali_graph import decode_pipeline
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.views.plan import Chunk

Outputs = tuple[Any, ...]  # DALI's TensorLists carry no types


def run_chunks(
    build: Callable[[Iterator[Chunk]], Pipeline], chunks: Iterator[Chunk]
) -> Iterator[tuple[Chunk, Outputs | None]]:
    """Run a DALI pipeline on chunks; yields each with its outputs, or with None if one of its files does not decode.

    Args:
        build: makes the pipeline, given its chunks, of which it takes as many ahead as its queue holds.

    Raises:
        RuntimeError: memory is short.
    """
    queued: deque[Chunk] = deque()  # and no `tee`, which keeps dozens of chunks that were taken

    def queue() -> Iterator[Chunk]:
        for chunk in chunks:
            queued.append(chunk)
            yield chunk

    pipeline = build(queue())
    pipeline.schedule_run()  # the first call fills DALI's queue
    while queued:
        outputs: Outputs | None = None
        try:
            outputs = tuple(pipeline.outputs())
        except RuntimeError as error:  # other chunks in the queue are not affected
            raise_if_no_memory(error)
        pipeline.schedule_run()
        yield queued.popleft(), outputs


class FileDecoder:
    """Decodes chunks one by one, to find the files that do not decode.

    DALI names the failed file of a batch only in the text of its message.
    """

    def __init__(self, settings: Settings) -> None:
        self._chunk: Chunk
        # The chunks are whichever is decoded next, without end.
        self._pipeline = decode_pipeline(replace(settings, prefetch=1), iter(lambda: self._chunk, None))

    def error(self, chunk: Chunk) -> RuntimeError | None:
        """DALI's error when a chunk is decoded, in its regions; None if all its files decode."""
        self._chunk = chunk
        try:
            self._pipeline.run()
        except RuntimeError as error:
            return error
        return None

    def decodes(self, chunk: Chunk) -> bool:
        """Whether the one file of a chunk decodes, in its region.

        Raises:
            RuntimeError: memory is short.
            UserError: a sound image does not decode either.
        """
        error = self.error(chunk)
        if error is None:
            return True
        raise_if_no_memory(error)
        (file,) = chunk.files
        grey = np.full((*file.size_px, 3), 128, np.uint8)  # takes as much memory
        sound = replace(chunk, files=[file._replace(encoded=cv2.imencode(".jpg", grey)[1])])
        if (again := self.error(sound)) is None:
            return False
        raise_if_no_memory(again)
        raise UserError(
            f"DALI does not decode a sound image either ({again}). So the machine is at fault, and no image is "
            "replaced. Check its memory and its GPU; a run goes on with --resume auto."
        )


def raise_if_no_memory(error: RuntimeError) -> None:
    """Raise DALI's error if its text tells of a lack of memory: then no file is at fault."""
    if re.search(r"alloc|out of memory|insufficient memory", str(error), re.IGNORECASE):
        error.add_note("Lower pipelines.batch, pipelines.ahead or pipelines.threads.")
        raise error
