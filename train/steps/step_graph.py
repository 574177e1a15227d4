"""The gradient of a step as one CUDA graph, which the host starts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.train.steps.exact import StepResult
from peclr_dali.train.steps.stopwatch import Stopwatch

_WARM_UP_CALLS: Final = 2
"""Calls before the recording. In them memory is measured, kernels are chosen, and networks compiled."""


@dataclass(frozen=True)
class _Recording:
    """A graph, and the tensors that its kernels read and write."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    result: StepResult
    gradients: list[Tensor | None]


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
        self._recording: _Recording | None = None

    def __call__(self, gradient: Callable[[Batch], StepResult], batch: Batch) -> StepResult:
        """Run `gradient` on a batch, or replay the first one that was recorded. All batches have the same shapes.

        `gradient` writes `.grad` of the network's parameters. It must not wait for the GPU, copy from the host, or use
        anything of the batch but its views.

        Raises:
            UserError: it cannot be recorded.
        """
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:
            return gradient(batch)
        recording = self._recording = self._recording or self._record(gradient, batch)
        for theirs, ours in zip(_tensors(batch), _tensors(recording.batch), strict=True):
            if theirs.shape != ours.shape:
                raise ValueError(f"a tensor of {tuple(theirs.shape)}, but the recorded one has {tuple(ours.shape)}")
        torch._foreach_copy_(_tensors(recording.batch), _tensors(batch))
        result = recording.result
        with self._own_work.running(result.loss.device):
            recording.graph.replay()
        # Others may have written gradients meanwhile.
        for parameter, written in zip(self._network.parameters(), recording.gradients, strict=True):
            parameter.grad = written
        change = result.recompute_difference
        # Copies, since the next replay overwrites the result.
        return StepResult(result.loss.clone(), result.embeddings.clone(), None if change is None else change.clone())

    def _record(self, gradient: Callable[[Batch], StepResult], batch: Batch) -> _Recording:
        views = [View(*(one.clone() for one in vars(view).values())) for view in batch.views]
        batch = replace(batch, views=tuple(views))
        graph = torch.cuda.CUDAGraph()
        # Of the same priority as a run's stream. Other threads, such as DALI's, may allocate memory meanwhile.
        stream = torch.cuda.Stream(views[0].image.device, priority=-1)  # type: ignore[no-untyped-call]
        self._own_work.is_off = True  # an event in a graph cannot be read
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = gradient(batch)
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # torch ends the recording with an error that hides the cause
                first = first.__context__
            reason = " ".join(str(first).split())[:200]
            raise UserError(
                f"the step cannot be recorded as a CUDA graph ({reason}): set train.cuda_graph = false"
            ) from error
        finally:
            self._own_work.is_off = False
        return _Recording(graph, batch, result, [parameter.grad for parameter in self._network.parameters()])


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for view in batch.views for tensor in vars(view).values()]
