"""The backends, which make pixels from requests, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from nvidia.dali import Pipeline
from torch.utils.dlpack import from_dlpack

from machine.cores import available_cores
from pipelines.arrays import IntArray
from pipelines.batch import View
from pipelines.config import PipelinesConfig
from pipelines.render.apply_appearance import apply_appearance
from pipelines.render.cpu_views import start_views
from pipelines.render.dali_graph import GraphConfig, decode_pipeline, view_pipeline
from pipelines.render.request import Request
from pipelines.render.runner import Outputs
from pipelines.samples.image_sizes import largest_pixels, samples_at_once
from pipelines.samples.index import Index
from pipelines.views.augmentation import Augmentation, GeometryConfig
from pipelines.views.plan import MAX_HALVINGS, Plan, most_halvings
from pipelines.views.regions import LEAST_PIXELS


class Renderer(Protocol):
    """Builds the pipeline and turns its outputs into views."""

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline that takes its requests from `source` and whose outputs `write` takes."""

    def write(self, outputs: Outputs, plan: Plan, views: list[View]) -> Callable[[], None]:
        """Write the views of one DALI batch into `views`, whose tensors have as many rows.

        Returns:
            A function that waits until the views are finished; call it before reading them.
        """

    def close(self) -> None:
        """Free threads and memory."""


def resolve_backend(backend: Literal["auto", "dali", "cpu"], device: torch.device) -> Literal["dali", "cpu"]:
    """The backend that is used on a device."""
    if backend == "auto":
        return "dali" if device.type == "cuda" else "cpu"
    return backend


