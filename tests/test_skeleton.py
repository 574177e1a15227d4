import itertools
from typing import get_args

import pytest

from peclr_dali.skeleton import HAND, HandOrder, hand_rows

# Indices as their sources number them, written out: FreiHAND's and MANO's own, and those of the authors' test code.
WHERE = {
    "freihand": {"thumb_mcp": 1, "thumb_tip": 4, "index_mcp": 5, "middle_pip": 10, "ring_dip": 15, "little_tip": 20},
    "mano": {"index_mcp": 1, "middle_mcp": 4, "little_mcp": 7, "ring_dip": 12, "thumb_mcp": 13, "thumb_pip": 14,
             "little_dip": 9, "ring_mcp": 10, "thumb_tip": 16, "index_tip": 17, "little_tip": 20},
    "peclr": {"thumb_mcp": 1, "index_mcp": 2, "middle_mcp": 3, "middle_pip": 8, "thumb_dip": 11, "thumb_tip": 16,
              "little_tip": 20},
}  # fmt: skip


@pytest.mark.parametrize("order", get_args(HandOrder))
def test_keypoints_have_the_order_of_their_source(order: HandOrder) -> None:
    rows = hand_rows("freihand", order)  # of each of their keypoints in ours
    assert sorted(rows) == list(range(21))
    assert rows[0] == 0
    for name, row in WHERE[order].items():
        assert HAND.keypoints[rows[row]] == name


def test_the_authors_order_equals_their_conversion() -> None:
    """Their test code fills FreiHAND's array by name from these rows."""
    fingers = [[1, 6, 11, 16], [2, 7, 12, 17], [3, 8, 13, 18], [4, 9, 14, 19], [5, 10, 15, 20]]
    assert hand_rows("peclr", "freihand") == [0, *itertools.chain.from_iterable(fingers)]


def test_a_hands_bones_are_a_tree_from_the_wrist_outward() -> None:
    bones = [bone for limb, _ in HAND.limbs for bone in itertools.pairwise(limb)]
    assert len(bones) == 20
    assert {child for _, child in bones} == set(range(1, 21))
    for parent, child in bones:
        finger, joint = HAND.keypoints[child].split("_")
        expected = {"mcp": "wrist", "pip": f"{finger}_mcp", "dip": f"{finger}_pip", "tip": f"{finger}_dip"}[joint]
        assert HAND.keypoints[parent] == expected
    assert HAND.reference_bone in bones
    assert [HAND.keypoints[row] for row in HAND.reference_bone] == ["middle_mcp", "middle_pip"]
