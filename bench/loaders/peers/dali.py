"""Peers that run in a DALI graph on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, math
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import DALIDataType, DALIImageType

from peclr_dali.bench.loaders.peers import paper_draws as ranges
from peclr_dali.bench.loaders.peers.paper_draws import BoxArray, endless_batches

_IMAGENET_MEAN = [0.485 * 255, 0.456 * 255, 0.406 * 255]
_IMAGENET_STD = [0.229 * 255, 0.224 * 255, 0.225 * 255]


def sources(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Any]:
    """Endless batches of decoded sources, (height, width, 3) uint8 RGB; no views, so the boxes are not used."""
    names = _names(paths)
    source = ([names[sample] for sample in samples] for samples in endless_batches(len(names), batch))
    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=None)
    with pipeline:
        pipeline.set_outputs(_decoded(fn.external_source(source=source, batch=True, dtype=DALIDataType.UINT8)))
    return iter(pipeline.run, None)


def views(paths: Sequence[Path], boxes_px: BoxArray, threads: int, batch: int) -> Iterator[Any]:
    """Endless batches of two views, (3, 128, 128) float32, by warp_affine, hsv and crop_mirror_normalize."""
    names = _names(paths)
    source = (
        ([names[sample] for sample in samples], boxes_px[samples]) for samples in endless_batches(len(names), batch)
    )
    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=None)
    with pipeline:
        path, box_px = fn.external_source(
            source=source, num_outputs=2, batch=True, dtype=[DALIDataType.UINT8, DALIDataType.FLOAT]
        )
        image = _decoded(path)
        height_px, width_px = (fn.cast(image.shape()[axis], dtype=DALIDataType.FLOAT) for axis in (0, 1))
        whole_px = fn.stack(width_px / 2, height_px / 2, math.max(width_px, height_px))
        box_px = box_px + whole_px * (box_px[2] == 0)
        pipeline.set_outputs(_view(image, box_px), _view(image, box_px))
    return iter(pipeline.run, None)


def _names(paths: Sequence[Path]) -> list[npt.NDArray[np.uint8]]:
    return [np.frombuffer(os.fsencode(path), np.uint8) for path in paths]


def _decoded(path: Any) -> Any:
    data = fn.io.file.read(path)
    return fn.decoders.image(data, device="cpu", output_type=DALIImageType.RGB)


def _view(image: Any, box_px: Any) -> Any:
    half_px = ranges.VIEW_PX / 2
    scale = fn.random.uniform(range=ranges.SCALE) * ranges.VIEW_PX / box_px[2]
    shift_px = fn.random.uniform(range=ranges.SHIFT_FRAC, shape=[2]) * ranges.VIEW_PX
    matrix = fn.transforms.translation(offset=-box_px[:2])
    matrix = fn.transforms.rotation(matrix, angle=fn.random.uniform(range=ranges.ROTATION_DEG))
    matrix = fn.transforms.scale(matrix, scale=fn.stack(scale, scale))
    matrix = fn.transforms.translation(matrix, offset=shift_px + half_px)
    view = fn.warp_affine(image, matrix, size=[ranges.VIEW_PX, ranges.VIEW_PX], inverse_map=False, fill_value=0)
    view = fn.hsv(
        view,
        hue=180 * fn.random.uniform(range=ranges.HUE),
        saturation=fn.random.uniform(range=ranges.SATURATION),
        value=fn.random.uniform(range=ranges.VALUE),
    )
    return fn.crop_mirror_normalize(view, dtype=DALIDataType.FLOAT, mean=_IMAGENET_MEAN, std=_IMAGENET_STD)
