"""The stage that makes the views of a chunk, in three ways: by the DALI graph, by a kernel on a CPU or on a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline
from torch.utils.dlpack import from_dlpack

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import View
from peclr_dali.pipelines.render.appearance_cpu import change_views
from peclr_dali.pipelines.render.appearance_tensors import change_tensors
from peclr_dali.pipelines.render.cpu_views import start_views
from peclr_dali.pipelines.render.dali_graph import decode_pipeline, view_pipeline
from peclr_dali.pipelines.render.runner import Outputs
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.plan import Chunk, Plan


class Renderer(ABC):
    """Builds a DALI pipeline, and turns its outputs into views, a chunk while the next one begins.

    This base class has the pipeline that only decodes, and waits for a GPU.
    """

    def __init__(self, settings: Settings, augmentations: Sequence[Augmentation]) -> None:
        self._settings, self._augmentations = settings, augmentations
        self._begun: tuple[torch.cuda.Event, Outputs] | None = None

    def build(self, chunks: Iterator[Chunk]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return decode_pipeline(self._settings, chunks)

    @abstractmethod
    def write(self, outputs: Outputs, plan: Plan, views: Sequence[View]) -> None:
        """Begin to write the views of a chunk into `views`, tensors with a row for each of its rows.

        The chunk before is finished when this returns; `finish` waits for this one.
        """

    def _hold(self, outputs: Outputs) -> None:
        """Keep DALI's outputs until the GPU's current stream has read them. Then their memory may be used again."""
        if self._settings.device == "cpu":
            return
        read = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting leaves the core to others
        read.record()  # type: ignore[no-untyped-call]
        self.finish()
        self._begun = (read, outputs)

    def finish(self) -> None:
        """Wait until the views that `write` has begun are there."""
        if self._begun is not None:
            read, _ = self._begun
            read.synchronize()
            self._begun = None

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free threads and memory."""


def make_renderer(settings: Settings, augmentations: Sequence[Augmentation]) -> Renderer:
    """Make the renderer of `PipelinesConfig.views`, given the augmentations of each view."""
    kinds: dict[str, type[Renderer]] = {"dali": DaliViews, "cpu": CpuViews, "gpu": GpuViews}
    return kinds[settings.views](settings, augmentations)


class DaliViews(Renderer):
    """Views "dali": the DALI graph makes all views of one image a row; they are copied into the training batch.

    The other renderers compare the decoded sizes with the headers, since their kernels read memory by them. DALI's
    nodes know their images' sizes and read nothing beyond them, so the graph does not give the sizes: on a GPU that
    would be one more output for the CPU in every chunk. tests/pipelines/test_exif.py compares the sizes for every kind
    of file.
    """

    def build(self, chunks: Iterator[Chunk]) -> Pipeline:
        """See `Renderer`."""
        return view_pipeline(self._settings, self._augmentations, chunks)

    def write(self, outputs: Outputs, plan: Plan, views: Sequence[View]) -> None:
        """See `Renderer`. On a GPU, the copies run on the current stream."""
        for number, (view, draws, augmentation) in enumerate(zip(views, plan.draws, self._augmentations, strict=True)):
            image, matrix, source_to_view_px = outputs[3 * number : 3 * number + 3]
            view.image.copy_(from_dlpack(image.as_tensor()).permute(0, 3, 1, 2))
            # Through NumPy: with a GPU, DALI may pin CPU memory, and torch accepts no pinned memory through DLPack.
            view.matrix.copy_(torch.from_numpy(np.asarray(matrix.as_tensor())))
            view.source_to_view_px.copy_(torch.from_numpy(np.asarray(source_to_view_px.as_tensor())))
            pixels = view.image.permute(0, 2, 3, 1)
            if self._settings.device == "gpu":
                change_tensors(pixels, draws, augmentation.appearance)
            else:
                change_views(pixels.numpy(), np.arange(len(pixels)), draws, augmentation.appearance)
        self._hold(outputs)


class CpuViews(Renderer):
    """Views "cpu": a pool of threads makes the views of the decoded images."""

    def __init__(self, settings: Settings, augmentations: Sequence[Augmentation]) -> None:
        super().__init__(settings, augmentations)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="views")
        self._shares: list[Future[None]] = []

    def write(self, outputs: Outputs, plan: Plan, views: Sequence[View]) -> None:
        """See `Renderer`."""
        (decoded,) = outputs
        address = _addresses(decoded, plan)
        pixels = _copy_matrices(plan, views)
        shares = start_views(self._pool, self._settings.threads, address, decoded, plan, self._augmentations, pixels)
        self.finish()  # the chunk before only now, so that the threads have work when it is done
        self._shares = shares

    def finish(self) -> None:
        """See `Renderer`."""
        for share in self._shares:
            share.result()
        self._shares = []

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)


class GpuViews(Renderer):
    """Views "gpu": one kernel on the GPU makes the views of the decoded images."""

    def __init__(self, settings: Settings, augmentations: Sequence[Augmentation]) -> None:
        super().__init__(settings, augmentations)
        from peclr_dali.pipelines.render.gpu_kernel import make_views  # Triton, which nothing else needs

        self._make_views = make_views

    def write(self, outputs: Outputs, plan: Plan, views: Sequence[View]) -> None:
        """See `Renderer`. The kernel runs on the current stream."""
        (decoded,) = outputs
        address = _addresses(decoded, plan)
        pixels = _copy_matrices(plan, views)
        self._make_views(address, plan, self._augmentations, pixels)
        for view_pixels, draws, augmentation in zip(pixels, plan.draws, self._augmentations, strict=True):
            change_tensors(view_pixels, draws, augmentation.appearance)
        self._hold(outputs)


def _copy_matrices(plan: Plan, views: Sequence[View]) -> list[torch.Tensor]:
    """Copy the matrices into the views; returns the views' pixels (N, S, S, 3), to be written."""
    for view, matrix, source_to_view_px in zip(views, plan.matrix, plan.source_to_view_px, strict=True):
        view.matrix.copy_(torch.from_numpy(matrix))
        view.source_to_view_px.copy_(torch.from_numpy(source_to_view_px))
    return [view.image.permute(0, 2, 3, 1) for view in views]


def _addresses(decoded: Any, plan: Plan) -> IntArray:
    """Addresses (M,) of the images in DALI's TensorListCPU or TensorListGPU; they must have the planned sizes."""
    decoded_px = np.array([shape[:2] for shape in decoded.shape()], np.int64)
    if not np.array_equal(decoded_px, plan.shape_px):  # otherwise the kernel would read beyond an image
        raise RuntimeError(f"DALI decoded images of {decoded_px} pixels, their headers say {plan.shape_px}")
    return np.array([decoded[image].data_ptr() for image in range(len(decoded))], np.int64)
