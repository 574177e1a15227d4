"""The 21 keypoints of a hand: their names, the bones between them, and the orders in which others store them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

FINGERS: Final = ("thumb", "index", "middle", "ring", "little")
JOINTS: Final = ("mcp", "pip", "dip", "tip")
"""Of each finger, from the palm outward. The thumb's are called so too; anatomy says cmc, mcp, ip, tip."""

KEYPOINTS: Final = ("wrist", *(f"{finger}_{joint}" for finger in FINGERS for joint in JOINTS))
"""FreiHAND's order, which is the order of every array and tensor in this project."""

BONES: Final = tuple(
    (0 if joint == 0 else 4 * finger + joint, 4 * finger + joint + 1) for finger in range(5) for joint in range(4)
)
"""Parent and child of the 20 bones, finger by finger from the palm outward."""

REFERENCE_BONE: Final = (9, 10)
"""The middle finger's first phalanx: its length is FreiHAND's scale, and 1 in a scale-normalised hand."""

Order = Literal["freihand", "mano", "ho3d", "peclr"]

_MANO: Final = (
    "wrist",
    *(f"{finger}_{joint}" for finger in ("index", "middle", "little", "ring", "thumb") for joint in JOINTS[:3]),
    *(f"{finger}_tip" for finger in FINGERS),
)
ORDERS: Final[dict[Order, tuple[str, ...]]] = {
    "freihand": KEYPOINTS,
    "mano": _MANO,
    "ho3d": _MANO,
    "peclr": ("wrist", *(f"{finger}_{joint}" for joint in JOINTS for finger in FINGERS)),
}
"""Names of the keypoints as others number them.

FreiHAND; MANO with the five fingertip vertices appended (16 joints of the model, then thumb to little); HO-3D, which
is MANO's; and the authors' models (PeCLR's code calls it "ait"): all mcp, then all pip, dip and tip.
"""

Keypoints = TypeVar("Keypoints", npt.NDArray[np.float32], npt.NDArray[np.float64], "Tensor")


def permutation(source: Order, target: Order) -> list[int]:
    """Where the keypoints of `target` stand in `source`: row i of the result is row permutation[i] of the input."""
    place = {name: row for row, name in enumerate(ORDERS[source])}
    return [place[name] for name in ORDERS[target]]


def reorder(keypoints: Keypoints, source: Order, target: Order) -> Keypoints:
    """Keypoints (..., 21, C) in the order of `source`, as (..., 21, C) in the order of `target`; a copy.

    Raises:
        ValueError: the last dimension but one is not 21.
    """
    if keypoints.ndim < 2 or keypoints.shape[-2] != len(KEYPOINTS):
        raise ValueError(f"keypoints have shape {tuple(keypoints.shape)}, expected (..., {len(KEYPOINTS)}, C)")
    return keypoints[..., permutation(source, target), :]
