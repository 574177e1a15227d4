"""Computes what the GPU path should cost: bytes and operations of the views and of the step, without a GPU.

These are estimates, not measurements. Each node reads its inputs from memory once and writes its output once; caches,
launches and the tables of the plan are left out. tests/bench/test_estimate.py compares the nodes with those of the DALI
graph, the operations of the network with torch's count, and the bytes of the optimiser with those of its kernels.

This file imports neither torch nor DALI.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from errors import UserError
from pipelines.arrays import DoubleArray, IntArray
from pipelines.views.augmentation import GeometryConfig
from pipelines.views.plan import MAX_HALVINGS, count_halvings
from train.config.pretraining import Config

PEAK_SHARE: Final = 0.4
"""Assumed share of a card's published matrix peak that the step reaches."""

HIDDEN_BELOW: Final = 0.01
"""Largest share of the step's time that the loader may take and still count as hidden."""

VIEWS: Final = 2
_SCALES: Final = 1000  # midpoints of the range of scales

_PIXEL: Final = 3  # bytes of an 8-bit pixel
_FLOAT_PIXEL: Final = 12

HSV: Final[tuple[tuple[str, int, int, int], ...]] = (
    ("max(&0 &1)", 2, 8, 4),
    ("mul(&0 &1)", 3, 4, 4),  # with a number for each image
    ("add(&0 &1)", 1, 4, 4),
    ("min(&0 $0:float32)", 1, 4, 4),
    ("min(&0 &1)", 5, 8, 4),
    ("sub(&0 &1)", 10, 8, 4),
    ("mul(&0 &1)", 7, 8, 4),
    ("max(&0 $0:float32)", 2, 4, 4),
    ("fdiv(&0 &1)", 1, 8, 4),
    ("fdiv($0:int32 &0)", 1, 4, 4),
    ("geq(&0 &1)", 2, 8, 1),
    ("lt(&0 &1)", 3, 8, 1),
    ("bitand(&0 &1)", 2, 2, 1),
    ("lt(&0 $0:int32)", 1, 4, 1),
    ("mul($0:float32 &0)", 4, 1, 4),
    ("add(&0 &1)", 3, 8, 4),
    ("mul(&0 &1)", 3, 5, 4),
    ("add(&0 $0:float32)", 5, 4, 4),
    ("geq(&0 $0:int32)", 3, 4, 1),
    ("sub($0:float32 &0)", 3, 4, 4),
    ("clamp(&0 $0:float32 $1:float32)", 3, 4, 4),
)
"""Elementwise nodes of the exact jitter of one view: DALI's expression, how many nodes, and for each node the bytes
that it reads and writes for a pixel of the view."""

LINEAR: Final[tuple[tuple[str, int, int, int], ...]] = (
    ("Hsv", 1, 12, 12),
    ("mul(&0 &1)", 1, 12, 12),
    ("add(&0 &1)", 1, 12, 12),
)
"""The same for the linear jitter."""

_JITTERS: Final = {"hsv": HSV, "linear": LINEAR, "none": ()}

_WARP_OPERATIONS: Final = 35  # of a pixel: 14 for position and weights, 7 for each channel
_TAP_OPERATIONS: Final = 24  # of a pixel: four weighted neighbours in three channels

OPTIMIZER_BYTES: Final = {
    "norms of weights and gradients": 8,
    "gradients plus weights times decay": 12,
    "gradients times factor": 8,
    "Adam: weights, gradients and two moments": 28,
}
"""Bytes that LARS and Adam read and write for each float32 parameter that decays, in the order of `Lars.step`."""


@dataclass(frozen=True)
class Source:
    """The images of a dataset.

    Attributes:
        box_px: side of the box of the canonical view, with its margin; 0: the whole image.
    """

    width_px: int
    height_px: int
    box_px: float = 0.0

    def __str__(self) -> str:
        """Such as "1280 x 720, box of 375"."""
        box = f", box of {self.box_px:g}" if self.box_px else ""
        return f"{self.width_px} x {self.height_px}{box}"

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return self.width_px * self.height_px


SOURCES: Final = (Source(224, 224), Source(1280, 720, 375.0))
"""Small images that are used whole, and the large frames of `bench-loader --large`: a box of 250 pixels, and its
margin (`data.box_margin`)."""


