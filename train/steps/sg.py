"""The gradient of a step as one CUDA graph, which the host starts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.train.steps.exact import StepResult
from peclr_dali.train.steps.stopwatch import Stopwatch

_CALLS_BEFORE: Final = 2
"""Calls before the recording. In them memory is measured, kernels are chosen, and networks compiled."""


class StepGraph:
    """Records a gradient's kernels as one CUDA graph, and replays it. One process on one GPU.

    The same kernels run on the same numbers. Where the host needs longer to start them than the GPU to run them, a step
    gets faster. The graph has memory of its own, as much as the recorded step, which nothing else can use.

    Args:
        network: its parameters and buffers stay in the same memory.
        own_work: measures the replays.
    """

    def __init__(self, network: nn.Module, own_work: Stopwatch) -> None:
        self._network, self._own_work = network, own_work
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch
        self._result: StepResult
        self._gradients: list[Tensor | None]

    def __call__(self, gradient: Callable[[Batch], StepResult], batch: Batch) -> StepResult:
        """Run `gradient` on a batch, or replay it. All batches have views of the same sizes.

        `gradient` writes `.grad` of the network's parameters. It must not wait for the GPU, copy from the host, or use
        anything of the batch but its views.
        """
        self._calls += 1
        if self._calls <= _CALLS_BEFORE:
            return gradient(batch)
        graph = self._graph = self._graph or self._record(gradient, batch)
        result = self._result
        with self._own_work.running(result.loss.device):
            graph.replay()
        # Others may have written gradients meanwhile.
        for parameter, written in zip(self._network.parameters(), self._gradients, strict=True):
            parameter.grad = written
        change = result.recompute_difference
        # Copies, since the next replay overwrites the result.
        return StepResult(result.loss.clone(), result.embeddings.clone(), None if change is None else change.clone())

    def _record(self, gradient: Callable[[Batch], StepResult], batch: Batch) -> torch.cuda.CUDAGraph:
        views = [View(*(one for one in vars(view).values())) for view in batch.views]
        self._batch = replace(batch, views=tuple(views))
        graph = torch.cuda.CUDAGraph()
        # Of the same priority as a run's stream. Other threads, such as DALI's, may allocate memory meanwhile.
        stream = torch.cuda.Stream(batch.views[0].image.device, priority=-1)  # type: ignore[no-untyped-call]
        self._own_work.is_off = True  # an event in a graph cannot be read
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._result = gradient(self._batch)
        finally:
            self._own_work.is_off = False
        self._gradients = [parameter.grad for parameter in self._network.parameters()]
        return graph


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for view in batch.views for tensor in vars(view).values()]
