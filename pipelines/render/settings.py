"""Settings of a loader: `PipelinesConfig` with every choice made for this process, device and dataset."""

import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from peclr_dali.errors import UserError
from peclr_dali.machine import available_cores
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.files.check import image_headers, spread
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.pipelines.views.plan import LEAST_PIXELS, MAX_HALVINGS, most_halvings

# Largest size of a chunk's decoded images, in bytes. A few chunks are in memory at once.
_CHUNK_BYTES = 2**28

_MOST = 256  # largest number of samples in a chunk, if none is configured

# Most threads if DALI decodes on a GPU and no number is configured. The GPU makes the pixels. The threads read files
# and undo their Huffman code, and DALI gives each its own buffers, on the GPU and in pinned memory.
_MOST_THREADS_ON_GPU = 16

# Compute capabilities of the GPUs with engines that decode JPEGs beside the cores: A100, H100 and H200, B200.
_WITH_JPEG_ENGINES = ((8, 0), (9, 0), (10, 0))


@dataclass(frozen=True)
class Settings:
    """How chunks are made.

    Attributes:
        decoder: where DALI decodes.
        views: what makes views: a kernel on the CPU, a kernel on the GPU, or the DALI graph.
        device_id: the GPU, or None on a CPU-only machine.
        chunk_size: largest number of images in a chunk.
        images_per_row: images that a row of a batch shows.
        threads: threads that read files; as many of DALI; as many that make views with `views` "cpu".
        prefetch: chunks in DALI's queue at once.
        ahead: batches prepared ahead.
        size_hint_px: height and width of the images for which a GPU's JPEG engines get memory in advance.
        regions: decode the regions in the plan. If False, the plan has whole images only.
        halvings: largest number of halvings of a view (`plan.most_halvings`); the DALI graph has as many nodes.
        why: for the log, why pixels are made where they are.
    """

    decoder: Literal["cpu", "gpu"]
    views: Literal["cpu", "gpu", "dali"]
    device_id: int | None
    chunk_size: int
    threads: int
    prefetch: int
    ahead: int = 1
    images_per_row: int = 1
    size_hint_px: tuple[int, int] = (0, 0)
    regions: bool = False
    halvings: int = MAX_HALVINGS
    why: str = ""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Where DALI leaves its images, and where views are made of them."""
        return "cpu" if self.device_id is None or self.views == "cpu" else "gpu"

    @property
    def described(self) -> str:
        """Where pixels are made and why, for the log."""
        made = {"cpu": "made on the CPU", "gpu": "made by a GPU kernel", "dali": "made by the DALI graph"}[self.views]
        return f"images decoded on the {self.decoder.upper()}, views {made} ({self.why})"


def choose_settings(
    index: Index,
    config: PipelinesConfig,
    device: torch.device,
    *,
    rows: int,
    processes_here: int = 1,
    geometries: Sequence[GeometryConfig] = (),
) -> Settings:
    """Make the choices that the configuration leaves open; reads the sizes of a few samples.

    Args:
        device: device of the batches.
        rows: rows of a batch that this process loads.
        processes_here: processes that share this machine's cores.
        geometries: of the views, so that the graph has no node for halvings that none of them needs; empty: not known.

    Raises:
        UserError: the configuration asks for a GPU, and `device` is none.
    """
    decoder, views, why = _where_pixels_are_made(config, device)
    sizes_px = image_headers(index.read_many(spread(len(index), 32)))[:, :2]  # as stored
    pixels = int(sizes_px.prod(axis=1).max(initial=0))
    share = max(1, available_cores() // processes_here)
    # Of the largest sampled images, in steps of 64 pixels: the decoder reserves as much for each image.
    hint_px = np.minimum(-(-sizes_px.max(axis=0, initial=1) // 64) * 64, 4096).tolist()
    images_per_row = 1 if index.partners is None else 2
    return Settings(
        decoder=decoder,
        views=views,
        device_id=device.index or 0 if device.type == "cuda" else None,
        chunk_size=images_per_row * min(samples_in_chunk(images_per_row * pixels, config.batch or _MOST), rows),
        threads=config.threads or (min(share, _MOST_THREADS_ON_GPU) if decoder == "gpu" else share),
        prefetch=config.prefetch,
        ahead=config.ahead,
        images_per_row=images_per_row,
        size_hint_px=(hint_px[0], hint_px[1]),
        regions=config.decode == "region" or (config.decode == "auto" and decoder == "cpu" and pixels >= LEAST_PIXELS),
        halvings=max((most_halvings(index.box_px, geometry) for geometry in geometries), default=MAX_HALVINGS),
        why=why,
    )


def _where_pixels_are_made(
    config: PipelinesConfig, device: torch.device
) -> tuple[Literal["cpu", "gpu"], Literal["cpu", "gpu", "dali"], str]:
    """The decoder, what makes the views, and why.

    Raises:
        UserError: one of them is to be the GPU, and `device` is none, or there is no C compiler for its kernel.
    """
    decoder, views = config.decoder, config.views
    if device.type != "cuda":
        for key, value in (("decoder", decoder), ("views", views)):
            if value == "gpu":
                raise UserError(f'pipelines.{key} = "gpu", and the batches are on the CPU: set "auto" or "cpu"')
        return "cpu", "cpu" if views == "auto" else views, "no GPU" if views == "auto" else "as configured"
    why = []
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    has_compiler = has_headers and bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    if views == "gpu" and not has_compiler:
        raise UserError(
            'pipelines.views = "gpu" needs a C compiler and Python\'s headers, for Triton: install gcc and '
            'python3-dev, or set views = "dali"'
        )
    if views == "auto":
        views = "gpu" if has_compiler else "dali"
        if not has_compiler:
            why.append("the GPU kernel needs a C compiler and Python's headers: install gcc and python3-dev")
    if decoder == "auto" and views == "cpu":
        decoder = "cpu"
    elif decoder == "auto":
        engines = torch.cuda.get_device_capability(device) in _WITH_JPEG_ENGINES
        decoder = "gpu" if engines else "cpu"
        why.append(f"the GPU has {'' if engines else 'no '}JPEG engines")
    return decoder, views, "; ".join(why) or "as configured"


def samples_in_chunk(pixels: int, most: int = _MOST) -> int:
    """Number of images of this many pixels for a chunk, at most `most`; a few such chunks fit into memory."""
    return int(np.clip(_CHUNK_BYTES // (3 * max(pixels, 1)), 1, most))