@dataclass(frozen=True)
class Cost:
    """Memory traffic and arithmetic of one kind of node, for a training batch.

    Attributes:
        nodes: number of such nodes in the graph.
        read: bytes.
        written: bytes.
        operations: arithmetic operations.
    """

    name: str
    nodes: int
    read: float
    written: float
    operations: float = 0.0

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


def find_source(given: str) -> Source:
    """The source that is described as WIDTHxHEIGHT, or WIDTHxHEIGHT:BOX.

    Raises:
        UserError: for anything else.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", given.strip())
    if found is None:
        raise UserError(
            f"--source {given}: expected width and height in pixels, such as 224x224, or these and the side of the "
            "canonical view's box, such as 1280x720:375"
        )
    return Source(int(found[1]), int(found[2]), float(found[3] or 0))


def magnifications(geometry: GeometryConfig, source: Source) -> DoubleArray:
    """Magnifications of the source in views: midpoints of the range of scales. Crops are left out."""
    low, high = geometry.scale
    scale = low + (high - low) * (np.arange(_SCALES) + 0.5) / _SCALES
    box_px = source.box_px or max(source.width_px, source.height_px)
    magnification: DoubleArray = geometry.side_px / box_px * (1 / scale if geometry.scale_is == "margin" else scale)
    return magnification


def _halvings(geometry: GeometryConfig, source: Source, magnification: DoubleArray) -> IntArray:
    if not geometry.antialias:
        return np.zeros(len(magnification), np.int64)
    size_px = np.tile([source.height_px, source.width_px], (len(magnification), 1))
    return count_halvings(size_px, magnification)


def graph_costs(config: Config, source: Source) -> list[Cost]:
    """The costs of the nodes of `dali_graph.view_pipeline` on a GPU, and of the copy into the training batch.

    On a GPU, DALI's Resize has two passes with a float32 image between them. A halving that an image does not need is
    a Resize to the same size.
    """
    geometry, images = config.geometry, config.train.batch
    seen = magnifications(geometry, source)
    halvings = _halvings(geometry, source, seen)
    views, view_pixels = VIEWS * images, VIEWS * images * geometry.side_px**2
    decoded = _PIXEL * source.pixels * images
    costs = [Cost("decode", 1, 0, decoded)]
    if geometry.antialias and geometry.fill != "edge":
        costs.append(Cost("pad", 1, decoded, decoded))
    for level in range(MAX_HALVINGS if geometry.antialias else 0):
        halves = halvings > level
        into = source.pixels / 4.0 ** np.minimum(halvings, level)
        between, out = into / np.where(halves, 2, 1), into / np.where(halves, 4, 1)
        read = views * float(np.mean(_PIXEL * into + _FLOAT_PIXEL * between))
        written = views * float(np.mean(_FLOAT_PIXEL * between + _PIXEL * out))
        costs.append(Cost(f"resize {level + 1}", VIEWS, read, written, views * float(np.mean(9 * (between + out)))))
    sampled = views * float(np.mean(_shown(geometry, source, seen, halvings)))
    costs.append(Cost("warp", VIEWS, _PIXEL * sampled, _FLOAT_PIXEL * view_pixels, _WARP_OPERATIONS * view_pixels))
    jitter = config.colour.jitter
    if jitter == "hsv":  # a colour of three lies in every third number, so reading it moves all of them
        costs.append(Cost("colours apart", 3 * VIEWS, 3 * 12 * view_pixels, 3 * 4 * view_pixels))
    for name, nodes, read_each, written_each in _JITTERS[jitter]:
        made = nodes * view_pixels
        numbers = 3 if written_each == _FLOAT_PIXEL else 1
        what = f"{name}, {read_each} + {written_each} B"
        costs.append(Cost(what, VIEWS * nodes, made * read_each, made * written_each, made * numbers))
    if jitter == "hsv":
        costs.append(Cost("stack", VIEWS, 12 * view_pixels, 12 * view_pixels))
    costs.append(Cost("cast", VIEWS, 12 * view_pixels, _PIXEL * view_pixels, 3 * view_pixels))
    costs.append(Cost("copy into the batch", VIEWS, _PIXEL * view_pixels, _PIXEL * view_pixels))
    return costs


def fused_costs(config: Config, source: Source) -> list[Cost]:
    """The costs of the decoder and of one kernel for all views, which reads decoded images and writes the batch.

    A pixel of an image that was halved h times is a mean of 4^h pixels, so the kernel adds 4^h bilinear samples. Each
    pixel that a view shows is read from memory once; the caches serve the other reads.
    """
    geometry, images = config.geometry, config.train.batch
    seen = magnifications(geometry, source)
    halvings = _halvings(geometry, source, seen)
    views, view_pixels = VIEWS * images, VIEWS * images * geometry.side_px**2
    shown = views * float(np.mean(_shown(geometry, source, seen, np.zeros_like(halvings))))
    jitter = sum(nodes for _, nodes, _, _ in _JITTERS[config.colour.jitter])
    each = 14 + _TAP_OPERATIONS * float(np.mean(4.0**halvings)) + jitter + 3
    return [
        Cost("decode", 1, 0, _PIXEL * source.pixels * images),
        Cost("one kernel", 1, _PIXEL * shown, _PIXEL * view_pixels, each * view_pixels),
    ]


def _shown(geometry: GeometryConfig, source: Source, magnification: DoubleArray, halvings: IntArray) -> DoubleArray:
    """Number of pixels that a view shows of the source after `halvings` halvings."""
    at_level = magnification * 2.0**halvings
    shown: DoubleArray = np.minimum(geometry.side_px**2 / at_level**2, source.pixels / 4.0**halvings)
    return shown


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of costs."""
    return Cost(
        "sum", sum(cost.nodes for cost in costs), sum(cost.read for cost in costs),
        sum(cost.written for cost in costs), sum(cost.operations for cost in costs),
    )  # fmt: skip


