"""Keeps a DALI pipeline busy with requests and hands back its outputs in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from nvidia.dali import Pipeline

from pipelines.render.graph import GraphConfig, decode_pipeline
from pipelines.render.request import Request

Outputs = tuple[Any, ...]  # DALI's TensorLists carry no types


class DecodeError(RuntimeError):
    """A file that passed the check did not decode; the rest of its request is lost with it."""


class Runner:
    """Iterates over the outputs of a pipeline that takes its requests from a function.

    A decoding error ends one item, not the iteration: the next item is the next request's.

    Args:
        build: makes the pipeline from the function that it is to call for every request.
        source: gives the next request and raises StopIteration after the last; up to the graph's `prefetch` requests
            are taken ahead.
    """

    def __init__(self, build: Callable[[Callable[[], Request]], Pipeline], source: Callable[[], Request]) -> None:
        self._pipeline = build(source)
        self._started = False

    def __iter__(self) -> Runner:
        return self

    def __next__(self) -> Outputs:
        """Wait for the oldest request's outputs.

        Raises:
            DecodeError: if one of its files does not decode; later requests are not affected.
            StopIteration: after the last one.
        """
        if not self._started:
            self._started = True
            self._pipeline.schedule_run()  # the first call takes as many requests as the queue is deep
        try:
            outputs = tuple(self._pipeline.outputs())
        except RuntimeError as error:
            raise DecodeError(str(error)) from error
        finally:
            self._pipeline.schedule_run()
        return outputs


def decodes(request: Request, config: GraphConfig) -> bool:
    """Whether the only file of a request decodes, in the region that the request names.

    DALI says that a batch failed, and only in prose which of its files did.
    """
    alone = replace(config, batch=1, threads=1, prefetch=1)
    try:
        next(Runner(partial(decode_pipeline, alone), iter([request]).__next__))
    except DecodeError:
        return False
    return True
