"""How many cores and what storage keep a GPU busy: from measured costs of an image, and from how fast a GPU trains.

A step takes R source images a second. The loader needs R c cores, c being the processor seconds that it takes for one
image, and R b bytes a second of storage, b being the mean size of a file, while files are not in the page cache.

What is measured: c and b, on one kind of processor. What is assumed:

- A GPU's R follows from a published rate of training ResNet-50 at 224 pixels, divided by two for two views, by the
  ratio of the models' operations, and by the ratio of the areas. A real GPU uses smaller pictures less well, and the
  optimiser and the exact batch take their share, so R is rather too high, and so are the cores.
- Costs of the views grow with the area of a view; reading, checking and decoding do not.
- Cores add up. They do until memory bandwidth ends it, which is to be measured on the machine in question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

VIEWS: Final = 2
MEASURED_SIDE_PX: Final = 128
"""Side of the views in the rows that costs are taken from."""

Model = Literal["ResNet-50", "ResNet-152"]

GFLOP_AT_224: Final[Mapping[Model, float]] = {"ResNet-50": 4.09, "ResNet-152": 11.51}
"""Multiply-adds in 1e9 of a forward pass at 224 pixels (torchvision's documentation of its weights)."""


@dataclass(frozen=True)
class Gpu:
    """A kind of node.

    Attributes:
        name: of the card.
        count: cards in the node.
        resnet50_images_per_s: training ResNet-50 at 224 pixels in mixed precision, one card.
        source: where that stands, or how it is assumed.
    """

    name: str
    count: int
    resnet50_images_per_s: float
    source: str


_A100_IMAGES_PER_S: Final = 2470.0
_PEAK_RATIO_H200_A100: Final = 989.0 / 312.0

GPUS: Final = (
    Gpu("RTX 3090", 1, 1218.0, "published: timm's results"),
    Gpu("A100", 8, _A100_IMAGES_PER_S, "published: NVIDIA DeepLearningExamples, A100 80 GB"),
    Gpu(
        "H200",
        8,
        _A100_IMAGES_PER_S * _PEAK_RATIO_H200_A100,
        "assumed: the A100's times the ratio of dense bf16 peaks (989 and 312 TFLOP/s, data sheets)",
    ),
)


@dataclass(frozen=True)
class Costs:
    """What one source image costs the loader, in processor seconds, with views of `MEASURED_SIDE_PX`.

    Attributes:
        read_s: reading, checking, draws.
        decode_s: decoding.
        views_s: both views, geometry and colour.
        hand_over_s: filling a batch and queueing it.
        bytes_per_image: mean size of a file.
    """

    read_s: float
    decode_s: float
    views_s: float
    hand_over_s: float
    bytes_per_image: float

    def on_cpu_s(self, side_px: int) -> float:
        """Everything on the CPU, with views of another side."""
        area = (side_px / MEASURED_SIDE_PX) ** 2
        return self.read_s + self.decode_s + (self.views_s + self.hand_over_s) * area


@dataclass(frozen=True)
class Need:
    """What a node needs to stay bound by computation.

    Attributes:
        images_per_s: source images per second that all cards of the node take.
        cores_cpu: cores if everything is made on the CPU.
        cores_read: cores if a GPU decodes and makes the views: reading and checking only, so a lower bound.
        storage_mib_per_s: from storage, until the files are in the page cache.
    """

    images_per_s: float
    cores_cpu: float
    cores_read: float
    storage_mib_per_s: float


def images_per_s(resnet50_at_224: float, model: Model, side_px: int) -> float:
    """Source images that one card takes in a second, each in two views."""
    smaller = GFLOP_AT_224["ResNet-50"] / GFLOP_AT_224[model] * (224 / side_px) ** 2
    return resnet50_at_224 * smaller / VIEWS


def need(costs: Costs, gpu: Gpu, model: Model, side_px: int) -> Need:
    """What a node of these cards needs for this model and side of a view."""
    rate = gpu.count * images_per_s(gpu.resnet50_images_per_s, model, side_px)
    return Need(rate, rate * costs.on_cpu_s(side_px), rate * costs.read_s, rate * costs.bytes_per_image / 2**20)


def costs_of_row(row: Mapping[str, Any]) -> Costs:
    """The costs that a row of bench-loader measured on the CPU path."""
    cost = {stage["name"]: stage["cpu_ms_per_image"] / 1e3 for stage in row["stages"]}
    return Costs(
        cost["read only"],
        cost["decode only"],
        cost["views only"],
        cost["hand-over only"],
        row["page_cache"]["bytes_per_image"],
    )
