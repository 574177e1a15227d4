"""The stage that makes the views of a chunk, in three ways: by the DALI graph, by a kernel on a CPU or on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline
from torch.utils.dlpack import from_dlpack

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import View
from peclr_dali.pipelines.render.apply_appearance import apply_appearance
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.cpu_views import start_views
from peclr_dali.pipelines.render.dali_graph import decode_pipeline, view_pipeline
from peclr_dali.pipelines.render.runner import Outputs
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.plan import Plan


class Renderer(ABC):
    """Builds a DALI pipeline, and turns its outputs into views. This base class has the pipeline that only decodes."""

    def __init__(self, settings: Settings, augmentations: Sequence[Augmentation]) -> None:
        self._settings, self._augmentations = settings, augmentations

    def build(self, chunks: Iterator[Chunk]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return decode_pipeline(self._settings, chunks)

    @abstractmethod
    def write(self, outputs: Outputs, images: slice, plan: Plan, views: list[View]) -> Callable[[], None]:
        """Write the views of some images of a chunk into `views`, whose tensors have as many rows.

        Args:
            outputs: of all images of the chunk.
            images: which of them.
            plan: of these images alone.

        Returns:
            A function that waits until the views are finished; call it before reading them.
        """

    def _finish(self, outputs: Outputs) -> Callable[[], None]:
        """The result of `write`, when the work on DALI's outputs is queued on the GPU's current stream."""
        if self._settings.device == "cpu":
            return lambda: None
        finished = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting leaves the core to others
        finished.record()  # type: ignore[no-untyped-call]
        return partial(_wait, finished, outputs)

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free threads and memory."""


def make_renderer(settings: Settings, augmentations: Sequence[Augmentation]) -> Renderer:
    """Make the renderer of `PipelinesConfig.views`, given the augmentations of each view."""
    kinds: dict[str, type[Renderer]] = {"dali": DaliViews, "cpu": CpuViews, "gpu": GpuViews}
    return kinds[settings.views](settings, augmentations)


class DaliViews(Renderer):
    """Views "dali": the DALI graph makes the views, and they are copied into the training batch.

    The other renderers compare the decoded sizes with the headers, since their kernels read memory by them. DALI's
    nodes know their images' sizes and read nothing beyond them, so the graph does not give the sizes: on a GPU that
    would be one more output for the CPU in every chunk. tests/pipelines/test_exif.py compares the sizes for every kind
    of file.
    """

    def build(self, chunks: Iterator[Chunk]) -> Pipeline:
        """See `Renderer`."""
        return view_pipeline(self._settings, self._augmentations, chunks)

    def write(self, outputs: Outputs, images: slice, plan: Plan, views: list[View]) -> Callable[[], None]:
        """See `Renderer`. On a GPU, the copies run on the current stream."""
        for number, (view, draws, of_view) in enumerate(zip(views, plan.draws, self._augmentations, strict=True)):
            image, matrix, source_to_view_px = outputs[3 * number : 3 * number + 3]
            view.image.copy_(from_dlpack(image.as_tensor())[images].permute(0, 3, 1, 2))
            # Through NumPy: with a GPU, DALI may pin CPU memory, and torch accepts no pinned memory through DLPack.
            view.matrix.copy_(torch.from_numpy(np.asarray(matrix.as_tensor())[images]))
            view.source_to_view_px.copy_(torch.from_numpy(np.asarray(source_to_view_px.as_tensor())[images]))
            apply_appearance(view.image.permute(0, 2, 3, 1), draws, of_view.appearance)
        return self._finish(outputs)


class CpuViews(Renderer):
    """Views "cpu": a pool of threads makes the views of the decoded images."""

    def __init__(self, settings: Settings, augmentations: Sequence[Augmentation]) -> None:
        super().__init__(settings, augmentations)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="views")

    def write(self, outputs: Outputs, images: slice, plan: Plan, views: list[View]) -> Callable[[], None]:
        """See `Renderer`."""
        (decoded,) = outputs
        address = _addresses(decoded, images, plan)
        pixels = _copy_matrices(plan, views)
        started = start_views(
            self._pool, self._settings.threads, address, decoded, plan, self._augmentations, pixels
        )  # fmt: skip

        def finish() -> None:
            for share in started:
                share.result()

        return finish

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)


class GpuViews(Renderer):
    """Views "gpu": one kernel on the GPU makes the views of the decoded images."""

    def __init__(self, settings: Settings, augmentations: Sequence[Augmentation]) -> None:
        super().__init__(settings, augmentations)
        from peclr_dali.pipelines.render.gpu_kernel import make_views  # Triton, which nothing else needs

        self._make_views = make_views

    def write(self, outputs: Outputs, images: slice, plan: Plan, views: list[View]) -> Callable[[], None]:
        """See `Renderer`. The kernel runs on the current stream."""
        (decoded,) = outputs
        address = _addresses(decoded, images, plan)
        pixels = _copy_matrices(plan, views)
        self._make_views(address, plan, self._augmentations, pixels)
        for of_view, draws, augmentation in zip(pixels, plan.draws, self._augmentations, strict=True):
            apply_appearance(of_view, draws, augmentation.appearance)
        return self._finish(outputs)


def _wait(finished: torch.cuda.Event, outputs: Outputs) -> None:
    """Wait until a GPU has made the views. `outputs` are held until then, since it reads their memory."""
    finished.synchronize()


def _copy_matrices(plan: Plan, views: list[View]) -> list[torch.Tensor]:
    """Copy the matrices into the views; returns the views' pixels (N, S, S, 3), to be written."""
    for view, matrix, source_to_view_px in zip(views, plan.matrix, plan.source_to_view_px, strict=True):
        view.matrix.copy_(torch.from_numpy(matrix))
        view.source_to_view_px.copy_(torch.from_numpy(source_to_view_px))
    return [view.image.permute(0, 2, 3, 1) for view in views]


def _addresses(decoded: Any, images: slice, plan: Plan) -> IntArray:
    """Addresses (N,) of some images in DALI's TensorListCPU or TensorListGPU; they must have the planned sizes."""
    decoded_px = np.array([shape[:2] for shape in decoded.shape()[images]], np.int64)
    if not np.array_equal(decoded_px, plan.shape_px):  # otherwise the kernel would read beyond an image
        raise RuntimeError(f"DALI decoded images of {decoded_px} pixels, their headers say {plan.shape_px}")
    return np.array([decoded[image].data_ptr() for image in range(len(decoded))[images]], np.int64)
