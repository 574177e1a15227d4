"""Keeps a DALI pipeline supplied with requests and returns its outputs in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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
            StopIteration: after the last one.
        """
        if not self._started:
            self._started = True
            self._pipeline.schedule_run()  # the first call fills the queue
        try:
            outputs = tuple(self._pipeline.outputs())
        except RuntimeError as error:
            raise DecodeError(str(error)) from error
        finally:
            self._pipeline.schedule_run()
        return outputs


def decodes(request: Request, config: GraphConfig) -> bool:
    """Whether the single file of a request decodes, in the request's region.

    DALI names the failed file of a batch only in the text of its message.
    """
    alone = replace(config, batch=1, threads=1, prefetch=1)
    try:
        next(Runner(partial(decode_pipeline, alone), iter([request]).__next__))
    except DecodeError:
        return False
    return True