@dataclass(frozen=True)
class StepCost:
    """What a training step costs.

    Attributes:
        forward_flop: operations of the network's forward pass, for all views of a batch. With recomputation it is made
            twice.
        backward_flop: operations of the backward pass.
        parameters: number of the network's parameters.
    """

    forward_flop: float
    backward_flop: float
    parameters: int

    def flop(self, *, recompute: bool) -> float:
        """Floating-point operations of a step."""
        return (2 if recompute else 1) * self.forward_flop + self.backward_flop

    @property
    def optimizer_bytes(self) -> float:
        """Bytes that LARS and Adam read and write, as if every parameter decayed."""
        return float(self.parameters * sum(OPTIMIZER_BYTES.values()))


_BLOCKS: Final = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_BOTTLENECKS: Final = ("resnet50", "resnet101", "resnet152")


def step_cost(config: Config) -> StepCost:
    """The cost of a step with one of torchvision's ResNets. A multiplication and its addition are two operations.

    Raises:
        UserError: for another encoder.
    """
    name, projector = config.encoder.name, config.projector
    if name not in _BLOCKS:
        raise UserError(f"encoder.name = {name!r}: the estimate only knows {', '.join(_BLOCKS)}")
    convolutions = _convolutions(name, config.geometry.side_px)
    flops = [2 * side**2 * into * out * kernel**2 for side, into, out, kernel in convolutions]
    features = convolutions[-1][2]
    head = 2 * features * projector.hidden + 2 * projector.hidden * projector.dim
    forward = sum(flops) + head
    parameters = sum(into * out * kernel**2 + 2 * out for _, into, out, kernel in convolutions)
    parameters += features * projector.hidden + 3 * projector.hidden + projector.hidden * projector.dim
    views = VIEWS * config.train.batch
    # Backward, each product has two gradients. The first layer needs none for the pixels.
    return StepCost(views * forward, views * (2 * forward - flops[0]), parameters)


def _convolutions(name: str, side_px: int) -> list[tuple[int, int, int, int]]:
    """Side of the output, channels in and out, and side of the kernel, of each convolution."""
    side = -(-side_px // 2)
    made = [(side, 3, 64, 7)]
    side, channels = -(-side // 2), 64
    for stage, blocks in enumerate(_BLOCKS[name]):
        width = 64 * 2**stage
        for block in range(blocks):
            halves = stage > 0 and block == 0
            before, side = side, -(-side // 2) if halves else side
            out = 4 * width if name in _BOTTLENECKS else width
            if name in _BOTTLENECKS:
                made += [(before, channels, width, 1), (side, width, width, 3), (side, width, out, 1)]
            else:
                made += [(side, channels, width, 3), (side, width, width, 3)]
            if halves or channels != out:
                made.append((side, channels, out, 1))
            channels = out
    return made
