"""The gradient of a step as CUDA graphs, each of which the host starts at once."""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.train.distributed.world import World
from peclr_dali.train.steps.exact import ExactStep, StepResult

# Calls before the recording. In them memory is measured, kernels are chosen, and networks compiled.
_WARM_UP_CALLS = 2


class _Recorder(World):
    """The ranks while a step is recorded: each exchange ends a graph, and the next one begins.

    The graphs share one pool of memory. As in a step that is not recorded, a tensor's memory is used again when nothing
    in Python refers to the tensor, within the same graph or in a later one. So activations of forward passes last until
    the backward pass in a later graph, and graphs may be replayed in the order of the recording only.

    Attributes:
        parts: each graph, with the tensor and the operation of the exchange that follows; the last one has none.
        recording: the graph that is being recorded; its end ends the graph.
    """

    overlaps = False  # the backward pass runs in autograd's thread, and only the thread that began a graph may end it

    def __init__(self, world: World) -> None:
        super().__init__(**vars(world))
        self.parts: list[tuple[torch.cuda.CUDAGraph, tuple[Tensor, dist.ReduceOp.RedOpType] | None]] = []
        self._pool = torch.cuda.graph_pool_handle()
        # Of the same priority as a run's stream, and one for all graphs: autograd goes back on the stream of the
        # forward pass.
        self._stream = torch.cuda.Stream(world.device, priority=-1)  # type: ignore[no-untyped-call]
        self.recording = ExitStack()

    def all_reduce_(
        self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
    ) -> None:
        """Note an exchange. It is made in replays, between two graphs."""
        self.recording.close()
        self.parts[-1] = (self.parts[-1][0], (tensor, operation))
        self.begin_graph()

    def begin_graph(self) -> None:
        """Begin to record a graph."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as DALI's, may allocate memory meanwhile.
        self.recording.enter_context(
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        )
        self.parts.append((graph, None))


@dataclass(frozen=True)
class _Recording:
    """Graphs and exchanges, and the tensors that they read and write."""

    recorder: _Recorder
    batch: Batch
    result: StepResult
    gradients: list[Tensor | None]


class StepGraph:
    """Records a step's kernels on a GPU as one CUDA graph, on several ranks one between every two exchanges.

    In replays the same kernels run on the same numbers. Where the host needs longer to start them than the GPU to run
    them, a step gets faster. The graphs have memory of their own, as much as the recorded step, which nothing else can
    use. Sums of gradients over ranks begin after the last backward pass, not during it.

    Args:
        step: it must not wait for the GPU, copy from the host, or use anything of a batch but its views. Its network's
            parameters and buffers stay in the same memory. Its `own_work` measures the graphs' replays.
    """

    def __init__(self, step: ExactStep[Batch]) -> None:
        self._step = step
        self._calls = 0
        self._recording: _Recording | None = None

    def __call__(self, batch: Batch) -> StepResult:
        """Run the step on a batch, or replay the first one that was recorded. All batches have the same shapes.

        Raises:
            UserError: it cannot be recorded.
        """
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:
            return self._step(batch)
        recording = self._recording = self._recording or self._record(batch)
        torch._foreach_copy_(_tensors(recording.batch), _tensors(batch))
        step, result = self._step, recording.result
        for graph, exchange in recording.recorder.parts:
            with step.own_work.running(step.world.device):
                graph.replay()
            if exchange is not None:
                step.world.all_reduce_(*exchange)
        # Others may have written gradients meanwhile.
        for parameter, written in zip(step.network.parameters(), recording.gradients, strict=True):
            parameter.grad = written
        change = result.recompute_difference
        # Copies, since the next replay overwrites the result.
        return StepResult(result.loss.clone(), result.embeddings.clone(), None if change is None else change.clone())

    def _record(self, batch: Batch) -> _Recording:
        views = [View(*(tensor.clone() for tensor in vars(view).values())) for view in batch.views]
        batch = replace(batch, views=tuple(views))
        step, world = self._step, self._step.world
        step.world = recorder = _Recorder(world)
        step.own_work.is_off = True  # an event in a graph cannot be read
        try:
            with warnings.catch_warnings(), recorder.recording:
                recorder.begin_graph()
                # After the last exchange, a network without batch norm has nothing to do.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                result = step(batch)
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # torch ends the recording with an error that hides the cause
                first = first.__context__
            raise UserError(
                f"the step cannot be recorded as a CUDA graph ({in_one_line(first)}): set train.cuda_graph = false"
            ) from error
        finally:
            step.world, step.own_work.is_off = world, False
        return _Recording(recorder, batch, result, [parameter.grad for parameter in step.network.parameters()])


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for view in batch.views for tensor in vars(view).values()]