def configure_graph(
    index: Index,
    config: PipelinesConfig,
    device: torch.device,
    *,
    rows: int,
    views: int = 2,
    processes_here: int = 1,
    geometry: GeometryConfig | None = None,
) -> GraphConfig:
    """Configure the DALI graph; reads the sizes of a few samples.

    Args:
        geometry: of all views, so that the graph has no node for halvings that none of them needs; None: not known.
        device: device of the batches.
        rows: rows of a batch that this process loads.
        processes_here: processes that share this machine's cores.
    """
    on_gpu = device.type == "cuda" and resolve_backend(config.backend, device) == "dali"
    pixels = largest_pixels(index)
    return GraphConfig(
        device="gpu" if on_gpu else "cpu",
        device_id=device.index or 0 if device.type == "cuda" else None,
        batch=min(config.batch or samples_at_once(pixels), rows),
        threads=config.threads or max(1, available_cores() // processes_here),
        prefetch=config.prefetch,
        views=views,
        hw_decoder_load=config.hw_decoder_load,
        regions=config.decode == "region" or (config.decode == "auto" and not on_gpu and pixels >= LEAST_PIXELS),
        fused=on_gpu and config.gpu_views == "fused",
        halvings=MAX_HALVINGS if geometry is None else most_halvings(index.box_px, geometry),
    )


def make_renderer(backend: Literal["dali", "cpu"], graph: GraphConfig, augmentation: Augmentation) -> Renderer:
    """Make the renderer of a backend."""
    if backend == "cpu":
        return CpuViews(graph, augmentation)
    return (FusedViews if graph.fused else DaliViews)(graph, augmentation)


class DaliViews:
    """Backend "dali": the DALI graph makes the views, and they are copied into the training batch."""

    def __init__(self, graph: GraphConfig, augmentation: Augmentation) -> None:
        self._graph, self._augmentation = graph, augmentation

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return view_pipeline(self._graph, self._augmentation, source)

    def write(self, outputs: Outputs, plan: Plan, views: list[View]) -> Callable[[], None]:
        """Copy one DALI batch into its rows of the training batch.

        The other backends compare the decoded sizes with the headers, since their kernels read memory by them. DALI's
        nodes know their images' sizes and read nothing beyond them, so the graph does not give the sizes: on a GPU that
        would be one more output for the CPU in every batch. tests/pipelines/test_exif.py compares the sizes for every
        kind of file.
        """
        for number, (view, planned) in enumerate(zip(views, plan.views, strict=True)):
            image, matrix, source_to_view_px = outputs[3 * number : 3 * number + 3]
            view.image.copy_(from_dlpack(image.as_tensor()).permute(0, 3, 1, 2))
            # Through NumPy: with a GPU, DALI may pin CPU memory, and torch accepts no pinned memory through DLPack.
            view.matrix.copy_(torch.from_numpy(np.asarray(matrix.as_tensor())))
            view.source_to_view_px.copy_(torch.from_numpy(np.asarray(source_to_view_px.as_tensor())))
            apply_appearance(view.image.permute(0, 2, 3, 1), planned.draws, self._augmentation.appearance)
        if self._graph.device == "gpu":
            # Until the copy is finished, DALI must not reuse its memory and the consumer must not read the batch.
            torch.cuda.current_stream().synchronize()
        return lambda: None

    def close(self) -> None:
        """Nothing to free."""


class FusedViews:
    """Backend "dali" on a GPU, fused: DALI decodes, and one kernel writes the views."""

    def __init__(self, graph: GraphConfig, augmentation: Augmentation) -> None:
        from pipelines.render.gpu_kernel import make_views, require_compiler  # Triton, which only this backend needs

        if graph.device == "gpu":
            require_compiler()
        self._graph, self._augmentation, self._make_views = graph, augmentation, make_views

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return decode_pipeline(self._graph, source)

    def write(self, outputs: Outputs, plan: Plan, views: list[View]) -> Callable[[], None]:
        """Start to make the views of one DALI batch in their rows of the training batch, on the current stream."""
        (images,) = outputs
        _copy_matrices(plan, views)
        pixels = [view.image.permute(0, 2, 3, 1) for view in views]
        self._make_views(_addresses(images, plan), plan, self._augmentation, pixels)
        for of_view, planned in zip(pixels, plan.views, strict=True):
            apply_appearance(of_view, planned.draws, self._augmentation.appearance)
        if self._graph.device == "cpu":  # in tests
            return lambda: None
        finished = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        finished.record(torch.cuda.current_stream(pixels[0].device))  # type: ignore[no-untyped-call]
        return partial(_wait, finished, images)

    def close(self) -> None:
        """Nothing to free."""


def _wait(finished: torch.cuda.Event, images: Any) -> None:
    """Wait until a GPU has made the views. `images` are held until then, since its kernel reads their memory."""
    finished.synchronize()


class CpuViews:
    """Backend "cpu": DALI decodes, and a pool of threads writes the views."""

    def __init__(self, graph: GraphConfig, augmentation: Augmentation) -> None:
        self._graph, self._augmentation = graph, augmentation
        self._pool = ThreadPoolExecutor(graph.threads, thread_name_prefix="views")

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return decode_pipeline(self._graph, source)

    def write(self, outputs: Outputs, plan: Plan, views: list[View]) -> Callable[[], None]:
        """Start to make the views of one DALI batch in their rows of the training batch."""
        (images,) = outputs
        address = _addresses(images, plan)
        _copy_matrices(plan, views)
        pixels = [view.image.permute(0, 2, 3, 1) for view in views]
        started = start_views(self._pool, self._graph.threads, address, images, plan, self._augmentation, pixels)

        def finish() -> None:
            for share in started:
                share.result()

        return finish

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)


def _copy_matrices(plan: Plan, views: list[View]) -> None:
    for view, planned in zip(views, plan.views, strict=True):
        view.matrix.copy_(torch.from_numpy(planned.matrix))
        view.source_to_view_px.copy_(torch.from_numpy(planned.source_to_view_px))


def _addresses(images: Any, plan: Plan) -> IntArray:
    """Addresses (N,) of the images in DALI's TensorListCPU or TensorListGPU; they must have the planned sizes."""
    decoded_px = np.array([shape[:2] for shape in images.shape()], np.int64)
    if not np.array_equal(decoded_px, plan.shape_px):  # otherwise the kernel would read beyond an image
        raise RuntimeError(f"DALI decoded images of {decoded_px} pixels, their headers say {plan.shape_px}")
    return np.array([image.data_ptr() for image in images], np.int64)
