"""Settings of a loader: `PipelinesConfig` with every choice made for this process, device and dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch

from peclr_dali.machine.cores import available_cores
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.samples.image_sizes import largest_pixels
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.pipelines.views.plan import MAX_HALVINGS, most_halvings
from peclr_dali.pipelines.views.regions import regions_pay

_CHUNK_BYTES: Final = 2**28
"""Largest size of a chunk's decoded images, in bytes. A few chunks are in memory at once."""

_MOST: Final = 256
"""Largest number of samples in a chunk; more are not faster."""

_MOST_THREADS_ON_GPU: Final = 16
"""Most threads if DALI decodes on a GPU and no number is configured. The GPU makes the pixels. The threads read files
and undo their Huffman code, and DALI gives each its own buffers, on the GPU and in pinned memory."""


@dataclass(frozen=True)
class Settings:
    """How chunks are made.

    Attributes:
        backend: "dali" makes views by the DALI graph, "cpu" by a kernel on the CPU, "fused" by a kernel on the GPU.
        device: where DALI decodes.
        device_id: the GPU, or None on a CPU-only machine.
        chunk_size: largest number of samples in a chunk.
        threads: threads that read files; as many of DALI; as many that make views with backend "cpu".
        prefetch: chunks in DALI's queue at once.
        hw_decoder_load: share of the images for the GPU's JPEG engines, if it has them.
        regions: decode the regions in the plan. If False, the plan has whole images only.
        halvings: largest number of halvings of a view (`plan.most_halvings`); the DALI graph has as many nodes.
    """

    backend: Literal["dali", "cpu", "fused"]
    device: Literal["cpu", "gpu"]
    device_id: int | None
    chunk_size: int
    threads: int
    prefetch: int
    hw_decoder_load: float = 0.65
    regions: bool = False
    halvings: int = MAX_HALVINGS


def choose_settings(
    index: Index,
    config: PipelinesConfig,
    device: torch.device,
    *,
    rows: int,
    images: int = 1,
    processes_here: int = 1,
    geometries: Sequence[GeometryConfig] = (),
) -> Settings:
    """Make the choices that the configuration leaves open; reads the sizes of a few samples.

    Args:
        device: device of the batches.
        rows: rows of a batch that this process loads.
        images: images in each row.
        processes_here: processes that share this machine's cores.
        geometries: of the views, so that the graph has no node for halvings that none of them needs; empty: not known.
    """
    on_gpu = device.type == "cuda" and config.backend != "cpu"
    backend = config.backend
    if backend == "auto":
        backend = "dali" if on_gpu else "cpu"
    pixels = largest_pixels(index)
    share = max(1, available_cores() // processes_here)
    return Settings(
        backend="fused" if on_gpu and config.gpu_views == "fused" else backend,
        device="gpu" if on_gpu else "cpu",
        device_id=device.index or 0 if device.type == "cuda" else None,
        chunk_size=min(config.batch or samples_in_chunk(images * pixels), rows),
        threads=config.threads or (min(share, _MOST_THREADS_ON_GPU) if on_gpu else share),
        prefetch=config.prefetch,
        hw_decoder_load=config.hw_decoder_load,
        regions=regions_pay(config.decode, pixels, on_gpu=on_gpu),
        halvings=max((most_halvings(index.box_px, geometry) for geometry in geometries), default=MAX_HALVINGS),
    )


def samples_in_chunk(pixels: int) -> int:
    """Number of images of this many pixels for a chunk; a few such chunks fit into memory."""
    return int(np.clip(_CHUNK_BYTES // (3 * max(pixels, 1)), 1, _MOST))
