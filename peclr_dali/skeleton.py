"""The skeleton of a hand: names of the keypoints, bones, and colours for drawing.

This file imports neither torch nor DALI, since the configuration uses it.
"""

from dataclasses import dataclass
from typing import Final, Literal

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""


@dataclass(frozen=True)
class Skeleton:
    """K keypoints and the bones between them.

    Attributes:
        keypoints: (K,) names, in the order of every array and tensor with a row for each keypoint. The first is the
            wrist.
        reference_bone: two keypoints; their distance is 1 in a scale-normalised pose.
        limbs: chains of keypoints, each with its colour.
    """

    keypoints: tuple[str, ...]
    reference_bone: tuple[int, int]
    limbs: tuple[tuple[tuple[int, ...], Colour], ...]

    def __len__(self) -> int:
        return len(self.keypoints)


THUMB_IN_ANATOMY: Final = {"thumb_mcp": "thumb_cmc", "thumb_pip": "thumb_mcp", "thumb_dip": "thumb_ip"}
"""Anatomy's names of the joints of the thumb, which files of annotations may have."""

FINGERS: Final = ("thumb", "index", "middle", "ring", "little")
# Joints of each finger, from the palm outward. The thumb's have the same names here; in anatomy they are cmc, mcp, ip,
# tip.
_JOINTS: Final = ("mcp", "pip", "dip", "tip")
_FINGER_COLOURS: Final = ((255, 92, 92), (255, 190, 60), (110, 220, 90), (70, 170, 255), (205, 120, 255))

HAND: Final = Skeleton(
    keypoints=("wrist", *(f"{finger}_{joint}" for finger in FINGERS for joint in _JOINTS)),
    reference_bone=(9, 10),
    limbs=tuple(((0, *range(4 * n + 1, 4 * n + 5)), colour) for n, colour in enumerate(_FINGER_COLOURS)),
)
"""FreiHAND's 21 keypoints in FreiHAND's order. The reference bone, the middle finger's first phalanx, is FreiHAND's
scale."""

HandOrder = Literal["freihand", "mano", "peclr"]
# The hand's keypoints in the orders of other projects.
#
# "mano" is the order of MANO's 16 joints followed by the five fingertip vertices, thumb to little; HO-3D has the same
# order. "peclr" is the order of the authors' models ("ait" in PeCLR's code): all mcp, then all pip, dip and tip.
_HAND_ORDERS: Final[dict[HandOrder, tuple[str, ...]]] = {
    "freihand": HAND.keypoints,
    "mano": (
        "wrist",
        *(f"{finger}_{joint}" for finger in ("index", "middle", "little", "ring", "thumb") for joint in _JOINTS[:3]),
        *(f"{finger}_tip" for finger in FINGERS),
    ),
    "peclr": ("wrist", *(f"{finger}_{joint}" for joint in _JOINTS for finger in FINGERS)),
}


def hand_rows(source: HandOrder, target: HandOrder) -> list[int]:
    """Rows that reorder a hand's keypoints from `source` to `target`: output row i is input row hand_rows[i]."""
    return [_HAND_ORDERS[source].index(name) for name in _HAND_ORDERS[target]]
