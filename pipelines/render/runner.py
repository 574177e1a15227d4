"""Keeps a DALI pipeline supplied with requests and returns its outputs in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np

from errors import UserError
from errors.refused import machine_error_line
from pipelines.files.check import check_image
from pipelines.render.dali_graph import GraphConfig, decode_pipeline
from pipelines.render.request import Request

Outputs = tuple[Any, ...]  # DALI's TensorLists carry no types


class DecodeError(RuntimeError):
    """A file that passed the check did not decode; the outputs of its whole request are lost."""


class Runner:
    """Iterates over the outputs of a pipeline whose requests come from a function.

    A decoding error affects one item and does not end the iteration: the next item belongs to the next request.

    Args:
        build: makes the pipeline, given the function that it calls for every request.
        source: gives the next request and raises StopIteration after the last; up to the graph's `prefetch` requests
            are taken ahead.
    """

    def __init__(self, build: Callable[[Callable[[], Request]], Any], source: Callable[[], Request]) -> None:
        self._pipeline = build(source)
        self._started = False

    def __iter__(self) -> Runner:
        return self

    def __next__(self) -> Outputs:
        """Wait for the oldest request's outputs.

        Raises:
            DecodeError: a file of the request does not decode; later requests are not affected.
            UserError: memory is short.
            StopIteration: after the last one.
        """
        if not self._started:
            self._started = True
            self._pipeline.schedule_run()  # the first call fills the queue
        try:
            outputs = tuple(self._pipeline.outputs())
        except RuntimeError as error:
            raise decode_error(error) from error
        finally:
            self._pipeline.schedule_run()
        return outputs


class FileDecoder:
    """Decodes requests one by one, to find the files that do not decode.

    DALI names the failed file of a batch only in the text of its message.
    """

    def __init__(self, config: GraphConfig) -> None:
        self._request: Request
        self._pipeline = decode_pipeline(replace(config, prefetch=1), lambda: self._request)

    def error(self, request: Request) -> DecodeError | UserError | None:
        """The error when a request is decoded, in its regions; None if all its files decode."""
        self._request = request
        try:
            self._pipeline.run()
        except RuntimeError as error:
            return decode_error(error)
        return None

    def decodes(self, request: Request) -> bool:
        """Whether the files of a request decode, in its regions.

        Raises:
            UserError: they do not, and the machine is at fault, as without memory.
        """
        error = self.error(request)
        if isinstance(error, DecodeError) and (again := self.error(_sound(request))) is not None:
            error = UserError(
                f"DALI does not decode a sound image either ({again}). So the machine is at fault, and no image is "
                "replaced. Check its memory and its GPU; a run goes on with --resume auto."
            )
        if isinstance(error, UserError):
            raise error
        return error is None


def decode_error(error: RuntimeError) -> DecodeError | UserError:
    """The error that DALI's error means: a `UserError` if its text tells of a lack of memory."""
    message = machine_error_line(error)
    return DecodeError(str(error)) if message is None else UserError(message)


def _sound(request: Request) -> Request:
    """A request like this one, but for grey JPEGs of the files' sizes, which take as much memory."""
    sizes_px = (check_image(file).size_px for file in request.encoded)
    grey = (np.full((height, width, 3), 128, np.uint8) for height, width in sizes_px)
    return replace(request, encoded=[cv2.imencode(".jpg", image)[1] for image in grey])
