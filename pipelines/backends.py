"""The two ways from a request to pixels, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol

import numpy as np
import torch
from nvidia.dali import Pipeline
from torch.utils.dlpack import from_dlpack

from pipelines import fast_cpu
from pipelines.batch import View
from pipelines.draws import NO_APPEARANCE, AppearanceConfig, ColourConfig, GeometryConfig
from pipelines.runner import Outputs
from pipelines.views import GraphConfig, Request, decode_pipeline, view_pipeline


class Backend(Protocol):
    """Builds the pipeline and turns its outputs into views."""

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline that takes its requests from `source` and whose outputs `write` takes."""

    def write(self, outputs: Outputs, request: Request, views: list[View]) -> list[Future[None]]:
        """Put the views of one DALI batch into `views`, whose tensors have its number of rows.

        Returns:
            What to wait for before the views are read.
        """

    def close(self) -> None:
        """Free what is held."""


def resolve_backend(backend: Literal["auto", "dali", "opencv"], device: torch.device) -> Literal["dali", "opencv"]:
    """What "auto" means on a device."""
    if backend == "auto":
        return "dali" if device.type == "cuda" else "opencv"
    return backend


def make_backend(
    backend: Literal["dali", "opencv"],
    graph: GraphConfig,
    geometry: GeometryConfig,
    colour: ColourConfig,
    appearance: AppearanceConfig = NO_APPEARANCE,
) -> Backend:
    """The backend of that name."""
    return (DaliViews if backend == "dali" else FastViews)(graph, geometry, colour, appearance)


class DaliViews:
    """Backend "dali": the graph has made the views; they are copied into the training batch."""

    def __init__(
        self, graph: GraphConfig, geometry: GeometryConfig, colour: ColourConfig, appearance: AppearanceConfig
    ) -> None:
        self._graph, self._geometry, self._colour, self._appearance = graph, geometry, colour, appearance

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return view_pipeline(self._graph, self._geometry, self._colour, source, self._appearance)

    def write(self, outputs: Outputs, request: Request, views: list[View]) -> list[Future[None]]:
        """Copy one DALI batch into its rows of the training batch."""
        for number, view in enumerate(views):
            image, matrix, source_to_view_px = outputs[3 * number : 3 * number + 3]
            view.image.copy_(from_dlpack(image.as_tensor()).permute(0, 3, 1, 2))
            # By NumPy: beside a GPU, DALI may pin what lies on the CPU, and torch takes no pinned memory by DLPack.
            view.matrix.copy_(torch.from_numpy(np.asarray(matrix.as_tensor())))
            view.source_to_view_px.copy_(torch.from_numpy(np.asarray(source_to_view_px.as_tensor())))
        if self._graph.device == "gpu":
            # Only now may DALI have its memory back, and a consumer the batch. This thread alone waits for it.
            torch.cuda.current_stream().synchronize()
        return []

    def close(self) -> None:
        """Nothing is held."""


class FastViews:
    """Backend "opencv": DALI has decoded; a pool of threads makes the views in place."""

    def __init__(
        self, graph: GraphConfig, geometry: GeometryConfig, colour: ColourConfig, appearance: AppearanceConfig
    ) -> None:
        self._graph, self._geometry, self._colour, self._appearance = graph, geometry, colour, appearance
        self._pool = ThreadPoolExecutor(graph.threads, thread_name_prefix="views")

    def build(self, source: Callable[[], Request]) -> Pipeline:
        """The pipeline whose outputs `write` takes."""
        return decode_pipeline(self._graph, source)

    def write(self, outputs: Outputs, request: Request, views: list[View]) -> list[Future[None]]:
        """Start to make the views of one DALI batch in their rows of the training batch."""
        decoded_px = np.array([shape[:2] for shape in outputs[0].shape()], np.int64)
        if not np.array_equal(decoded_px, request.plan.shape_px):  # the kernel would read beyond an image
            raise RuntimeError(f"DALI decoded images of {decoded_px} pixels, their headers say {request.plan.shape_px}")
        for view, plan in zip(views, request.plan.views, strict=True):
            view.matrix.copy_(torch.from_numpy(plan.matrix))
            view.source_to_view_px.copy_(torch.from_numpy(plan.source_to_view_px))
        return fast_cpu.start_views(
            self._pool,
            self._graph.threads,
            outputs[0],
            request.plan,
            self._geometry,
            self._colour,
            [view.image.permute(0, 2, 3, 1).numpy() for view in views],
            self._appearance,
        )

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)
