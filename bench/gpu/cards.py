"""Published figures of cards: what their makers state, not what we measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from errors import UserError


@dataclass(frozen=True)
class Card:
    """Published figures of a card.

    Attributes:
        bytes_per_s: bandwidth of its memory.
        flop_per_s: peak of dense products of 16-bit matrices that are summed in float32.
        jpeg_engines: whether it has engines for JPEG; None: not known.
        source: where the figures are published.
    """

    name: str
    bytes_per_s: float
    flop_per_s: float
    jpeg_engines: bool | None
    source: str


CARDS: Final = (
    Card("RTX 2080 Ti", 616e9, 53.8e12, False, "NVIDIA Turing GPU Architecture (reference card, float16)"),
    Card("RTX 3090", 936e9, 71e12, False, "NVIDIA Ampere GA102 GPU Architecture"),
    Card("RTX 4090", 1008e9, 165.2e12, False, "NVIDIA Ada GPU Architecture"),
    Card("A100 40 GB", 1555e9, 312e12, True, "NVIDIA A100 data sheet"),
    Card("A100 80 GB PCIe", 1935e9, 312e12, True, "NVIDIA A100 data sheet"),
    Card("A100 80 GB SXM", 2039e9, 312e12, True, "NVIDIA A100 data sheet"),
    Card("H100 PCIe", 2000e9, 756.5e12, True, "NVIDIA H100 data sheet (half of the sparse peak)"),
    Card("H100 SXM", 3350e9, 989.5e12, True, "NVIDIA H100 data sheet (half of the sparse peak)"),
    Card("H200 SXM", 4800e9, 989.5e12, True, "NVIDIA H200 data sheet (half of the sparse peak)"),
)

JPEG_SOURCE: Final = (
    'NVIDIA\'s article "Loading Data Fast with DALI and the New Hardware JPEG Decoder in NVIDIA A100 GPUs", as quoted '
    "in issue 5362 of DALI"
)
JPEG_CARD: Final = "A100"
JPEG_IMAGES_PER_S: Final = {
    "CUDA and hybrid only": 6000.0,
    "engines only": 5000.0,
    "75 % of the images on the engines": 7000.0,
}
"""Rates that NVIDIA published for one A100. NVIDIA does not state the size of the images."""


def find_card(given: str) -> Card:
    """The card of a name, or one that is described as NAME,GB/s,TFLOP/s.

    Raises:
        UserError: the name is unknown and not a description.
    """
    for card in CARDS:
        if card.name.lower() == given.strip().lower():
            return card
    name, *numbers = given.split(",")
    try:
        bandwidth, peak = (float(number) for number in numbers)
        if not (name.strip() and 0 < bandwidth < 1e6 and 0 < peak < 1e6):
            raise ValueError
    except ValueError:
        known = ", ".join(card.name for card in CARDS)
        raise UserError(
            f'--card {given}: expected one of {known}; or a name, GB/s and TFLOP/s, such as "RTX 3060,360,51"'
        ) from None
    return Card(name, bandwidth * 1e9, peak * 1e12, None, "--card")
