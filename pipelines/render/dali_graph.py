"""The DALI graphs: from encoded bytes and the plan of their views to pixels.

`view_pipeline` runs every node, on a CPU or on a GPU. `decode_pipeline` stops at the decoded image; `cpu_views.py` or
`gpu_kernel.py` makes the views. Neither graph draws random numbers or computes matrices: the plan is an input.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import nvidia.dali.math as dali_math
import nvidia.dali.types as types
from nvidia.dali import Pipeline, fn

from peclr_dali.pipelines.arrays import FloatArray, IntArray, PixelArray
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.plan import Chunk

Node = Any  # DALI's DataNode carries no types

_TINY: Final = 1e-6

# Size of the buffers that nvJPEG gets in advance: one on the GPU and two in pinned memory for each of DALI's threads.
# Nearly an image of 600 x 600 pixels with halved chroma; for larger ones they grow. DALI's own 16 and 8 MiB would be
# 1 GiB of the GPU with 64 threads, and 1 GiB of pinned memory.
_PADDING_BYTES: Final = 2**20


# Share of the images for a GPU's JPEG engines, if it has them. With all, training kept fewer cores busy.
_ENGINES_SHARE: Final = 1.0


def view_pipeline(settings: Settings, augmentations: Sequence[Augmentation], chunks: Iterator[Chunk]) -> Pipeline:
    """Decode once and make every view, without the augmentations of `views.appearance`.

    Outputs, per view: image (S, S, 3) uint8 on `settings.device`, matrix (2, 3) and source_to_view_px (2, 3) float32 on
    the CPU.
    """
    fill = augmentations[0].geometry.fill  # that of all views
    halvings = [settings.halvings if one.geometry.antialias else 0 for one in augmentations]
    pads = max(halvings) > 0 and fill != "edge"
    # Inputs of the image and of each view; DALI warns about inputs that are not used.
    of_image = ["padded_px"] * pads + ["start_px", "shape_px"] * settings.regions
    of_views = [
        ["matrix", "source_to_view_px", "decoded_to_view_px"]
        + ["draws"] * (augmentation.colour.jitter != "none")
        + ["sizes_px"] * (times > 0)
        for augmentation, times in zip(augmentations, halvings, strict=True)
    ]

    def inputs(chunk: Chunk) -> tuple[Any, ...]:
        plan = chunk.plan
        needed = plan.halvings.max(axis=0)
        if needed.max() > max(halvings):
            raise RuntimeError(f"views need {needed.max()} halvings, the graph was built for {max(halvings)}")
        block_px = 2 ** needed[:, None]  # of whole blocks, images can be halved without a remainder
        padded_px = -(-plan.shape_px // block_px) * block_px if pads else plan.shape_px
        image = {"padded_px": padded_px, "start_px": plan.start_px, "shape_px": plan.shape_px}
        views = [
            _halving_sizes_px(padded_px, plan.halvings[number], halvings[number])
            if name == "sizes_px"
            else getattr(plan, name)[number]
            for number, of_view in enumerate(of_views)
            for name in of_view
        ]
        return (_encoded(chunk), *(image[name].astype(np.int32) for name in of_image), *views)

    kinds = [(types.INT32, 1) for _ in of_image]
    kinds += [(types.FLOAT, 1 if name == "draws" else 2) for of_view in of_views for name in of_view]
    pipeline = _empty_pipeline(settings)
    with pipeline:
        encoded, *nodes = _external(map(inputs, chunks), kinds)
        image_nodes = dict(zip(of_image, nodes, strict=False))
        image = decode(
            encoded, settings, [image_nodes["start_px"], image_nodes["shape_px"]] if settings.regions else []
        )
        if pads:  # an odd last row or column is halved together with the fill beyond it
            image = fn.pad(image, axes=[0, 1], shape=image_nodes["padded_px"], fill_value=fill)
        outputs, of_each = [], iter(nodes[len(of_image) :])
        for augmentation, times, of_view in zip(augmentations, halvings, of_views, strict=True):
            view = {name: next(of_each) for name in of_view}
            outputs += [_view(image, view, augmentation, times), view["matrix"], view["source_to_view_px"]]
        pipeline.set_outputs(*outputs)
    pipeline.build()
    return pipeline


def _view(image: Node, view: Mapping[str, Node], augmentation: Augmentation, halvings: int) -> Node:
    """A view of the image, (S, S, 3) uint8: halved, warped, and its colours jittered. `view` has its inputs by name."""
    geometry = augmentation.geometry
    warped = fn.warp_affine(
        _halve(image, view["sizes_px"], halvings) if halvings else image,
        matrix=view["decoded_to_view_px"],
        inverse_map=False,
        size=[geometry.side_px, geometry.side_px],
        interp_type=types.INTERP_LINEAR,
        fill_value=None if geometry.fill == "edge" else geometry.fill,
        dtype=types.FLOAT,
    )
    return fn.cast(_hsv(warped, view["draws"]) if "draws" in view else warped, dtype=types.UINT8)


def _hsv(image: Node, draws: Node) -> Node:
    """Scale hue and saturation of (S, S, 3) float pixels in [0, 255], map value to a x + b; not yet rounded or clipped.

    DALI's own `fn.hsv` works linearly in YIQ and cannot scale a hue, so HSV is written out in DALI's arithmetic, which
    runs on a CPU and on a GPU, without branches (paper, supplement, "Self-supervised pre-training").
    With value V, chroma C and hue h in sixths of a turn, channel n of the result is
    V' - V' S' clip(min(k, 4 - k), 0, 1), k = (n + h') mod 6, for n = 5, 3, 1.
    """
    red, green, blue = (image[:, :, channel] for channel in range(3))
    value = dali_math.max(red, dali_math.max(green, blue))
    chroma = value - dali_math.min(red, dali_math.min(green, blue))
    per_chroma = 1 / dali_math.max(chroma, _TINY)

    is_red = red >= value
    is_green = (green >= value) & (red < value)
    is_blue = (red < value) & (green < value)
    from_red = (green - blue) * per_chroma
    sixths = (
        is_red * (from_red + 6.0 * (from_red < 0))
        + is_green * ((blue - red) * per_chroma + 2.0)
        + is_blue * ((red - green) * per_chroma + 4.0)
    ) * draws[Draw.HUE]

    new_value = dali_math.min(value * draws[Draw.VALUE_SCALE] + draws[Draw.VALUE_SHIFT], 255.0)
    new_chroma = new_value * draws[Draw.SATURATION] * chroma / dali_math.max(value, _TINY)

    def channel(offset: float) -> Node:
        k = sixths + offset
        k = k - 6.0 * (k >= 6)
        return new_value - new_chroma * dali_math.clamp(dali_math.min(k, 4.0 - k), 0.0, 1.0)

    return fn.stack(channel(5.0), channel(3.0), channel(1.0), axis=2)


def decode_pipeline(settings: Settings, chunks: Iterator[Chunk]) -> Pipeline:
    """Decode only. Output: image or its region (H, W, 3) uint8 on `settings.device`."""

    def inputs(chunk: Chunk) -> tuple[Any, ...]:
        region = (chunk.plan.start_px, chunk.plan.shape_px) if settings.regions else ()
        return (_encoded(chunk), *(array.astype(np.int32) for array in region))

    pipeline = _empty_pipeline(settings)
    with pipeline:
        encoded, *region = _external(map(inputs, chunks), [(types.INT32, 1)] * (2 * settings.regions))
        pipeline.set_outputs(decode(encoded, settings, region))
    pipeline.build()
    return pipeline


def _encoded(chunk: Chunk) -> list[PixelArray]:
    return [file.encoded for file in chunk.files]


def _halve(image: Node, sizes_px: Node, times: int) -> Node:
    """Halve to the sizes of `_halving_sizes_px`. Bilinear sampling in the middle of four pixels gives their mean.

    If the mean is halfway between two levels, DALI's CPU operator rounds to the even level in blocks of 16 columns.
    In the columns behind them it rounds up. So a part of an image may be rounded differently from the whole.
    """
    for level in range(times):
        image = fn.resize(
            image,
            size=sizes_px[level],
            roi_start=[0.0, 0.0],
            roi_end=sizes_px[times + level],  # beyond the border, an odd one is repeated
            interp_type=types.INTERP_LINEAR,
            antialias=False,
        )
    return image


def decode(encoded: Node, settings: Settings, region: Sequence[Node] = ()) -> Node:
    """Node of the decoded RGB image (H, W, 3) uint8 as stored: the Exif orientation is not applied.

    `region` are the nodes of start and shape, (2,) int32 each: row and column in stored pixels; empty: the whole image.
    """
    options = {
        "device": "cpu",
        "output_type": types.RGB,
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,  # the CPU's decoder always does this; so both give the same colours
    }
    if settings.decoder == "gpu":
        height_px, width_px = settings.size_hint_px
        options |= {
            "device": "mixed",
            "hw_decoder_load": _ENGINES_SHARE,
            "preallocate_height_hint": height_px,  # else memory grows again and again, and each time the GPU waits
            "preallocate_width_hint": width_px,
            "device_memory_padding": _PADDING_BYTES,
            "host_memory_padding": _PADDING_BYTES,
        }
    if region:
        start, shape = region
        image = fn.decoders.image_slice(encoded, start=start, shape=shape, axes=[0, 1], **options)
    else:
        image = fn.decoders.image(encoded, **options)
    return image.gpu() if settings.device == "gpu" and settings.decoder == "cpu" else image


def _empty_pipeline(settings: Settings) -> Pipeline:
    return Pipeline(
        batch_size=settings.chunk_size,
        num_threads=settings.threads,
        device_id=settings.device_id,
        prefetch_queue_depth=settings.prefetch,
        exec_dynamic=True,  # reuses the memory of an output only when nothing in Python refers to it
    )


def _external(inputs: Iterator[tuple[Any, ...]], kinds: Sequence[tuple[Any, int]]) -> Sequence[Node]:
    """Input nodes: one of encoded files, and one for each (type, dimensions)."""
    kinds = [(types.UINT8, 1), *kinds]
    nodes: Sequence[Node] = fn.external_source(
        source=inputs,
        num_outputs=len(kinds),
        dtype=[kind for kind, _ in kinds],
        ndim=[dimensions for _, dimensions in kinds],
        batch=True,
        no_copy=True,
    )
    return nodes


def _halving_sizes_px(sizes_px: IntArray, halvings: IntArray, times: int) -> FloatArray:
    """Sizes of N images in each of the graph's halvings: (N, 2 times, 2) heights and widths.

    For each halving: the size after it, and twice this size, which is the size before it. A halving that an image does
    not need keeps its size.
    """
    after, taken = [], []
    size = sizes_px
    for level in range(times):
        needed = (halvings > level)[:, None]
        half = -(-size // 2)
        taken.append(np.where(needed, 2 * half, size))
        size = np.where(needed, half, size)
        after.append(size)
    return np.stack([*after, *taken], axis=1).astype(np.float32)
