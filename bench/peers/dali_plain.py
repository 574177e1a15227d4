"""A peer: a DALI graph of common operators."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import DALIDataType, DALIImageType

from peclr_dali.bench.peers.workers import RANGES, Files, endless_batches


def batches(files: Files, threads: int, batch: int) -> Iterator[Any]:
    """Endless batches of two views, (3, S, S) float32, by warp_affine, hsv and crop_mirror_normalize."""
    names = [np.frombuffer(os.fsencode(path), np.uint8) for path in files.paths]
    order = endless_batches(len(names), batch)
    source = (([names[sample] for sample in samples], files.boxes_px[samples]) for samples in order)
    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=None)
    with pipeline:
        kinds = [DALIDataType.UINT8, DALIDataType.FLOAT]
        path, box_px = fn.external_source(source=source, num_outputs=2, batch=True, dtype=kinds)
        image = fn.decoders.image(fn.io.file.read(path), device="cpu", output_type=DALIImageType.RGB)
        pipeline.set_outputs(*(_view(image, box_px, files.side_px) for _ in range(2)))
    return iter(pipeline.run, None)


def _view(image: Any, box_px: Any, view_px: int) -> Any:
    """A view (3, S, S) float32 of the image's box. Hue is added, in DALI's linear colours."""
    uniform = fn.random.uniform
    scale = uniform(range=RANGES.scale) * view_px / box_px[2]
    shift_px = uniform(range=RANGES.x_frac, shape=[2]) * view_px
    matrix = fn.transforms.translation(offset=-box_px[:2])
    matrix = fn.transforms.rotation(matrix, angle=uniform(range=RANGES.rotation_deg))
    matrix = fn.transforms.scale(matrix, scale=fn.stack(scale, scale))
    matrix = fn.transforms.translation(matrix, offset=shift_px + view_px / 2)
    view = fn.warp_affine(image, matrix=matrix, size=[view_px, view_px], inverse_map=False, fill_value=0)
    saturation, value = uniform(range=RANGES.saturation), uniform(range=RANGES.value)
    view = fn.hsv(view, hue=180 * uniform(range=RANGES.hue), saturation=saturation, value=value)
    mean, deviation = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]  # ImageNet's
    return fn.crop_mirror_normalize(view, dtype=DALIDataType.FLOAT, mean=mean, std=deviation)
